//! Leak checks: the accounts that must be equal before and after a guest has done the same thing
//! many times.
//!
//! There are two independent accounts. One is the kernel's account of the VMM's process
//! ([`crate::vmm_process::Cost`]). The other is the VMM's own log at each reset of the machine
//! (memory slots, ioeventfds, vectors, routes, irqfds) and of a vDPA device (IOTLB). This module
//! owns the comparison and the number of repetitions.

use crate::error::{Error, Result};
use crate::vmm_process::Cost;
use std::collections::BTreeSet;

pub use launcher::endurance::{CYCLES, DEFAULT_CYCLES, SOAK, cycles, soak};

/// How much a VMM's own memory ([`Cost::own_kib`]) may grow after the first cycle, in KiB. From
/// cycle to cycle, the allocator keeps a little more or less (16 pages). A leak shows from 22 KiB
/// per cycle with 3 cycles, and from 656 bytes per cycle with 100.
pub const GROWTH: u64 = 64;

/// Compares the kernel's accounts of the VMM. Its own memory may have grown by [`GROWTH`]. Pages of
/// files, which are not its own, are ignored.
///
/// # Errors
/// [`Error::Invalid`] with both accounts.
pub fn same_cost(before: &Cost, after: &Cost) -> Result<()> {
    let without_memory = |cost: &Cost| Cost {
        rss_outside_ram_kib: 0,
        own_kib: 0,
        ..*cost
    };
    if without_memory(before) != without_memory(after) || after.own_kib > before.own_kib + GROWTH {
        return Err(Error::invalid(
            "the account of the VMM",
            format!("it was {before:?} and is {after:?}"),
        ));
    }
    Ok(())
}

/// Lines of the VMM's log that must all be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SteadyLine<'a> {
    /// A part of the line.
    pub what: &'a str,
    /// How many of the first ones may differ.
    pub skipped: usize,
    /// The least number of lines.
    pub least: usize,
}

/// Checks that each kind of line is the same each time, and that no line is a warning or worse.
///
/// # Errors
/// [`Error::Invalid`] with the lines that differ or complain.
pub fn steady_log(console: &str, lines: &[SteadyLine<'_>]) -> Result<()> {
    let wrong = |what: String| Err(Error::invalid("the VMM's log", what));
    for expected in lines {
        let found: Vec<&str> = console
            .lines()
            .filter(|line| line.contains(expected.what))
            .collect();
        if found.len() < expected.least {
            return wrong(format!(
                "it has {} of {} lines {:?}",
                found.len(),
                expected.least,
                expected.what
            ));
        }
        let different: BTreeSet<&str> = found.into_iter().skip(expected.skipped).collect();
        if different.len() > 1 {
            return wrong(format!("it differs from time to time: {different:#?}"));
        }
    }
    let said: Vec<&str> = console
        .lines()
        .filter(|line| {
            ["ERROR", "WARN", "panicked"]
                .iter()
                .any(|word| line.contains(word))
        })
        .collect();
    if !said.is_empty() {
        return wrong(format!("it complains: {said:#?}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Cost = Cost {
        rss_outside_ram_kib: 2700,
        own_kib: 800,
        threads: 2,
        descriptors: 40,
        pinned_kib: 262_144,
        mappings: 60,
    };

    #[test]
    fn a_leak_is_an_error() {
        same_cost(&COST, &COST).unwrap();
        let grown = |cost: Cost| same_cost(&COST, &cost);
        grown(Cost {
            rss_outside_ram_kib: 5000,
            own_kib: 800 + GROWTH,
            ..COST
        })
        .unwrap();
        for leaked in [
            Cost {
                own_kib: 801 + GROWTH,
                ..COST
            },
            Cost { threads: 3, ..COST },
            Cost {
                descriptors: 41,
                ..COST
            },
            Cost {
                pinned_kib: 262_148,
                ..COST
            },
            Cost {
                mappings: 61,
                ..COST
            },
        ] {
            assert!(grown(leaked).is_err(), "{leaked:?}");
        }
    }

    #[test]
    fn lines_that_differ_or_complain_are_errors() {
        let reset = |least, skipped| SteadyLine {
            what: "reset",
            skipped,
            least,
        };
        let log = "DEBUG reset slots=1\nhello\nDEBUG reset slots=2\nDEBUG reset slots=2\n";
        steady_log(log, &[reset(3, 1)]).unwrap();
        assert!(steady_log(log, &[reset(3, 0)]).is_err());
        assert!(steady_log(log, &[reset(4, 1)]).is_err());
        assert!(steady_log("WARN no\n", &[]).is_err());
    }
}
