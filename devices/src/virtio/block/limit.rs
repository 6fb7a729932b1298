//! Limits of a disk, as token buckets: bytes and requests per second, with a burst.
//!
//! ```text
//!   bucket: filled by its rate, holds `burst` seconds of it, full at the start
//!   a request begins while no bucket is in debt, and may put it into debt
//! ```
//! So a request of any size can begin, and the next one waits until its cost is paid. The rate over
//! a long time is exact. A bucket is one point in time: when it would be full. A request costs no
//! memory and two additions.
//!
//! Owns the buckets and the timer of the wait.

use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use vmm_sys_util::timerfd::TimerFd;

use crate::Error;

/// What a guest may ask of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimits {
    /// Bytes per second, read and written together; `None`: no limit.
    pub bytes: Option<NonZeroU64>,
    /// Requests per second; `None`: no limit.
    pub requests: Option<NonZeroU64>,
    /// The time whose unused rate is saved up.
    pub burst: Duration,
}

#[derive(Debug)]
struct Bucket {
    rate: NonZeroU64,
    full_at: Instant,
}

impl Bucket {
    fn new(rate: NonZeroU64, now: Instant) -> Self {
        Self { rate, full_at: now }
    }

    /// How long it stays in debt.
    fn debt(&self, burst: Duration, now: Instant) -> Duration {
        let missing = self.full_at.saturating_duration_since(now);
        missing.saturating_sub(burst)
    }

    fn charge(&mut self, tokens: u64, now: Instant) {
        let nanos = u128::from(tokens) * 1_000_000_000 / u128::from(self.rate.get());
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let from = self.full_at.max(now);
        self.full_at = from.checked_add(cost).unwrap_or(from);
    }
}

/// The limits of one disk at work.
pub(super) struct Limiter {
    burst: Duration,
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
    timer: TimerFd,
}

vdpa::opaque_debug!(Limiter, this => burst: this.burst, bytes: this.bytes, requests: this.requests);

impl Limiter {
    /// # Errors
    /// The process has no free descriptor.
    pub(super) fn new(limits: RateLimits) -> Result<Self, Error> {
        let now = Instant::now();
        let bucket = |rate: Option<NonZeroU64>| rate.map(|rate| Bucket::new(rate, now));
        Ok(Self {
            burst: limits.burst,
            bytes: bucket(limits.bytes),
            requests: bucket(limits.requests),
            timer: TimerFd::new().map_err(Error::context("cannot create a timer for the disk"))?,
        })
    }

    /// Readable when a request may begin that could not before.
    pub(super) fn timer_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Ends the wait; call it before [`Limiter::admits`].
    pub(super) fn acknowledge(&mut self) {
        // Setting the timer also clears its expiry, without the risk to wait for one.
        if let Err(error) = self.timer.clear() {
            tracing::error!(%error, "cannot stop a timer");
        }
    }

    /// Whether another request may begin now. If not, the timer expires when it may.
    pub(super) fn admits(&mut self, now: Instant) -> bool {
        let buckets = self.bytes.iter().chain(&self.requests);
        let debts = buckets.map(|bucket| bucket.debt(self.burst, now));
        let wait = debts.max().unwrap_or_default();
        if wait.is_zero() {
            return true;
        }
        match self.timer.reset(wait, None) {
            Ok(()) => false,
            Err(error) => {
                // A disk without limits is better than one that stops.
                tracing::error!(%error, "cannot set a timer: a request passes the disk's limits");
                true
            }
        }
    }

    /// Counts a request that begins.
    pub(super) fn charge(&mut self, bytes: u64, now: Instant) {
        if let Some(bucket) = &mut self.bytes {
            bucket.charge(bytes, now);
        }
        if let Some(bucket) = &mut self.requests {
            bucket.charge(1, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limited(bytes: u64, requests: u64, burst: Duration) -> (Limiter, Instant) {
        let limits = RateLimits {
            bytes: NonZeroU64::new(bytes),
            requests: NonZeroU64::new(requests),
            burst,
        };
        (Limiter::new(limits).unwrap(), Instant::now())
    }

    /// How many requests of this size begin until `end`.
    fn begun(limiter: &mut Limiter, start: Instant, end: Duration, bytes: u64) -> u64 {
        let mut count = 0;
        let mut at = Duration::ZERO;
        while at < end {
            while limiter.admits(start + at) {
                limiter.charge(bytes, start + at);
                count += 1;
            }
            at += Duration::from_millis(1);
        }
        count
    }

    #[test]
    fn the_rate_over_a_long_time_is_exact() {
        for burst in [SECOND / 10, SECOND, 5 * SECOND] {
            let (mut limiter, start) = limited(0, 100, burst);
            let expected = 100 * (10 + burst.as_millis() / 1000);
            let count = u128::from(begun(&mut limiter, start, 10 * SECOND, 4096));
            assert!(count.abs_diff(expected) <= 12, "{burst:?}: {count}");
        }
        let (mut limiter, start) = limited(1 << 20, 0, SECOND);
        let count = begun(&mut limiter, start, 10 * SECOND, 4096);
        assert!(count.abs_diff(256 * 11) <= 2, "{count}");
    }

    #[test]
    fn the_lower_limit_decides() {
        let (mut limiter, start) = limited(1 << 20, 10, SECOND);
        assert!(begun(&mut limiter, start, SECOND, 512) <= 21);
        let (mut limiter, start) = limited(4096, 1000, SECOND);
        assert!(begun(&mut limiter, start, SECOND, 4096) <= 3);
        let (mut limiter, start) = limited(0, 0, SECOND);
        assert!((0..100_000).all(|_| {
            limiter.charge(u64::MAX, start);
            limiter.admits(start)
        }));
    }

    #[test]
    fn a_large_request_is_paid_afterwards() {
        let (mut limiter, start) = limited(1 << 20, 0, SECOND);
        assert!(limiter.admits(start));
        limiter.charge(10 << 20, start);
        assert!(!limiter.admits(start + 8 * SECOND));
        assert!(limiter.admits(start + 9 * SECOND));
        // What is not used is saved up for the burst only.
        let later = start + 1000 * SECOND;
        limiter.charge(2 << 20, later);
        assert!(!limiter.admits(later + SECOND / 2));
        // No size is too large.
        limiter.charge(u64::MAX, later);
        limiter.charge(u64::MAX, later);
        assert!(!limiter.admits(later));
    }

    #[test]
    fn the_timer_expires_when_a_request_may_begin() {
        let (mut limiter, start) = limited(0, 20, Duration::from_millis(1));
        limiter.charge(0, start);
        assert!(!limiter.admits(Instant::now()));
        let mut event = libc::pollfd {
            fd: limiter.timer_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `event` is one valid pollfd for the call.
        assert_eq!(unsafe { libc::poll(&raw mut event, 1, 10_000) }, 1);
        limiter.acknowledge();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::poll(&raw mut event, 1, 0) }, 0);
        assert!(limiter.admits(Instant::now()));
    }
}
