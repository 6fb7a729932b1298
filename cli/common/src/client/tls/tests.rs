//! The client against a daemon over TLS. The certificates beside this file are for this test only
//! and valid until 2126. They are an authority, and its certificates for a server (localhost) and a
//! client.

use std::fs;
use std::io::{Read as _, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use hyper::Method;
use hyper::header::AUTHORIZATION;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use tokio_tungstenite::tungstenite::accept_hdr;
use tokio_tungstenite::tungstenite::handshake::server as handshake;

use super::*;
use crate::client::{Address, Answer, Http, Request, Transport};
use crate::error::ErrorKind;

const AUTHORITY: &str = include_str!("test_authority.pem");
const SERVER: &str = include_str!("test_server.pem");
const SERVER_KEY: &str = include_str!("test_server_key.pem");
const CLIENT: &str = include_str!("test_client.pem");
const CLIENT_KEY: &str = include_str!("test_client_key.pem");

/// The files of a client; removed when dropped.
struct Files(PathBuf);

impl Files {
    fn new(name: &str) -> Self {
        let file = format!("bellhop-tls-{}-{name}", std::process::id());
        let directory = std::env::temp_dir().join(file);
        fs::create_dir(&directory).unwrap();
        let files = Self(directory);
        files.put("ca", AUTHORITY, 0o644);
        files.put("cert", CLIENT, 0o644);
        files.put("key", CLIENT_KEY, 0o600);
        files.put("token", "s3cret\n", 0o600);
        files
    }

    fn put(&self, name: &str, text: &str, mode: u32) {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn credentials(&self) -> Credentials {
        let file = |name: &str| Some(self.0.join(name));
        Credentials {
            node_ca: file("ca"),
            node_cert: file("cert"),
            node_key: file("key"),
            node_token_file: file("token"),
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

type Stream = StreamOwned<ServerConnection, TcpStream>;

/// A server that requests certificates and answers with the request's head; returns its port.
fn server() -> u16 {
    server_that(|stream| {
        let mut head = [0; 4096];
        // The client rejects this server's certificate.
        let Ok(count) = stream.read(&mut head) else {
            return;
        };
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {count}\r\n\r\n");
        let _ = stream.write_all(answer.as_bytes());
        let _ = stream.write_all(&head[..count]);
        stream.conn.send_close_notify();
        let _ = stream.flush();
    })
}

/// A server that requests certificates and serves each connection so; returns its port.
fn server_that(serve: fn(&mut Stream)) -> u16 {
    let mut authorities = RootCertStore::empty();
    let der = CertificateDer::from_pem_slice(AUTHORITY.as_bytes()).unwrap();
    authorities.add(der).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider.clone());
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(SERVER.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(SERVER_KEY.as_bytes()).unwrap(),
        )
        .unwrap();
    let config = Arc::new(config);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let session = ServerConnection::new(Arc::clone(&config)).unwrap();
            serve(&mut StreamOwned::new(session, stream.unwrap()));
        }
    });
    port
}

fn ask(host: &str, port: u16, credentials: &Credentials) -> Result<Answer, Error> {
    let address = Address::Https {
        host: host.to_owned(),
        port,
    };
    let http = Http::new(&address, credentials)?;
    http.exchange(&Request::new(
        Method::GET,
        "/v1/version",
        Duration::from_secs(20),
    ))
}

#[test]
fn certificate_and_token_are_shown_to_a_server_of_the_authority() {
    let files = Files::new("good");
    let port = server();
    for host in ["localhost", "127.0.0.1"] {
        let answer = ask(host, port, &files.credentials()).unwrap();
        let head = String::from_utf8(answer.body).unwrap().to_lowercase();
        assert!(head.starts_with("get /v1/version http/1.1\r\n"), "{head}");
        assert!(head.contains("authorization: bearer s3cret\r\n"), "{head}");
        assert!(head.contains(&format!("host: {host}:{port}\r\n")), "{head}");
    }
    // Its certificate is for other names.
    let error = ask("127.0.0.2", port, &files.credentials()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NoDaemon), "{error:?}");
}

#[test]
fn a_websocket_passes_over_tls_with_the_token() {
    let port = server_that(|stream| {
        let mut token = None;
        #[expect(
            clippy::result_large_err,
            reason = "the trait of tungstenite has this type"
        )]
        let look = |request: &handshake::Request, response: handshake::Response| {
            token = request.headers().get(AUTHORIZATION).cloned();
            Ok::<_, handshake::ErrorResponse>(response)
        };
        let mut socket = accept_hdr(stream, look).unwrap();
        assert_eq!(token.unwrap(), "Bearer s3cret");
        let message = socket.read().unwrap();
        socket.send(message).unwrap();
        // Until the client closes it.
        while socket.read().is_ok() {}
    });
    let address = format!("https://localhost:{port}").parse().unwrap();
    let files = Files::new("websocket");
    let http = Http::new(&address, &files.credentials()).unwrap();
    let request = Request::new(Method::GET, "/v1/console", Duration::from_secs(20));
    let socket = http.web_socket(&request).unwrap();
    let mut stream = socket.stream();
    stream.write_all(b"ls\r").unwrap();
    let mut echo = [0; 3];
    stream.read_exact(&mut echo).unwrap();
    assert_eq!(&echo, b"ls\r");
    assert_eq!(socket.close(), None);
}

#[test]
fn a_server_of_another_authority_learns_nothing() {
    let files = Files::new("stranger");
    let port = server();
    // Not the authority of the server: the client's own certificate is not an authority, but can be
    // a trust anchor.
    files.put("ca", CLIENT, 0o644);
    let error = ask("localhost", port, &files.credentials()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NoDaemon), "{error:?}");
}

#[test]
fn files_that_are_missing_or_not_secret_are_named() {
    let files = Files::new("bad");
    let fails = |credentials: &Credentials| {
        let error = ask("localhost", 1, credentials).unwrap_err();
        assert!(!matches!(error.kind(), ErrorKind::NoDaemon), "{error:?}");
        error.to_string()
    };
    let mut credentials = files.credentials();
    credentials.node_token_file = None;
    assert!(fails(&credentials).contains("--node-token-file"));
    for (name, text, mode, said) in [
        ("key", CLIENT_KEY, 0o644, "chmod go-rwx"),
        ("key", "", 0o600, "no private key"),
        ("key", SERVER_KEY, 0o600, "does not match"),
        ("key", CLIENT_KEY, 0o600, "more than"),
        ("token", "s3cret", 0o640, "chmod go-rwx"),
        ("token", " \n", 0o600, "has no token"),
        ("token", "two\nlines", 0o600, "no token on one line"),
        ("cert", "rubbish", 0o644, "no certificate"),
        ("ca", "", 0o644, "no certificate"),
    ] {
        let good = fs::read_to_string(files.0.join(name)).unwrap();
        match said {
            "more than" => files.put(name, &"x".repeat((1 << 20) + 1), mode),
            _ => files.put(name, text, mode),
        }
        let error = fails(&files.credentials());
        assert!(error.contains(said), "{name}: {error}");
        files.put(name, &good, 0o600);
    }
    fs::remove_file(files.0.join("ca")).unwrap();
    assert!(fails(&files.credentials()).contains("cannot read"));
}
