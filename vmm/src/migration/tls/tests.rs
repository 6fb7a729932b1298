//! Two ends over the loopback device, with certificates made for each test, and peers without one
//! or with another protocol.

// The same makeshift authority as in the tests of the daemon's access.
#[path = "../../../../cli/tests/api_access/certificates.rs"]
mod certificates;

use std::fs;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;

use super::*;
use crate::migration::Connection as _;
use crate::migration::endpoint::{Endpoint, Listener, Stream, connect};
use certificates::{Identity, Validity};

const HOST: &str = "127.0.0.1";
const PATIENCE: Duration = Duration::from_secs(10);
const SLICE: Duration = Duration::from_millis(50);

/// Files in a directory of their own, which is removed when this is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("bellhop-migration-tls-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn put(&self, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn files(&self, identity: &Identity, authority: &Identity) -> TlsFiles {
        TlsFiles {
            certificate: self.put("certificate", &identity.certificate_pem(), 0o644),
            key: self.put("key", &identity.key_pem(), 0o600),
            authority: self.put("authority", &authority.certificate_pem(), 0o644),
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn load(identity: &Identity, authority: &Identity) -> Tls {
    Tls::load(&Directory::new().files(identity, authority)).unwrap()
}

/// Source and destination that trust each other; the destination is at 127.0.0.1.
pub(in crate::migration) fn both_hosts() -> (Tls, Tls) {
    let authority = Identity::authority("migrations");
    (
        load(&authority.signs("node1", Validity::Now), &authority),
        load(&authority.signs(HOST, Validity::Now), &authority),
    )
}

/// The certificate and the key of one side, as a daemon makes them for one migration.
fn self_signed(host: &str) -> (String, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec![host.to_owned()]).unwrap();
    let certificate = certificate.self_signed(&key).unwrap();
    (certificate.pem(), key.serialize_pem())
}

/// The terms of the side with this certificate and key, whose peer has that certificate.
fn terms((certificate, key): &(String, String), peer: &str) -> PairedTls {
    PairedTls {
        certificate: certificate.clone(),
        key: key.clone(),
        peer: peer.to_owned(),
    }
}

/// Source and destination of one pairing; the destination is at 127.0.0.1.
pub(in crate::migration) fn paired_hosts() -> (Tls, Tls) {
    let (source, destination) = (self_signed("node1"), self_signed(HOST));
    (
        Tls::paired(&terms(&source, &destination.0)).unwrap(),
        Tls::paired(&terms(&destination, &source.0)).unwrap(),
    )
}

/// Listens at a port that the kernel chooses.
pub(in crate::migration) fn listen(tls: Option<Tls>) -> (Listener, Endpoint) {
    let anywhere = Endpoint::Tcp {
        host: HOST.to_owned(),
        port: 0,
    };
    let listener = Listener::bind(&anywhere, tls).unwrap();
    let endpoint = listener.endpoint();
    (listener, endpoint)
}

fn accept(listener: &Listener) -> Stream {
    let mut stream = listener.accept().unwrap();
    stream.set_timeout(SLICE).unwrap();
    stream
}

/// Both ends of a connection: the source's, the destination's.
fn connected(source: &Tls, destination: &Tls) -> (Stream, Stream) {
    let (listener, endpoint) = listen(Some(destination.clone()));
    let mut near = connect(&endpoint, PATIENCE, Some(source)).unwrap();
    near.set_timeout(SLICE).unwrap();
    (near, accept(&listener))
}

fn socket(stream: &Stream) -> &TcpStream {
    match stream {
        Stream::Tls(stream) => stream.socket(),
        other => panic!("no TLS: {other:?}"),
    }
}

/// Waits until a call of the other end would have blocked once more than `before` times.
fn await_block(blocked: &AtomicU32, before: u32) {
    let end = Instant::now() + PATIENCE;
    while blocked.load(Ordering::Relaxed) <= before {
        assert!(Instant::now() < end, "the other end never blocks");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Repeats a call as long as it would block.
fn insist<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < end => {}
            result => return result,
        }
    }
}

