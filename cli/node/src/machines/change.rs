//! What becomes of machines, in words: what clients are told as events, what they ask for, and what that came to.
//!
//! Owns those words. It must not know how anything of it is done.

use bellhop_api::machine::{AlarmInfo, End, VmState};
use bellhop_api::node::{DeviceId, NicId};

/// What became of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// It was made.
    Created,
    /// It is another one by the same name.
    Replaced,
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
    /// A queue of one of its devices hangs.
    AlarmRaised(AlarmInfo),
    /// A queue that hung does not any more.
    AlarmCleared(AlarmInfo),
    /// It is gone.
    Deleted,
}

/// The most alarms of a machine that count, and the longest name of a device: its process may be
/// hostile.
pub(super) const ALARMS_MAX: usize = 64;
pub(super) const DEVICE_NAME_MAX: usize = 64;

/// The alarms that were raised and cleared between two accounts of a machine.
pub(super) fn alarm_changes(before: &[AlarmInfo], now: &[AlarmInfo]) -> Vec<Change> {
    let cleared = before.iter().filter(|alarm| !now.contains(alarm));
    let raised = now.iter().filter(|alarm| !before.contains(alarm));
    let cleared = cleared.cloned().map(Change::AlarmCleared);
    cleared
        .chain(raised.cloned().map(Change::AlarmRaised))
        .collect()
}

fn alarm_in_words(alarm: &AlarmInfo) -> Option<String> {
    let AlarmInfo {
        device,
        queue,
        alarm,
    } = alarm;
    Some(format!("{device}, queue {queue}: {alarm:?}"))
}

impl Change {
    /// As an event: a word, and a sentence where there is more to say.
    pub(crate) fn as_event(&self) -> Option<(&'static str, Option<String>)> {
        match self {
            Self::Created => Some(("created", None)),
            Self::Replaced => Some(("replaced", None)),
            Self::Started => Some(("started", None)),
            Self::Adopted => Some(("adopted", None)),
            Self::State(VmState::Paused) => Some(("paused", None)),
            Self::State(VmState::Running) => Some(("running", None)),
            Self::State(VmState::NotStarted | VmState::Starting | VmState::Stopped) => None,
            Self::Stopping => Some(("stopping", None)),
            Self::Ended(end) => Some(("ended", Some(end.detail.clone()))),
            Self::MayBeElsewhere(why) => Some(("may_be_elsewhere", Some(why.clone()))),
            Self::Settled { here: true } => Some(("settled", Some("its guest is here".to_owned()))),
            Self::Settled { here: false } => {
                Some(("settled", Some("its guest runs elsewhere".to_owned())))
            }
            Self::Awaited(listen) => Some(("awaited", Some(format!("at {listen}")))),
            Self::Arrived => Some(("arrived", None)),
            Self::NotArrived(why) => Some(("not_arrived", Some(why.clone()))),
            Self::NotStarted(why) => Some(("not_started", Some(why.clone()))),
            Self::NicAdded(id) => Some(("nic_added", Some(format!("NIC {id}")))),
            Self::NicMoved(id) => Some(("nic_moved", Some(format!("NIC {id}")))),
            Self::NicFailedOver(id, why) => {
                let why = why.as_ref().map(|why| format!(": {why}"));
                let why = why.unwrap_or_default();
                let detail = format!("NIC {id} is on the device that stood by{why}");
                Some(("nic_failed_over", Some(detail)))
            }
            Self::NicNotFailedOver(id, why) => {
                Some(("nic_not_failed_over", Some(format!("NIC {id}: {why}"))))
            }
            Self::NicRemoved(id) => Some(("nic_removed", Some(format!("NIC {id}")))),
            Self::DiskAdded(id) => Some(("disk_added", Some(format!("disk {id}")))),
            Self::DiskRemoved(id) => Some(("disk_removed", Some(format!("disk {id}")))),
            Self::AlarmRaised(alarm) => Some(("alarm_raised", alarm_in_words(alarm))),
            Self::AlarmCleared(alarm) => Some(("alarm_cleared", alarm_in_words(alarm))),
            Self::Deleted => Some(("deleted", None)),
        }
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
    use bellhop_api::machine::AlarmKind;

    use super::*;

    #[test]
    fn alarms_are_events_when_they_begin_and_end() {
        let alarm = |queue, alarm| AlarmInfo {
            device: "net0".to_owned(),
            queue,
            alarm,
        };
        let (stuck, other) = (
            alarm(0, AlarmKind::Stuck),
            alarm(1, AlarmKind::Inconsistent),
        );
        let stalled = alarm(0, AlarmKind::DriverStalled);
        let before = [stuck.clone(), other.clone()];
        assert_eq!(alarm_changes(&before, &before), []);
        let changes = alarm_changes(&before, &[other, stalled]);
        let words = changes.iter().map(|change| change.as_event().unwrap());
        let words: Vec<_> = words
            .map(|(word, detail)| (word, detail.unwrap()))
            .collect();
        let wanted = [
            ("alarm_cleared", "net0, queue 0: Stuck".to_owned()),
            ("alarm_raised", "net0, queue 0: DriverStalled".to_owned()),
        ];
        assert_eq!(words, wanted);
    }
}
