//! What the daemon tells of a machine, in words.

use std::time::Duration;

use bellhop_api::node::VmInfo;
use bellhop_common::text::printable;

/// In a few words.
pub(crate) fn line(vm: &VmInfo) -> String {
    let pid = vm.pid.map(|pid| format!(", pid {pid}"));
    let name = printable(&vm.name);
    format!("{name}: {}{}", vm.phase, pid.unwrap_or_default())
}

pub(crate) fn uptime(vm: &VmInfo) -> Option<String> {
    Some(time(Duration::from_secs(vm.uptime_s?)))
}

/// A time in its two largest units: `3h12m`.
pub(crate) fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}
