//! A WebSocket of the daemon as a socket of this process, for commands that poll descriptors.
//!
//! Owns the handshake, and the thread that passes bytes.
//!
//! ```text
//!   command <── socket pair ──> thread `websocket` <── binary messages ──> daemon
//! ```

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use hyper::Request as HttpRequest;
use hyper::body::Bytes;
use hyper::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use vmm::http::client::{Client, Switched};

use super::refusal::{BROKEN, Refusal, STRANGE};
use crate::error::Error;

/// The size of a message to the daemon, in bytes.
const CHUNK: usize = 16 * 1024;
/// The largest accepted message, in bytes.
const MESSAGE_MAX: usize = 1 << 20;
/// The time limit for the daemon's reason after the last byte.
const LAST: Duration = Duration::from_secs(2);

/// Why the daemon closed a WebSocket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closed {
    /// The code (RFC 6455, section 7.4).
    pub code: u16,
    /// The reason.
    pub reason: String,
}

/// See the module.
#[derive(Debug)]
pub struct WebSocket {
    stream: UnixStream,
    closed: Receiver<Option<Closed>>,
}

impl WebSocket {
    /// Connects to `path`.
    pub(super) fn open(client: Client, path: &str) -> Result<Self, Error> {
        let (near, far) = UnixStream::pair().map_err(Error::context(BROKEN))?;
        let (opened, is_open) = mpsc::channel();
        let (closing, closed) = mpsc::channel();
        let path = path.to_owned();
        let thread = thread::Builder::new().name("websocket".to_owned());
        let serve = move || serve(&client, &path, far, &opened, &closing);
        thread.spawn(serve).map_err(Error::context(BROKEN))?;
        // An error means that the thread panicked.
        is_open.recv().map_err(Error::context(BROKEN))??;
        Ok(Self {
            stream: near,
            closed,
        })
    }

    /// One that the daemon closed after these bytes.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn fake(bytes: &[u8], closed: Closed) -> Result<Self, Error> {
        use std::io::Write as _;

        let (stream, mut far) = UnixStream::pair().map_err(Error::context(BROKEN))?;
        far.write_all(bytes).map_err(Error::context(BROKEN))?;
        let (closing, receiver) = mpsc::channel();
        // The receiver is here.
        let _ = closing.send(Some(closed));
        Ok(Self {
            stream,
            closed: receiver,
        })
    }

    /// Its bytes in both directions. The end is that of the WebSocket.
    #[must_use]
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Closes it, and returns the daemon's reason if the daemon closed it first. Bytes that were
    /// written before still arrive.
    pub fn close(self) -> Option<Closed> {
        // An error means that the other end is closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.closed.recv_timeout(LAST).ok().flatten()
    }
}

fn serve(
    client: &Client,
    path: &str,
    far: UnixStream,
    opened: &Sender<Result<(), Error>>,
    closing: &Sender<Option<Closed>>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build();
    // An error of a channel means that the command is gone.
    match runtime {
        Ok(runtime) => runtime.block_on(async {
            match connect(client, path).await {
                Ok(socket) => {
                    let _ = opened.send(Ok(()));
                    let _ = closing.send(pass(socket, far).await.ok().flatten());
                }
                Err(error) => {
                    let _ = opened.send(Err(error));
                }
            }
        }),
        Err(error) => {
            let _ = opened.send(Err(Error::context(BROKEN)(error)));
        }
    }
}

type Socket = WebSocketStream<TokioIo<Upgraded>>;

async fn connect(client: &Client, path: &str) -> Result<Socket, Error> {
    let key = generate_key();
    let request = HttpRequest::builder()
        .uri(path)
        .header(CONNECTION, "upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_VERSION, "13")
        .header(SEC_WEBSOCKET_KEY, &key)
        .body(Bytes::new())
        .map_err(Error::context(BROKEN))?;
    let (head, connection) = match client.switch(request).await? {
        Switched::To(head, connection) => (head, connection),
        Switched::Refused(answer) => {
            return Err(Refusal::of(answer.status(), answer.body()).into());
        }
    };
    let accepted = head.headers().get(SEC_WEBSOCKET_ACCEPT);
    if accepted.is_none_or(|accepted| *accepted != derive_accept_key(key.as_bytes())) {
        return Err(Error::failed(STRANGE));
    }
    let config = WebSocketConfig::default()
        .max_message_size(Some(MESSAGE_MAX))
        .max_frame_size(Some(MESSAGE_MAX));
    let connection = TokioIo::new(connection);
    Ok(WebSocketStream::from_raw_socket(connection, Role::Client, Some(config)).await)
}

/// Passes bytes in both directions until either end closes.
async fn pass(socket: Socket, far: UnixStream) -> io::Result<Option<Closed>> {
    far.set_nonblocking(true)?;
    let far = tokio::net::UnixStream::from_std(far)?;
    let (mut from_command, mut to_command) = far.into_split();
    let (mut sink, mut stream) = socket.split();
    let sent = async {
        let mut buffer = vec![0; CHUNK];
        while let Ok(count @ 1..) = from_command.read(&mut buffer).await {
            let bytes = Bytes::copy_from_slice(buffer.get(..count).unwrap_or_default());
            sink.send(Message::Binary(bytes)).await.ok()?;
        }
        // An error means that the daemon has closed it meanwhile.
        let _ = sink.send(Message::Close(None)).await;
        None
    };
    let received = async {
        while let Some(Ok(message)) = stream.next().await {
            match message {
                Message::Binary(bytes) => {
                    // An error means that the command has left, which ends the other direction.
                    let _ = to_command.write_all(&bytes).await;
                }
                Message::Close(frame) => return frame.map(closed),
                _ => {}
            }
        }
        None
    };
    let closed = tokio::select! {
        closed = sent => closed,
        closed = received => closed,
    };
    // Closing a connection with unread bytes could discard the last ones that were sent.
    let rest = async { while let Some(Ok(_)) = stream.next().await {} };
    let _ = tokio::time::timeout(LAST, rest).await;
    Ok(closed)
}

fn closed(frame: CloseFrame) -> Closed {
    Closed {
        code: frame.code.into(),
        reason: frame.reason.to_string(),
    }
}

#[cfg(test)]
mod tests;
