//! Journeys: a guest that moves to and fro, and what each of its moves was like.
//!
//! ```text
//!  cargo lab soak --moves ── leg ([`Leg`], by variable) ──▶ test in the lab host (tests/moving/journey.rs)
//!        ▲                                                    │
//!        └────────────── a line for each move ([`Move`]) ─────┘
//! ```
//! Owns both forms, so that the test and the verb cannot disagree: a host that falls over takes no
//! move away that was made before. Knows nothing of how guests are moved.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The variable that says which leg of a journey a test makes; `cargo lab soak --moves` sets it.
pub const LEG: &str = "LAB_LEG";

/// Before the JSON of a move, on a line of a test's output.
const PREFIX: &str = "journey: ";

/// A part of a journey that one guest makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leg {
    /// Which of the moments comes first, counted from the journey's begin.
    pub first: usize,
    /// How many moves.
    pub moves: u32,
}

impl Leg {
    /// The one that is asked for, else this one.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the variable says no leg.
    pub fn asked_or(self) -> Result<Self> {
        match std::env::var(LEG) {
            Ok(text) => text.parse(),
            Err(_) => Ok(self),
        }
    }
}

/// As the variable has it: `FIRST+MOVES`.
impl fmt::Display for Leg {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}+{}", self.first, self.moves)
    }
}

impl FromStr for Leg {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.split_once('+')
            .and_then(|(first, moves)| {
                Some(Self {
                    first: first.parse().ok()?,
                    moves: moves.parse().ok().filter(|moves| *moves > 0)?,
                })
            })
            .ok_or_else(|| Error::invalid(LEG, format!("{text:?} is not FIRST+MOVES")))
    }
}

/// Buffers that the guest's NICs had been given and had not used when it was stopped, as Bellhop counts
/// them (`in_flight` of `GET /v1/vm/migration`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InFlight {
    /// Receive buffers that were not filled.
    pub rx: u32,
    /// Frames that were not sent.
    pub tx: u32,
    /// Commands on control queues that were not answered.
    pub cvq: u32,
}

/// One move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// What the guest did at that time.
    pub moment: String,
    /// How long it had done so, in milliseconds.
    pub after_ms: u64,
    /// How long the guest stood still, as Bellhop measured it, in milliseconds.
    pub downtime_ms: f64,
    /// What was under way when it was stopped.
    pub in_flight: InFlight,
    /// Frames that the guest's peer did not get, or the guest did not get back; none where its cable was
    /// pulled or its driver taken off.
    pub lost: Option<u64>,
    /// Commands that the guest sent to its control queue in that time, and that were answered; none where it sent none.
    pub commands: Option<u64>,
}

impl Move {
    /// The line of a test's output.
    pub fn line(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_else(|error| error.to_string());
        format!("{PREFIX}{json}")
    }

    /// The move that a line of a test's output tells of; the test's name may be before it.
    pub fn read(line: &str) -> Option<Self> {
        let (_, json) = line.split_once(PREFIX)?;
        serde_json::from_str(json).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leg_is_what_its_text_says() {
        let leg = Leg {
            first: 7,
            moves: 10,
        };
        assert_eq!(leg.to_string().parse::<Leg>().unwrap(), leg);
        for wrong in ["", "7", "7+", "+1", "7+0", "-1+3"] {
            wrong.parse::<Leg>().unwrap_err();
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
        assert_eq!(Move::read("journey: {"), None);
        assert_eq!(Move::read("test a_guest_moves ... ok"), None);
    }
}
