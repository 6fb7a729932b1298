//! KVM's counters of a guest, read through its VMM: no other process may read them.
//!
//! Bellhop logs them (level info) on SIGUSR1. This module sends the signal and parses the log line.

use crate::error::{Error, Result};
use crate::guest::Guest;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The start of the answer.
const ANSWER: &str = "KVM counted ";

/// How long the VMM may take to answer.
const LIMIT: Duration = Duration::from_secs(20);

/// All counters of the guest's vCPUs, summed: `exits`, `halt_exits`, …
///
/// # Errors
/// [`Error::System`]; [`Error::Invalid`] when no answer arrives: the VMM must have been started
/// with `BELLHOP_LOG=info`.
pub fn read(guest: &Guest) -> Result<BTreeMap<String, u64>> {
    let before = answers(&guest.console()).count();
    let pid = i32::try_from(guest.pid())
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| Error::invalid("the VMM's process id", "it is out of range"))?;
    kill_process(pid, Signal::USR1).map_err(Error::system("signal the VMM"))?;
    let asked = Instant::now();
    while asked.elapsed() < LIMIT {
        if let Some(answer) = answers(&guest.console()).nth(before) {
            return Ok(answer);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(Error::invalid(
        "the VMM's statistics",
        "it does not log them; does it run with BELLHOP_LOG=info?",
    ))
}

/// The answers in a log.
fn answers(log: &str) -> impl Iterator<Item = BTreeMap<String, u64>> {
    log.lines()
        .filter_map(|line| serde_json::from_str(line.split_once(ANSWER)?.1).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_between_other_lines() {
        let counted: BTreeMap<&str, u64> = [("exits", 7), ("halt_exits", 2)].into();
        let log =
            format!(" INFO something\n INFO KVM counted {counted:?}\nguest: KVM counted sheep\n");
        let found: Vec<_> = answers(&log).collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0]["exits"], 7);
    }
}