fn say(stream: &mut Stream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = insist(|| stream.write(bytes))?;
        bytes = &bytes[count..];
    }
    insist(|| stream.flush())
}

fn hear(stream: &mut Stream, into: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        match insist(|| stream.read(&mut into[filled..]))? {
            0 => return Err(ErrorKind::ConnectionAborted.into()),
            count => filled += count,
        }
    }
    Ok(())
}

/// The results of both ends of an exchange of one message in each direction: the source's, the
/// destination's.
fn exchange(source: &Tls, destination: &Tls) -> (io::Result<()>, io::Result<()>) {
    let (mut near, mut far) = connected(source, destination);
    let there = thread::spawn(move || {
        let mut word = [0; 5];
        hear(&mut far, &mut word)?;
        assert_eq!(&word, b"HELLO");
        say(&mut far, b"WELCOME")
    });
    let mut word = [0; 7];
    let here = say(&mut near, b"HELLO").and_then(|()| hear(&mut near, &mut word));
    let there = there.join().unwrap();
    if here.is_ok() {
        assert_eq!(&word, b"WELCOME");
    }
    (here, there)
}

fn why(result: io::Result<()>) -> SessionError {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    *error
        .into_inner()
        .unwrap()
        .downcast::<SessionError>()
        .unwrap()
}

/// The source rejects the destination's certificate.
fn source_refuses(source: &Tls, destination: &Tls, reason: &str) {
    let (here, there) = exchange(source, destination);
    let (here, there) = (why(here), why(there));
    assert!(
        matches!(&here, SessionError::Certificate(error) if format!("{error:?}").contains(reason)),
        "{here:?}"
    );
    assert!(matches!(there, SessionError::Ended(_)), "{there:?}");
}

/// The destination rejects the source's certificate.
fn destination_refuses(source: &Tls, destination: &Tls, reason: &str) {
    let (here, there) = exchange(source, destination);
    let (here, there) = (why(here), why(there));
    assert!(matches!(here, SessionError::Ended(_)), "{here:?}");
    assert!(
        matches!(&there, SessionError::Certificate(error) if format!("{error:?}").contains(reason)),
        "{there:?}"
    );
}

#[test]
fn hosts_of_one_authority_can_connect() {
    let (source, destination) = both_hosts();
    let (here, there) = exchange(&source, &destination);
    here.unwrap();
    there.unwrap();
    let shown = format!("{source:?}");
    assert_eq!(shown, "Tls { .. }");
}

#[test]
fn hosts_of_another_authority_are_refused_by_either_side() {
    let (mine, other) = (Identity::authority("mine"), Identity::authority("other"));
    let good = load(&mine.signs(HOST, Validity::Now), &mine);
    // Each trusts mine, and one is signed by the other.
    let stranger = load(&other.signs(HOST, Validity::Now), &mine);
    destination_refuses(&stranger, &good, "UnknownIssuer");
    source_refuses(&good, &stranger, "UnknownIssuer");
    // The same name does not make it the same authority.
    let false_mine = Identity::authority("mine");
    let stranger = load(&false_mine.signs(HOST, Validity::Now), &mine);
    destination_refuses(&stranger, &good, "BadSignature");
    source_refuses(&good, &stranger, "BadSignature");
}

