//! `/v1/vms/{name}/console`: the serial console of a VM as a WebSocket (RFC 6455).
//!
//! Owns the handshake, the messages and the limits of a client. [`crate::consoles`] owns the output
//! and the right to write.
//!
//! ```text
//!   output of the guest ─> binary message      the client lags by 256 KiB: a note instead
//!                                              it does not read for 10 s: closed
//!   input of the guest <─ binary message       text, more than 64 KiB, not the writer: closed
//! ```
//! A connection stays open for any time, beyond the limits of requests. The daemon closes it with
//! the VM's process, when another client takes the console, and when the client's right ends
//! ([`Permit`]).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::UPGRADE;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use bellhop_api::node::{ConsoleQuery, Role as ClientRole};
use bellhop_api::responses::{NameErrors, ProxyErrors};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::server::create_response_with_body;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error as SocketError, Message};
use vmm::http::budget::BudgetPlace;
use vmm::http::parameters::Parameters;
use vmm::http::{ErrorBody, HttpError};

use super::state::Api;
use super::vm_path::VmPath;
use crate::access::{Permit, PermitEnd};
use crate::consoles::{Console, Consoles, Output};
use crate::error::Error;
use crate::machines::operations::Requested;
use crate::machines::spec::VmName;

/// The largest message of a client, in bytes.
const INPUT_MAX: usize = 64 * 1024;
/// The largest message to a client, in bytes.
const OUTPUT_MAX: usize = 16 * 1024;
/// The buffers of a connection, in bytes.
const READ_BUFFER: usize = 4 * 1024;
const WRITE_BUFFER_MAX: usize = 4 * OUTPUT_MAX;
/// The time limit for a client to read a message.
const SEND_TIME: Duration = Duration::from_secs(10);
/// The interval of pings on an idle connection, so that the kernel detects a vanished client.
const PING: Duration = Duration::from_secs(30);
/// The time limit for the last message and the client's answer.
const LAST: Duration = Duration::from_secs(2);
/// The reason of the last message when the process has closed its console.
const ENDED: &str = "the virtual machine has ended";
/// The most characters of a client's name in the last message.
const NAME_SHOWN: usize = 60;

type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Use the console of a virtual machine
///
/// A WebSocket (RFC 6455): binary messages are output of the guest and input for it, at most 64 KiB
/// each. One client writes, any number reads. With `read_only=true` the role read is sufficient. A
/// note replaces output that a slow client missed.
///
/// The last message is a close frame with the reason. 1001: the machine has ended. 1008: the client
/// does not read, its token has expired, or another client took the console. 1012: the daemon
/// reloaded its tokens.
#[utoipa::path(get, path = "/v1/vms/{name}/console", operation_id = "get_vm_console",
    params(VmPath, ConsoleQuery), responses(
    (status = 101, description = "Switching protocols: the console follows"),
    NameErrors,
    ProxyErrors,
    (status = 409, description = "Another client writes, or the machine is stopped",
        body = ErrorBody),
    (status = 426, description = "The request is not a WebSocket handshake", body = ErrorBody),
))]
pub(super) async fn open(
    State(node): Api,
    VmPath { name }: VmPath,
    Parameters(query): Parameters<ConsoleQuery>,
    Requested { by, .. }: Requested,
    request: Request,
) -> Result<Response, Error> {
    // A stopped VM has no console.
    node.machines.vmm(&name)?;
    let socket = node.paths.console_socket(&name);
    join(&node.consoles, &name, &socket, query, &by, request).await
}

/// Joins a client to the console that the process of `vm` serves on `socket`.
async fn join(
    consoles: &Consoles,
    vm: &VmName,
    socket: &Path,
    query: ConsoleQuery,
    by: &str,
    mut request: Request,
) -> Result<Response, Error> {
    let permit = request.extensions_mut().remove::<Permit>();
    let role = request.extensions().get::<ClientRole>().copied();
    let [read_only, take, history] =
        [query.read_only, query.take, query.history].map(Option::unwrap_or_default);
    if read_only && take {
        let message = "`take` is for a client that writes: omit `read_only`";
        return Err(HttpError::Parameter(message.to_owned()).into());
    }
    let response = match create_response_with_body(&request, Body::empty) {
        Ok(response) => response,
        Err(error) => return Ok(no_handshake(error)),
    };
    let place = consoles.place(role.unwrap_or(ClientRole::Read), read_only)?;
    let console = consoles.attach(vm, socket).await?;
    let (output, position) = console.output(history);
    let taken = if read_only {
        None
    } else {
        Some(console.claim(by, take)?)
    };
    let client = Client {
        console,
        output,
        position,
        taken,
        permit,
        _place: place,
    };
    tokio::spawn(client.serve(hyper::upgrade::on(&mut request)));
    Ok(response)
}

