//! Short texts for the daemon's data of a VM.

use std::time::Duration;

use bellhop_api::machine::AlarmInfo;
use bellhop_api::node::{Vm, VmPhase};
use bellhop_common::text::printable;
use serde_json::{Map, Value};

/// The state in a few words.
pub(crate) fn line(vm: &Vm) -> String {
    let pid = vm.status.pid.map(|pid| format!(", pid {pid}"));
    let name = printable(&vm.name);
    format!("{name}: {}{}", vm.status.phase, pid.unwrap_or_default())
}

pub(crate) fn uptime(vm: &Vm) -> Option<String> {
    Some(time(Duration::from_secs(vm.status.uptime_s?)))
}

/// A NIC in a VM's spec.
pub(crate) fn nic<'a>(vm: &'a Vm, id: &str) -> Option<&'a Map<String, Value>> {
    let nics = vm.spec.get("nics")?.as_array()?.iter();
    let mut nics = nics.filter_map(Value::as_object);
    nics.find(|nic| nic.get("id").and_then(Value::as_str) == Some(id))
}

/// The address that a NIC was given; none for its device's own.
pub(crate) fn mac(vm: &Vm, nic_id: &str) -> Option<String> {
    Some(nic(vm, nic_id)?.get("mac")?.as_str()?.to_owned())
}

/// The health of a running VM: `ok`, or the first finding and the number of others, such as `net0
/// q1 STUCK (+1)`. Of one whose process does not end: the cause.
pub(crate) fn health(vm: &Vm) -> Option<String> {
    let status = &vm.status;
    if let Some(why) = &status.not_ended {
        return Some(format!("stop pending: {why}"));
    }
    if !matches!(status.phase, VmPhase::Running | VmPhase::Paused) {
        return None;
    }
    let alarm = |alarm: &AlarmInfo| format!("{} {}", alarm.device, hanging(alarm));
    let failed_over = status.nic_devices.iter().filter(|nic| nic.failed_over);
    let failed_over = failed_over.map(|nic| format!("{} failed over", nic.id));
    let mut all = status.alarms.iter().map(alarm).chain(failed_over);
    let first = all.next().unwrap_or_else(|| "ok".to_owned());
    Some(match all.count() {
        0 => first,
        more => format!("{first} (+{more})"),
    })
}

/// A queue that hangs: `q1 STUCK`. For the guest's IOMMU: `REFUSED`.
fn hanging(alarm: &AlarmInfo) -> String {
    let what = format!("{:?}", alarm.alarm).to_uppercase();
    // The guest's IOMMU has one queue for requests, and a function of the host none.
    if alarm.alarm.is_of_other_device() {
        return what;
    }
    format!("q{} {what}", alarm.queue)
}

/// The findings of `health` for one NIC.
pub(crate) fn findings(vm: &Vm, nic: &str) -> Vec<String> {
    let alarms = vm.status.alarms.iter().filter(|alarm| alarm.device == nic);
    let failed_over = vm
        .status
        .nic_devices
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
