//! The event stream of the node daemon (Server-Sent Events).
//!
//! Owns the position in the stream, which outlives connections and daemons.
//!
//! ```text
//!         the stream begins            it ends, breaks, or is silent for 45 s
//!   (none) ─ Notice::Begin ─> connected ───────────────────────────────> away
//!                                 ^     after the last event that was      │
//!                                 └── read; every second, at most 60 s ────┘
//! ```

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use bellhop_api::node::EventQuery;
use serde_json::Value;

use super::{Node, Piece, STRANGE, Stream, with_query};
use crate::error::{Error, ErrorKind};

/// The daemon sends a keep-alive every 15 s.
const SILENCE: Duration = Duration::from_secs(45);
/// The delay between two attempts to connect.
const PAUSE: Duration = Duration::from_secs(1);
/// The time limit for an unreachable daemon.
const AWAY: Duration = Duration::from_secs(60);
/// The longest accepted message, in bytes.
const MESSAGE_MAX: usize = 1 << 20;

/// The path of these events.
fn path(query: &EventQuery) -> String {
    let values = [
        ("vm", query.vm.clone()),
        ("type", query.kind.clone()),
        ("since", query.since.map(|since| since.to_string())),
        ("follow", query.follow.map(|follow| follow.to_string())),
    ];
    with_query("/v1/events", values)
}

/// A part of the stream that readers need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// The stream begins: all later events follow.
    Begin,
    /// An event, unchanged.
    Event(Value),
    /// The reader missed events and must read the state again.
    Lost,
}

impl Node {
    /// The past events that the daemon still keeps.
    ///
    /// # Errors
    /// The daemon is unreachable, refuses, or sends an unexpected answer.
    pub fn past_events(&self, query: EventQuery) -> Result<Vec<Value>, Error> {
        let query = EventQuery {
            since: Some(0),
            follow: Some(false),
            ..query
        };
        let text = self.get_bytes(&path(&query))?;
        let mut parser = Parser::default();
        parser.read(&text)?;
        let events = parser
            .notices
            .into_iter()
            .filter_map(|notice| match notice {
                Notice::Event(event) => Some(event),
                Notice::Begin | Notice::Lost => None,
            });
        Ok(events.collect())
    }

    /// New events as they happen.
    #[must_use]
    pub fn events(&self, query: EventQuery) -> EventStream<'_> {
        EventStream {
            node: self,
            query,
            connection: None,
            heard: Instant::now(),
            away: None,
            begun: false,
            reached: false,
            parser: Parser::default(),
        }
    }
}

/// Whether the daemon ended while it answered. Without a daemon no connection can break.
#[must_use]
pub fn connection_broke(error: &Error) -> bool {
    let first: Option<&(dyn std::error::Error + 'static)> = Some(error);
    std::iter::successors(first, |error| error.source()).any(|error| error.is::<hyper::Error>())
}

/// A stream of events: see the module.
pub struct EventStream<'a> {
    node: &'a Node,
    query: EventQuery,
    connection: Option<Box<dyn Stream + 'a>>,
    /// The time of the last received data.
    heard: Instant,
    /// The time since which there was no data or no connection.
    away: Option<Instant>,
    begun: bool,
    /// Whether there was a daemon.
    reached: bool,
    parser: Parser,
}