/// RFC 9110, section 15.5.22: the answer names the protocol.
fn no_handshake(error: SocketError) -> Response {
    let message = "the console needs a WebSocket handshake";
    let error = Error::answered(StatusCode::UPGRADE_REQUIRED, "websocket_required", message)
        .because(error)
        .hint("use a WebSocket client, or `bellhop vm console`");
    let mut response = error.into_response();
    let websocket = HeaderValue::from_static("websocket");
    response.headers_mut().insert(UPGRADE, websocket);
    response
}

/// Why a connection ends: the last message, or none if the client has left.
type Ending = Option<CloseFrame>;

fn close(code: CloseCode, reason: &str) -> Ending {
    let reason = reason.into();
    Some(CloseFrame { code, reason })
}

/// A client of a console.
struct Client {
    console: Arc<Console>,
    output: watch::Receiver<Output>,
    /// The position of the next byte to send.
    position: u64,
    /// The right to write; `None` for a reader.
    taken: Option<oneshot::Receiver<String>>,
    permit: Option<Permit>,
    _place: BudgetPlace,
}

impl Client {
    async fn serve(self, upgrade: OnUpgrade) {
        let Ok(connection) = upgrade.await else {
            return;
        };
        let config = WebSocketConfig::default()
            .read_buffer_size(READ_BUFFER)
            .write_buffer_size(0)
            .max_write_buffer_size(WRITE_BUFFER_MAX)
            .max_message_size(Some(INPUT_MAX))
            .max_frame_size(Some(INPUT_MAX));
        let connection = TokioIo::new(connection);
        let socket = WebSocketStream::from_raw_socket(connection, Role::Server, Some(config)).await;
        let (mut sink, mut stream) = socket.split();
        let Self {
            console,
            output,
            position,
            taken,
            mut permit,
            _place,
        } = self;
        let writes = taken.is_some();
        let taken = async {
            let by = match taken {
                Some(taken) => taken.await.ok(),
                None => std::future::pending().await,
            };
            another(&by.unwrap_or_default())
        };
        let ending = tokio::select! {
            biased;
            ending = taken => ending,
            end = Permit::ended(permit.as_mut()) => match end {
                PermitEnd::Reloaded => {
                    close(CloseCode::Restart, "the daemon reloaded its tokens: connect again")
                }
                PermitEnd::Expired => close(CloseCode::Policy, "the token has expired"),
            },
            ending = send(output, position, &mut sink) => ending,
            ending = receive(writes.then_some(&*console), &mut stream) => ending,
        };
        drop(console);
        let last = async {
            if let Some(frame) = ending
                && sink.send(Message::Close(Some(frame))).await.is_err()
            {
                return;
            }
            // Sends the reply to the client's close, or waits until the client has read ours.
            while let Some(Ok(_)) = stream.next().await {}
        };
        let _ = timeout(LAST, last).await;
    }
}

/// The client `by` has taken the console.
fn another(by: &str) -> Ending {
    // A close frame has room for 123 bytes.
    let by: String = by
        .chars()
        .filter(|c| (' '..='~').contains(c))
        .take(NAME_SHOWN)
        .collect();
    let reason = format!("another client took the console: {by}");
    close(CloseCode::Policy, &reason)
}

/// Sends output until the console is closed.
async fn send(
    mut output: watch::Receiver<Output>,
    mut position: u64,
    sink: &mut SplitSink<Socket, Message>,
) -> Ending {
    loop {
        let ((lost, bytes), closed) = {
            let output = output.borrow_and_update();
            (output.read(position, OUTPUT_MAX), output.is_closed())
        };
        let message = if lost > 0 {
            position = position.saturating_add(lost);
            let note = format!("\r\n[bellhop: {lost} bytes of output are missing here]\r\n");
            Message::Binary(note.into())
        } else if !bytes.is_empty() {
            position = position.saturating_add(bytes.len() as u64);
            Message::Binary(bytes.into())
        } else if closed {
            return close(CloseCode::Away, ENDED);
        } else {
            tokio::select! {
                changed = output.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return close(CloseCode::Away, ENDED),
                },
                () = sleep(PING) => Message::Ping(Bytes::new()),
            }
        };
        match timeout(SEND_TIME, sink.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return None,
            Err(_) => return close(CloseCode::Policy, "this client does not read"),
        }
    }
}

/// Passes messages to the guest until the client leaves. Without a console it must not write.
async fn receive(console: Option<&Console>, stream: &mut SplitStream<Socket>) -> Ending {
    while let Some(message) = stream.next().await {
        match (message, console) {
            (Ok(Message::Binary(bytes)), Some(console)) => {
                if console.write(&bytes).await.is_err() {
                    // The other direction reports the end, after the last output.
                    std::future::pending::<()>().await;
                }
            }
            (Ok(Message::Binary(_)), None) => {
                return close(CloseCode::Policy, "this client only reads: omit read_only");
            }
            (Ok(Message::Text(_)), _) => {
                return close(CloseCode::Unsupported, "send binary messages");
            }
            (Ok(Message::Close(_)), _) => return None,
            (Ok(_), _) => {}
            (Err(SocketError::Capacity(_)), _) => {
                return close(CloseCode::Size, "a message has more than 64 KiB");
            }
            (Err(_), _) => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests;
