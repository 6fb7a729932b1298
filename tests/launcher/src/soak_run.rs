//! Soak runs of a migrating guest: the request for a run and the record of each migration.
//!
//! ```text
//!  cargo lab soak --moves ── run ([`Run`], by variable) ──▶ test (tests/moving/soak.rs)
//!        ▲                                                    │
//!        └────────────── a line for each move ([`Move`]) ─────┘
//! ```
//! Both formats are here, so that the test and the verb cannot disagree. The test prints each move
//! at once, so a host that crashes loses none of the earlier moves.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The variable with the run that a test runs; `cargo lab soak --moves` sets it.
pub const RUN: &str = "LAB_SOAK_RUN";

/// The text before the JSON of a move, on a line of a test's output.
const PREFIX: &str = "migration: ";

/// The part of a scenario that one guest makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The index of the first moment, counted from the start of the scenario.
    pub first: usize,
    /// How many moves.
    pub moves: u32,
}

impl Run {
    /// The run that the variable requests, else this one.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the variable holds no run.
    pub fn asked_or(self) -> Result<Self> {
        match std::env::var(RUN) {
            Ok(text) => text.parse(),
            Err(_) => Ok(self),
        }
    }
}

/// Formats the run as the variable has it: `FIRST+MOVES`.
impl fmt::Display for Run {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}+{}", self.first, self.moves)
    }
}

impl FromStr for Run {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.split_once('+')
            .and_then(|(first, moves)| {
                Some(Self {
                    first: first.parse().ok()?,
                    moves: moves.parse().ok().filter(|moves| *moves > 0)?,
                })
            })
            .ok_or_else(|| Error::invalid(RUN, format!("{text:?} is not FIRST+MOVES")))
    }
}

/// Buffers of the guest's NICs that were available but not used when the guest stopped, as Bellhop
/// counts them (`in_flight` of `GET /v1/vm/migration`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InFlight {
    /// Receive buffers not yet filled.
    pub rx: u32,
    /// Frames not yet sent.
    pub tx: u32,
    /// Control queue commands not yet answered.
    pub cvq: u32,
}

/// One migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// The guest's activity at that time.
    pub moment: String,
    /// How long the activity had run, in milliseconds.
    pub after_ms: u64,
    /// The downtime that Bellhop measured, in milliseconds.
    pub downtime_ms: f64,
    /// The buffers in flight when the guest stopped.
    pub in_flight: InFlight,
    /// Frames that the guest's peer or the guest did not receive; `None` where the test pulled the
    /// cable or unbound the driver.
    pub lost: Option<u64>,
    /// Control queue commands that the guest sent in that time and the device answered; `None`
    /// where it sent none.
    pub commands: Option<u64>,
}

impl Move {
    /// Formats the move as a line of a test's output.
    pub fn line(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_else(|error| error.to_string());
        format!("{PREFIX}{json}")
    }

    /// Parses the move in a line of a test's output. The test's name may precede it.
    pub fn read(line: &str) -> Option<Self> {
        let (_, json) = line.split_once(PREFIX)?;
        serde_json::from_str(json).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_parsed_from_its_text() {
        let run = Run {
            first: 7,
            moves: 10,
        };
        assert_eq!(run.to_string().parse::<Run>().unwrap(), run);
        for wrong in ["", "7", "7+", "+1", "7+0", "-1+3"] {
            wrong.parse::<Run>().unwrap_err();
        }
    }

    #[test]
    fn a_move_is_read_from_a_line_that_begins_with_the_tests_name() {
        let one = Move {
            moment: "Traffic".into(),
            after_ms: 12,
            downtime_ms: 3.5,
            in_flight: InFlight {
                rx: 256,
                tx: 0,
                cvq: 1,
            },
            lost: Some(2),
            commands: None,
        };
        let line = format!("test a_guest_moves ... {}", one.line());
        assert_eq!(Move::read(&line), Some(one));
        assert_eq!(Move::read("migration: {"), None);
        assert_eq!(Move::read("test a_guest_moves ... ok"), None);
    }
}
