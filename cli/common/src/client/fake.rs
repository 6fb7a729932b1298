//! A fake daemon for tests of commands.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "only tests use it")]

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bellhop_api::merge_patch;
use hyper::StatusCode;
use hyper::header::{HeaderName, HeaderValue};
use parking_lot::Mutex;
use serde_json::Value;

use super::{Answer, Closed, Node, Opened, Piece, Refusal, Request, Stream, Transport, WebSocket};
use crate::error::Error;

/// The header of a prepared answer 101 with the code that closes the WebSocket; 1001 without it.
pub const CLOSE_CODE: &str = "made-up-close-code";

/// The received requests and the prepared answers of a fake daemon.
#[derive(Clone, Default)]
pub struct FakeDaemon(Arc<Mutex<Script>>);

#[derive(Default)]
struct Script {
    answers: VecDeque<Answer>,
    asked: Vec<Request>,
}

impl fmt::Debug for FakeDaemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FakeDaemon")
    }
}

impl FakeDaemon {
    /// Appends an answer, which is sent once.
    #[must_use]
    pub fn answer(self, status: u16, body: &Value) -> Self {
        self.answer_with(status, &[], body)
    }

    /// The same, with these headers.
    #[must_use]
    pub fn answer_with(
        self,
        status: u16,
        headers: &[(&'static str, &'static str)],
        body: &Value,
    ) -> Self {
        let body = match body {
            Value::Null => Vec::new(),
            Value::String(text) => text.clone().into_bytes(),
            body => serde_json::to_vec(body).unwrap(),
        };
        self.0.lock().answers.push_back(Answer {
            status: StatusCode::from_u16(status).unwrap(),
            headers: headers
                .iter()
                .map(|&(name, value)| {
                    let name = HeaderName::from_static(name);
                    (name, HeaderValue::from_static(value))
                })
                .collect(),
            body,
        });
        self
    }

    /// A client of the fake daemon.
    #[must_use]
    pub fn node(&self) -> Node {
        Node::new(self.clone())
    }

    /// The requests so far: `METHOD PATH BODY`, with a precondition before the body.
    #[must_use]
    pub fn asked(&self) -> Vec<String> {
        let script = self.0.lock();
        let line = |request: &Request| {
            let body = request.body.as_deref().map(String::from_utf8_lossy);
            let condition = request.condition.as_ref().map(|condition| {
                let (name, value) = condition.header();
                format!("{name}: {value} ")
            });
            let line = format!(
                "{} {} {}{}",
                request.method,
                request.path,
                condition.unwrap_or_default(),
                body.unwrap_or_default()
            );
            line.trim_end().to_owned()
        };
        script.asked.iter().map(line).collect()
    }
}

impl Transport for FakeDaemon {
    fn exchange(&self, request: &Request) -> Result<Answer, Error> {
        let mut script = self.0.lock();
        script.asked.push(request.clone());
        let asked = format!("{} {}", request.method, request.path);
        Ok(script.answers.pop_front().expect(&asked))
    }

    /// The whole answer is one piece.
    fn open(&self, request: &Request) -> Result<Opened<'_>, Error> {
        let answer = self.exchange(request)?;
        Ok(if answer.status.is_success() {
            Opened::Stream(Box::new(Whole(Some(answer.body))))
        } else {
            Opened::Refused(answer)
        })
    }

    /// With the status 101 the daemon sends the body, and closes with the code of [`CLOSE_CODE`].
    fn web_socket(&self, request: &Request) -> Result<WebSocket, Error> {
        let answer = self.exchange(request)?;
        if answer.status != StatusCode::SWITCHING_PROTOCOLS {
            return Err(Refusal::of(answer.status, &answer.body).into());
        }
        let code = answer.headers.get(CLOSE_CODE);
        let code = code.and_then(|code| code.to_str().ok()?.parse().ok());
        let closed = Closed {
            code: code.unwrap_or(1001),
            reason: "made up".to_owned(),
        };
        WebSocket::fake(&answer.body, closed)
    }
}

#[derive(Debug)]
struct Whole(Option<Vec<u8>>);

impl Stream for Whole {
    fn next(&mut self, _limit: Duration) -> Piece {
        self.0.take().map_or(Piece::End, Piece::Data)
    }
}

/// A running VM, as a daemon describes it, with a merge patch.
#[must_use]
pub fn vm(patch: &Value) -> Value {
    let mut vm = serde_json::json!({
        "name": "web",
        "spec": {
            "kernel": "/boot/vmlinuz", "cpus": 1, "memory": {"size": "512M"}, "nics": [],
            "state": "Running", "restart": "OnFailure",
        },
        "status": {
            "phase": "Running", "pid": 7, "nic_devices": [],
            "console": {"socket": "/run/c.socket", "log": "/var/c.log"}, "log": "/var/vmm.log",
        },
    });
    merge_patch::apply(&mut vm, patch);
    vm
}
