//! A client of QEMU's machine protocol (QMP): one command at a time, each with its answer.
//!
//! ```text
//!   greeting ─▶ qmp_capabilities ─▶ ready ─▶ command, answer ─▶ ready …
//! ```
//! Every line is one JSON object, ended by a line break. The client keeps events that arrive before
//! an answer for [`Qmp::take_events`].

use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long QEMU may take for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// The longest line that QEMU sends, in bytes.
const LINE_LIMIT: u64 = 1 << 20;

/// How many events that arrive before an answer the client keeps.
const EVENTS_LIMIT: usize = 1000;

/// A connection to a QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// True after QEMU's greeting and the negotiation of capabilities.
    ready: bool,
    /// The first events, in their order.
    events: Vec<Value>,
}

impl Qmp {
    /// Creates a connection. The other end is or becomes the monitor of a QEMU.
    ///
    /// # Errors
    /// [`Error::System`] when the socket rejects a time limit.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream
            .set_read_timeout(Some(ANSWER_LIMIT))
            .and_then(|()| stream.set_write_timeout(Some(ANSWER_LIMIT)))
            .map_err(Error::system("limit the time of QEMU's monitor"))?;
        Ok(Self {
            stream: BufReader::new(stream),
            ready: false,
            events: Vec::new(),
        })
    }

    /// The events that arrived before answers since the last call.
    pub fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    /// Executes a command and returns QEMU's answer.
    ///
    /// # Errors
    /// [`Error::Invalid`] with QEMU's text when it refuses, or for a malformed answer;
    /// [`Error::System`] when the connection breaks.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        if !self.ready {
            let greeting = self.line()?;
            if greeting.get("QMP").is_none() {
                return Err(Error::invalid(
                    "QEMU's greeting",
                    format!("it is {greeting}"),
                ));
            }
            self.exchange(&json!({ "execute": "qmp_capabilities" }))?;
            self.ready = true;
        }
        self.exchange(&json!({ "execute": command, "arguments": arguments }))
    }

    fn exchange(&mut self, command: &Value) -> Result<Value> {
        self.stream
            .get_mut()
            .write_all(format!("{command}\n").as_bytes())
            .map_err(Error::system("write to QEMU's monitor"))?;
        for _ in 0..EVENTS_LIMIT {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                let words = error["desc"].as_str().unwrap_or("it gave no reason");
                return Err(Error::invalid("a command for QEMU", words.to_owned()));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if self.events.len() < EVENTS_LIMIT {
                self.events.push(answer);
            }
        }
        Err(Error::invalid(
            "QEMU's monitor",
            "it answers with events only",
        ))
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = Vec::new();
        self.stream
            .by_ref()
            .take(LINE_LIMIT)
            .read_until(b'\n', &mut line)
            .map_err(Error::system("read from QEMU's monitor"))?;
        serde_json::from_slice(&line)
            .map_err(|error| Error::invalid("a line of QEMU's monitor", error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that has written all its lines in advance and reads nothing.
    fn peer(lines: &str) -> (Qmp, UnixStream) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(lines.as_bytes()).unwrap();
        (Qmp::new(ours).unwrap(), theirs)
    }

    #[test]
    fn answers_are_found_between_events() {
        let (mut qmp, mut theirs) = peer(
            "{\"QMP\":{}}\n{\"return\":{}}\n{\"event\":\"X\"}\n{\"return\":7}\n{\"return\":8}\n",
        );
        assert_eq!(qmp.execute("one", &json!({})).unwrap(), 7);
        assert_eq!(qmp.take_events(), [json!({ "event": "X" })]);
        assert_eq!(qmp.execute("two", &json!({ "a": 1 })).unwrap(), 8);
        assert!(qmp.take_events().is_empty());
        drop(qmp);
        let mut sent = String::new();
        theirs.read_to_string(&mut sent).unwrap();
        let commands: Vec<Value> = sent
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(commands[0]["execute"], "qmp_capabilities");
        assert_eq!(commands[2]["arguments"]["a"], 1);
    }

    #[test]
    fn refusals_and_nonsense_are_errors() {
        let (mut qmp, _theirs) =
            peer("{\"QMP\":{}}\n{\"return\":{}}\n{\"error\":{\"desc\":\"no such thing\"}}\n");
        let error = qmp.execute("one", &json!({})).unwrap_err();
        assert!(error.to_string().contains("no such thing"), "{error}");
        for lines in ["", "{}\n", "hello\n", "{\"QMP\":{}}\n{\"return\":{}}\n[]\n"] {
            let (mut qmp, theirs) = peer(lines);
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(qmp.execute("one", &json!({})).is_err(), "{lines}");
        }
    }
}
