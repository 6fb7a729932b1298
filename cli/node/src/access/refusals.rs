//! A limit for the audit lines of requests that changed nothing, for each client.
//!
//! Owns the number of lines of each client. No client may fill the host's log or hide the lines of
//! another one, neither with refused requests nor with requests that fail.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bellhop_common::log_rate::{LineSource, Rate};
use parking_lot::Mutex;

use super::caller::Peer;

/// An operator who tries out a token sees each line.
const RATE: Rate = Rate {
    burst: 30,
    interval: Duration::from_secs(5),
};
/// The most clients that have a limit of their own.
const CLIENTS_MAX: usize = 1024;

/// A client, over all its connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Client {
    Uid(u32),
    /// The fingerprint of a certificate.
    Certificate(Arc<str>),
    /// All further ones.
    Other,
}

impl From<&Peer> for Client {
    fn from(peer: &Peer) -> Self {
        match peer {
            Peer::Unix(peer) => Self::Uid(peer.uid),
            Peer::Tls(peer) => Self::Certificate(peer.fingerprint.clone()),
            Peer::Unknown => Self::Other,
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<Client, LineSource>>);

impl Refusals {
    /// Decides on the line of a request that changed nothing. Returns the number of this client's
    /// lines suppressed before it, or `None` if this one is suppressed, too.
    pub(super) fn admit(&self, peer: &Peer, now: Instant) -> Option<u64> {
        let mut clients = self.0.lock();
        let mut client = Client::from(peer);
        if clients.len() >= CLIENTS_MAX && !clients.contains_key(&client) {
            // One that has rested has its whole burst again. Only its count is lost.
            clients.retain(|_, source| !source.has_rested(now));
            if clients.len() >= CLIENTS_MAX {
                client = Client::Other;
            }
        }
        let source = clients
            .entry(client)
            .or_insert_with(|| LineSource::new(now));
        source.admit(RATE, now)
    }
}

#[cfg(test)]
mod tests {
    use super::super::listener::TlsPeer;
    use super::*;

    fn with_certificate(fingerprint: &str) -> Peer {
        Peer::Tls(TlsPeer {
            fingerprint: fingerprint.into(),
            ..TlsPeer::example()
        })
    }

    #[test]
    fn a_flood_of_one_client_suppresses_no_line_of_another() {
        let refusals = Refusals::default();
        let now = Instant::now();
        let (one, other) = (with_certificate("01"), with_certificate("02"));
        let lines = (0..2000).filter_map(|_| refusals.admit(&one, now));
        assert_eq!(lines.collect::<Vec<_>>(), [0; 30]);
        assert_eq!(refusals.admit(&other, now), Some(0));
        // Another connection of the same client has no burst of its own.
        assert_eq!(refusals.admit(&with_certificate("01"), now), None);
        let later = now + RATE.interval;
        assert_eq!(refusals.admit(&one, later), Some(1971));
        assert_eq!(refusals.admit(&one, later), None);
    }

    #[test]
    fn any_number_of_clients_has_a_bounded_number_of_records() {
        let refusals = Refusals::default();
        let now = Instant::now();
        let lines = |prefix: &str, now| {
            let clients = (0..3 * CLIENTS_MAX).map(|number| format!("{prefix}{number}"));
            let admitted = clients.map(|name| refusals.admit(&with_certificate(&name), now));
            admitted.flatten().count()
        };
        // The further ones share a burst.
        assert_eq!(lines("a", now), CLIENTS_MAX + 30);
        assert_eq!(refusals.0.lock().len(), CLIENTS_MAX + 1);
        // Records of clients at rest make place.
        let later = now + 30 * RATE.interval;
        assert_eq!(lines("b", later), CLIENTS_MAX + 30);
        assert_eq!(refusals.0.lock().len(), CLIENTS_MAX + 1);
    }
}
