//! TLS for a daemon on another host. Both ends check the other's certificate against their own
//! authorities, and the client also sends a token.
//!
//! Owns the files and their configuration. TLS 1.3 only, as in the daemon.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::header::HeaderValue;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{self, ClientConfig};
use vmm::credentials::{self, Holder, Secrecy};
use vmm::http::client::Tls;

use super::Remote;
use crate::error::Error;

/// The paths of the files.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct Credentials {
    /// With https: the authorities that may have issued the daemon's certificate (PEM)
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "BELLHOP_NODE_CA",
        hide_short_help = true,
        help_heading = "Connection options"
    )]
    node_ca: Option<PathBuf>,

    /// With https: the client's certificate (PEM)
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "BELLHOP_NODE_CERT",
        hide_short_help = true,
        help_heading = "Connection options"
    )]
    node_cert: Option<PathBuf>,

    /// With https: the certificate's private key (PEM)
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "BELLHOP_NODE_KEY",
        hide_short_help = true,
        help_heading = "Connection options"
    )]
    node_key: Option<PathBuf>,

    /// With https: the file with the client's token
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "BELLHOP_NODE_TOKEN_FILE",
        hide_short_help = true,
        help_heading = "Connection options"
    )]
    node_token_file: Option<PathBuf>,
}

impl Credentials {
    /// Removes the values of options for whose ID `keep` is false.
    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        for (id, file) in [
            ("node_ca", &mut self.node_ca),
            ("node_cert", &mut self.node_cert),
            ("node_key", &mut self.node_key),
            ("node_token_file", &mut self.node_token_file),
        ] {
            if !keep(id) {
                *file = None;
            }
        }
    }

    /// Adds the files of a remote that no option names.
    #[must_use]
    pub fn or(self, remote: &Remote) -> Self {
        let Remote {
            ca,
            cert,
            key,
            token_file,
            ..
        } = remote.clone();
        Self {
            node_ca: self.node_ca.or(ca),
            node_cert: self.node_cert.or(cert),
            node_key: self.node_key.or(key),
            node_token_file: self.node_token_file.or(token_file),
        }
    }

    /// Reads the files.
    ///
    /// # Errors
    /// A file is missing from the options, or cannot be used.
    pub(super) fn load(&self) -> Result<Tls, Error> {
        let ca = given(&self.node_ca, "--node-ca", "BELLHOP_NODE_CA")?;
        let certificate = given(&self.node_cert, "--node-cert", "BELLHOP_NODE_CERT")?;
        let key = given(&self.node_key, "--node-key", "BELLHOP_NODE_KEY")?;
        let token = given(
            &self.node_token_file,
            "--node-token-file",
            "BELLHOP_NODE_TOKEN_FILE",
        )?;
        let authorities = credentials::authorities(ca, Holder::Caller)?;
        let chain = credentials::certificates(certificate, Holder::Caller)?;
        let private = credentials::private_key(key, Holder::Caller)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(Error::context("cannot configure TLS 1.3"))?
            .with_root_certificates(authorities)
            .with_client_auth_cert(chain, private)
            .map_err(Error::context(format!(
                "the key {} does not match the certificate {}",
                key.display(),
                certificate.display()
            )))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls {
            connector: TlsConnector::from(Arc::new(config)),
            authorization: authorization(token)?,
        })
    }
}

fn given<'a>(
    path: &'a Option<PathBuf>,
    option: &'static str,
    variable: &'static str,
) -> Result<&'a Path, Error> {
    path.as_deref().ok_or_else(|| {
        Error::wrong(format!(
            "a daemon on another host needs a certificate and a token: give {option} or set \
             {variable}"
        ))
        .hint("`bellhop remote add` stores them under a name for --remote")
    })
}

fn authorization(path: &Path) -> Result<HeaderValue, Error> {
    let bytes = credentials::read(path, Secrecy::Secret, Holder::Caller)?;
    let token = bytes.trim_ascii();
    if token.is_empty() {
        let message = format!("{} has no token", path.display());
        return Err(Error::failed(message));
    }
    let mut value = b"Bearer ".to_vec();
    value.extend_from_slice(token);
    let bad = Error::context(format!("{} has no token on one line", path.display()));
    let mut value = HeaderValue::from_bytes(&value).map_err(bad)?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests;
