//! What came of a journey: its moves, what was under way at them, and the legs that did not come to their end.

use super::migration::Ended;
use crate::figures::{median, rounded};
use crate::journey::{InFlight, Move};
use serde::Serialize;
use std::collections::BTreeMap;

/// A journey so far.
#[derive(Debug, Serialize)]
pub(super) struct Journeyed {
    file: &'static str,
    test: &'static str,
    /// How many moves there were to be.
    wanted: u32,
    moves: u32,
    /// How many of the moves were made at which moment.
    moments: BTreeMap<String, u32>,
    /// At how many moves buffers of a kind were under way.
    in_flight: InFlight,
    /// The most of them at one move.
    most_in_flight: InFlight,
    downtime_ms: f64,
    downtime_ms_max: f64,
    /// Frames that were lost, all moves together, where nothing else than the move could lose them.
    frames_lost: u64,
    legs: u32,
    /// Legs in which the emulation lost the guest or the host, and why it is thought so.
    lost: Vec<String>,
    /// Legs in which something was not as it must be.
    failed: Vec<String>,
    #[serde(skip)]
    downtimes: Vec<f64>,
}

impl Journeyed {
    pub(super) fn new(file: &'static str, test: &'static str, wanted: u32) -> Self {
        Self {
            file,
            test,
            wanted,
            moves: 0,
            moments: BTreeMap::new(),
            in_flight: InFlight::default(),
            most_in_flight: InFlight::default(),
            downtime_ms: 0.0,
            downtime_ms_max: 0.0,
            frames_lost: 0,
            legs: 0,
            lost: Vec::new(),
            failed: Vec::new(),
            downtimes: Vec::new(),
        }
    }

    pub(super) fn moves(&self) -> u32 {
        self.moves
    }

    /// Legs that were lost, or failed.
    pub(super) fn ended_early(&self) -> u32 {
        u32::try_from(self.lost.len() + self.failed.len()).unwrap_or(u32::MAX)
    }

    /// One move more.
    pub(super) fn take(&mut self, one: Move) {
        self.moves += 1;
        *self.moments.entry(one.moment).or_default() += 1;
        let Move { in_flight, .. } = one;
        for (count, met, most) in [
            (
                in_flight.rx,
                &mut self.in_flight.rx,
                &mut self.most_in_flight.rx,
            ),
            (
                in_flight.tx,
                &mut self.in_flight.tx,
                &mut self.most_in_flight.tx,
            ),
            (
                in_flight.cvq,
                &mut self.in_flight.cvq,
                &mut self.most_in_flight.cvq,
            ),
        ] {
            *met += u32::from(count > 0);
            *most = count.max(*most);
        }
        self.downtimes.push(one.downtime_ms);
        self.downtime_ms = rounded(median(&self.downtimes), 1);
        self.downtime_ms_max = self.downtime_ms_max.max(one.downtime_ms);
        self.frames_lost += one.lost.unwrap_or(0);
    }

    pub(super) fn leg_ended(&mut self, ended: Ended) {
        self.legs += 1;
        match ended {
            Ended::Whole => {}
            Ended::Lost(why) => self.lost.push(why),
            Ended::Failed(why) => self.failed.push(why),
        }
    }

    /// All moves were made, nothing was wrong, and buffers of each kind were under way at one move at least.
    pub(super) fn is_right(&self) -> bool {
        let InFlight { rx, tx, cvq } = self.in_flight;
        self.moves >= self.wanted
            && self.failed.is_empty()
            && [rx, tx, cvq].iter().all(|met| *met > 0)
    }

    pub(super) fn show(&self) {
        println!(
            "lab: {}: {}",
            self.test,
            if self.is_right() { "right" } else { "WRONG" }
        );
        println!(
            "  {} of {} moves: {:?}",
            self.moves, self.wanted, self.moments
        );
        let InFlight { rx, tx, cvq } = self.in_flight;
        println!(
            "  under way when the guest was stopped: RX at {rx} moves, TX at {tx}, CVQ at {cvq}"
        );
        println!(
            "  downtime {} ms in the middle, {} ms at most; {} frames lost",
            self.downtime_ms, self.downtime_ms_max, self.frames_lost
        );
        println!(
            "  {} legs; {} lost by the emulation, {} failed",
            self.legs,
            self.lost.len(),
            self.failed.len()
        );
        for why in self.lost.iter().chain(&self.failed) {
            println!("    {why}");
        }
    }
}
