//! Access control and requests of clients by TCP, for tests of the router.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::Method;
use axum::http::header::AUTHORIZATION;
use bellhop_api::node::Role;
use parking_lot::RwLock;
use ring::digest::{SHA256, digest};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::server::{ResolvesServerCertUsingSni, WebPkiClientVerifier};
use tokio_rustls::rustls::{ServerConfig, version};

use super::certificates::Tls;
use super::listener::TlsPeer;
use super::{Access, AccessFiles, CertificateFiles, Loaded, Tokens};

/// Access control with one token of each role: the role's name.
pub(crate) fn access() -> Arc<Access> {
    let line = |role: Role| {
        let hash = digest(&SHA256, role.to_string().as_bytes());
        let digits = hash.as_ref().iter().map(|byte| format!("{byte:02x}"));
        format!("{role} {role} {}\n", digits.collect::<String>())
    };
    let lines: String = [Role::Read, Role::Operate, Role::Admin].map(line).concat();
    // No connection uses it.
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(ResolvesServerCertUsingSni::new()));
    let files = AccessFiles {
        certificates: CertificateFiles::default(),
        tokens: "tokens".into(),
    };
    let loaded = Loaded {
        tls: Tls {
            config: Arc::new(config),
            clients: WebPkiClientVerifier::no_client_auth(),
        },
        tokens: Arc::new(Tokens::parse(lines.as_bytes(), "tokens".as_ref()).unwrap()),
    };
    Arc::new(Access::of(Some((files, RwLock::new(loaded)))))
}

/// A request without a body, of a client with the token of this role.
pub(crate) fn request(method: Method, path: &str, role: Role) -> Request {
    let peer = TlsPeer {
        address: ([192, 0, 2, 1], 5000).into(),
        subject: "CN=client".into(),
        fingerprint: "00".into(),
        chain: [].into(),
        loads: 0,
    };
    Request::builder()
        .method(method)
        .uri(path)
        .header(AUTHORIZATION, format!("Bearer {role}"))
        .extension(peer)
        .body(Body::empty())
        .unwrap()
}
