//! The printed form of refusals, and HTTP over a socket against faulty servers.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;

use super::fake::FakeDaemon;
use super::*;
use crate::error::ErrorKind;
use crate::exit::{Code, Report};

fn refused(status: u16, body: &Value) -> Error {
    let fake = FakeDaemon::default().answer(status, body);
    fake.node().get::<Value>("/v1/vms/a").unwrap_err()
}

#[test]
fn a_refusal_keeps_the_daemons_words() {
    let error = refused(
        409,
        &json!({"code": "wrong_state", "message": "the VM runs", "causes": ["because", "it does"],
                "hint": "stop it", "request_id": "4f", "new": 1}),
    );
    let messages = ["the VM runs", "because", "it does"].map(str::to_owned);
    let wanted = Report::from_messages(messages)
        .code("wrong_state")
        .hint("stop it")
        .request_id("4f");
    assert_eq!(error.in_words(), wanted);
    assert_eq!(error.code(), Code::Conflict);
    assert_eq!(error.to_string(), "the VM runs");
}

#[test]
fn foreign_refusals_are_shown_shortened() {
    let page = format!("<html>{}", "x".repeat(10_000));
    let error = refused(502, &json!(page));
    let said = format!("{:?}", error.in_words());
    assert!(said.contains("502 Bad Gateway"), "{said}");
    assert!(said.contains("<html>xxx") && said.len() < 600, "{said}");
    let error = refused(500, &Value::Null);
    assert!(error.refusal().unwrap().body.causes.is_empty());
}

#[test]
fn the_exit_code_gives_the_reason() {
    let code = |status, code: &str| {
        let body = json!({"code": code, "message": "no"});
        refused(status, &body).code()
    };
    for status in (300..600).filter(|status| *status != 404) {
        let wanted = match status {
            401 | 403 => Code::NotAllowed,
            409 | 412 | 428 => Code::Conflict,
            400 | 413 | 415 | 422 => Code::InvalidInput,
            408 | 504 => Code::TimedOut,
            _ => Code::Failed,
        };
        for word in ["", "internal", "no_such_path"] {
            assert_eq!(code(status, word), wanted, "{status} {word}");
        }
    }
    for word in ["no_such_vm", "no_migration", "not_found", ""] {
        assert_eq!(code(404, word), Code::NotThere, "{word}");
    }
    // A daemon of another version: the object may exist.
    assert_eq!(code(404, "no_such_path"), Code::Failed);
}

#[test]
fn segments_of_a_path_stay_segments() {
    assert_eq!(path(["v1", "vms", "web-1"]), "/v1/vms/web-1");
    assert_eq!(path(["a/../b", "ö?#"]), "/a%2F..%2Fb/%C3%B6%3F%23");
}

/// A socket that answers each connection with these bytes after a request.
struct Server {
    path: PathBuf,
}

impl Server {
    fn start(name: &str, answer: &'static [u8], hold: Duration) -> Self {
        let file = format!("bellhop-client-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(file);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut request = [0; 4096];
                let _ = stream.read(&mut request);
                let _ = stream.write_all(answer);
                std::thread::sleep(hold);
            }
        });
        Self { path }
    }

    fn ask(&self, time: Duration) -> Result<Answer, Error> {
        let http = Http::new(&Address::Socket(self.path.clone()), &Credentials::default())?;
        http.exchange(&Request::new(Method::GET, "/v1/version", time))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

const LONG: Duration = Duration::from_secs(20);

#[test]
fn answers_of_all_framings_are_read() {
    for (name, answer) in [
        (
            "length",
            &b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"[..],
        ),
        (
            "chunked",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        ),
        ("close", b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{}"),
    ] {
        let answer = Server::start(name, answer, Duration::ZERO)
            .ask(LONG)
            .unwrap();
        assert_eq!(
            (answer.status, answer.body.as_slice()),
            (StatusCode::OK, &b"{}"[..])
        );
    }
}

#[test]
fn servers_that_are_not_as_they_should_be_end_in_errors() {
    for (name, answer) in [
        ("nothing", &b""[..]),
        ("rubbish", b"SSH-2.0-OpenSSH_9.9\r\n"),
        ("cut", b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{"),
        (
            "huge",
            b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n{",
        ),
    ] {
        let result = Server::start(name, answer, Duration::ZERO).ask(LONG);
        let error = result.unwrap_err();
        let text = error.to_string();
        let known = text.contains("broke") || text.contains("more than");
        assert!(known, "{name}: {error:?}");
    }
}

#[test]
fn a_silent_server_times_out() {
    let server = Server::start("mute", b"HTTP/1.1 200 OK\r\n", Duration::from_secs(60));
    let start = Instant::now();
    let error = server.ask(Duration::from_millis(200)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TimedOut), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(30));
    assert_eq!(error.code(), Code::TimedOut);
}

#[test]
fn a_stream_comes_piece_by_piece_and_ends_with_its_connection() {
    let events = b"HTTP/1.1 200 OK\r\n\r\nid: 1\ndata: {}\n\n";
    let server = Server::start("events", events, Duration::from_secs(2));
    let address = Address::Socket(server.path.clone());
    let node = Node::new(Http::new(&address, &Credentials::default()).unwrap());
    let mut stream = node.open("/v1/events").unwrap();
    let mut heard = Vec::new();
    loop {
        match stream.next(Duration::from_millis(100)) {
            Piece::Data(data) => heard.extend(data),
            Piece::Silence => break,
            Piece::End => panic!("the server still has it open"),
        }
    }
    assert_eq!(heard, b"id: 1\ndata: {}\n\n");
    assert_eq!(stream.next(LONG), Piece::End);
    let refusal =
        b"HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\n{\"code\": \"no_such_path\"}";
    let server = Server::start("no-events", refusal, Duration::ZERO);
    let address = Address::Socket(server.path.clone());
    let node = Node::new(Http::new(&address, &Credentials::default()).unwrap());
    let error = node.open("/v1/events").unwrap_err();
    assert_eq!(error.refusal().unwrap().status, StatusCode::NOT_FOUND);
}

#[test]
fn without_a_daemon_the_hint_gives_the_command_to_start_one() {
    let path = std::env::temp_dir().join("bellhop-client-absent");
    let node = Node::new(Http::new(&Address::Socket(path), &Credentials::default()).unwrap());
    let error = node.get::<Value>("/v1/version").unwrap_err();
    assert!(format!("{:?}", error.in_words()).contains("bellhop serve"));
    assert_eq!(error.code(), Code::NoDaemon);
}
