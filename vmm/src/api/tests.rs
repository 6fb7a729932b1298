//! The API in process: the router without a socket, and the server over one. The lab tests the
//! effects of requests on a VM (`tests/tests/api_vm.rs`).

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use super::controller::Controller;
use super::error::ApiError;
use super::*;
use crate::config::VmConfig;
use crate::http::server::BODY_MAX;
use crate::http::{HttpError, Problem as _};
use crate::machine::fake_machine::FakeMachine;
use crate::machine::{DeviceKind, Origin, StopHandle};
use crate::{Error, ErrorKind};

mod any_request;
mod description;
mod descriptors;
mod running;

/// The parts of a server without a socket.
struct Inside {
    router: Router,
    starts: Option<Starts>,
    stop: StopHandle,
    runtime: tokio::runtime::Runtime,
    /// The fake VM, once it is built.
    machine: Option<FakeMachine>,
}

impl Inside {
    fn new(config: Option<VmConfig>) -> Self {
        let stop = StopHandle::new().unwrap();
        let (controller, starts) = Controller::new(config.map(Origin::Boot), &stop).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        Self {
            router: endpoints::router(controller),
            starts: Some(starts),
            stop,
            runtime,
            machine: None,
        }
    }

    fn starts(&self) -> &Starts {
        self.starts.as_ref().unwrap()
    }

    fn send(&self, request: Request<Body>) -> (StatusCode, Value) {
        let (method, path) = (request.method().to_string(), request.uri().to_string());
        let (status, body) = self.runtime.block_on(async {
            let response = self.router.clone().oneshot(request).await.unwrap();
            let status = response.status();
            let id = response.headers()["x-request-id"]
                .to_str()
                .unwrap()
                .to_owned();
            let bytes = response.into_body().collect().await.unwrap().to_bytes();
            let body = if bytes.is_empty() {
                Value::Null
            } else {
                serde_json::from_slice(&bytes)
                    .unwrap_or_else(|_| Value::String(String::from_utf8(bytes.to_vec()).unwrap()))
            };
            let has_body = method != "HEAD";
            if has_body && (status.is_client_error() || status.is_server_error()) {
                assert_eq!(body["request_id"], id, "{body}");
                assert!(body["causes"].is_array(), "{body}");
            }
            (status, body)
        });
        description::is_described(&method, &path, status.as_u16());
        (status, body)
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .body(Body::from(body.to_owned()))
            .unwrap();
        let (status, body) = self.send(request);
        (status.as_u16(), body)
    }

    #[track_caller]
    fn refused(&self, method: &str, path: &str, body: &str, expected: (u16, &str)) -> Value {
        let (status, answer) = self.ask(method, path, body);
        let code = answer["code"].as_str().unwrap_or_default();
        assert_eq!((status, code), expected, "{method} {path} {body}: {answer}");
        answer
    }

    #[track_caller]
    fn done(&self, method: &str, path: &str, body: &str) {
        let (status, answer) = self.ask(method, path, body);
        assert_eq!(status, 204, "{method} {path} {body}: {answer}");
    }
}

/// The header of each request with a body.
const JSON: &str = "content-type: application/json";
const CONFIG: &str = r#"{"kernel": "/nonexistent", "memory": "64M"}"#;

fn two_devices() -> Error {
    let message = "two devices have the id nic; give one of them another id";
    Error::new(ErrorKind::NoRoom, message)
}

#[test]
fn a_machine_is_configured_before_it_starts() {
    let inside = Inside::new(None);
    inside.refused("GET", "/v1/vm/config", "", (409, "no_configuration"));
    inside.refused(
        "PATCH",
        "/v1/vm",
        r#"{"state":"Running"}"#,
        (409, "no_configuration"),
    );
    let (_, before) = inside.ask("GET", "/v1/vm", "");
    assert_eq!(before["state"], "NotStarted");
    inside.done("PUT", "/v1/vm", CONFIG);
    let (status, config) = inside.ask("GET", "/v1/vm/config", "");
    assert_eq!(status, 200);
    assert_eq!(config["kernel"], "/nonexistent");
    assert_eq!(config["memory"]["size"], "64M");
    // The answer of GET is a valid PUT.
    inside.done("PUT", "/v1/vm", &config.to_string());
    let (_, after) = inside.ask("GET", "/v1/vm", "");
    assert_eq!(
        after["generation"].as_u64(),
        before["generation"].as_u64().map(|seen| seen + 1),
        "the same again is no change"
    );
    assert!(inside.starts().queue.try_recv().is_err());
}

