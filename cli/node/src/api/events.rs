//! `/v1/events`: the node's events as they happen (Server-Sent Events, WHATWG HTML standard,
//! section 9.2).
//!
//! Owns the form of the stream.
//!
//! ```text
//!   retry: 1000                 the delay before the next connection
//!   id: 1764000000000123        where it begins
//!
//!   id: 1764000000000124        the event's generation, which a reader sends in Last-Event-ID
//!   data: {"generation":1764000000000124,"time_ms":…,"subject":"/v1/vms/web","change":"created"}
//!
//!   id: 1764000000002000        the reader was away or slow for too long: events up to
//!   event: lost                 this one may be lost to it; those that are kept follow
//!   data: {"generation":1764000000002000}
//!
//!   :                           every 15 s, so that each side sees that the other is alive
//!   id: 1764000000003000        instead, if a filter has skipped events meanwhile
//! ```
//! The stream ends with its connection, after 5 minutes at the latest (`vmm::http::server`), and
//! with the client's right ([`Permit`]). A reader reconnects with its position; browsers do so by
//! themselves.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bellhop_api::node::{Event, EventChange, EventQuery, Role};
use bellhop_api::responses::WatchErrors;
use futures_util::stream;
use serde::Deserialize as _;
use serde::de::IntoDeserializer as _;
use serde::de::value::Error as Unreadable;
use tokio::sync::watch;
use tokio::time::Instant;
use vmm::http::HttpError;
use vmm::http::budget::BudgetPlace;
use vmm::http::parameters::Parameters;
use vmm::http::server::Closing;

use super::state::{Api, SenderRole};
use crate::access::Permit;
use crate::error::Error;
use crate::events::{Events, Read};
use crate::machines::spec::VmName;

/// The interval of keep-alives on an idle stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The most events per write.
const CHUNK: usize = 64;

/// Watch events
///
/// Server-Sent Events: `data` is an `Event`, `id` its generation. With the header `Last-Event-ID`
/// the stream continues after that event. The daemon keeps 1024 events. If some are lost, the event
/// `lost` comes first, and then those that are kept: read the objects of interest again.
///
/// A comment comes every 15 s. The stream ends after at most 5 minutes: connect again. By TCP it
/// also ends when the token expires, and when the daemon reloads its tokens. To list and watch
/// without a gap, read the list once the stream has begun.
#[utoipa::path(get, path = "/v1/events", operation_id = "watch_events",
    params(EventQuery, ("Last-Event-ID" = Option<u64>, Header,
        description = "The generation of the last received event (default: the newest)")),
    responses(
    (status = 200, description = "The stream; each `data` is an event", body = Event,
        content_type = "text/event-stream"),
    WatchErrors,
))]
pub(super) async fn follow(
    State(node): Api,
    SenderRole(role): SenderRole,
    closing: Option<Extension<Closing>>,
    permit: Option<Extension<Permit>>,
    headers: HeaderMap,
    Parameters(query): Parameters<EventQuery>,
) -> Result<Response, Error> {
    let closing = closing.map(|Extension(closing)| closing);
    let permit = permit.map(|Extension(permit)| permit);
    stream_of(node.events.clone(), role, closing, permit, &headers, query)
}

fn stream_of(
    events: Arc<Events>,
    role: Role,
    closing: Option<Closing>,
    permit: Option<Permit>,
    headers: &HeaderMap,
    query: EventQuery,
) -> Result<Response, Error> {
    let asked = last_event_id(headers)?.or(query.since);
    let vm = query.vm.map(|name| name.parse()).transpose()?;
    let change = query.kind.as_deref().map(change_of).transpose()?;
    let place = events.place(role).ok_or_else(|| {
        let message = format!("too many clients with the role {role} already read events");
        Error::unavailable("too_many_readers", message).hint("try again later")
    })?;
    let newest = events.newest();
    let begin = *newest.borrow();
    let after = match asked {
        Some(0) => events.oldest(),
        asked => asked.unwrap_or(begin),
    };
    let reader = Reader {
        after,
        last_sent: after,
        filter: Filter { vm, change },
        follows: query.follow.unwrap_or(true),
        // A resuming reader has its position already.
        greeting: Some(match asked {
            Some(_) => "retry: 1000\n\n".to_owned(),
            None => format!("retry: 1000\nid: {begin}\n\n"),
        }),
        events,
        newest,
        closing,
        permit,
        _place: place,
    };
    let stream = stream::unfold(reader, |mut reader| async {
        let text = reader.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(text)), reader))
    });
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-store"),
    ];
    Ok((headers, Body::from_stream(stream)).into_response())
}

