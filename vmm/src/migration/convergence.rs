//! Decides when to stop the guest, from the measurements of each round.
//!
//! Pure arithmetic: no clock, no connection, no machine.
//!
//! ```text
//!                 ┌── the rest fits the downtime, and another round would save little ──> Stop
//!   end of a      │
//!   round ────────┼── the timeout has expired ──────────────────────────────────────────> GiveUp
//!                 │
//!                 ├── the second round in a row that shrank little ─────> Throttle, the next step
//!                 └── otherwise ────────────────────────────────────────────────────────> Round
//! ```
//!
//! The downtime that the user allows is a limit, not a goal. While each round leaves less than half
//! of its pages dirty, the next one costs little and shortens the downtime.
//!
//! vCPUs are only ever throttled more, in steps, so the decisions cannot oscillate; the last step
//! leaves them one per cent of their time. After it, rounds continue until the rest fits or the
//! timeout expires.

use std::time::Duration;

/// Throttle steps of vCPUs, in per cent of their time.
const THROTTLE: [u8; 7] = [20, 40, 60, 80, 90, 95, 99];
/// A round helps if it leaves less than this share (per cent) of its pages dirty.
const HELPS_PERCENT: u64 = 80;
/// vCPUs are throttled after this many rounds in a row that do not help.
const PATIENCE: u8 = 2;

/// Another round shortens the downtime if the last one left less than this share (per cent) of its
/// pages dirty, ...
const SHORTENS_PERCENT: u64 = 50;
/// ... and if sending those takes longer than this.
const SHORT: Duration = Duration::from_millis(5);

/// The limits that the user sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long the guest may be stopped.
    pub downtime: Duration,
    /// How long the migration may take from its start to the stop of the guest.
    pub timeout: Duration,
    /// How long the guest is stopped for anything but memory: devices, state, the round trip.
    pub switch: Duration,
}

/// Least time to wait for the peer while the guest is stopped. A busy peer is no reason to start
/// over.
const STANDSTILL_MIN: Duration = Duration::from_secs(2);
/// Multiple of the allowed downtime: the guest was stopped because everything was to fit into that.
const STANDSTILL_TIMES: u32 = 4;

impl Limits {
    /// How long the peer may take for all its work while the guest is stopped, up to GO. A silent
    /// peer does not hold a guest for longer.
    #[must_use]
    pub fn standstill(&self) -> Duration {
        self.downtime
            .saturating_mul(STANDSTILL_TIMES)
            .max(STANDSTILL_MIN)
    }
}

/// Measurements of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// Since the beginning of the migration.
    pub elapsed: Duration,
    /// Bytes on the wire.
    pub sent_bytes: u64,
    /// How long the round took, until the next pages were collected.
    pub time: Duration,
    /// Bytes of memory that the round covered, zeros included.
    pub round_bytes: u64,
    /// Bytes of memory written meanwhile, in whole pages: the rest to send.
    pub dirty_bytes: u64,
}

/// The next step of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Send the rest while the guest runs.
    Round,
    /// Stop the guest and send the rest.
    Stop,
    /// Throttle vCPUs by this share of their time, in per cent, then continue as with
    /// [`Decision::Round`].
    Throttle(u8),
    /// The timeout has expired.
    GiveUp,
}

/// An estimate from the rounds so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forecast {
    /// Rounds until the guest can be stopped, at the present rate; `None` if it never can.
    pub rounds_left: Option<u32>,
    /// How long the guest would be stopped if it stopped now.
    pub downtime: Duration,
}

/// The decisions of one migration.
#[derive(Debug, Clone)]
pub struct Convergence {
    limits: Limits,
    /// Bytes and nanoseconds of the rounds so far; older rounds weigh less.
    bytes: u128,
    nanoseconds: u128,
    dirty_per_second: u64,
    /// Rounds in a row that did not help.
    stuck: u8,
    /// Number of [`THROTTLE`] steps taken.
    steps: usize,
}