#[test]
fn bodies_are_refused_by_the_field() {
    let inside = Inside::new(None);
    for (body, expected, words) in [
        ("", (400, "malformed_body"), "EOF"),
        ("{", (400, "malformed_body"), "EOF"),
        (r#"{"kernel": "k"} x"#, (400, "malformed_body"), "trailing"),
        ("\u{0}", (400, "malformed_body"), "line 1"),
        ("[]", (422, "invalid_body"), "expected struct VmConfig"),
        ("{}", (422, "invalid_body"), "missing field `kernel`"),
        (
            r#"{"kernel": "k", "kernal": 1}"#,
            (422, "invalid_body"),
            "unknown field `kernal`",
        ),
        (
            r#"{"kernel": "k", "kernel": "l"}"#,
            (422, "invalid_body"),
            "duplicate field `kernel`",
        ),
        (
            r#"{"kernel": "k", "cpus": 0}"#,
            (422, "invalid_body"),
            "at cpus: 0 vCPUs",
        ),
        (
            r#"{"kernel": "k", "memory": "17179869184G"}"#,
            (422, "invalid_body"),
            "at memory: ",
        ),
        (
            r#"{"kernel": "k", "memory": {"size": "1G", "shared": true}}"#,
            (422, "invalid_body"),
            "unknown field `shared`",
        ),
        (
            r#"{"kernel": "k", "vdpa": [{"path": "/a"},
               {"path": "/b", "mac": "01:00:00:00:00:00"}]}"#,
            (422, "invalid_body"),
            "at vdpa[1].mac",
        ),
    ] {
        let answer = inside.refused("PUT", "/v1/vm", body, expected);
        assert!(answer.to_string().contains(words), "{body}: {answer}");
    }
    for body in [
        r#"{"state": "Flying"}"#,
        r#"{"state": "Running", "force": true}"#,
        "{}",
        "null",
    ] {
        inside.refused("PATCH", "/v1/vm", body, (422, "invalid_body"));
    }
    inside.refused("GET", "/v1/vm/config", "", (409, "no_configuration"));
}

#[test]
fn deep_and_large_bodies_are_refused() {
    let inside = Inside::new(None);
    inside.refused(
        "PUT",
        "/v1/vm",
        &"[".repeat(60_000),
        (400, "malformed_body"),
    );
    let large = " ".repeat(BODY_MAX + 1);
    inside.refused("PUT", "/v1/vm", &large, (413, "body_too_large"));
    // A declared length alone is sufficient.
    let request = Request::builder()
        .method("PUT")
        .uri("/v1/vm")
        .header("content-length", "1000000000000")
        .body(Body::empty())
        .unwrap();
    assert_eq!(inside.send(request).0, StatusCode::PAYLOAD_TOO_LARGE);
    let just = format!("{CONFIG}{}", " ".repeat(BODY_MAX - CONFIG.len()));
    inside.done("PUT", "/v1/vm", &just);
}

#[test]
fn the_error_for_a_missing_object_names_it() {
    let inside = Inside::new(None);
    for path in ["/", "/v1", "/v1/vm/", "/v1/vm/../vm", "/v1/%00", "/v2/vm"] {
        inside.refused("GET", path, "", (404, "no_such_path"));
    }
    for method in ["POST", "DELETE", "OPTIONS", "BREW"] {
        inside.refused(method, "/v1/vm", "", (405, "method_not_allowed"));
    }
}

#[test]
fn a_request_id_is_the_clients_if_it_is_safe_to_log() {
    let inside = Inside::new(None);
    let long = "x".repeat(65);
    for (given, taken) in [
        ("a-b/1", true),
        ("", false),
        ("two words", false),
        (&long, false),
    ] {
        let request = Request::builder()
            .uri("/v1/vm/config")
            .header("x-request-id", given)
            .body(Body::empty())
            .unwrap();
        let (_, body) = inside.send(request);
        assert_eq!(body["request_id"] == given, taken, "{body}");
    }
}