fn last_event_id(headers: &HeaderMap) -> Result<Option<u64>, HttpError> {
    let Some(value) = headers.get("last-event-id") else {
        return Ok(None);
    };
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong = || HttpError::Parameter("the header Last-Event-ID is not a generation".into());
    number.ok_or_else(wrong).map(Some)
}

/// The change that the parameter `type` names. Unknown words are rejected, because they would match
/// no event.
fn change_of(word: &str) -> Result<EventChange, HttpError> {
    let change: Result<_, Unreadable> = EventChange::deserialize(word.into_deserializer());
    match change {
        Ok(EventChange::Unknown) | Err(_) => Err(HttpError::Parameter(
            "`type` is not a known change: see `EventChange` in /v1/openapi.json".into(),
        )),
        Ok(change) => Ok(change),
    }
}

/// The events that a reader selects.
#[derive(Debug)]
struct Filter {
    vm: Option<VmName>,
    change: Option<EventChange>,
}

impl Filter {
    fn has(&self, event: &Event) -> bool {
        let of_vm = |vm: &VmName| {
            let below = event.subject.strip_prefix("/v1/vms/");
            below.is_some_and(|below| below.split('/').next() == Some(vm.as_str()))
        };
        self.vm.as_ref().is_none_or(of_vm)
            && self.change.is_none_or(|change| event.change == change)
    }
}

/// A stream of one reader.
struct Reader {
    events: Arc<Events>,
    /// The generation up to which all events are written or skipped.
    after: u64,
    /// The last generation that the reader has received.
    last_sent: u64,
    filter: Filter,
    /// Whether it waits for new events.
    follows: bool,
    greeting: Option<String>,
    newest: watch::Receiver<u64>,
    /// None without a server.
    closing: Option<Closing>,
    permit: Option<Permit>,
    _place: BudgetPlace,
}

impl Reader {
    /// The next text of the stream; none at its end.
    async fn next(&mut self) -> Option<String> {
        // A reader that lags may have events to read for any time.
        if self
            .permit
            .as_ref()
            .is_some_and(|permit| permit.end().is_some())
        {
            return None;
        }
        if let Some(greeting) = self.greeting.take() {
            return Some(greeting);
        }
        let quiet = Instant::now() + KEEP_ALIVE;
        loop {
            // Before the read, so that later events wake the reader.
            self.newest.borrow_and_update();
            match self.events.read(self.after, CHUNK) {
                Read::Events(events) if !events.is_empty() => {
                    self.after = events.last().map_or(self.after, |last| last.generation);
                    let mut text = String::new();
                    for event in events.iter().filter(|event| self.filter.has(event)) {
                        text.push_str(&written(event));
                        self.last_sent = event.generation;
                    }
                    if text.is_empty() {
                        continue;
                    }
                    return Some(text);
                }
                Read::Events(_) if !self.follows => return self.place(),
                Read::Events(_) => {}
                Read::Lost(until) => {
                    (self.after, self.last_sent) = (until, until);
                    return Some(format!(
                        "id: {until}\nevent: lost\ndata: {{\"generation\":{until}}}\n\n"
                    ));
                }
            }
            let closing = async {
                match &mut self.closing {
                    Some(closing) => closing.wait().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.newest.changed() => changed.ok()?,
                () = tokio::time::sleep_until(quiet) => {
                    return Some(self.place().unwrap_or_else(|| ":\n\n".to_owned()));
                }
                () = closing => return None,
                _ = Permit::ended(self.permit.as_mut()) => return None,
            }
        }
    }

    /// The reader's new position, if events were skipped that it does not know of.
    fn place(&mut self) -> Option<String> {
        let after = self.after;
        let last_sent = std::mem::replace(&mut self.last_sent, after);
        (last_sent != after).then(|| format!("id: {after}\n\n"))
    }
}

fn written(event: &Event) -> String {
    let mut text = format!("id: {}\n", event.generation);
    // JSON has no line breaks, neither outside of strings nor in them. An event of text and numbers
    // always serializes.
    let data = serde_json::to_string(event).unwrap_or_default();
    let _ = write!(text, "data: {data}\n\n");
    text
}

#[cfg(test)]
mod tests;
