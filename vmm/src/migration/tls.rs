//! Authentication of the peer of a migration over TCP: it needs a certificate from this host's
//! authority.
//!
//! Owns the certificates, and the configuration of either side from them. It must not know what
//! passes over a connection; `stream.rs` has the TLS connection itself.
//!
//! Both hosts show a certificate and check the peer's. The destination checks that the source's is
//! that of a node, from the authority (`node_verifier.rs`). The source also checks that the
//! destination's is for the host it has dialled. TLS 1.3 (RFC 8446) only, and no resumption: each
//! connection shows its certificate anew.
//!
//! Between the machines of two daemons each side has a key and a self-signed certificate for this
//! migration only. Its authority is the other side's certificate, so no other key is accepted.

mod node_verifier;
mod stream;

#[cfg(test)]
pub(super) mod tests;

use std::net::TcpStream;
use std::sync::Arc;

pub use bellhop_api::machine::{PairedTls, TlsFiles};
use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::NoServerSessionStorage;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};

use crate::Error;
use crate::credentials::{self, Holder};
use node_verifier::NodeVerifier;

pub use stream::{SessionError, TlsStream};

/// The ALPN protocol (RFC 7301). A connection for another use of the certificate, such as the
/// daemon's API, does not match it.
const PROTOCOL: &[u8] = b"bellhop-migration";

/// The library does not support it.
fn no_tls(source: rustls::Error) -> Error {
    Error::tls("cannot set up TLS 1.3").because(source)
}

/// Loaded certificates. Clones share them.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

vdpa::opaque_debug!(Tls);

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`Error`] for a file that other users can change, or a key that they can read. Also for a
    /// malformed certificate or key, and for a key of another certificate. The peer checks the
    /// validity.
    pub fn load(files: &TlsFiles) -> Result<Self, Error> {
        let chain = credentials::certificates(&files.certificate, Holder::Service)?;
        let key = credentials::private_key(&files.key, Holder::Service)?;
        let authorities = credentials::authorities(&files.authority, Holder::Service)?;
        Self::new(&chain, &key, authorities, |source| {
            let (key, certificate) = (files.key.display(), files.certificate.display());
            Error::tls(format!(
                "the key {key} does not match the certificate {certificate}"
            ))
            .because(source)
        })
    }

    /// Takes the certificates of a paired migration.
    ///
    /// # Errors
    /// [`Error`] for a malformed certificate or key, and for a key of another certificate.
    pub fn paired(terms: &PairedTls) -> Result<Self, Error> {
        let certificate = |text: &str| {
            CertificateDer::from_pem_slice(text.as_bytes()).map_err(|source| {
                Error::tls("a certificate of the pairing is not PEM").because(source)
            })
        };
        let key = PrivateKeyDer::from_pem_slice(terms.key.as_bytes())
            .map_err(|source| Error::tls("the key of the pairing is not PEM").because(source))?;
        let mut peer = RootCertStore::empty();
        peer.add(certificate(&terms.peer)?).map_err(|source| {
            Error::tls("the other side's certificate of the pairing is invalid").because(source)
        })?;
        Self::new(&[certificate(&terms.certificate)?], &key, peer, |source| {
            Error::tls("the key of the pairing does not match its certificate").because(source)
        })
    }

    /// `unmatched` is the error for a key of another certificate.
    fn new(
        chain: &[CertificateDer<'static>],
        key: &PrivateKeyDer<'static>,
        authorities: RootCertStore,
        unmatched: impl Fn(rustls::Error) -> Error,
    ) -> Result<Self, Error> {
        let authorities = Arc::new(authorities);
        let provider = Arc::new(rustls::crypto::ring::default_provider());

        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(no_tls)?
            .with_root_certificates(authorities.clone())
            .with_client_auth_cert(chain.to_vec(), key.clone_key())
            .map_err(&unmatched)?;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        client.resumption = Resumption::disabled();

        let verifier = NodeVerifier::new(authorities, &provider).map_err(|source| {
            Error::tls("cannot check certificates against the authority").because(source)
        })?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(no_tls)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_single_cert(chain.to_vec(), key.clone_key())
            .map_err(&unmatched)?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// Creates the source's side of a connection to `host`, a name or an IP address without
    /// brackets. Sends nothing yet.
    ///
    /// # Errors
    /// No certificate can be for such a host, or there is no TLS 1.3.
    pub(super) fn connect(&self, host: &str, socket: TcpStream) -> Result<TlsStream, Error> {
        let name = ServerName::try_from(host.to_owned()).map_err(|source| {
            Error::tls(format!("no certificate can be for a host named {host:?}")).because(source)
        })?;
        let session = ClientConnection::new(self.client.clone(), name);
        let session = Connection::Client(session.map_err(no_tls)?);
        Ok(TlsStream::new(session, socket))
    }

    /// Creates the destination's side of a connection. Reads nothing yet.
    ///
    /// # Errors
    /// There is no TLS 1.3.
    pub(super) fn accept(&self, socket: TcpStream) -> Result<TlsStream, Error> {
        let session = ServerConnection::new(self.server.clone());
        let session = Connection::Server(session.map_err(no_tls)?);
        Ok(TlsStream::new(session, socket))
    }
}
