//! When to stop the guest: what a round has measured, and what follows from it.
//!
//! Pure arithmetic: no clock, no connection, no machine.
//!
//! ```text
//!                 ┌── what is left fits into the downtime, and a round more would not shorten it much ─> Stop
//!   end of a      │
//!   round ────────┼──────────────── the time is up ────────────────────────────────────> GiveUp
//!                 │
//!                 ├── not much less is left than was sent, for the second time ──> Throttle, a step more
//!                 └── otherwise ──> Round
//! ```
//!
//! The downtime that the user allows is a limit, not a goal: while each round leaves less than half of what it sent, the next
//! one costs little and the guest stands still for less.
//!
//! vCPUs are only ever held back more, in steps, so it cannot swing to and fro; the last step leaves them
//! one per cent. From there on there are rounds until it fits or the time is up.

use std::time::Duration;

/// Steps of holding back vCPUs, in per cent of their time.
const THROTTLE: [u8; 7] = [20, 40, 60, 80, 90, 95, 99];
/// A round helps if what is left after it is less than this share (per cent) of what it sent.
const HELPS_PERCENT: u64 = 80;
/// So many rounds in a row that don't help, and vCPUs are held back.
const PATIENCE: u8 = 2;

/// A round more shortens the downtime if the last one left less than this share (per cent) of what it sent, ...
const SHORTENS_PERCENT: u64 = 50;
/// ... and if what it left takes longer than this.
const SHORT: Duration = Duration::from_millis(5);

/// What the user allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long the guest may stand still.
    pub downtime: Duration,
    /// How long all of it may take, from the beginning to the stop.
    pub timeout: Duration,
    /// How long the guest stands still for anything but memory: devices, state, the way back.
    pub switch: Duration,
}

/// How long the other host is waited for at least while the guest stands still: one that is busy is no reason to start
/// all over.
const STANDSTILL_MIN: Duration = Duration::from_secs(2);
/// How many times the downtime that is allowed: it was stopped because all of it was to fit into that.
const STANDSTILL_TIMES: u32 = 4;

impl Limits {
    /// How long the other host may take for all that it has to do while the guest stands still, up to GO. Whoever is
    /// silent then does not hold a guest for longer than this.
    #[must_use]
    pub fn standstill(&self) -> Duration {
        self.downtime
            .saturating_mul(STANDSTILL_TIMES)
            .max(STANDSTILL_MIN)
    }
}

/// What one round has measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// Since the beginning of the migration.
    pub elapsed: Duration,
    /// Bytes on the wire in this round.
    pub sent_bytes: u64,
    /// How long that took, until the next pages were collected.
    pub time: Duration,
    /// Bytes of memory that this round was about, zeros included.
    pub round_bytes: u64,
    /// Bytes of memory that were written meanwhile, a page counting as a whole: what is left now.
    pub dirty_bytes: u64,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Send what is left while the guest runs.
    Round,
    /// Stop the guest and send the rest.
    Stop,
    /// Hold vCPUs back for this share of their time, in per cent, and go on as with [`Decision::Round`].
    Throttle(u8),
    /// The time is up.
    GiveUp,
}

/// What is to be expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forecast {
    /// Rounds until the guest can be stopped, if it goes on as now; `None` if it never can.
    pub rounds_left: Option<u32>,
    /// How long the guest would stand still if it were stopped now.
    pub downtime: Duration,
}

/// The decisions of one migration.
#[derive(Debug, Clone)]
pub struct Convergence {
    limits: Limits,
    /// Bytes and nanoseconds of the rounds so far, older ones counting for less.
    bytes: u128,
    nanoseconds: u128,
    dirty_per_second: u64,
    /// Rounds in a row that did not help.
    stuck: u8,
    /// Steps of [`THROTTLE`] taken.
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

    /// Bytes per second on the wire, as far as they are known.
    #[must_use]
    pub fn bytes_per_second(&self) -> Option<u64> {
        per_second(self.bytes, self.nanoseconds).filter(|&rate| rate > 0)
    }

    /// Bytes per second that the guest and its devices write, in the last round.
    #[must_use]
    pub fn dirty_bytes_per_second(&self) -> u64 {
        self.dirty_per_second
    }

    /// How long the guest would stand still with so many bytes to send.
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

    /// Decides at the end of a round.
    pub fn decide(&mut self, measured: &Measured) -> (Decision, Forecast) {
        self.bytes = self.bytes / 2 + u128::from(measured.sent_bytes);
        self.nanoseconds = self.nanoseconds / 2 + measured.time.as_nanos();
        self.dirty_per_second =
            per_second(measured.dirty_bytes.into(), measured.time.as_nanos().max(1)).unwrap_or(0);
        let downtime = self.downtime(measured.dirty_bytes);
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
            // Less than half each time: this comes to an end.
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
        // Not memory stands in the way: to hold vCPUs back would not help.
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

    /// Each round leaves the same share of what it sends.
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

/// Whether less is left after the round than this share of what it was about, in per cent.
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

    /// A guest that writes `dirty` bytes/s over at most `set` bytes, a link of `rate` bytes/s: the
    /// decisions until the end, with the downtime that would have come of it.
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
    fn a_stopped_guest_waits_for_a_multiple_of_what_is_allowed() {
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

    /// What is left after the first round fits already, but the second one leaves next to nothing.
    #[test]
    fn rounds_go_on_while_they_shorten_the_standstill() {
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

    /// No round helps, but it fits: the guest is not kept waiting for less.
    #[test]
    fn a_standstill_that_no_round_shortens_is_not_put_off() {
        let decisions = simulate(limits(300, 60), 16 * MIB, 100 * MIB, 80 * MIB, 1024 * MIB);
        assert_eq!(decisions.len(), 1, "{decisions:?}");
        assert_eq!(decisions[0].0, Decision::Stop);
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
        /// Whatever the guest and the link do: it ends, by stopping when it fits or by the time alone, and
        /// vCPUs are held back more and more, never less.
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
                prop_assert!(!matches!(decision, Decision::GiveUp | Decision::Throttle(_)) || !fits);
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
            rounds in prop::collection::vec((any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()), 1..8),
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