impl Convergence {
    /// Before the first round.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            bytes: 0,
            nanoseconds: 0,
            dirty_per_second: 0,
            stuck: 0,
            steps: 0,
        }
    }

    /// Bytes per second on the wire, if known.
    #[must_use]
    pub fn bytes_per_second(&self) -> Option<u64> {
        per_second(self.bytes, self.nanoseconds).filter(|&rate| rate > 0)
    }

    /// Bytes per second that the guest and its devices wrote in the last round.
    #[must_use]
    pub fn dirty_bytes_per_second(&self) -> u64 {
        self.dirty_per_second
    }

    /// How long the guest would be stopped with this many bytes to send.
    fn downtime(&self, bytes: u64) -> Duration {
        let sending = match self.bytes_per_second() {
            _ if bytes == 0 => Duration::ZERO,
            Some(rate) => {
                let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
                Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
            }
            None => Duration::MAX,
        };
        sending.saturating_add(self.limits.switch)
    }

    /// How long the guest would be stopped for the pages of the last two rounds, if those are the
    /// same. A device may write some pages at any moment, for example. The time of a round shows
    /// how little pages of zeros cost, and the rate on the wire does not.
    fn downtime_of_same(&self, measured: &Measured) -> Duration {
        if self.stuck == 0 || left_less_than(measured, HELPS_PERCENT) {
            return Duration::MAX;
        }
        let time = measured.time.as_nanos();
        let scaled = time.saturating_mul(measured.dirty_bytes.into())
            / u128::from(measured.round_bytes.max(1));
        let sending = Duration::from_nanos(u64::try_from(scaled).unwrap_or(u64::MAX));
        sending.saturating_add(self.limits.switch)
    }

    /// Decides at the end of a round.
    pub fn decide(&mut self, measured: &Measured) -> (Decision, Forecast) {
        self.bytes = self.bytes / 2 + u128::from(measured.sent_bytes);
        self.nanoseconds = self.nanoseconds / 2 + measured.time.as_nanos();
        self.dirty_per_second =
            per_second(measured.dirty_bytes.into(), measured.time.as_nanos().max(1)).unwrap_or(0);
        let downtime = self.downtime(measured.dirty_bytes);
        let downtime = downtime.min(self.downtime_of_same(measured));
        let fits = downtime <= self.limits.downtime;
        let forecast = Forecast {
            rounds_left: if fits {
                Some(0)
            } else {
                self.rounds_left(measured)
            },
            downtime,
        };
        (self.choose(measured, fits), forecast)
    }

    fn choose(&mut self, measured: &Measured, fits: bool) -> Decision {
        let in_time = measured.elapsed < self.limits.timeout;
        if fits {
            // Each round leaves less than half, so this terminates.
            let shortens = in_time
                && left_less_than(measured, SHORTENS_PERCENT)
                && self.downtime(measured.dirty_bytes) > self.limits.switch.saturating_add(SHORT);
            return if shortens {
                Decision::Round
            } else {
                Decision::Stop
            };
        }
        if !in_time {
            return Decision::GiveUp;
        }
        // Memory is not the obstacle: throttling vCPUs would not help.
        if self.downtime(0) > self.limits.downtime {
            return Decision::Round;
        }
        if left_less_than(measured, HELPS_PERCENT) {
            self.stuck = 0;
            return Decision::Round;
        }
        self.stuck = self.stuck.saturating_add(1);
        match THROTTLE.get(self.steps) {
            Some(&percent) if self.stuck >= PATIENCE => {
                self.stuck = 0;
                self.steps += 1;
                Decision::Throttle(percent)
            }
            _ => Decision::Round,
        }
    }

    /// Assumes that each round leaves the same share of its pages dirty.
    fn rounds_left(&self, measured: &Measured) -> Option<u32> {
        let mut left = measured.dirty_bytes;
        (1..=100).find(|_| {
            let next = u128::from(left) * u128::from(measured.dirty_bytes)
                / u128::from(measured.round_bytes.max(1));
            left = u64::try_from(next).unwrap_or(u64::MAX);
            self.downtime(left) <= self.limits.downtime
        })
    }
}

