//! Descriptors in requests. The lab tests vhost-vdpa devices among them
//! (`tests/tests/api_descriptors.rs`); these tests use other files.
//!
//! The other end of a pipe shows whether the server has closed a descriptor.

use std::io::{IoSlice, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};

use axum::body::Bytes;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;
use crate::http::client::{Client, ClientError};
use crate::http::descriptors::DESCRIPTORS_MAX;

/// Sends `bytes` with descriptors, as many as the kernel accepts at once.
fn send(stream: &UnixStream, bytes: &str, descriptors: &[BorrowedFd<'_>]) {
    let mut space = vec![std::mem::MaybeUninit::uninit(); 4096];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let bytes = [IoSlice::new(bytes.as_bytes())];
    rustix::net::sendmsg(stream, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn head(method: &str, path: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
}

/// Reads one answer of a persistent connection: status and body.
fn answer(stream: &mut UnixStream) -> (u16, Value) {
    let mut bytes = Vec::new();
    loop {
        let mut more = [0; 4096];
        let count = stream.read(&mut more).unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&bytes));
        bytes.extend(&more[..count]);
        let text = String::from_utf8_lossy(&bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let length = length.map_or(0, |length| length.parse().unwrap());
        if body.len() >= length {
            let status = head[9..12].parse().unwrap();
            return (status, serde_json::from_str(body).unwrap_or(Value::Null));
        }
    }
}

#[track_caller]
fn is_closed(mut reader: PipeReader, writer: PipeWriter) {
    drop(writer);
    // Blocks until the last writer is closed.
    assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
}

fn refused(stream: &mut UnixStream, body: &Value, descriptors: &[BorrowedFd<'_>], words: &str) {
    let body = body.to_string();
    let request = head("PUT", "/v1/vm", &body) + &body;
    send(stream, &request, descriptors);
    let (status, answer) = answer(stream);
    let found = (status, answer["code"].as_str().unwrap_or_default());
    assert_eq!(found, (422, "bad_descriptor"), "{answer}");
    assert!(answer.to_string().contains(words), "{answer}");
}

fn nic(fd: u32) -> Value {
    json!({ "kernel": "/k", "vdpa": [{ "fd": fd, "id": "nic" }] })
}

#[test]
fn descriptors_that_are_no_devices_are_refused_and_closed() {
    let served = Served::new("no-device");
    let mut stream = served.connect();
    refused(
        &mut stream,
        &nic(0),
        &[],
        "fd=0 of NIC nic did not come with the request: 0 came",
    );
    let (reader, writer) = std::io::pipe().unwrap();
    refused(
        &mut stream,
        &nic(1),
        &[writer.as_fd()],
        "fd=1 of NIC nic did not come with the request: 1 came",
    );
    is_closed(reader, writer);
    let (socket, _other) = UnixStream::pair().unwrap();
    let file = std::fs::File::open("/proc/self/status").unwrap();
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .unwrap();
    let event = vdpa::eventfd::new().unwrap();
    // SAFETY: the descriptor is open while `event` lives, which is the whole test.
    let event = unsafe { BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&event)) };
    for (descriptor, words) in [
        (socket.as_fd(), "not a character device"),
        (file.as_fd(), "not a character device"),
        (event, "not a character device"),
        (null.as_fd(), "/dev/null is not a vhost-vdpa device"),
    ] {
        refused(&mut stream, &nic(0), &[descriptor], words);
    }
    let nameless = json!({ "kernel": "/k", "vdpa": [{ "fd": 0 }] });
    refused(&mut stream, &nameless, &[null.as_fd()], "needs an id");
    // There is no configuration.
    send(&stream, &head("GET", "/v1/vm/config", ""), &[]);
    assert_eq!(answer(&mut stream).0, 409);
}

#[test]
fn a_nic_has_a_path_or_a_descriptor() {
    let inside = Inside::new(None);
    for nic in [
        json!({ "id": "a" }),
        json!({ "path": "/a", "fd": 0, "id": "a" }),
    ] {
        let body = json!({ "kernel": "/k", "vdpa": [nic] }).to_string();
        let answer = inside.refused("PUT", "/v1/vm", &body, (422, "invalid_body"));
        let message = answer["message"].as_str().unwrap();
        assert!(message.contains("vdpa[0]"), "{message}");
        assert!(
            message.contains("`path`") && message.contains("`fd`"),
            "{message}"
        );
    }
    inside.done("PUT", "/v1/vm", r#"{"kernel": "/k"}"#);
    // A transport without descriptors never delivers one.
    let answer = inside.refused(
        "PUT",
        "/v1/vm/nics/a",
        r#"{"fd": 0}"#,
        (422, "bad_descriptor"),
    );
    assert!(
        answer["message"].as_str().unwrap().contains("did not come"),
        "{answer}"
    );
    inside.refused(
        "PATCH",
        "/v1/vm/nics/a",
        r#"{"fd": 0}"#,
        (422, "bad_descriptor"),
    );
    inside.refused(
        "PATCH",
        "/v1/vm/nics/a",
        r#"{"fd": 0, "path": "/dev/vhost-vdpa-0"}"#,
        (422, "invalid_body"),
    );
}

#[test]
fn a_function_comes_as_its_own_file_or_not() {
    let served = Served::new("function");
    let mut stream = served.connect();
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .unwrap();
    let body = json!({ "kernel": "/k", "vfio": [{ "fd": 0, "id": "vf" }] });
    let words = "fd=0 of VFIO device vf did not come with the request: 0 came";
    refused(&mut stream, &body, &[], words);
    let words = "/dev/null is not a device file of VFIO";
    refused(&mut stream, &body, &[null.as_fd()], words);
    // One descriptor for two devices.
    let twice = json!({
        "kernel": "/k",
        "vdpa": [{ "path": "/a" }],
        "vfio": [{ "host": "0000:03:10.1" }, { "fd": 1, "id": "vf" }],
    });
    refused(&mut stream, &twice, &[null.as_fd()], "1 came");
    drop(stream);
    let inside = Inside::new(None);
    inside.done("PUT", "/v1/vm", r#"{"kernel": "/k"}"#);
    let (at, refusal) = ("/v1/vm/vfio/a", (422, "bad_descriptor"));
    let answer = inside.refused("PUT", at, r#"{"fd": 0}"#, refusal);
    let text = answer.to_string();
    assert!(text.contains("fd=0 of VFIO device a"), "{text}");
}

#[test]
fn a_migration_waits_at_the_socket_that_came_with_its_request() {
    let served = Served::new("listener");
    let mut stream = served.connect();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let body = json!({ "receive": {
        "listen": format!("tcp:{address}"), "plaintext": true, "kernel": "/k", "fd": 0,
    } });
    let body = body.to_string();
    let request = head("POST", "/v1/vm/migration", &body) + &body;
    let (pair, _other) = UnixStream::pair().unwrap();
    for (descriptors, words) in [
        (&[][..], "did not come with the request"),
        (&[pair.as_fd()], "the passed descriptor cannot listen"),
    ] {
        send(&stream, &request, descriptors);
        let (status, refused) = answer(&mut stream);
        assert!((400..500).contains(&status), "{status} {refused}");
        assert!(refused.to_string().contains(words), "{refused}");
    }
    send(&stream, &request, &[listener.as_fd()]);
    let (status, begun) = answer(&mut stream);
    assert_eq!(status, 202, "{begun}");
    drop(listener);
    std::net::TcpStream::connect(address).unwrap();
}

#[test]
fn too_many_descriptors_are_closed_and_reported() {
    let served = Served::new("flood");
    for count in [DESCRIPTORS_MAX + 1, 150] {
        let mut stream = served.connect();
        let (reader, writer) = std::io::pipe().unwrap();
        let many = vec![writer.as_fd(); count];
        let body = nic(0).to_string();
        send(&stream, &head("PUT", "/v1/vm", &body), &many);
        send(&stream, &body, &many);
        let (status, told) = answer(&mut stream);
        assert_eq!(status, 400, "{told}");
        assert!(
            told["message"].as_str().unwrap().contains("more than 16"),
            "{told}"
        );
        is_closed(reader, writer);
        // The connection still works.
        refused(&mut stream, &nic(0), &[], "0 came");
    }
    // As many as fit, in several pieces: the server verifies the named one.
    let mut stream = served.connect();
    let (reader, writer) = std::io::pipe().unwrap();
    let body = nic(15).to_string();
    let request = head("PUT", "/v1/vm", &body) + &body;
    let pieces: Vec<&str> = request.split_inclusive(' ').collect();
    for (number, piece) in pieces.iter().enumerate() {
        let count = if number == 0 {
            10
        } else {
            usize::from(number <= 6)
        };
        send(&stream, piece, &vec![writer.as_fd(); count]);
        std::thread::sleep(Duration::from_millis(5));
    }
    let (_, told) = answer(&mut stream);
    assert_eq!(told["code"], "bad_descriptor", "{told}");
    let expected = if pieces.len() > 6 {
        "cannot be used"
    } else {
        "did not come"
    };
    assert!(
        told["message"].as_str().unwrap().contains(expected),
        "{told}"
    );
    is_closed(reader, writer);
}

#[test]
fn unclaimed_descriptors_are_closed() {
    let served = Served::new("unwanted");
    let mut stream = served.connect();
    for (method, path) in [
        ("GET", "/v1/vm"),
        ("PATCH", "/v1/vm"),
        ("GET", "/v1/nothing"),
        ("DELETE", "/v1/vm/nics/x"),
        ("PUT", "/v1/vm/nics/%20"),
        ("PUT", "/v1/vm"),
    ] {
        for _ in 0..20 {
            let (reader, writer) = std::io::pipe().unwrap();
            let many = vec![writer.as_fd(); 10];
            let body = if method == "GET" { "" } else { "{}" };
            if !body.is_empty() {
                // An answer before the end of the body closes the connection.
                stream = served.connect();
            }
            send(&stream, &(head(method, path, body) + body), &many);
            answer(&mut stream);
            is_closed(reader, writer);
        }
    }
    // Descriptors of a request that never ends, and of a connection without a request.
    for words in ["", "GET /v1/vm", &head("PUT", "/v1/vm", "12345")] {
        let stream = served.connect();
        let (reader, writer) = std::io::pipe().unwrap();
        send(&stream, &format!("{words}\r"), &[writer.as_fd()]);
        std::thread::sleep(Duration::from_millis(50));
        drop(stream);
        is_closed(reader, writer);
    }
    served.works();
}

#[test]
fn the_client_passes_descriptors_and_keeps_its_limits() {
    let served = Served::new("client");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let client = Client::new(&served.path);
    let request = |method: &str, path: &str, body: &Value| {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        Request::builder()
            .method(method)
            .uri(path)
            .body(Bytes::from(body))
            .unwrap()
    };
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    runtime.block_on(async {
        let vm = client
            .send(request("GET", "/v1/vm", &Value::Null), &[])
            .await
            .unwrap();
        assert_eq!(vm.status(), 200);
        assert!(vm.headers().contains_key("x-request-id"));
        let put = request("PUT", "/v1/vm", &nic(1));
        let answer = client
            .send(put, &[writer.as_fd(), null.as_fd()])
            .await
            .unwrap();
        assert_eq!(answer.status(), 422);
        let text = String::from_utf8_lossy(answer.body()).into_owned();
        assert!(
            text.contains("/dev/null is not a vhost-vdpa device"),
            "{text}"
        );

        let many = vec![null.as_fd(); DESCRIPTORS_MAX + 1];
        let refused = client
            .send(request("GET", "/v1/vm", &Value::Null), &many)
            .await;
        assert!(
            matches!(refused, Err(ClientError::TooManyDescriptors(_))),
            "{refused:?}"
        );
        let small = client.clone().answer_max(10);
        let refused = small
            .send(request("GET", "/v1/vm", &Value::Null), &[])
            .await;
        assert!(
            matches!(refused, Err(ClientError::TooLarge { .. })),
            "{refused:?}"
        );
        let quick = client.clone().time(Duration::from_millis(100));
        let watch = request("GET", "/v1/vm/watch?since=1", &Value::Null);
        let refused = quick.send(watch, &[]).await;
        assert!(
            matches!(refused, Err(ClientError::TooSlow { .. })),
            "{refused:?}"
        );
        let nobody = Client::new(std::path::Path::new("/nonexistent"));
        let refused = nobody.send(request("GET", "/", &Value::Null), &[]).await;
        assert!(
            matches!(refused, Err(ClientError::Connect { .. })),
            "{refused:?}"
        );
    });
    is_closed(reader, writer);
    // A server that closes the connection, or uses another protocol.
    let path = served.path.with_extension("rubbish");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        for said in [
            "",
            "SSH-2.0\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        ] {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 1000]);
            stream.write_all(said.as_bytes()).unwrap();
        }
    });
    let client = Client::new(&path);
    runtime.block_on(async {
        for _ in 0..3 {
            let refused = client.send(request("GET", "/", &Value::Null), &[]).await;
            assert!(
                matches!(
                    refused,
                    Err(ClientError::Http { .. } | ClientError::Body { .. })
                ),
                "{refused:?}"
            );
        }
    });
    server.join().unwrap();
    std::fs::remove_file(path).unwrap();
}
