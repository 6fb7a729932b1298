//! Requests and answers, independent of their transport.

use std::fmt;
use std::time::Duration;

use hyper::header::{HeaderName, IF_MATCH, IF_NONE_MATCH};
use hyper::{HeaderMap, Method, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::refusal::STRANGE;
use super::web_socket::WebSocket;
use crate::error::Error;

/// A request to a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// GET, PUT, POST, PATCH or DELETE.
    pub method: Method,
    /// The path with its query, percent-encoded.
    pub path: String,
    /// A JSON document.
    pub body: Option<Vec<u8>>,
    /// Whether the body is a merge patch (RFC 7396).
    pub is_merge_patch: bool,
    /// The timeout of the whole exchange; for a stream, until it begins.
    pub time: Duration,
    /// The precondition of the request.
    pub condition: Option<Condition>,
}

/// A precondition on the object that a request names: if it does not hold, the daemon refuses the
/// request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// It does not exist.
    Absent,
    /// It exists.
    Present,
    /// It has this entity tag.
    At(String),
}

impl Condition {
    /// The header with this precondition.
    pub(super) fn header(&self) -> (HeaderName, &str) {
        match self {
            Self::Absent => (IF_NONE_MATCH, "*"),
            Self::Present => (IF_MATCH, "*"),
            Self::At(tag) => (IF_MATCH, tag),
        }
    }
}

impl Request {
    pub(super) fn new(method: Method, path: &str, time: Duration) -> Self {
        Self {
            method,
            path: path.to_owned(),
            body: None,
            is_merge_patch: false,
            time,
            condition: None,
        }
    }

    /// Adds a precondition.
    pub(super) fn only_if(mut self, condition: Condition) -> Self {
        self.condition = Some(condition);
        self
    }

    /// Adds a body.
    ///
    /// # Errors
    /// The value cannot be serialized.
    pub(super) fn json(mut self, body: &impl Serialize) -> Result<Self, Error> {
        let body = serde_json::to_vec(body);
        self.body = Some(body.map_err(Error::context("cannot encode the request"))?);
        Ok(self)
    }
}

/// An answer of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// The body, unchanged.
    pub body: Vec<u8>,
}

impl Answer {
    /// Decodes the body; an empty one is `null`.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let body = match self.body.as_slice() {
            [] => b"null",
            body => body,
        };
        serde_json::from_slice(body).map_err(Error::context(STRANGE))
    }

    /// The body as text.
    pub(super) fn text(&self) -> Result<String, Error> {
        String::from_utf8(self.body.clone()).map_err(Error::context(STRANGE))
    }
}

/// A part of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Data of the stream.
    Data(Vec<u8>),
    /// No data within the limit.
    Silence,
    /// The end of the stream, or of the connection.
    End,
}

/// The body of an answer as it arrives.
pub trait Stream: fmt::Debug {
    /// The next part, after at most `limit`.
    fn next(&mut self, limit: Duration) -> Piece;
}

/// The answer to a request for a stream.
#[derive(Debug)]
pub enum Opened<'a> {
    /// The stream has begun.
    Stream(Box<dyn Stream + 'a>),
    /// The daemon refuses.
    Refused(Answer),
}

/// Carries requests to a daemon and returns its answers. Threads may share it.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Sends one request, and returns its answer, which may be a refusal.
    ///
    /// # Errors
    /// The daemon is unreachable, or does not answer in time or in HTTP.
    fn exchange(&self, request: &Request) -> Result<Answer, Error>;

    /// Sends one request whose answer is a stream.
    ///
    /// # Errors
    /// As [`Self::exchange`].
    fn open(&self, request: &Request) -> Result<Opened<'_>, Error>;

    /// Sends one request that opens a WebSocket.
    ///
    /// # Errors
    /// As [`Self::exchange`]; the daemon refuses.
    fn web_socket(&self, request: &Request) -> Result<WebSocket, Error>;
}
