//! What becomes of machines, in words: what clients are told as events, what they ask for, and what that came to.
//!
//! Owns those words. It must not know how anything of it is done.

use bellhop_api::machine::{AlarmInfo, End, Place, VmState};
use bellhop_api::node::{DeviceId, Event, EventChange, NicId, OperationKind, OperationPhase};

use super::spec::VmName;

/// What became of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// It was made.
    Created,
    /// It is another one by the same name.
    Replaced,
    /// Its spec has changed: these members, as JSON pointers.
    SpecChanged(Vec<String>),
    /// It runs.
    Started,
    /// It was found running by this daemon.
    Adopted,
    /// What it does has changed, by its own account.
    State(VmState),
    /// Its guest was asked to power off.
    Stopping,
    /// It has ended.
    Ended(End),
    /// Its process is gone, and its guest may run elsewhere: why.
    MayBeElsewhere(String),
    /// Somebody has said where its guest is.
    Settled {
        /// It is here.
        here: bool,
    },
    /// It is waited for: where.
    Awaited(String),
    /// It has come from another node, and runs.
    Arrived,
    /// It has not come: why.
    NotArrived(String),
    /// It could not be started; it is tried again later.
    NotStarted(String),
    /// It has a NIC more.
    NicAdded(NicId),
    /// One of its NICs is on another device.
    NicMoved(NicId),
    /// One of its NICs has failed, and is on the device that stood by; why it was moved, if not by the machine itself.
    NicFailedOver(NicId, Option<String>),
    /// One of its NICs has failed as devlink says, and stays where it is: why.
    NicNotFailedOver(NicId, String),
    /// It has a NIC less.
    NicRemoved(NicId),
    /// It has one more disk.
    DiskAdded(DeviceId),
    /// It has one disk less.
    DiskRemoved(DeviceId),
    /// A queue of one of its devices has an alarm, or has it no more.
    Alarm {
        /// The device, the queue and the alarm.
        alarm: AlarmInfo,
        /// Whether the device is a NIC; else it is a disk.
        is_nic: bool,
        /// Whether it is new.
        raised: bool,
    },
    /// Long work began or ended.
    Operation {
        /// Which.
        id: String,
        /// What it does.
        kind: OperationKind,
        /// Whether it began, or how it ended.
        phase: OperationPhase,
        /// Why it failed.
        reason: Option<String>,
    },
    /// It is gone.
    Deleted,
}

/// The most alarms of a machine that count, and the longest name of a device: its process may be
/// hostile.
pub(super) const ALARMS_MAX: usize = 64;
pub(super) const DEVICE_NAME_MAX: usize = 64;

impl Change {
    /// As an event of this machine, if it is one.
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
            Self::MayBeElsewhere(why) => because(EventChange::MayBeElsewhere, why),
            Self::Settled { here } => {
                let (place, detail) = if *here {
                    (Place::Here, "its guest is here")
                } else {
                    (Place::There, "its guest runs elsewhere")
                };
                Event {
                    place: Some(place),
                    ..event(EventChange::Settled).detail(detail)
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
                } = alarm;
                Event {
                    nic: is_nic.then(|| device.clone()),
                    disk: (!is_nic).then(|| device.clone()),
                    queue: Some(*queue),
                    alarm: Some(*alarm),
                    ..event(change).detail(format!("{device}, queue {queue}: {alarm:?}"))
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

/// What `PUT` came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// There was none of this name.
    Created,
    /// It was there, as it is to be.
    Same,
    /// It was stopped, and is another one now.
    Replaced,
}

/// What the removal of a NIC or a disk came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removed {
    /// It is gone.
    Gone,
    /// The guest was asked to give it up, and has not yet.
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
                Change::Settled { here: false },
                json!({"change": "settled", "place": "There",
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
        ] {
            assert_eq!(event(&change), expected);
        }
        let starts = Change::State(VmState::Starting);
        assert_eq!(starts.as_event(&"web".parse().unwrap()), None);
    }
}
