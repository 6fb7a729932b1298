//! The right of a client by TCP to a stream, which may end before the stream does.
//!
//! Owns when it ends. It must not know the streams.
//!
//! ```text
//!   SIGHUP: files are reloaded ──> loads + 1 ─┐
//!   the next token expires ──> the same loads ┴─> each stream: other loads, or its token expired?
//! ```

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::Access;
use super::tokens::has_passed;

/// How long the daemon relies on its clock, which may be set.
const CLOCK: Duration = Duration::from_secs(60);

/// Why a right ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PermitEnd {
    /// Certificates and tokens were reloaded: the client has to authenticate again.
    Reloaded,
    /// The client's token has expired.
    Expired,
}

/// The right of a client by TCP to a stream: an extension of the request.
#[derive(Debug, Clone)]
pub(crate) struct Permit {
    changes: watch::Receiver<u64>,
    loads: u64,
    expires: Option<String>,
}

impl Permit {
    /// Begins before the client's token is checked, so that a reload meanwhile ends it. `changes`
    /// has the number of reloads.
    pub(crate) fn new(changes: &watch::Sender<u64>) -> Self {
        let changes = changes.subscribe();
        let loads = *changes.borrow();
        Self {
            changes,
            loads,
            expires: None,
        }
    }

    /// The same until this time, in the form of [`bellhop_common::text::utc`].
    pub(crate) fn until(self, expires: Option<String>) -> Self {
        Self { expires, ..self }
    }

    /// Why it has ended, if it has.
    pub(crate) fn end(&self) -> Option<PermitEnd> {
        let has_expired = || self.expires.as_deref().is_some_and(has_passed);
        if *self.changes.borrow() != self.loads {
            Some(PermitEnd::Reloaded)
        } else {
            has_expired().then_some(PermitEnd::Expired)
        }
    }

    /// Waits for the end of a right. A client of the Unix socket needs none. Cancel-safe.
    pub(crate) async fn ended(permit: Option<&mut Self>) -> PermitEnd {
        let Some(permit) = permit else {
            return std::future::pending().await;
        };
        loop {
            permit.changes.mark_unchanged();
            if let Some(end) = permit.end() {
                return end;
            }
            if permit.changes.changed().await.is_err() {
                // The daemon ends.
                return PermitEnd::Reloaded;
            }
        }
    }
}

impl Access {
    /// Has streams check their tokens, and waits until the next token expires.
    pub(crate) async fn next_expiry(&self) {
        self.changes.send_modify(|_| ());
        match self.tokens().and_then(|tokens| tokens.next_expiry()) {
            Some(left) => sleep(left.min(CLOCK)).await,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn a_right_ends_at_the_expiry_of_its_token_and_at_a_reload() {
        let changes = watch::Sender::new(7_u64);
        let end_of = |permit: Option<&mut Permit>| {
            let ended = pin!(Permit::ended(permit));
            match ended.poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(end) => Some(end),
                Poll::Pending => None,
            }
        };
        let permit = |expires: &str| Permit::new(&changes).until(Some(expires.to_owned()));
        let mut expired = permit("2026-01-01T00:00:00Z");
        let mut valid = permit("9999-01-01T00:00:00Z");
        let mut unlimited = Permit::new(&changes);
        assert_eq!(end_of(Some(&mut expired)), Some(PermitEnd::Expired));
        changes.send_modify(|_| ());
        for permit in [&mut valid, &mut unlimited] {
            assert_eq!(end_of(Some(permit)), None);
        }
        changes.send_modify(|loads| *loads += 1);
        for permit in [&mut valid, &mut unlimited] {
            assert_eq!(end_of(Some(permit)), Some(PermitEnd::Reloaded));
        }
        assert_eq!(end_of(None), None);
        // One that begins after the reload.
        assert_eq!(end_of(Some(&mut permit("9999-01-01T00:00:00Z"))), None);
    }
}
