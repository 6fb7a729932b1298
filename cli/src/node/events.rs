//! The node's one stream of events.
//!
//! Owns the order and the number (generation) of events. It must not know who reads them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokio::sync::broadcast;
use utoipa::ToSchema;

/// Events that a slow reader may be behind.
const BEHIND_MAX: usize = 256;

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct Event {
    /// Grows with each event, from 1 when the daemon starts.
    pub(super) generation: u64,
    /// When, in milliseconds since 1970.
    pub(super) time_ms: u64,
    /// What it happened to, as its path in the API: `/v1/vms/web`.
    pub(super) subject: String,
    /// What happened, a word: `created`.
    pub(super) change: String,
    /// More about it, a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) detail: Option<String>,
}

/// All events, in their order.
#[derive(Debug)]
pub(super) struct Events {
    last: AtomicU64,
    readers: broadcast::Sender<Event>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            last: AtomicU64::new(0),
            readers: broadcast::Sender::new(BEHIND_MAX),
        }
    }
}

impl Events {
    /// Tells everybody.
    pub(super) fn publish(&self, subject: &str, change: &str, detail: Option<String>) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let event = Event {
            generation: self.last.fetch_add(1, Ordering::Relaxed) + 1,
            time_ms: since
                .ok()
                .and_then(|since| u64::try_from(since.as_millis()).ok())
                .unwrap_or_default(),
            subject: subject.to_owned(),
            change: change.to_owned(),
            detail,
        };
        tracing::info!(subject, change, detail = event.detail, "event");
        // Nobody may be listening.
        let _ = self.readers.send(event);
    }
}