#[test]
fn a_start_that_fails_leaves_the_machine_as_it_was() {
    let mut inside = Inside::new(None);
    inside.done("PUT", "/v1/vm", CONFIG);
    let starts = inside.starts.take().unwrap();
    let builder = std::thread::spawn({
        let stop = inside.stop.clone();
        move || {
            let request = starts.wait(&stop).unwrap().unwrap();
            assert_eq!(
                request.origin().config().unwrap().kernel,
                PathBuf::from("/nonexistent")
            );
            request.failed(two_devices());
            starts
        }
    });
    let answer = inside.refused(
        "PATCH",
        "/v1/vm",
        r#"{"state":"Running"}"#,
        (409, "no_room"),
    );
    assert!(answer["causes"][0].as_str().unwrap().contains("the id nic"));
    let starts = builder.join().unwrap();
    assert_eq!(inside.ask("GET", "/v1/vm", "").1["state"], "NotStarted");
    inside.done("PUT", "/v1/vm", r#"{"kernel": "/other"}"#);
    // A stop is also possible before boot.
    inside.done("PATCH", "/v1/vm", r#"{"state":"Stopped"}"#);
    assert!(starts.wait(&inside.stop).unwrap().is_none());
    // No thread builds VMs any more.
    drop(starts);
    inside.refused("PATCH", "/v1/vm", r#"{"state":"Running"}"#, (503, "ending"));
}

#[test]
fn a_given_configuration_starts_by_itself() {
    let config: VmConfig = serde_json::from_str(CONFIG).unwrap();
    let inside = Inside::new(Some(config.clone()));
    assert_eq!(inside.ask("GET", "/v1/vm", "").1["state"], "Starting");
    let (_, shown) = inside.ask("GET", "/v1/vm/config", "");
    assert_eq!(shown, serde_json::to_value(&config).unwrap());
    for (method, body) in [
        ("PUT", CONFIG),
        ("PATCH", r#"{"state":"Running"}"#),
        ("PATCH", r#"{"state":"Paused"}"#),
    ] {
        let answer = inside.refused(method, "/v1/vm", body, (409, "wrong_state"));
        assert!(
            answer["message"]
                .as_str()
                .unwrap()
                .contains("the machine is starting")
        );
    }
    let request = inside.starts().wait(&inside.stop).unwrap().unwrap();
    assert_eq!(request.origin().config(), Some(&config));
}

#[test]
fn every_error_has_a_status() {
    use crate::machine::RequestError as Refused;
    let io = || std::io::Error::from_raw_os_error(libc::EMFILE);
    let json = serde_json::from_str::<u8>("x").unwrap_err();
    let errors: [(ApiError, u16); 26] = [
        (HttpError::NoSuchPath("/x".into()).into(), 404),
        (
            HttpError::Method {
                path: "/x".into(),
                method: "PUT".into(),
            }
            .into(),
            405,
        ),
        (HttpError::Malformed(json).into(), 400),
        (
            HttpError::Invalid {
                at: String::new(),
                reason: String::new(),
            }
            .into(),
            422,
        ),
        (HttpError::Parameter("x".into()).into(), 400),
        (
            HttpError::UnknownParameter {
                name: "x".into(),
                known: String::new(),
            }
            .into(),
            400,
        ),
        (HttpError::ContentType.into(), 415),
        (
            HttpError::Condition(axum::http::header::IF_MATCH).into(),
            412,
        ),
        (HttpError::Browser.into(), 403),
        (HttpError::TooLarge.into(), 413),
        (HttpError::TooSlow.into(), 408),
        (HttpError::Receive(axum::Error::new(io())).into(), 400),
        (
            ApiError::WrongState {
                state: bellhop_api::machine::VmState::Paused,
                remedy: "",
            },
            409,
        ),
        (ApiError::NoConfig, 409),
        (ApiError::TooManyWatchers, 503),
        (ApiError::Ending, 503),
        (ApiError::Start(two_devices()), 409),
        (ApiError::Start(Error::failed("eventfd")(io())), 500),
        (Refused::Ended.into(), 409),
        (Refused::Busy.into(), 503),
        (Refused::IdInUse("x".into()).into(), 409),
        (Refused::NoSuchDevice("x".into()).into(), 404),
        (
            Refused::OtherKind {
                id: "x".into(),
                wanted: DeviceKind::Disk,
            }
            .into(),
            409,
        ),
        (Refused::NoAnnouncement("x".into()).into(), 409),
        (Refused::Wake(io()).into(), 500),
        (Refused::Device(two_devices()).into(), 409),
    ];
    for (error, status) in errors {
        assert_eq!(error.kind().0.as_u16(), status, "{error}");
        assert!(!error.kind().1.is_empty() && !error.to_string().is_empty());
    }
}

/// A whole server on its own socket.
struct Served {
    server: Server,
    starts: Starts,
    stop: StopHandle,
    path: PathBuf,
}

impl Served {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("api-{name}-{}", std::process::id()));
        let stop = StopHandle::new().unwrap();
        let (server, starts) = Server::start(&path, None, &stop).unwrap();
        Self {
            server,
            starts,
            stop,
            path,
        }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        stream
    }

    /// Sends bytes unchanged; returns the whole answer as text.
    fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may close the connection meanwhile.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[track_caller]
    fn works(&self) {
        let answer = self.raw(b"GET /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }
}

#[test]
fn garbage_is_survived() {
    let served = Served::new("garbage");
    let headers = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(1000));
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000));
    let endless = format!(
        "PUT /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{JSON}\r\n\
         transfer-encoding: chunked\r\n\r\nffffffff\r\n{}",
        "x".repeat(100_000)
    );
    for (bytes, status) in [
        (endless.as_bytes(), "413"),
        (b"\x16\x03\x01\x00\xff".as_slice(), "400"),
        (b"GET\r\n\r\n", "400"),
        (b"GET / HTTP/9.9\r\n\r\n", "400"),
        (b"GET / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", "400"),
        (headers.as_bytes(), "431"),
        (long.as_bytes(), "431"),
        (
            b"PUT /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
              content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n\
              fffffffffffffffff\r\n",
            "400",
        ),
    ] {
        let answer = served.raw(bytes);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")) || answer.is_empty(),
            "{}: {answer}",
            String::from_utf8_lossy(&bytes[..bytes.len().min(60)])
        );
    }
    served.works();
}

#[test]
fn slow_and_idle_clients_are_let_go() {
    let served = Served::new("slow");
    let started = Instant::now();
    let mut streams: Vec<UnixStream> = [
        // Sends nothing, half a head, half a body, and idles after an answer.
        "".to_owned(),
        "GET /v1/vm HT".to_owned(),
        format!("PUT /v1/vm HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: 100\r\n\r\n{{"),
        "GET /v1/vm HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(),
    ]
    .iter()
    .map(|bytes| {
        let mut stream = served.connect();
        stream.write_all(bytes.as_bytes()).unwrap();
        stream
    })
    .collect();
    let answers: Vec<String> = streams
        .iter_mut()
        .map(|stream| {
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            String::from_utf8_lossy(&answer).into_owned()
        })
        .collect();
    let took = started.elapsed();
    assert!(took > Duration::from_secs(9), "{took:?}");
    assert!(took < Duration::from_secs(50), "{took:?}");
    assert!(answers[2].starts_with("HTTP/1.1 408"), "{answers:?}");
    assert!(answers[2].contains("body_too_slow"), "{answers:?}");
    assert!(answers[3].starts_with("HTTP/1.1 200"), "{answers:?}");
    served.works();
}

#[test]
fn more_connections_than_there_is_room_for_wait() {
    let served = Served::new("many");
    let mut idle: Vec<UnixStream> = (0..64).map(|_| served.connect()).collect();
    let mut late = served.connect();
    late.write_all(b"GET /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .unwrap();
    late.set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut answer = String::new();
    assert!(late.read_to_string(&mut answer).is_err() && answer.is_empty());
    drop(idle.pop());
    late.set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    late.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn a_client_can_go_while_it_is_started_for() {
    let served = Served::new("gone");
    let put = format!(
        "PUT /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{JSON}\r\n\
         content-length: {}\r\n\r\n{CONFIG}",
        CONFIG.len()
    );
    assert!(served.raw(put.as_bytes()).starts_with("HTTP/1.1 204"));
    let wanted = json!({"state": "Running"}).to_string();
    let mut stream = served.connect();
    stream
        .write_all(
            format!(
                "PATCH /v1/vm HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: {}\r\n\r\n{wanted}",
                wanted.len()
            )
            .as_bytes(),
        )
        .unwrap();
    let request = served.starts.wait(&served.stop).unwrap().unwrap();
    drop(stream);
    request.failed(two_devices());
    served.works();
}

#[test]
fn the_end_waits_for_answers_but_not_for_clients() {
    let served = Served::new("end");
    let _silent = served.connect();
    let path = served.path.clone();
    served.works();
    let started = Instant::now();
    drop(served);
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(!path.exists());
}

#[test]
fn a_process_that_cannot_continue_gives_the_reason() {
    let served = Served::new("failed");
    let mut stream = served.connect();
    // After one answer the connection is certainly accepted when the server ends.
    stream
        .write_all(b"GET /v1/vm HTTP/1.1\r\nhost: x\r\n\r\n")
        .unwrap();
    stream.read_exact(&mut [0; 12]).unwrap();
    stream
        .write_all(b"GET /v1/vm/watch?since=1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    served.server.end_with(&two_devices());
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains(r#""reason":"Failed""#), "{answer}");
    assert!(answer.contains("the id nic"), "{answer}");
}

#[test]
fn a_socket_in_use_is_an_error() {
    let served = Served::new("twice");
    let again = Server::start(&served.path, None, &served.stop).unwrap_err();
    assert!(again.to_string().contains("serves"), "{again}");
    served.works();
}
