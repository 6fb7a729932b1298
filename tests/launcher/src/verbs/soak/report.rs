//! The result of a scenario: its migrations, the buffers in flight, and the runs that did not
//! finish.

use super::migration::Ended;
use crate::figures::{median, rounded};
use crate::soak_run::{InFlight, Move};
use serde::Serialize;
use std::collections::BTreeMap;

/// A scenario so far.
#[derive(Debug, Serialize)]
pub(super) struct SoakResult {
    file: &'static str,
    test: &'static str,
    /// How many moves the scenario needs.
    wanted: u32,
    moves: u32,
    /// The number of moves at each moment.
    moments: BTreeMap<String, u32>,
    /// For each kind of buffer, the number of moves with such buffers in flight.
    in_flight: InFlight,
    /// The most buffers in flight at one move.
    most_in_flight: InFlight,
    downtime_ms: f64,
    downtime_ms_max: f64,
    /// Frames lost in all moves in which only the move could lose them.
    frames_lost: u64,
    runs: u32,
    /// Runs in which the emulation lost the guest or the host, with the evidence.
    lost: Vec<String>,
    /// Runs in which a check failed.
    failed: Vec<String>,
    #[serde(skip)]
    downtimes: Vec<f64>,
}

impl SoakResult {
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
            runs: 0,
            lost: Vec::new(),
            failed: Vec::new(),
            downtimes: Vec::new(),
        }
    }

    pub(super) fn moves(&self) -> u32 {
        self.moves
    }

    /// Runs that were lost or failed.
    pub(super) fn ended_early(&self) -> u32 {
        u32::try_from(self.lost.len() + self.failed.len()).unwrap_or(u32::MAX)
    }

    /// Adds a move.
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

    pub(super) fn run_ended(&mut self, ended: Ended) {
        self.runs += 1;
        match ended {
            Ended::Whole => {}
            Ended::Lost(why) => self.lost.push(why),
            Ended::Failed(why) => self.failed.push(why),
        }
    }

    /// True if all moves were made, no check failed, and buffers of each kind were in flight in at
    /// least one move.
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
            "  {} runs; {} lost by the emulation, {} failed",
            self.runs,
            self.lost.len(),
            self.failed.len()
        );
        for why in self.lost.iter().chain(&self.failed) {
            println!("    {why}");
        }
    }
}
