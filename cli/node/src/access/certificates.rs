//! The TLS configuration: this server's certificate and key, the authorities of clients and their
//! revoked certificates.
//!
//! Owns the files and their configuration.
//!
//! TLS 1.3 only, without resumption: each connection verifies its certificate anew. So a
//! certificate that has expired or is revoked, or whose authority was removed (SIGHUP), opens no
//! further connection. On a connection from before the reload, the next request is refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use tokio_rustls::rustls;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use vmm::credentials::{self, Holder};
use x509_cert::crl::CertificateList;
use x509_cert::der::Decode as _;

use crate::error::Error;

/// The paths of the files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CertificateFiles {
    /// This server's certificate, then the intermediate certificates; PEM.
    pub certificate: PathBuf,
    /// Its private key; PEM.
    pub key: PathBuf,
    /// The authorities that may issue certificates of clients; PEM.
    pub client_ca: PathBuf,
    /// The revoked certificates of clients, a list of each authority; PEM.
    pub client_crl: Option<PathBuf>,
}

/// The configuration for incoming connections.
#[derive(Clone)]
pub(super) struct Tls {
    pub(super) config: Arc<ServerConfig>,
    pub(super) clients: Arc<dyn ClientCertVerifier>,
}

impl Tls {
    /// Reads the files and creates the configuration.
    ///
    /// # Errors
    /// A file cannot be used.
    pub(super) fn load(files: &CertificateFiles) -> Result<Self, Error> {
        let chain = credentials::certificates(&files.certificate, Holder::Service)?;
        let key = credentials::private_key(&files.key, Holder::Service)?;
        let authorities = credentials::authorities(&files.client_ca, Holder::Service)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut clients =
            WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider.clone());
        if let Some(path) = &files.client_crl {
            clients = clients
                .with_crls(revocations(path)?)
                .enforce_revocation_expiration();
        }
        let clients = clients.build().map_err(Error::context(format!(
            "cannot verify clients' certificates with {}",
            files.client_ca.display()
        )))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(Error::context("cannot configure TLS 1.3"))?
            .with_client_cert_verifier(clients.clone())
            .with_single_cert(chain, key)
            .map_err(Error::context(format!(
                "the key {} does not match the certificate {}",
                files.key.display(),
                files.certificate.display()
            )))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        let config = Arc::new(config);
        Ok(Self { config, clients })
    }

    /// Checks a client's certificates again: they may have been revoked since its handshake.
    pub(super) fn verify_client(
        &self,
        chain: &[CertificateDer<'static>],
    ) -> Result<(), rustls::Error> {
        let (own, intermediates) = chain
            .split_first()
            .ok_or(rustls::Error::NoCertificatesPresented)?;
        self.clients
            .verify_client_cert(own, intermediates, UnixTime::now())
            .map(drop)
    }
}

/// The lists of revoked certificates in a file. One that has expired refuses each client, and is
/// logged.
fn revocations(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, Error> {
    let lists = credentials::revocations(path, Holder::Service)?;
    let shown = path.display();
    for list in &lists {
        let list: CertificateList = CertificateList::from_der(list).map_err(Error::context(
            format!("{shown} has a damaged list of revoked certificates"),
        ))?;
        let until = list.tbs_cert_list.next_update;
        if let Some(until) = until.filter(|until| until.to_system_time() <= SystemTime::now()) {
            tracing::error!(
                file = %shown,
                %until,
                "a list of revoked certificates has expired, so its authority's clients are \
                 refused; write another one (`bellhop pki revoke`) and send SIGHUP"
            );
        }
    }
    Ok(lists)
}

#[cfg(test)]
mod tests;
