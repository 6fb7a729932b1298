//! The client of a WebSocket against fake servers.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread::JoinHandle;

use bellhop_api::address::Address;
use tokio_tungstenite::accept_async;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use super::*;

type Accepted = WebSocketStream<tokio::net::UnixStream>;

/// A server of one connection, with a socket that is removed when this is dropped.
struct Server {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn new(name: &str, serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let name = format!("bellhop-web-socket-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let thread = thread::spawn(move || serve(listener.accept().unwrap().0));
        Self {
            path,
            thread: Some(thread),
        }
    }

    /// One that talks WebSocket.
    fn of<F: Future<Output = ()> + 'static>(
        name: &str,
        serve: impl FnOnce(Accepted) -> F + Send + 'static,
    ) -> Self {
        Self::new(name, |stream| {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_all().build().unwrap();
            runtime.block_on(async {
                stream.set_nonblocking(true).unwrap();
                let stream = tokio::net::UnixStream::from_std(stream).unwrap();
                serve(accept_async(stream).await.unwrap()).await;
            });
        })
    }

    /// One that answers with this text.
    fn saying(name: &str, answer: &'static str) -> Self {
        Self::new(name, |mut stream| {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer.as_bytes());
        })
    }

    fn open(&self) -> Result<WebSocket, Error> {
        let client = Client::of(Address::Socket(self.path.clone()));
        WebSocket::open(client.time(Duration::from_secs(20)), "/v1/x?y=1")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read(socket: &WebSocket) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut stream = socket.stream();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn bytes_pass_both_ways_until_the_daemon_closes_with_a_reason() {
    let server = Server::of("both", |mut socket| async move {
        let message = socket.next().await.unwrap().unwrap();
        socket.send(Message::Ping(Bytes::new())).await.unwrap();
        socket.send(message).await.unwrap();
        let frame = CloseFrame {
            code: CloseCode::Policy,
            reason: "taken".into(),
        };
        socket.send(Message::Close(Some(frame))).await.unwrap();
        while let Some(Ok(_)) = socket.next().await {}
    });
    let socket = server.open().unwrap();
    let mut stream = socket.stream();
    stream.write_all(b"ls\r").unwrap();
    assert_eq!(read(&socket), b"ls\r");
    let closed = Closed {
        code: 1008,
        reason: "taken".to_owned(),
    };
    assert_eq!(socket.close(), Some(closed));
}

#[test]
fn bytes_before_the_end_arrive() {
    let server = Server::of("end", |mut socket| async move {
        // More than all buffers: the client does not read.
        let flood = Message::Binary(vec![b'x'; 1 << 20].into());
        let _ = socket.send(flood).await;
        let message = socket.next().await.unwrap().unwrap();
        assert_eq!(message.into_data(), "exit\r");
        let message = socket.next().await.unwrap().unwrap();
        assert!(message.is_close(), "{message}");
    });
    let socket = server.open().unwrap();
    let mut stream = socket.stream();
    stream.write_all(b"exit\r").unwrap();
    assert_eq!(socket.close(), None);
}

#[test]
fn an_answer_without_websocket_is_an_error() {
    let refusal = "HTTP/1.1 409 Conflict\r\ncontent-length: 38\r\n\r\n\
                   {\"code\":\"console_in_use\",\"message\":\"\"}";
    let error = Server::saying("refusal", refusal).open().unwrap_err();
    assert_eq!(error.refusal().unwrap().body.code, "console_in_use");
    let other = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n\
                 upgrade: websocket\r\nsec-websocket-accept: AAAA\r\n\r\n";
    let error = Server::saying("other", other).open().unwrap_err();
    assert_eq!(error.to_string(), STRANGE);
    for (name, answer) in [
        ("success", "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
        ("garbage", "no http\r\n\r\n"),
        ("nothing", ""),
    ] {
        assert!(Server::saying(name, answer).open().is_err(), "{name}");
    }
}
