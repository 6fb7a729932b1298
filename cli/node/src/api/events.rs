//! `/v1/events`: what happens on the node, as it happens (Server-Sent Events, the WHATWG's HTML standard, section 9.2).
//!
//! Owns the stream's form. It must not know what happens.
//!
//! ```text
//!   retry: 1000                 how long to wait before connecting again
//!   id: 1764000000000123        where it begins
//!
//!   id: 1764000000000124        the event's generation: what a reader says in Last-Event-ID
//!   data: {"generation":1764000000000124,"time_ms":…,"subject":"/v1/vms/web","change":"created"}
//!
//!   id: 1764000000002000        the reader was away or slow for too long: what came before this is lost to it
//!   event: lost
//!   data: {"generation":1764000000002000}
//!
//!   :                           every 15 s, so that both sides see that the other is there
//! ```
//! The stream ends with its connection, after 5 minutes at the latest (`vmm::http::server`). A reader connects again
//! and says where it was; readers in browsers do so by themselves.

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
use bellhop_api::node::Event;
use bellhop_api::responses::WatchErrors;
use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, watch};
use vmm::http::HttpError;
use vmm::http::server::Closing;

use super::state::Api;
use crate::error::Error;
use crate::events::{Events, READERS_MAX, Read};

/// How often something comes when nothing happens.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Events that are written at once.
const CHUNK: usize = 64;

/// Watch events
///
/// Server-Sent Events: `data` is an `Event`, `id` its generation. With the header `Last-Event-ID`
/// the stream continues after that event. The daemon keeps 1024 events. If some are lost, the event
/// `lost` comes first: read the objects of interest again.
///
/// A comment comes every 15 s. The stream ends after 5 minutes at the latest: connect again.
#[utoipa::path(get, path = "/v1/events", operation_id = "watch_events",
    params(("Last-Event-ID" = Option<u64>, Header,
        description = "The generation of the last event that was read; by default the newest")),
    responses(
    (status = 200, description = "The stream; each `data` is an event", body = Event,
        content_type = "text/event-stream"),
    WatchErrors,
))]
pub(super) async fn follow(
    State(node): Api,
    closing: Option<Extension<Closing>>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let closing = closing.map(|Extension(closing)| closing);
    stream_of(node.events.clone(), closing, &headers)
}

fn stream_of(
    events: Arc<Events>,
    closing: Option<Closing>,
    headers: &HeaderMap,
) -> Result<Response, Error> {
    let asked = last_event_id(headers)?;
    let place = events.place().ok_or_else(|| {
        let message = format!("{READERS_MAX} clients read events already");
        Error::unavailable("too_many_readers", message).hint("try again later")
    })?;
    let newest = events.newest();
    let begin = *newest.borrow();
    let reader = Reader {
        after: asked.unwrap_or(begin),
        // One that goes on has its place already.
        greeting: Some(match asked {
            Some(_) => "retry: 1000\n\n".to_owned(),
            None => format!("retry: 1000\nid: {begin}\n\n"),
        }),
        events,
        newest,
        closing,
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
    let wrong = || HttpError::Parameter("the header Last-Event-ID is no event's generation".into());
    number.ok_or_else(wrong).map(Some)
}

/// One stream.
struct Reader {
    events: Arc<Events>,
    /// The generation up to which everything is written.
    after: u64,
    greeting: Option<String>,
    newest: watch::Receiver<u64>,
    /// Absent where no server serves it.
    closing: Option<Closing>,
    _place: OwnedSemaphorePermit,
}

impl Reader {
    /// What is to be written next; none at the end.
    async fn next(&mut self) -> Option<String> {
        if let Some(greeting) = self.greeting.take() {
            return Some(greeting);
        }
        loop {
            // Before reading: what comes after that wakes.
            self.newest.borrow_and_update();
            match self.events.read(self.after, CHUNK) {
                Read::Events(events) if !events.is_empty() => {
                    self.after = events.last().map_or(self.after, |last| last.generation);
                    return Some(events.iter().map(|event| written(event)).collect());
                }
                Read::Events(_) => {}
                Read::Lost(newest) => {
                    self.after = newest;
                    return Some(format!(
                        "id: {newest}\nevent: lost\ndata: {{\"generation\":{newest}}}\n\n"
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
                () = tokio::time::sleep(KEEP_ALIVE) => return Some(":\n\n".to_owned()),
                () = closing => return None,
            }
        }
    }
}

fn written(event: &Event) -> String {
    let mut text = format!("id: {}\n", event.generation);
    // JSON has no line breaks outside of strings, and none in them. An event of text and numbers can always be written.
    let data = serde_json::to_string(event).unwrap_or_default();
    let _ = write!(text, "data: {data}\n\n");
    text
}

#[cfg(test)]
mod tests;
