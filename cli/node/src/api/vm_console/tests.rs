//! Clients of a console, over the server's connections.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;

use axum::Router;
use axum::routing::get;
use bellhop_api::ErrorBody as Refusal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio_tungstenite::client_async;
use vmm::http::server;

use super::*;

/// A daemon with the console of one VM, whose process is this test.
struct Daemon {
    directory: PathBuf,
    consoles: Arc<Consoles>,
    process: UnixListener,
    /// The number of reloads of access control.
    loads: watch::Sender<u64>,
    _end: watch::Sender<bool>,
}

type Client = WebSocketStream<UnixStream>;

impl Daemon {
    fn start(name: &str) -> Self {
        Self::with_token(name, None)
    }

    /// A daemon whose clients have a token with this expiry.
    fn with_token(name: &str, expires: Option<&str>) -> Self {
        let name = format!("bellhop-vm-console-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        let consoles = Arc::new(Consoles::default());
        let socket = directory.join("console");
        let process = UnixListener::bind(&socket).unwrap();
        let loads = watch::Sender::default();
        let endpoint = {
            let consoles = consoles.clone();
            let permit = Permit::new(&loads).until(expires.map(str::to_owned));
            move |Parameters(query): Parameters<ConsoleQuery>, mut request: Request| {
                request.extensions_mut().insert(permit.clone());
                let (consoles, socket) = (consoles.clone(), socket.clone());
                async move {
                    let vm = "web".parse().unwrap();
                    join(&consoles, &vm, &socket, query, "uid 0", request).await
                }
            }
        };
        let router = vmm::http::surround(Router::new().route("/", get(endpoint)));
        let listener = UnixListener::bind(directory.join("api")).unwrap();
        let (end, ended) = watch::channel(false);
        tokio::spawn(server::serve(listener, router, ended));
        Self {
            directory,
            consoles,
            process,
            loads,
            _end: end,
        }
    }

    async fn connect(&self, query: &str) -> Result<Client, SocketError> {
        let stream = UnixStream::connect(self.directory.join("api"))
            .await
            .unwrap();
        let client = client_async(format!("ws://localhost/{query}"), stream).await;
        client.map(|(client, _)| client)
    }

    /// The first client, and the process's end of the console.
    async fn first(&self, query: &str, history: &[u8]) -> (Client, UnixStream) {
        let process = async {
            let (mut stream, _) = self.process.accept().await.unwrap();
            stream.write_all(history).await.unwrap();
            stream
        };
        let (client, stream) = tokio::join!(self.connect(query), process);
        (client.unwrap(), stream)
    }

    /// The status and the code of a refusal.
    async fn refused(&self, query: &str) -> (u16, String) {
        match self.connect(query).await {
            Err(SocketError::Http(response)) => {
                let body = response.body().clone().unwrap_or_default();
                let body: Result<Refusal, _> = serde_json::from_slice(&body);
                let code = body.map(|body| body.code).unwrap_or_default();
                (response.status().as_u16(), code)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Waits until no client is left.
    async fn emptied(&self) {
        while self.consoles.clients() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The next output.
async fn output(client: &mut Client) -> Bytes {
    loop {
        match client.next().await.unwrap().unwrap() {
            Message::Binary(bytes) => return bytes,
            Message::Ping(_) => {}
            other => panic!("{other}"),
        }
    }
}

/// The close code and the reason, after any output.
async fn end(client: &mut Client) -> (CloseCode, String) {
    loop {
        match client.next().await.unwrap().unwrap() {
            Message::Close(frame) => {
                let frame = frame.unwrap();
                return (frame.code, frame.reason.to_string());
            }
            Message::Binary(_) | Message::Ping(_) => {}
            other => panic!("{other}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn many_read_and_one_writes() {
    let daemon = Daemon::start("share");
    let (mut writer, mut guest) = daemon.first("?history=true", b"booted\r\n").await;
    assert_eq!(output(&mut writer).await, "booted\r\n");
    let mut reader = daemon.connect("?read_only=true").await.unwrap();
    let mut late = daemon
        .connect("?read_only=true&history=true")
        .await
        .unwrap();
    assert_eq!(output(&mut late).await, "booted\r\n");
    writer.send(Message::Binary("ls\r".into())).await.unwrap();
    let mut typed = [0; 3];
    guest.read_exact(&mut typed).await.unwrap();
    assert_eq!(&typed, b"ls\r");
    guest.write_all(b"file\r\n").await.unwrap();
    for client in [&mut writer, &mut reader, &mut late] {
        assert_eq!(output(client).await, "file\r\n");
    }

    // A second writer is refused, or takes the first one's place.
    let refused = daemon.refused("").await;
    assert_eq!(refused, (409, "console_in_use".to_owned()));
    let refused = daemon.refused("?take=true&read_only=true").await;
    assert_eq!(refused, (400, "bad_parameter".to_owned()));
    let mut second = daemon.connect("?take=true").await.unwrap();
    let (code, reason) = end(&mut writer).await;
    assert_eq!(code, CloseCode::Policy);
    assert_eq!(reason, "another client took the console: uid 0");
    second.send(Message::Binary("id\r".into())).await.unwrap();
    guest.read_exact(&mut typed).await.unwrap();
    assert_eq!(&typed, b"id\r");

    // All get the last output, and learn of the end.
    guest.write_all(b"bye").await.unwrap();
    drop(guest);
    for client in [&mut second, &mut reader, &mut late] {
        assert_eq!(output(client).await, "bye");
        assert_eq!(end(client).await.0, CloseCode::Away);
    }
    drop((writer, second, reader, late));
    daemon.emptied().await;
}

#[tokio::test(start_paused = true)]
async fn clients_that_break_a_rule_are_disconnected() {
    let daemon = Daemon::start("rules");
    let (mut client, _guest) = daemon.first("?read_only=true", b"").await;
    client.send(Message::Binary("x".into())).await.unwrap();
    assert_eq!(end(&mut client).await.0, CloseCode::Policy);
    drop(client);
    daemon.emptied().await;
    let large = Message::Binary(vec![0; INPUT_MAX + 1].into());
    for (message, code) in [
        (Message::Text("ls".into()), CloseCode::Unsupported),
        (large, CloseCode::Size),
    ] {
        let (mut client, _guest) = daemon.first("", b"").await;
        client.send(message).await.unwrap();
        assert_eq!(end(&mut client).await.0, code);
        drop(client);
        daemon.emptied().await;
    }
    // One that vanishes leaves its place, and the right to write.
    let (client, _guest) = daemon.first("", b"").await;
    drop(client);
    daemon.emptied().await;
    let (mut client, _guest) = daemon.first("", b"").await;
    daemon.loads.send_modify(|loads| *loads += 1);
    assert_eq!(end(&mut client).await.0, CloseCode::Restart);
}

#[tokio::test(start_paused = true)]
async fn an_expired_token_ends_the_connection() {
    let daemon = Daemon::with_token("expired", Some("2026-01-01T00:00:00Z"));
    let (mut client, _guest) = daemon.first("?read_only=true", b"").await;
    let expired = (CloseCode::Policy, "the token has expired".to_owned());
    assert_eq!(end(&mut client).await, expired);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_never_reads_is_dropped_and_delays_no_other() {
    let daemon = Daemon::start("deaf");
    let (deaf, mut guest) = daemon.first("?read_only=true", b"").await;
    let mut reader = daemon.connect("?read_only=true").await.unwrap();
    let flood = tokio::spawn(async move {
        for _ in 0..1024 {
            guest.write_all(&[b'x'; 4096]).await.unwrap();
        }
        guest.write_all(b"END").await.unwrap();
        guest
    });
    while !output(&mut reader).await.ends_with(b"END") {}
    let _guest = flood.await.unwrap();
    while daemon.consoles.clients() > 1 {
        sleep(Duration::from_millis(100)).await;
    }
    drop(deaf);
}

#[tokio::test]
async fn a_request_without_a_handshake_learns_the_protocol() {
    let daemon = Daemon::start("plain");
    let mut stream = UnixStream::connect(daemon.directory.join("api"))
        .await
        .unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let answer = answer.to_lowercase();
    assert!(answer.starts_with("http/1.1 426 "), "{answer}");
    assert!(answer.contains("upgrade: websocket\r\n"), "{answer}");
    assert!(answer.contains("websocket_required"), "{answer}");
}
