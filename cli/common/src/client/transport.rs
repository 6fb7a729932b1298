//! What is asked and answered, whatever carries it.

use std::fmt;
use std::time::Duration;

use hyper::header::{HeaderName, IF_MATCH, IF_NONE_MATCH};
use hyper::{Method, StatusCode};
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
    /// How long the whole exchange may take.
    pub time: Duration,
    /// A stream of events without an end, which is listened to for so long.
    pub listen: Option<Duration>,
    /// The condition on which the daemon carries it out.
    pub condition: Option<Condition>,
}

/// A condition on the object that a request names: if it does not hold, the daemon refuses the
/// request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// It does not exist.
    Absent,
    /// It exists.
    Present,
}

impl Condition {
    /// The header that says so.
    pub(super) fn header(self) -> (HeaderName, &'static str) {
        match self {
            Self::Absent => (IF_NONE_MATCH, "*"),
            Self::Present => (IF_MATCH, "*"),
        }
    }
}

impl Request {
    pub(super) fn new(method: Method, path: &str, time: Duration) -> Self {
        Self {
            method,
            path: path.to_owned(),
            body: None,
            time,
            listen: None,
            condition: None,
        }
    }

    /// For a stream of events, from the oldest that is kept: what came within `time` is the answer.
    pub(super) fn listening(mut self, time: Duration) -> Self {
        self.listen = Some(time);
        self
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
}

/// Carries requests to a daemon, and brings answers back. Threads may share it.
pub trait Transport: fmt::Debug + Send + Sync {
    /// One request, and its answer, also one that refuses.
    ///
    /// # Errors
    /// The daemon cannot be reached, or does not answer in time or in HTTP.
    fn exchange(&self, request: &Request) -> Result<Answer, Error>;
}
