//! Changes of VMs, as clients receive them as events, and the results of requests.
//!
//! Owns the types of changes and results.

use axum::http::StatusCode;
use bellhop_api::machine::{AlarmInfo, End, Place, VmState};
use bellhop_api::node::{DeviceId, Event, EventChange, NicId, OperationKind, OperationPhase};

use super::spec::VmName;

/// A change of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// It was created.
    Created,
    /// Another VM of the same name replaced it.
    Replaced,
    /// Its spec changed: these members, as JSON pointers.
    SpecChanged(Vec<String>),
    /// It runs.
    Started,
    /// This daemon found it running and adopted it.
    Adopted,
    /// The VMM reports another state.
    State(VmState),
    /// Its guest was requested to power off.
    Stopping,
    /// It has ended.
    Ended(End),
    /// Its process is gone, and its guest may run elsewhere: the reason.
    MigrationUnknown(String),
    /// A client reported where its guest is.
    MigrationResolved {
        /// Whether it is here.
        here: bool,
    },
    /// A process waits for its arrival: at this address.
    Awaited(String),
    /// It arrived from another node, and runs.
    Arrived,
    /// It did not arrive: the reason.
    NotArrived(String),
    /// Its start failed; the daemon retries later.
    NotStarted(String),
    /// A NIC was added.
    NicAdded(NicId),
    /// One of its NICs moved to another device.
    NicMoved(NicId),
    /// One of its NICs failed and moved to its backup device. The reason is given if the daemon,
    /// not the VMM, moved it.
    NicFailedOver(NicId, Option<String>),
    /// One of its NICs failed according to devlink, and stays on its device: the reason.
    NicNotFailedOver(NicId, String),
    /// The host has removed the device of a NIC, and no backup replaces it.
    NicDeviceRemoved(NicId),
    /// A NIC was removed.
    NicRemoved(NicId),
    /// A disk was added.
    DiskAdded(DeviceId),
    /// A disk was removed.
    DiskRemoved(DeviceId),
    /// A queue of one of its devices raised or cleared an alarm.
    Alarm {
        /// The device, the queue and the alarm.
        alarm: AlarmInfo,
        /// Whether the device is a NIC; otherwise it is a disk or the guest's IOMMU.
        is_nic: bool,
        /// Whether it was raised.
        raised: bool,
    },
    /// An operation began or ended.
    Operation {
        /// The operation's ID.
        id: String,
        /// The kind of work.
        kind: OperationKind,
        /// Whether it began, or how it ended.
        phase: OperationPhase,
        /// The reason of a failure.
        reason: Option<String>,
    },
    /// It was deleted.
    Deleted,
}

/// The most alarms per VM that are processed, and the longest name of a device: the VM's process
/// may be hostile.
pub(super) const ALARMS_MAX: usize = 64;
pub(super) const DEVICE_NAME_MAX: usize = 64;
/// The longest cause of an alarm, in bytes.
pub(super) const ALARM_DETAIL_MAX: usize = 1024;

impl Change {
    /// Converts the change to an event of this VM, if it is one.
    pub(crate) fn as_event(&self, vm: &VmName) -> Option<Event> {
        let event = |change| Event::new(format!("/v1/vms/{vm}"), change);
        let because = |change, why: &String| Event {
            reason: Some(why.clone()),
            ..event(change).detail(why)
        };
        let of_nic = |change, id: &NicId| Event {
            nic: Some(id.to_string()),
            ..event(change).detail(format!("NIC {id}"))
        };
        let of_disk = |change, id: &DeviceId| Event {
            disk: Some(id.to_string()),
            ..event(change).detail(format!("disk {id}"))
        };
        Some(match self {
            Self::Created => event(EventChange::Created),
            Self::Replaced => event(EventChange::Replaced),
            Self::SpecChanged(fields) => event(EventChange::Changed).detail(fields.join(", ")),
            Self::Started => event(EventChange::Started),
            Self::Adopted => event(EventChange::Adopted),
            Self::State(VmState::Paused) => event(EventChange::Paused),
            Self::State(VmState::Running) => event(EventChange::Running),
            Self::State(VmState::NotStarted | VmState::Starting | VmState::Stopped) => return None,
            Self::Stopping => event(EventChange::Stopping),
            Self::Ended(end) => Event {
                end: Some(end.reason),
                ..because(EventChange::Ended, &end.detail)
            },
            Self::MigrationUnknown(why) => because(EventChange::MigrationUnknown, why),
            Self::MigrationResolved { here } => {
                let (place, detail) = if *here {
                    (Place::Here, "its guest is here")
                } else {
                    (Place::There, "its guest runs elsewhere")
                };
                Event {
                    place: Some(place),
                    ..event(EventChange::MigrationResolved).detail(detail)
                }
            }
            Self::Awaited(listen) => Event {
                listen: Some(listen.clone()),
                ..event(EventChange::Awaited).detail(format!("at {listen}"))
            },
            Self::Arrived => event(EventChange::Arrived),
            Self::NotArrived(why) => because(EventChange::NotArrived, why),
            Self::NotStarted(why) => because(EventChange::NotStarted, why),
            Self::NicAdded(id) => of_nic(EventChange::NicAdded, id),
            Self::NicMoved(id) => of_nic(EventChange::NicMoved, id),
            Self::NicFailedOver(id, why) => {
                let cause = why.as_ref().map(|why| format!(": {why}"));
                let cause = cause.unwrap_or_default();
                Event {
                    reason: why.clone(),
                    ..of_nic(EventChange::NicFailedOver, id)
                        .detail(format!("NIC {id} is on its backup{cause}"))
                }
            }
            Self::NicNotFailedOver(id, why) => Event {
                reason: Some(why.clone()),
                ..of_nic(EventChange::NicNotFailedOver, id).detail(format!("NIC {id}: {why}"))
            },
            Self::NicDeviceRemoved(id) => of_nic(EventChange::NicDeviceRemoved, id)
                .detail(format!("the host has removed the device of NIC {id}")),
            Self::NicRemoved(id) => of_nic(EventChange::NicRemoved, id),
            Self::Alarm {
                alarm,
                is_nic,
                raised,
            } => {
                let change = if *raised {
                    EventChange::AlarmRaised
                } else {
                    EventChange::AlarmCleared
                };
                let AlarmInfo {
                    device,
                    queue,
                    alarm,
                    detail,
                } = alarm;
                let cause = detail.as_ref().map(|why| format!(": {why}"));
                let cause = cause.unwrap_or_default();
                let is_disk = !is_nic && !alarm.is_of_other_device();
                Event {
                    nic: is_nic.then(|| device.clone()),
                    disk: is_disk.then(|| device.clone()),
                    queue: Some(*queue),
                    alarm: Some(*alarm),
                    reason: detail.clone(),
                    ..event(change).detail(format!("{device}, queue {queue}: {alarm:?}{cause}"))
                }
            }
            Self::Operation {
                id,
                kind,
                phase,
                reason,
            } => {
                let change = if phase.is_end() {
                    EventChange::OperationEnded
                } else {
                    EventChange::OperationStarted
                };
                let cause = reason.as_ref().map(|why| format!(": {why}"));
                let cause = cause.unwrap_or_default();
                Event {
                    operation: Some(id.clone()),
                    kind: Some(*kind),
                    phase: Some(*phase),
                    reason: reason.clone(),
                    ..event(change).detail(format!("{kind} {id} {phase}{cause}"))
                }
            }
            Self::DiskAdded(id) => of_disk(EventChange::DiskAdded, id),
            Self::DiskRemoved(id) => of_disk(EventChange::DiskRemoved, id),
            Self::Deleted => event(EventChange::Deleted),
        })
    }
}