vdpa::opaque_debug!(EventStream<'_>, this => query: this.query);

impl EventStream<'_> {
    /// The next notice; none after `limit`.
    ///
    /// # Errors
    /// The daemon refuses, sends an unexpected answer, or is unreachable: at first, or for a
    /// minute.
    pub fn next(&mut self, limit: Duration) -> Result<Option<Notice>, Error> {
        let end = Instant::now() + limit;
        loop {
            if let Some(notice) = self.parser.notices.pop_front() {
                return Ok(Some(notice));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let Some(connection) = &mut self.connection else {
                self.connect(left)?;
                continue;
            };
            match connection.next(left.min(SILENCE)) {
                Piece::Data(data) => {
                    self.heard = Instant::now();
                    self.away = None;
                    self.parser.read(&data)?;
                }
                Piece::Silence if self.heard.elapsed() < SILENCE => {}
                Piece::Silence | Piece::End => {
                    self.connection = None;
                    self.parser.cut();
                }
            }
        }
    }

    fn connect(&mut self, left: Duration) -> Result<(), Error> {
        if self.away.is_some() {
            thread::sleep(PAUSE.min(left));
        }
        let query = EventQuery {
            since: self.parser.id.or(self.query.since),
            ..self.query.clone()
        };
        match self.node.open(&path(&query)) {
            Ok(connection) => {
                self.reached = true;
                self.connection = Some(connection);
                self.heard = Instant::now();
                // Until the connection delivers data.
                self.away.get_or_insert(self.heard);
                if !self.begun {
                    self.begun = true;
                    self.parser.notices.push_back(Notice::Begin);
                }
                Ok(())
            }
            Err(error) => {
                let since = *self.away.get_or_insert_with(Instant::now);
                let passes = matches!(error.kind(), ErrorKind::NoDaemon | ErrorKind::TimedOut);
                self.reached |= connection_broke(&error);
                if self.reached && passes && since.elapsed() < AWAY {
                    Ok(())
                } else {
                    Err(error)
                }
            }
        }
    }
}

/// Parses a stream of Server-Sent Events.
#[derive(Debug, Default)]
struct Parser {
    /// The beginning of a line.
    line: Vec<u8>,
    data: String,
    lost: bool,
    /// The generation of the current message.
    next_id: Option<u64>,
    /// The generation up to which all messages are complete.
    id: Option<u64>,
    notices: VecDeque<Notice>,
}

impl Parser {
    fn read(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if self.line.len().saturating_add(self.data.len()) > MESSAGE_MAX {
                return Err(Error::failed(STRANGE));
            }
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                let line = String::from_utf8_lossy(&line);
                self.line(line.trim_end_matches(['\n', '\r']))?;
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &str) -> Result<(), Error> {
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "" if line.is_empty() => return self.end(),
            "id" => self.next_id = value.parse().ok(),
            "event" => self.lost = value == "lost",
            "data" => self.data.push_str(value),
            // A comment, or an unused field.
            _ => {}
        }
        Ok(())
    }

    /// Completes a message.
    fn end(&mut self) -> Result<(), Error> {
        let (data, lost) = (
            std::mem::take(&mut self.data),
            std::mem::take(&mut self.lost),
        );
        self.id = self.next_id.take().or(self.id);
        if lost {
            self.notices.push_back(Notice::Lost);
        } else if !data.is_empty() {
            let event = serde_json::from_str(&data).map_err(Error::context(STRANGE))?;
            self.notices.push_back(Notice::Event(event));
        }
        Ok(())
    }

    /// Handles the end of the connection: the server repeats an incomplete message.
    fn cut(&mut self) {
        self.line.clear();
        self.data.clear();
        self.lost = false;
        self.next_id = None;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::fake::FakeDaemon;
    use super::*;

    #[test]
    fn messages_are_read_however_they_are_cut() {
        let text = "retry: 1000\nid: 7\n\n:\n\nid: 8\ndata: {\"generation\":8}\n\n\
                    id: 20\nevent: lost\ndata: {}\n\n\
                    id: 21\r\ndata:{\"a\":\"b: c\"}\r\n\r\nid: 22\n\nid: x";
        let wanted = [
            Notice::Event(json!({"generation": 8})),
            Notice::Lost,
            Notice::Event(json!({"a": "b: c"})),
        ];
        for size in 1..text.len() {
            let mut parser = Parser::default();
            for bytes in text.as_bytes().chunks(size) {
                parser.read(bytes).unwrap();
            }
            assert_eq!(parser.notices, wanted, "pieces of {size}");
            assert_eq!(parser.id, Some(22));
        }
        assert!(Parser::default().read(b"data: {\n\n").is_err());
        assert!(
            Parser::default()
                .read(&vec![b'x'; MESSAGE_MAX + 1])
                .is_err()
        );
    }

    #[test]
    fn a_stream_continues_after_its_last_event_on_another_connection() {
        let query = EventQuery {
            vm: Some("web".to_owned()),
            kind: Some("a&b".to_owned()),
            ..EventQuery::default()
        };
        let refusal = json!({"code": "too_many_readers", "message": "no"});
        let fake = FakeDaemon::default()
            .answer(200, &json!("retry: 1000\nid: 7\n\n"))
            .answer(
                200,
                &json!("id: 9\ndata: {\"generation\":9}\n\nid: 10\ndata: {\"gen"),
            )
            .answer(503, &refusal);
        let node = fake.node();
        let mut stream = node.events(query);
        let long = Duration::from_secs(20);
        assert_eq!(stream.next(long).unwrap(), Some(Notice::Begin));
        let event = Notice::Event(json!({"generation": 9}));
        assert_eq!(stream.next(long).unwrap(), Some(event));
        let error = stream.next(long).unwrap_err();
        assert!(error.refusal().is_some(), "{error}");
        let path = "GET /v1/events?vm=web&type=a%26b";
        assert_eq!(
            fake.asked(),
            [
                path.to_owned(),
                format!("{path}&since=7"),
                format!("{path}&since=9")
            ]
        );
        assert_eq!(stream.next(Duration::ZERO).unwrap(), None);
    }

    #[test]
    fn past_events_are_a_list() {
        let fake = FakeDaemon::default().answer(
            200,
            &json!("retry: 1000\n\nid: 9\ndata: {\"generation\":9}\n\n"),
        );
        let past = fake.node().past_events(EventQuery::default());
        assert_eq!(past.unwrap(), [json!({"generation": 9})]);
        assert_eq!(fake.asked(), ["GET /v1/events?since=0&follow=false"]);
    }
}
