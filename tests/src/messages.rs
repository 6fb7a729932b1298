//! The warnings of a guest's kernel, for tests in which its machine stops for a while.

use crate::error::{Error, Result};
use crate::guest::Guest;

/// Messages that appear if the guest stopped at a bad moment. Its kernel may have been comparing
/// two clocks; it then skips the comparison, as it should (kernel/time/clocksource.c). It may have
/// been serving a timer (kernel/time/hrtimer.c). Or the stop was longer than its scheduler lets
/// ordinary tasks wait (kernel/sched/deadline.c).
const STOOD_STILL: [&str; 3] = [
    "Long readout interval, skipping watchdog check",
    "hrtimer: interrupt took",
    "DL replenish lagged too much",
];

/// The kernel's warnings and errors so far, without those that only report that the guest stopped.
///
/// # Errors
/// Those of [`Guest::command`]; [`Error::Invalid`] for an answer without lines.
pub fn messages(guest: &mut Guest) -> Result<Vec<String>> {
    let said = guest.command("dmesg")?;
    let lines = said["lines"].as_array();
    let lines = lines.ok_or_else(|| Error::invalid(said.to_string(), "it has no lines"))?;
    Ok(lines
        .iter()
        .filter_map(|line| line.as_str())
        .filter(|line| !STOOD_STILL.iter().any(|said| line.contains(said)))
        .map(str::to_owned)
        .collect())
}
