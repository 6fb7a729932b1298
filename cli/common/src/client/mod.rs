//! The client of the node daemon for the command line.
//!
//! [`Node`] sends requests and interprets answers. A [`Transport`] carries them, so that tests of
//! commands can use prepared answers. Owns addresses, limits, and the form of the daemon's errors
//! on this side. Must not know any subcommand.
//!
//! ```text
//!   command ──> Node (JSON, errors) ──> Transport ──> Unix socket, ssh, or TLS with a token
//! ```

mod arguments;
mod events;
mod http;
pub mod operations;
mod refusal;
mod remotes;
mod ssh;
mod tls;
mod transport;
mod web_socket;

use std::time::Duration;

use hyper::{Method, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use arguments::NodeArguments;
pub use bellhop_api::address::Address;
pub use events::{EventStream, Notice, connection_broke};
pub use http::Http;
pub use refusal::{Refusal, STRANGE};
pub use remotes::{LOCAL, Remote, Remotes};
pub use tls::Credentials;
pub use transport::{Answer, Condition, Opened, Piece, Request, Stream, Transport};
pub use web_socket::{Closed, WebSocket};

use crate::error::Error;

/// The timeout of an ordinary request.
const ORDINARY: Duration = Duration::from_secs(60);
/// The timeout of creating or starting a VM: it creates NICs, opens devices and pins all memory.
pub const MAKING: Duration = Duration::from_secs(600);

/// A client of a node's daemon.
#[derive(Debug)]
pub struct Node {
    transport: Box<dyn Transport>,
}

impl Node {
    /// A client that uses `transport`.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Self {
            transport: Box::new(transport),
        }
    }

    /// Gets the object at `path`.
    ///
    /// # Errors
    /// The daemon is unreachable, refuses, or sends an unexpected answer.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        let answer = self.ask(&Request::new(Method::GET, path, ORDINARY))?;
        answer.read()
    }

    /// Gets the body at `path` unchanged.
    ///
    /// # Errors
    /// The daemon is unreachable, or refuses.
    pub fn get_bytes(&self, path: &str) -> Result<Vec<u8>, Error> {
        Ok(self.get_whole(path)?.body)
    }

    /// Gets the whole answer for `path`, with its headers.
    ///
    /// # Errors
    /// The daemon is unreachable, or refuses.
    pub fn get_whole(&self, path: &str) -> Result<Answer, Error> {
        self.ask(&Request::new(Method::GET, path, ORDINARY))
    }

    /// Opens a stream: the answer to a GET of `path`, piece by piece.
    ///
    /// # Errors
    /// The daemon is unreachable, or refuses.
    pub fn open(&self, path: &str) -> Result<Box<dyn Stream + '_>, Error> {
        let request = Request::new(Method::GET, path, ORDINARY);
        match self.transport.open(&request)? {
            Opened::Stream(stream) => Ok(stream),
            Opened::Refused(answer) => Err(Refusal::of(answer.status, &answer.body).into()),
        }
    }

    /// Opens the WebSocket at `path`.
    ///
    /// # Errors
    /// The daemon is unreachable, or refuses.
    pub fn web_socket(&self, path: &str) -> Result<WebSocket, Error> {
        let request = Request::new(Method::GET, path, ORDINARY);
        self.transport.web_socket(&request)
    }

    /// Sends a change; returns the answer, `Null` if it is empty.
    ///
    /// # Errors
    /// The daemon is unreachable, refuses, or sends an unexpected answer.
    pub fn change(&self, method: Method, path: &str) -> Result<Value, Error> {
        Ok(self.change_within(method, path, ORDINARY)?.1)
    }

    /// The same, within `time`; also returns the status, for answers that need it.
    ///
    /// # Errors
    /// The daemon is unreachable, refuses, or sends an unexpected answer.
    pub fn change_within(
        &self,
        method: Method,
        path: &str,
        time: Duration,
    ) -> Result<(StatusCode, Value), Error> {
        let answer = self.ask(&Request::new(method, path, time))?;
        Ok((answer.status, answer.read()?))
    }

    /// The same with a body, and within `time`.
    ///
    /// # Errors
    /// The daemon is unreachable, refuses, or sends an unexpected answer.
    pub fn send(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        time: Duration,
    ) -> Result<(StatusCode, Value), Error> {
        let request = Request::new(method, path, time).json(body)?;
        let answer = self.ask(&request)?;
        Ok((answer.status, answer.read()?))
    }

    /// `PUT`s `body` to `path`, within `time` and only if `condition` holds.
    ///
    /// # Errors
    /// The daemon is unreachable, refuses, or sends an unexpected answer.
    pub fn put(
        &self,
        path: &str,
        condition: Condition,
        body: &impl Serialize,
        time: Duration,
    ) -> Result<Value, Error> {
        let request = Request::new(Method::PUT, path, time).only_if(condition);
        self.ask(&request.json(body)?)?.read()
    }

    /// Changes the object at `path` by a merge patch, within `time` and only if `condition` holds.
    ///
    /// # Errors
    /// The daemon is unreachable, refuses, or sends an unexpected answer.
    pub fn merge_patch(
        &self,
        path: &str,
        condition: Option<Condition>,
        patch: &Value,
        time: Duration,
    ) -> Result<Value, Error> {
        let mut request = Request::new(Method::PATCH, path, time).json(patch)?;
        request.is_merge_patch = true;
        request.condition = condition;
        self.ask(&request)?.read()
    }

    fn ask(&self, request: &Request) -> Result<Answer, Error> {
        let answer = self.transport.exchange(request)?;
        if answer.status.is_success() {
            Ok(answer)
        } else {
            Err(Refusal::of(answer.status, &answer.body).into())
        }
    }
}

/// Builds a path of the API from segments, which may be any text.
#[must_use]
pub fn path<'a>(segments: impl IntoIterator<Item = &'a str>) -> String {
    let mut path = String::new();
    for segment in segments {
        path.push('/');
        push_encoded(&mut path, segment);
    }
    path
}

/// Appends those of these query parameters that have a value.
#[must_use]
pub fn with_query<'a>(
    path: &str,
    values: impl IntoIterator<Item = (&'a str, Option<String>)>,
) -> String {
    let mut path = path.to_owned();
    let values = values.into_iter();
    for (key, value) in values.filter_map(|(key, value)| Some((key, value?))) {
        path.push(if path.contains('?') { '&' } else { '?' });
        path.push_str(key);
        path.push('=');
        push_encoded(&mut path, &value);
    }
    path
}

/// Appends a percent-encoded segment of a path, or a value of a query.
fn push_encoded(to: &mut String, text: &str) {
    for byte in text.bytes() {
        match byte {
            // RFC 3986, 2.3
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                to.push(char::from(byte));
            }
            _ => to.push_str(&format!("%{byte:02X}")),
        }
    }
}

#[cfg(any(test, feature = "testing"))]
pub mod fake;
#[cfg(test)]
mod tests;
