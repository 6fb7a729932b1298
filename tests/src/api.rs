//! A client of Bellhop's APIs: HTTP/1.1 on a Unix socket, one connection for each request.
//!
//! It writes the few lines of HTTP itself. It does not interpret requests, and it shares no code
//! with the server that it tests.

use crate::error::{Error, Result};
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long an answer may take. To open a device in the emulated lab host takes time, and so does a
/// watch.
const LIMIT: Duration = Duration::from_secs(120);

/// A client of the API on one socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

/// The response.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The headers as received, each on a line.
    pub headers: String,
    /// The body as JSON. Text that is not JSON becomes a string, an empty body null.
    pub body: Value,
}

impl Client {
    /// A client of the API on this socket, which need not exist yet.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_path_buf(),
        }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a request and waits for the whole answer.
    ///
    /// # Errors
    /// [`Error::File`] if no server answers; [`Error::Invalid`] for an answer that is not HTTP.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
        let failed = |what| Error::file(what, &self.socket);
        let mut stream = UnixStream::connect(&self.socket).map_err(failed("connect to"))?;
        stream
            .set_read_timeout(Some(LIMIT))
            .map_err(failed("set a limit for"))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: lab\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream
            .write_all(request.as_bytes())
            .map_err(failed("write to"))?;
        let mut answer = Vec::new();
        stream
            .read_to_end(&mut answer)
            .map_err(failed("read from"))?;
        parse(&answer).ok_or_else(|| {
            let text = String::from_utf8_lossy(&answer).into_owned();
            Error::invalid(format!("the answer to {method} {path}"), text)
        })
    }

    /// Sends a request, expects a status of success and returns the body.
    ///
    /// # Errors
    /// As [`Self::ask`]; [`Error::Invalid`] with the answer for any other status.
    pub fn done(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let answer = self.ask(method, path, body)?;
        if (200..300).contains(&answer.status) {
            return Ok(answer.body);
        }
        Err(Error::invalid(
            format!("the answer to {method} {path}"),
            format!("{} {}", answer.status, answer.body),
        ))
    }

    /// Returns the resource at `path`.
    ///
    /// # Errors
    /// As [`Self::done`].
    pub fn get(&self, path: &str) -> Result<Value> {
        self.done("GET", path, None)
    }
}

/// Parses an answer whose end is the end of the connection.
fn parse(answer: &[u8]) -> Option<Answer> {
    let text = std::str::from_utf8(answer).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let (line, headers) = head.split_once("\r\n").unwrap_or((head, ""));
    let status = line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let body = match body {
        "" => Value::Null,
        body => serde_json::from_str(body).unwrap_or_else(|_| Value::String(body.to_owned())),
    };
    Some(Answer {
        status,
        headers: headers.to_owned(),
        body,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_apart() {
        let answer = parse(b"HTTP/1.1 200 OK\r\na: b\r\nc: d\r\n\r\n{\"x\":1}").unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(answer.headers, "a: b\r\nc: d");
        assert_eq!(answer.body["x"], 1);
        let answer = parse(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
        assert_eq!((answer.status, answer.body), (204, Value::Null));
        let answer = parse(b"HTTP/1.1 200 OK\r\n\r\nup 1\n").unwrap();
        assert_eq!(answer.body, "up 1\n");
        for bad in [
            "",
            "HTTP/1.1 200 OK\r\n",
            "HTTP/2 200\r\n\r\n",
            "HTTP/1.1 2x0\r\n\r\n",
        ] {
            assert!(parse(bad.as_bytes()).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_missing_server_is_an_error() {
        assert!(Client::new(Path::new("/nonexistent")).get("/").is_err());
    }
}
