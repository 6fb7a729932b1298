//! Short texts for the daemon's data of a VM.

use std::time::Duration;

use bellhop_api::machine::AlarmInfo;
use bellhop_api::node::{VmInfo, VmPhase};
use bellhop_common::text::printable;

/// The state in a few words.
pub(crate) fn line(vm: &VmInfo) -> String {
    let pid = vm.pid.map(|pid| format!(", pid {pid}"));
    let name = printable(&vm.name);
    format!("{name}: {}{}", vm.phase, pid.unwrap_or_default())
}

pub(crate) fn uptime(vm: &VmInfo) -> Option<String> {
    Some(time(Duration::from_secs(vm.uptime_s?)))
}

/// The health of a running VM: `ok`, or the first finding and the number of others, such as `net0
/// q1 STUCK (+1)`.
pub(crate) fn health(vm: &VmInfo) -> Option<String> {
    if !matches!(vm.phase, VmPhase::Running | VmPhase::Paused) {
        return None;
    }
    let alarm = |alarm: &AlarmInfo| format!("{} {}", alarm.device, hanging(alarm));
    let failed_over = vm.nics.iter().filter(|nic| nic.failed_over);
    let failed_over = failed_over.map(|nic| format!("{} failed over", nic.id));
    let mut all = vm.alarms.iter().map(alarm).chain(failed_over);
    let first = all.next().unwrap_or_else(|| "ok".to_owned());
    Some(match all.count() {
        0 => first,
        more => format!("{first} (+{more})"),
    })
}

/// A queue that hangs: `q1 STUCK`.
fn hanging(alarm: &AlarmInfo) -> String {
    let what = format!("{:?}", alarm.alarm).to_uppercase();
    format!("q{} {what}", alarm.queue)
}

/// The findings of `health` for one NIC.
pub(crate) fn findings(vm: &VmInfo, nic: &str) -> Vec<String> {
    let alarms = vm.alarms.iter().filter(|alarm| alarm.device == nic);
    let failed_over = vm
        .nics
        .iter()
        .filter(|one| one.id == nic && one.failed_over);
    let failed_over = failed_over.map(|_| "failed over".to_owned());
    alarms.map(hanging).chain(failed_over).collect()
}

/// A duration in its two largest units: `3h12m`.
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
