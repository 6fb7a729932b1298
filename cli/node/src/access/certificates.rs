//! What TLS needs: this server's certificate and key, and whose certificates clients may have.
//!
//! Owns the files and what is made of them. It must not know what is spoken on a connection.
//!
//! TLS 1.3 only, and no resumption: each connection shows its certificate anew, so that one that has expired or whose
//! authority was taken away (SIGHUP) opens no more of them.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::rustls;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use vmm::credentials::{self, Holder};

use crate::error::Error;

/// Where the files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// This server's certificate, then those between it and its authority; PEM.
    pub certificate: PathBuf,
    /// Its private key; PEM.
    pub key: PathBuf,
    /// The authorities whose certificates clients may have; PEM.
    pub client_ca: PathBuf,
}

/// Reads the files and makes of them what accepts connections.
///
/// # Errors
/// A file cannot be used.
pub(super) fn load(files: &CertificateFiles) -> Result<Arc<ServerConfig>, Error> {
    let chain = credentials::certificates(&files.certificate, Holder::Service)?;
    let key = credentials::private_key(&files.key, Holder::Service)?;
    let authorities = credentials::authorities(&files.client_ca, Holder::Service)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider.clone())
            .build()
            .map_err(Error::context(format!(
                "clients' certificates cannot be checked against {}",
                files.client_ca.display()
            )))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(Error::context("TLS 1.3 cannot be set up"))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(Error::context(format!(
            "the key {} does not go with the certificate {}",
            files.key.display(),
            files.certificate.display()
        )))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
