//! Sends requests of any bytes and parses their answers.
//!
//! For a stream of events, only the head is read.

use crate::error::{Error, Result};
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long an answer may take: an emulated host that is building a machine.
const LIMIT: Duration = Duration::from_secs(120);

/// The longest answer, in bytes: none of ours comes near.
const ANSWER_MAX: usize = 16 << 20;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The method, the first word.
    pub method: String,
    /// Path and query, as they are sent.
    pub target: Vec<u8>,
    /// Headers in addition to `host`, `connection`, `content-length` and, with a body,
    /// `content-type` unless it is here.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body. With `None`, not even its length is sent.
    pub body: Option<Vec<u8>>,
}

impl Request {
    /// A request without headers and body.
    #[must_use]
    pub fn new(method: &str, target: impl Into<Vec<u8>>) -> Self {
        Self {
            method: method.to_owned(),
            target: target.into(),
            headers: Vec::new(),
            body: None,
        }
    }

    /// Adds this body.
    #[must_use]
    pub fn with_body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// The body as JSON; null without one.
    #[must_use]
    pub fn json(&self) -> Value {
        let body = self.body.as_deref().unwrap_or_default();
        serde_json::from_slice(body).unwrap_or_default()
    }

    /// The path and query as text.
    #[must_use]
    pub fn path(&self) -> String {
        String::from_utf8_lossy(&self.target).into_owned()
    }

    /// The bytes on the stream.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.method.as_bytes().to_vec();
        bytes.push(b' ');
        bytes.extend_from_slice(&self.target);
        bytes.extend_from_slice(b" HTTP/1.1\r\nhost: lab\r\nconnection: close\r\n");
        for (name, value) in &self.headers {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        }
        if let Some(body) = &self.body {
            let is_typed = self.headers.iter().any(|(name, _)| name == "content-type");
            if !is_typed {
                bytes.extend_from_slice(b"content-type: application/json\r\n");
            }
            bytes.extend_from_slice(format!("content-length: {}\r\n", body.len()).as_bytes());
        }
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(self.body.as_deref().unwrap_or_default());
        bytes
    }
}

/// The response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The body; empty for a stream of events.
    pub body: Vec<u8>,
}

impl Answer {
    /// A header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(one, _)| one == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The body as JSON; null for any other body.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// Sends a request on its own connection. `None`: the other end closed it without an answer.
///
/// # Errors
/// [`Error::File`] if no server listens or no byte arrives for two minutes; [`Error::Invalid`] for
/// an answer that is not HTTP.
pub fn ask(socket: &Path, request: &Request) -> Result<Option<Answer>> {
    let failed = |what| Error::file(what, socket);
    let stream = UnixStream::connect(socket).map_err(failed("connect to"))?;
    for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
        set(&stream, Some(LIMIT)).map_err(failed("set a limit for"))?;
    }
    send(&stream, &request.bytes()).map_err(failed("write to"))?;
    receive(&stream, &request.method)
}

/// Sends bytes. It is no error if the server has already rejected the request and reads no more.
///
/// # Errors
/// The kernel's.
pub fn send(mut stream: impl Write, bytes: &[u8]) -> std::io::Result<()> {
    match stream.write_all(bytes) {
        Err(error) if gone(&error) => Ok(()),
        sent => sent,
    }
}

fn gone(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
    )
}

/// Reads one answer from a connection that closes after it.
///
/// # Errors
/// As [`ask`].
pub fn receive(mut stream: impl Read, method: &str) -> Result<Option<Answer>> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 8192];
    loop {
        let count = match stream.read(&mut chunk) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if gone(&error) => 0,
            // TLS without its own end.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => 0,
            other => other.map_err(Error::system("read an answer"))?,
        };
        bytes.extend_from_slice(chunk.get(..count).unwrap_or_default());
        let is_stream = head(&bytes).is_some_and(|(answer, _)| {
            answer
                .header("content-type")
                .is_some_and(|kind| kind.starts_with("text/event-stream"))
        });
        if count == 0 || is_stream || bytes.len() > ANSWER_MAX {
            break;
        }
    }
    if bytes.is_empty() {
        return Ok(None);
    }
    let wrong = |why: &str| {
        let text = String::from_utf8_lossy(&bytes)
            .chars()
            .take(2000)
            .collect::<String>();
        Error::invalid(format!("the answer to {method}: {why}"), text)
    };
    let (mut answer, rest) = head(&bytes).ok_or_else(|| wrong("no head"))?;
    let length = answer.header("content-length").map(str::parse::<usize>);
    answer.body = match (answer.header("transfer-encoding"), length) {
        (Some("chunked"), _) => unchunked(rest).ok_or_else(|| wrong("its chunks"))?,
        // The answer to HEAD has the length of the omitted body.
        (_, Some(Ok(length))) if method != "HEAD" && length != rest.len() => {
            return Err(wrong("its length"));
        }
        _ => rest.to_vec(),
    };
    Ok(Some(answer))
}

/// The head of an answer, and the bytes after it.
fn head(bytes: &[u8]) -> Option<(Answer, &[u8])> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let text = std::str::from_utf8(bytes.get(..end)?).ok()?;
    let mut lines = text.split("\r\n");
    let status = lines.next()?.strip_prefix("HTTP/1.1 ")?.get(..3)?;
    let mut headers = Vec::new();
    for line in lines {
        let (name, value) = line.split_once(':')?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let answer = Answer {
        status: status.parse().ok()?,
        headers,
        body: Vec::new(),
    };
    Some((answer, bytes.get(end + 4..)?))
}

/// Joins chunks (RFC 9112, 7.1); of a truncated body it keeps what has arrived.
fn unchunked(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    while let Some(line) = rest.windows(2).position(|two| two == b"\r\n") {
        let length = std::str::from_utf8(rest.get(..line)?).ok()?;
        let length = usize::from_str_radix(length.split(';').next()?.trim(), 16).ok()?;
        rest = rest.get(line + 2..)?;
        whole.extend_from_slice(rest.get(..length.min(rest.len()))?);
        if length == 0 || rest.len() < length + 2 {
            break;
        }
        rest = rest.get(length + 2..)?;
    }
    Some(whole)
}
