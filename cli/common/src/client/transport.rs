//! What is asked and answered, whatever carries it.

use std::fmt;
use std::time::Duration;

use hyper::header::{HeaderName, IF_MATCH, IF_NONE_MATCH};
use hyper::{HeaderMap, Method, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Error;

/// The text about an answer that cannot be decoded.
pub const STRANGE: &str =
    "the node daemon's answer is not understood; is it of another version? `bellhop report` tells";

/// What a daemon is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// GET, PUT, POST, PATCH or DELETE.
    pub method: Method,
    /// With its query, percent-encoded.
    pub path: String,
    /// JSON.
    pub body: Option<Vec<u8>>,
    /// The body is a merge patch (RFC 7396).
    pub is_merge_patch: bool,
    /// How long the whole exchange may take; of a stream, how long until it begins.
    pub time: Duration,
    /// The condition on which the daemon carries it out.
    pub condition: Option<Condition>,
}

/// A condition on the object that a request names: if it does not hold, the daemon refuses the
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
    /// The header that says so.
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

    /// Only if this holds.
    pub(super) fn only_if(mut self, condition: Condition) -> Self {
        self.condition = Some(condition);
        self
    }

    /// With a body.
    ///
    /// # Errors
    /// The value has no JSON.
    pub(super) fn json(mut self, body: &impl Serialize) -> Result<Self, Error> {
        let body = serde_json::to_vec(body);
        self.body = Some(body.map_err(Error::context("the request cannot be put into words"))?);
        Ok(self)
    }
}

/// What it answers, whatever that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// The body as it is.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body; an answer without one is `null`.
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
    /// Bytes of it.
    Data(Vec<u8>),
    /// Nothing, for as long as was waited.
    Silence,
    /// Its end, or that of the connection.
    End,
}

/// An answer's body while it arrives.
pub trait Stream: fmt::Debug {
    /// The next part, after at most `limit`.
    fn next(&mut self, limit: Duration) -> Piece;
}

/// The answer to a request for a stream.
#[derive(Debug)]
pub enum Opened<'a> {
    /// It has begun.
    Stream(Box<dyn Stream + 'a>),
    /// The daemon refuses.
    Refused(Answer),
}

/// Carries requests to a daemon, and brings answers back. Threads may share it.
pub trait Transport: fmt::Debug + Send + Sync {
    /// One request, and its answer, also one that refuses.
    ///
    /// # Errors
    /// The daemon cannot be reached, or does not answer in time or in HTTP.
    fn exchange(&self, request: &Request) -> Result<Answer, Error>;

    /// One request whose answer is a stream.
    ///
    /// # Errors
    /// As [`Self::exchange`].
    fn open(&self, request: &Request) -> Result<Opened<'_>, Error>;
}
