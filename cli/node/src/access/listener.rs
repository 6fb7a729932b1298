//! TCP with mutual TLS: connections for the server, with the subject of each client's certificate.
//!
//! Owns the listening socket and the handshake.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::server::TlsStream;
use vmm::http::server::Transport;

use super::Access;
use super::subject;

/// The number of shown bytes of a certificate's SHA-256.
const FINGERPRINT_SIZE: usize = 8;

/// The other end of a TLS connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsPeer {
    /// The remote address.
    pub(super) address: SocketAddr,
    /// The subject of the certificate (RFC 4514), or the fingerprint if the subject is empty.
    pub(super) subject: Arc<str>,
    /// The first 8 bytes of the certificate's SHA-256 in hexadecimal: distinguishes certificates of
    /// one subject.
    pub(super) fingerprint: Arc<str>,
    /// Its certificates, its own first.
    pub(super) chain: Arc<[CertificateDer<'static>]>,
    /// The number of reloads before its handshake.
    pub(super) loads: u64,
}

/// Listens on TCP for clients with a certificate.
#[derive(Debug)]
pub(crate) struct TlsListener {
    listener: TcpListener,
    access: Arc<Access>,
}

impl TlsListener {
    /// Accepts connections of `listener` from clients that `access` permits at the time.
    pub(crate) fn new(listener: TcpListener, access: Arc<Access>) -> Self {
        Self { listener, access }
    }
}

impl Transport for TlsListener {
    type Incoming = (TcpStream, SocketAddr);
    type Stream = TlsStream<TcpStream>;
    type Peer = TlsPeer;

    async fn accept(&self) -> io::Result<Self::Incoming> {
        self.listener.accept().await
    }

    fn source((_, address): &Self::Incoming) -> Option<IpAddr> {
        Some(address.ip())
    }

    async fn establish(&self, incoming: Self::Incoming) -> io::Result<(Self::Stream, TlsPeer)> {
        let (stream, address) = incoming;
        stream.set_nodelay(true)?;
        // First, so that a reload during the handshake is noticed.
        let loads = self.access.loads();
        let tls = self.access.tls().ok_or(io::ErrorKind::Unsupported)?;
        let accepted = TlsAcceptor::from(tls.config).accept(stream).await;
        // Failed handshakes help to diagnose clients that cannot connect.
        let stream = accepted
            .map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))?;
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let chain: Arc<[_]> = chain.into();
        // The handshake fails without a certificate; if that ever changes, this check refuses the
        // client.
        let certificate = chain
            .first()
            .ok_or_else(|| io::Error::other("the client sent no certificate"))?;
        let hash = digest(&SHA256, certificate);
        let hash = hash.as_ref().iter().take(FINGERPRINT_SIZE);
        let fingerprint: String = hash.map(|byte| format!("{byte:02x}")).collect();
        let subject = subject::of(certificate).unwrap_or_else(|| fingerprint.clone());
        let peer = TlsPeer {
            address,
            subject: subject.into(),
            fingerprint: fingerprint.into(),
            chain,
            loads,
        };
        Ok((stream, peer))
    }
}