#[test]
fn the_hosts_of_a_pairing_accept_only_each_other() {
    let (source, destination) = paired_hosts();
    let (here, there) = exchange(&source, &destination);
    here.unwrap();
    there.unwrap();

    // Either side of another pairing has the same names and another key.
    let (other_source, other_destination) = paired_hosts();
    source_refuses(&source, &other_destination, "BadSignature");
    source_refuses(&other_source, &destination, "BadSignature");
    // Nodes of an authority, which this destination does not have.
    let (node1, node2) = both_hosts();
    source_refuses(&source, &node2, "UnknownIssuer");
    source_refuses(&node1, &destination, "UnknownIssuer");

    // A source that knows the destination's certificate, and is not its peer.
    let (peer, far) = (self_signed("node1"), self_signed(HOST));
    let destination = Tls::paired(&terms(&far, &peer.0)).unwrap();
    let stranger = Tls::paired(&terms(&self_signed("node1"), &far.0)).unwrap();
    destination_refuses(&stranger, &destination, "BadSignature");
    let node = Identity::authority("mine").signs("node1", Validity::Now);
    let node = (node.certificate_pem(), node.key_pem());
    let stranger = Tls::paired(&terms(&node, &far.0)).unwrap();
    destination_refuses(&stranger, &destination, "UnknownIssuer");
    // The certificate without its key is nothing.
    let (_, other_key) = self_signed("node1");
    let error = Tls::paired(&terms(&(peer.0, other_key), &far.0)).unwrap_err();
    assert!(error.to_string().contains("does not match"), "{error}");
}

#[test]
fn terms_that_are_malformed_are_named() {
    let (own, peer) = (self_signed("node1"), self_signed(HOST));
    let good = terms(&own, &peer.0);
    let damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (certificate, key, peer, said) in [
        ("", &*good.key, &*good.peer, "certificate"),
        (&good.key, &good.key, &good.peer, "certificate"),
        (&good.certificate, "", &good.peer, "key"),
        (&good.certificate, &good.certificate, &good.peer, "key"),
        (&good.certificate, &good.key, "rubbish", "certificate"),
        (&good.certificate, &good.key, damaged, "other side's"),
        (damaged, &good.key, &good.peer, "does not match"),
    ] {
        let error = Tls::paired(&PairedTls {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            peer: peer.to_owned(),
        });
        let text = error.unwrap_err().to_string();
        assert!(text.contains(said) && !text.contains("BEGIN"), "{text}");
    }
}

#[test]
fn certificates_count_in_their_time_only() {
    let authority = Identity::authority("mine");
    let good = load(&authority.signs(HOST, Validity::Now), &authority);
    for (validity, reason) in [
        (Validity::Past, "Expired"),
        (Validity::Future, "NotValidYet"),
    ] {
        let bad = load(&authority.signs(HOST, validity), &authority);
        destination_refuses(&bad, &good, reason);
        source_refuses(&good, &bad, reason);
    }
}

#[test]
fn a_certificate_for_clients_only_is_refused_by_either_side() {
    let authority = Identity::authority("mine");
    let node = load(&authority.signs(HOST, Validity::Now), &authority);
    // The name of a host does not make it a node's.
    let client = load(&authority.signs_client(HOST), &authority);
    destination_refuses(&client, &node, "InvalidPurpose");
    source_refuses(&node, &client, "InvalidPurpose");
}

#[test]
fn the_destination_must_be_the_host_that_was_dialled() {
    let authority = Identity::authority("mine");
    let source = load(&authority.signs("node1", Validity::Now), &authority);
    for other in ["127.0.0.2", "node2", "::1"] {
        let destination = load(&authority.signs(other, Validity::Now), &authority);
        source_refuses(&source, &destination, "NotValidForName");
    }
    // A name works too.
    let named = load(&authority.signs("localhost", Validity::Now), &authority);
    let (listener, endpoint) = listen(Some(named));
    let Endpoint::Tcp { port, .. } = endpoint else {
        panic!("{endpoint}");
    };
    let localhost = Endpoint::Tcp {
        host: "localhost".to_owned(),
        port,
    };
    let there = thread::spawn(move || {
        let mut word = [0; 5];
        hear(&mut accept(&listener), &mut word).map(|()| word)
    });
    let mut near = connect(&localhost, PATIENCE, Some(&source)).unwrap();
    near.set_timeout(SLICE).unwrap();
    say(&mut near, b"HELLO").unwrap();
    assert_eq!(&there.join().unwrap().unwrap(), b"HELLO");
}

