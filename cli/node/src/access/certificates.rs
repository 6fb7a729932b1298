//! The TLS configuration: this server's certificate and key, and the authorities of clients.
//!
//! Owns the files and their configuration.
//!
//! TLS 1.3 only, without resumption: each connection verifies its certificate anew. So a
//! certificate that has expired, or whose authority was removed (SIGHUP), opens no further
//! connection.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::rustls;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use vmm::credentials::{self, Holder};

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
}

/// Reads the files and creates the configuration for incoming connections.
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
                "cannot verify clients' certificates with {}",
                files.client_ca.display()
            )))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(Error::context("cannot configure TLS 1.3"))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(Error::context(format!(
            "the key {} does not match the certificate {}",
            files.key.display(),
            files.certificate.display()
        )))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
