//! Access control without files and connections, for tests and fuzz targets.

use std::sync::Arc;

use bellhop_api::node::Role;
use parking_lot::RwLock;
use ring::digest::{SHA256, digest};
use tokio_rustls::rustls::server::{ResolvesServerCertUsingSni, WebPkiClientVerifier};
use tokio_rustls::rustls::{self, ServerConfig};

use super::certificates::Tls;
use super::listener::TlsPeer;
use super::{Access, AccessFiles, CertificateFiles, Loaded, Tokens};

impl Access {
    /// Access by TCP for callers with these tokens: the token, its role and its expiry.
    pub(crate) fn with_tokens(tokens: &[(&str, Role, &str)]) -> Self {
        let lines = tokens.iter().map(|(token, role, expiry)| {
            let hash = digest(&SHA256, token.as_bytes());
            let hash = hash.as_ref().iter().map(|byte| format!("{byte:02x}"));
            format!("{role} {token} {} {expiry}\n", hash.collect::<String>())
        });
        let text: String = lines.collect();
        // No handshake: requests go to the router.
        let resolver = Arc::new(ResolvesServerCertUsingSni::new());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(resolver);
        let loaded = Loaded {
            tls: Tls {
                config: Arc::new(tls),
                clients: WebPkiClientVerifier::no_client_auth(),
            },
            tokens: Arc::new(Tokens::parse(text.as_bytes(), "tokens".as_ref()).unwrap()),
        };
        let files = AccessFiles {
            certificates: CertificateFiles {
                certificate: "/nonexistent".into(),
                key: "/nonexistent".into(),
                client_ca: "/nonexistent".into(),
                client_crl: None,
            },
            tokens: "/nonexistent".into(),
        };
        Self::of(Some((files, RwLock::new(loaded))))
    }
}

impl TlsPeer {
    /// A client with a certificate.
    pub(crate) fn example() -> Self {
        Self {
            address: ([192, 0, 2, 1], 5000).into(),
            subject: "CN=ops".into(),
            fingerprint: "00".into(),
            chain: Arc::default(),
            loads: 0,
        }
    }
}