/// Whether the round left less than this share of its pages dirty, in per cent.
fn left_less_than(measured: &Measured, percent: u64) -> bool {
    u128::from(measured.dirty_bytes) * 100 < u128::from(measured.round_bytes) * u128::from(percent)
}

fn per_second(bytes: u128, nanoseconds: u128) -> Option<u64> {
    let rate = bytes
        .saturating_mul(1_000_000_000)
        .checked_div(nanoseconds)?;
    Some(u64::try_from(rate).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn limits(downtime: u64, timeout: u64) -> Limits {
        Limits {
            downtime: Duration::from_millis(downtime),
            timeout: Duration::from_secs(timeout),
            switch: Duration::from_millis(5),
        }
    }

    /// A guest that writes `dirty` bytes/s over at most `set` bytes, and a link of `rate` bytes/s.
    /// Returns the decisions until the end, with the resulting downtime.
    fn simulate(
        limits: Limits,
        ram: u64,
        rate: u64,
        dirty: u64,
        set: u64,
    ) -> Vec<(Decision, Duration)> {
        let mut convergence = Convergence::new(limits);
        let (mut elapsed, mut left, mut throttle) = (Duration::ZERO, ram, 0);
        let mut decisions = Vec::new();
        loop {
            let time = Duration::from_millis(1)
                + Duration::from_nanos(
                    u64::try_from(u128::from(left) * 1_000_000_000 / u128::from(rate)).unwrap(),
                );
            elapsed += time;
            let written = u128::from(dirty) * u128::from(100 - throttle) / 100 * time.as_nanos()
                / 1_000_000_000;
            let dirty_bytes = u64::try_from(written).unwrap().min(set).min(ram);
            let (decision, forecast) = convergence.decide(&Measured {
                elapsed,
                sent_bytes: left,
                time,
                round_bytes: left,
                dirty_bytes,
            });
            decisions.push((decision, forecast.downtime));
            left = dirty_bytes;
            match decision {
                Decision::Round => {}
                Decision::Throttle(percent) => throttle = u64::from(percent),
                Decision::Stop | Decision::GiveUp => return decisions,
            }
        }
    }

    #[test]
    fn a_stopped_guest_waits_for_a_multiple_of_the_limit() {
        for (downtime, seconds) in [(0, 2), (300, 2), (500, 2), (1000, 4), (30_000, 120)] {
            let standstill = limits(downtime, 60).standstill();
            assert_eq!(standstill, Duration::from_secs(seconds), "{downtime}");
        }
        let longest = limits(u64::from(u32::MAX), 60).standstill();
        assert!(longest > Duration::from_secs(10_000_000));
    }

    #[test]
    fn an_idle_guest_is_stopped_after_one_round() {
        let decisions = simulate(limits(300, 60), 1024 * MIB, 100 * MIB, 0, 0);
        assert_eq!(decisions, [(Decision::Stop, Duration::from_millis(5))]);
    }

    #[test]
    fn a_busy_guest_is_held_back_and_then_stopped() {
        let decisions = simulate(
            limits(300, 600),
            1024 * MIB,
            100 * MIB,
            400 * MIB,
            512 * MIB,
        );
        let steps: Vec<u8> = decisions
            .iter()
            .filter_map(|(decision, _)| match decision {
                Decision::Throttle(percent) => Some(*percent),
                _ => None,
            })
            .collect();
        assert!(steps.len() >= 3 && steps.is_sorted(), "{steps:?}");
        assert_eq!(decisions.last().unwrap().0, Decision::Stop);
    }

    /// The rest fits after the first round already, but the second one leaves next to nothing.
    #[test]
    fn rounds_continue_while_they_shorten_the_standstill() {
        let decisions = simulate(
            limits(300, 60),
            1024 * MIB,
            1000 * MIB,
            100 * MIB,
            1024 * MIB,
        );
        let (last, before) = decisions.split_last().unwrap();
        assert_eq!(last.0, Decision::Stop);
        assert!(last.1 <= Duration::from_millis(5) + SHORT, "{decisions:?}");
        assert!(
            before.iter().any(|(decision, downtime)| {
                *decision == Decision::Round && *downtime <= Duration::from_millis(300)
            }),
            "{decisions:?}"
        );
    }

    /// No round helps, but the rest fits: waiting would not shorten the downtime.
    #[test]
    fn a_standstill_that_no_round_shortens_is_not_put_off() {
        let decisions = simulate(limits(300, 60), 16 * MIB, 100 * MIB, 80 * MIB, 1024 * MIB);
        assert_eq!(decisions.len(), 1, "{decisions:?}");
        assert_eq!(decisions[0].0, Decision::Stop);
    }

    /// A device may always write 64 MiB, of which most are zeros: 1 MiB goes over the wire.
    #[test]
    fn zeros_that_are_always_dirty_do_not_count_as_data() {
        let mut convergence = Convergence::new(limits(300, 60));
        let mut decide = || {
            convergence.decide(&Measured {
                elapsed: Duration::ZERO,
                sent_bytes: MIB,
                time: Duration::from_millis(20),
                round_bytes: 64 * MIB,
                dirty_bytes: 64 * MIB,
            })
        };
        // The guest may write data into them for the first time.
        let (decision, forecast) = decide();
        assert_eq!(decision, Decision::Round);
        assert_eq!(forecast.downtime, Duration::from_millis(64 * 20 + 5));
        let (decision, forecast) = decide();
        assert_eq!(decision, Decision::Stop);
        assert_eq!(forecast.downtime, Duration::from_millis(25));
    }

    #[test]
    fn nothing_known_of_the_link_is_no_reason_to_stop() {
        let mut convergence = Convergence::new(limits(300, 60));
        let measured = Measured {
            elapsed: Duration::ZERO,
            sent_bytes: 0,
            time: Duration::ZERO,
            round_bytes: 0,
            dirty_bytes: 4096,
        };
        let (decision, forecast) = convergence.decide(&measured);
        assert_eq!((decision, forecast.rounds_left), (Decision::Round, None));
        assert_eq!(forecast.downtime, Duration::MAX);
    }

    proptest! {
        /// For any guest and link the migration ends: it stops when the rest fits, or the timeout
        /// ends it. Throttling only ever increases.
        #[test]
        fn it_ends_as_it_must(
            downtime in 0_u64..2000,
            timeout in 1_u64..20,
            ram in 1_u64..4096,
            rate in 1_u64..4096,
            dirty in 0_u64..16384,
            set in 0_u64..4096,
        ) {
            let limits = limits(downtime, timeout);
            let decisions = simulate(limits, ram * MIB, rate * MIB, dirty * MIB, set * MIB);
            let mut throttle = 0;
            for (index, (decision, expected)) in decisions.iter().enumerate() {
                let fits = *expected <= limits.downtime;
                prop_assert!(*decision != Decision::Stop || fits);
                prop_assert!(
                    !matches!(decision, Decision::GiveUp | Decision::Throttle(_)) || !fits
                );
                if let Decision::Throttle(percent) = decision {
                    prop_assert!(*percent > throttle && *percent < 100);
                    throttle = *percent;
                }
                let end = matches!(decision, Decision::Stop | Decision::GiveUp);
                prop_assert_eq!(end, index + 1 == decisions.len());
            }
        }

        #[test]
        fn no_number_is_too_large(
            rounds in prop::collection::vec(
                (any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()),
                1..8,
            ),
        ) {
            let mut convergence = Convergence::new(limits(300, 1 << 40));
            for (elapsed, sent_bytes, nanoseconds, round_bytes, dirty_bytes) in rounds {
                convergence.decide(&Measured {
                    elapsed: Duration::from_secs(elapsed.into()),
                    sent_bytes,
                    time: Duration::from_nanos(nanoseconds),
                    round_bytes,
                    dirty_bytes,
                });
            }
        }
    }
}