#[test]
fn a_source_without_a_certificate_is_refused() {
    let (mut source, destination) = both_hosts();
    let roots = {
        // This authority never checks a certificate: the destination checks first.
        let authority = Identity::authority("x");
        let mut roots = RootCertStore::empty();
        roots.add(authority.certificate.into()).unwrap();
        roots
    };
    let verifier = AcceptAnything(Arc::new(rustls::crypto::ring::default_provider()));
    let mut client = ClientConfig::builder_with_provider(verifier.0.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    client
        .dangerous()
        .set_certificate_verifier(Arc::new(verifier));
    client.alpn_protocols = vec![PROTOCOL.to_vec()];
    source.client = Arc::new(client);
    destination_refuses(&source, &destination, "NoCertificatesPresented");
}

#[test]
fn another_protocol_of_the_same_authority_is_refused() {
    let (mut source, destination) = both_hosts();
    Arc::make_mut(&mut source.client).alpn_protocols = vec![b"http/1.1".to_vec()];
    let (here, there) = exchange(&source, &destination);
    assert!(matches!(why(here), SessionError::Ended(_)));
    assert!(matches!(why(there), SessionError::Protocol(_)));
}

/// The verifier of a careless source.
#[derive(Debug)]
struct AcceptAnything(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for AcceptAnything {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        unreachable!("TLS 1.3 only")
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        let algorithms = &self.0.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}

#[test]
fn garbage_instead_of_a_handshake_ends_it_for_good() {
    let (source, destination) = both_hosts();
    let record = [&[22, 3, 1, 0x40, 0][..], &[0xff; 0x4000]].concat();
    let huge = [22, 3, 1, 0xff, 0xff];
    let garbage: [&[u8]; 4] = [b"GET / HTTP/1.1\r\n\r\n", &record, &huge, &[0; 100_000]];
    for bytes in garbage {
        let (listener, endpoint) = listen(Some(destination.clone()));
        let mut stranger = connect(&endpoint, PATIENCE, None).unwrap();
        let mut arrived = accept(&listener);
        let sender = {
            let bytes = bytes.to_vec();
            thread::spawn(move || stranger.write_all(&bytes).map(|()| stranger))
        };
        let mut byte = [0];
        let error = why(hear(&mut arrived, &mut byte));
        assert!(matches!(error, SessionError::Protocol(_)), "{error:?}");
        // The error persists for every call.
        for result in [
            arrived.read(&mut byte).map(drop),
            arrived.write(&byte).map(drop),
            arrived.flush(),
        ] {
            assert!(matches!(why(result), SessionError::Protocol(_)));
        }
        drop(arrived);
        let _ = sender.join().unwrap();
    }

    // The destination does not use TLS.
    let (listener, endpoint) = listen(None);
    let mut near = connect(&endpoint, PATIENCE, Some(&source)).unwrap();
    near.set_timeout(SLICE).unwrap();
    let mut far = accept(&listener);
    say(&mut far, b"these are frames without TLS").unwrap();
    let error = why(say(&mut near, b"HELLO"));
    assert!(matches!(error, SessionError::Protocol(_)), "{error:?}");
    assert!(error.to_string().contains("do both hosts use TLS"));
}

#[test]
fn silence_and_dribble_hold_no_call_for_long() {
    let (source, destination) = both_hosts();
    let (listener, endpoint) = listen(Some(destination));
    let mut stranger = connect(&endpoint, PATIENCE, None).unwrap();
    let mut arrived = accept(&listener);
    let mut byte = [0];
    let in_time = |call: &mut dyn FnMut() -> io::Result<usize>| {
        let started = Instant::now();
        assert_eq!(call().unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(
            started.elapsed() < 20 * SLICE,
            "returned after {:?}",
            started.elapsed()
        );
    };
    in_time(&mut || arrived.read(&mut byte));
    in_time(&mut || arrived.write(b"x"));

    // The header of a long record, and then a byte of it now and then.
    stranger.write_all(&[22, 3, 1, 0x40, 0]).unwrap();
    let dribble = thread::spawn(move || {
        for _ in 0..100 {
            if stranger.write_all(&[1]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    });
    for _ in 0..3 {
        in_time(&mut || arrived.read(&mut byte));
    }
    // Not forever: then it has ended.
    let Stream::Tls(stream) = &mut arrived else {
        panic!("no TLS");
    };
    stream.be_late();
    for _ in 0..2 {
        assert!(matches!(
            why(arrived.read(&mut byte).map(drop)),
            SessionError::Late
        ));
    }
    drop(arrived);
    dribble.join().unwrap();

    // It does not delay others.
    let _silent = connect(&endpoint, PATIENCE, None).unwrap();
    let mut good = connect(&endpoint, PATIENCE, Some(&source)).unwrap();
    good.set_timeout(SLICE).unwrap();
    let there = thread::spawn(move || {
        let mut word = [0; 5];
        let silent = accept(&listener);
        hear(&mut accept(&listener), &mut word).map(|()| (word, silent))
    });
    say(&mut good, b"HELLO").unwrap();
    assert_eq!(&there.join().unwrap().unwrap().0, b"HELLO");
}

/// Pseudorandom numbers, the same each time.
fn numbers(seed: u64) -> impl FnMut() -> usize {
    let mut state = seed;
    move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(state >> 33).unwrap()
    }
}

#[test]
fn calls_that_would_block_lose_and_double_nothing() {
    const LENGTH: usize = 24 << 20;
    let (source, destination) = both_hosts();
    let (mut near, mut far) = connected(&source, &destination);
    // Calls end long before their work is done.
    for end in [&mut near, &mut far] {
        end.set_timeout(Duration::from_millis(1)).unwrap();
        sockopt::set_socket_recv_buffer_size(socket(end), 64 << 10).unwrap();
        sockopt::set_socket_send_buffer_size(socket(end), 64 << 10).unwrap();
    }
    // Number of times each end's calls would have blocked.
    let [reads, writes]: [Arc<AtomicU32>; 2] = Default::default();
    let (its_reads, its_writes) = (reads.clone(), writes.clone());
    let mut number = numbers(7);
    let data: Vec<u8> = (0..LENGTH).map(|_| number().to_le_bytes()[0]).collect();
    let expected = data.clone();
    let reader = thread::spawn(move || {
        let mut number = numbers(9);
        let mut heard = Vec::with_capacity(LENGTH);
        let mut buffer = vec![0; 1 << 20];
        while heard.len() < LENGTH {
            let size = 1 + number() % buffer.len();
            match far.read(&mut buffer[..size]) {
                Ok(0) => panic!("it ends after {} bytes", heard.len()),
                Ok(count) => heard.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    its_reads.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => panic!("{error}"),
            }
            // From here on nothing is read until the socket is full.
            if heard.len() > 1 << 20 {
                await_block(&its_writes, 0);
            }
            if number().is_multiple_of(64) {
                thread::sleep(Duration::from_millis(20));
            }
        }
        (heard, far)
    });
    let (mut sent, mut paused) = (0, false);
    while sent < LENGTH {
        // And here nothing is written until everything is read.
        if sent > LENGTH / 2 && !paused {
            paused = true;
            insist(|| near.flush()).unwrap();
            await_block(&reads, reads.load(Ordering::Relaxed));
        }
        let end = LENGTH.min(sent + 1 + number() % (1 << 20));
        let piece = &data[sent..end];
        let (one, rest) = piece.split_at(number() % (piece.len() + 1));
        let (two, three) = rest.split_at(number() % (rest.len() + 1));
        let slices = [one, two, three].map(IoSlice::new);
        match near.write_vectored(&slices) {
            Ok(0) => panic!("it takes nothing more"),
            Ok(count) => sent += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                writes.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => panic!("{error}"),
        }
    }
    insist(|| near.flush()).unwrap();
    let (heard, mut far) = reader.join().unwrap();
    assert!(heard == expected, "other bytes than were sent");

    // Dropping an end announces it.
    drop(near);
    assert_eq!(insist(|| far.read(&mut [0; 1])).unwrap(), 0);
}

#[test]
fn an_unannounced_end_differs_from_a_close() {
    let (source, destination) = both_hosts();
    let (mut near, mut far) = connected(&source, &destination);
    let there = thread::spawn(move || {
        let mut word = [0; 5];
        hear(&mut far, &mut word).unwrap();
        // As after a crash.
        socket(&far).shutdown(std::net::Shutdown::Both).unwrap();
        far
    });
    say(&mut near, b"HELLO").unwrap();
    let _far = there.join().unwrap();
    let error = hear(&mut near, &mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_unix_socket_takes_no_certificates() {
    let (tls, _) = both_hosts();
    let unix = Endpoint::Unix("/nonexistent/socket".into());
    for error in [
        connect(&unix, PATIENCE, Some(&tls)).unwrap_err(),
        Listener::bind(&unix, Some(tls)).unwrap_err(),
    ] {
        assert!(
            error.to_string().contains("does not leave this host"),
            "{error}"
        );
    }
}

#[test]
fn a_host_that_no_certificate_can_be_for_is_named() {
    let (tls, _) = both_hosts();
    let port = TcpListener::bind((HOST, 0)).unwrap();
    let socket = TcpStream::connect(port.local_addr().unwrap()).unwrap();
    let error = tls.connect("no name", socket).unwrap_err();
    assert!(error.to_string().contains("\"no name\""), "{error}");
}

#[test]
fn files_that_are_wrong_or_not_secret_are_named() {
    let directory = Directory::new();
    let authority = Identity::authority("mine");
    let host = authority.signs(HOST, Validity::Now);
    let other = authority.signs(HOST, Validity::Now);
    let files = directory.files(&host, &authority);
    Tls::load(&files).unwrap();
    let (certificate, key) = (host.certificate_pem(), host.key_pem());
    let large = "x".repeat((1 << 20) + 1);
    for (name, text, mode, said) in [
        ("key", key.as_str(), 0o640, "chmod go-rwx"),
        ("key", &key, 0o604, "chmod go-rwx"),
        ("key", "", 0o600, "no private key"),
        ("key", &certificate, 0o600, "no private key"),
        ("key", &other.key_pem(), 0o600, "does not match"),
        ("key", &large, 0o600, "more than"),
        ("certificate", &certificate, 0o664, "chmod go-w"),
        ("certificate", "rubbish", 0o644, "no certificate"),
        ("certificate", &large, 0o644, "more than"),
        ("authority", &certificate, 0o646, "chmod go-w"),
        ("authority", "", 0o644, "no certificate"),
        ("authority", &key, 0o644, "no certificate"),
        (
            "authority",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            0o644,
            "cannot be an authority",
        ),
    ] {
        directory.put(name, text, mode);
        let error = Tls::load(&files).unwrap_err();
        assert!(error.to_string().contains(said), "{name}: {error}");
        assert!(
            error.to_string().contains(directory.0.to_str().unwrap()),
            "{error}"
        );
        directory.files(&host, &authority);
    }
    let missing = TlsFiles {
        key: directory.0.join("none"),
        ..files.clone()
    };
    let error = Tls::load(&missing).unwrap_err();
    assert!(error.to_string().starts_with("cannot read"), "{error}");
    let no_file = TlsFiles {
        authority: directory.0.clone(),
        ..files
    };
    let error = Tls::load(&no_file).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
}

#[test]
fn the_files_are_written_as_the_api_has_them() {
    let text = r#"{"certificate":"/c.pem","key":"/k.pem","authority":"/a.pem"}"#;
    let files: TlsFiles = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&files).unwrap(), text);
    let more = text.replace("}", r#","ca":"/a.pem"}"#);
    assert!(serde_json::from_str::<TlsFiles>(&more).is_err());
    let less = r#"{"certificate":"/c.pem","key":"/k.pem"}"#;
    assert!(serde_json::from_str::<TlsFiles>(less).is_err());
}