/// The result of a `PUT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// There was no VM of this name.
    Created,
    /// It exists and already matches the request.
    Same,
    /// It was stopped, and another VM replaced it.
    Replaced,
}

impl Put {
    /// The status of the answer.
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::Created => StatusCode::CREATED,
            Self::Same | Self::Replaced => StatusCode::OK,
        }
    }
}

/// The result of the removal of a NIC or a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removed {
    /// It is removed.
    Gone,
    /// The guest was requested to release it, and has not yet done so.
    Asked,
}

#[cfg(test)]
mod tests {
    use bellhop_api::machine::{AlarmKind, EndReason};
    use serde_json::{Value, json};

    use super::*;

    fn event(change: &Change) -> Value {
        let event = change.as_event(&"web".parse().unwrap()).unwrap();
        let mut event = serde_json::to_value(event).unwrap();
        for field in ["generation", "time_ms", "subject"] {
            event.as_object_mut().unwrap().remove(field).unwrap();
        }
        event
    }

    #[test]
    fn events_have_typed_members() {
        let id: NicId = "net0".parse().unwrap();
        let alarm = AlarmInfo {
            device: "net0".to_owned(),
            queue: 1,
            alarm: AlarmKind::Stuck,
            detail: None,
        };
        let refused = AlarmInfo {
            device: "iommu".to_owned(),
            queue: 0,
            alarm: AlarmKind::Refused,
            detail: Some("net0: full".to_owned()),
        };
        for (change, expected) in [
            (
                Change::NicFailedOver(id, Some("why".to_owned())),
                json!({"change": "nic_failed_over", "nic": "net0", "reason": "why",
                    "detail": "NIC net0 is on its backup: why"}),
            ),
            (
                Change::Ended(End::new(EndReason::Crashed, "triple fault")),
                json!({"change": "ended", "end": "Crashed", "reason": "triple fault",
                    "detail": "triple fault"}),
            ),
            (
                Change::MigrationResolved { here: false },
                json!({"change": "migration_resolved", "place": "There",
                    "detail": "its guest runs elsewhere"}),
            ),
            (
                Change::Operation {
                    id: "7".to_owned(),
                    kind: OperationKind::Migration,
                    phase: OperationPhase::Failed,
                    reason: Some("why".to_owned()),
                },
                json!({"change": "operation_ended", "operation": "7", "kind": "migration",
                    "phase": "failed", "reason": "why", "detail": "migration 7 failed: why"}),
            ),
            (
                Change::DiskAdded("data".parse().unwrap()),
                json!({"change": "disk_added", "disk": "data", "detail": "disk data"}),
            ),
            (
                Change::Alarm {
                    alarm,
                    is_nic: true,
                    raised: true,
                },
                json!({"change": "alarm_raised", "nic": "net0", "queue": 1, "alarm": "Stuck",
                    "detail": "net0, queue 1: Stuck"}),
            ),
            (
                Change::Alarm {
                    alarm: refused,
                    is_nic: false,
                    raised: true,
                },
                json!({"change": "alarm_raised", "queue": 0, "alarm": "Refused",
                    "reason": "net0: full", "detail": "iommu, queue 0: Refused: net0: full"}),
            ),
        ] {
            assert_eq!(event(&change), expected);
        }
        let starts = Change::State(VmState::Starting);
        assert_eq!(starts.as_event(&"web".parse().unwrap()), None);
    }
}
