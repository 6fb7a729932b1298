//! Health as devlink reports it: whose NIC depends on the failed part, and whether the backup
//! device can replace it.
//!
//! ```text
//!   reporter of     the NIC's own device         the backup device  the NIC
//!   a function      depends on it, at any depth  depends on it      stays: the backup is no better
//!                                                does not           moves, once for each failure
//!   a port          is that port's function's,   as above           as above
//!                   or the function has the port
//!   anything else   does not                     either             stays
//! ```
//! A failure begins with a reporter's first message in the error state, and ends with one in
//! another state. The daemon ignores reports from before its start, and from while messages were
//! lost. They may be old, and NICs may have moved since.
//!
//! Owns that table.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use vdpa_mgmt::devlink::{Handle, HealthReporter, HealthState, PortHandle};
use vdpa_mgmt::nic::{MadeNic, Step};

/// More directories than there are between a device and the root of sysfs.
const DEPTH_MAX: usize = 32;
/// More reporters than a host has in error. Further ones are not stored: their next report counts
/// as a new failure.
const IN_ERROR_MAX: usize = 4096;

/// The parents that a vDPA device depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its function, then the parents of that, in devlink's names.
    functions: Vec<Handle>,
    /// The port of its function in the switch, if it was created with one.
    port: Option<PortHandle>,
}

impl Place {
    /// Reads the parents of the vDPA device `device` from the sysfs at `sysfs`; `made` is the
    /// record of its creation.
    pub(crate) fn read(sysfs: &Path, device: &str, made: Option<&MadeNic>) -> Self {
        let path = fs::canonicalize(sysfs.join("bus/vdpa/devices").join(device));
        let above = path.iter().flat_map(|path| path.ancestors().skip(1));
        let functions = above.take(DEPTH_MAX).flat_map(|directory| {
            // A virtual function is a sibling of its physical function in sysfs, and a part of it.
            let physical = fs::canonicalize(directory.join("physfn")).ok();
            let physical = physical.as_deref().and_then(handle);
            handle(directory).into_iter().chain(physical)
        });
        let steps = made.into_iter().flat_map(MadeNic::steps);
        Self {
            functions: functions.collect(),
            port: steps.filter_map(port).next_back(),
        }
    }

    /// Whether an error of this reporter makes the device fail.
    fn hangs_on(&self, reporter: &HealthReporter) -> bool {
        match reporter.port_index {
            None => self.functions.contains(&reporter.handle),
            // All ports of its own function are its own; of the whole NIC's ports it has one.
            Some(index) => {
                self.functions.first() == Some(&reporter.handle)
                    || self.port.as_ref() == Some(&reporter.handle.port(index))
            }
        }
    }
}

/// The devlink handle of this sysfs directory, if it is a device on a bus.
fn handle(directory: &Path) -> Option<Handle> {
    let bus = fs::read_link(directory.join("subsystem")).ok()?;
    let [bus, device] = [bus.as_path(), directory].map(|path| path.file_name()?.to_str());
    Handle::new(bus?, device?).ok()
}

/// The port that a step concerns.
fn port(step: &Step) -> Option<PortHandle> {
    match step {
        Step::AddPort { port, .. } => port.clone(),
        Step::ActivatePort { port } => Some(port.clone()),
        _ => None,
    }
}

/// The consequence of a failure for a NIC with a backup device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureAction {
    /// The failure does not affect it.
    Untouched,
    /// It must move to the backup.
    FailOver,
    /// Its own device and the backup have both failed.
    Both,
}

/// The consequence of this reporter's error for a NIC at `own` with a backup device at `backup`.
pub(crate) fn action_for(reporter: &HealthReporter, own: &Place, backup: &Place) -> FailureAction {
    match (own.hangs_on(reporter), backup.hangs_on(reporter)) {
        (false, _) => FailureAction::Untouched,
        (true, false) => FailureAction::FailOver,
        (true, true) => FailureAction::Both,
    }
}

/// A sentence for people about the failure.
pub(crate) fn reason(reporter: &HealthReporter) -> String {
    let (name, handle) = (&reporter.name, &reporter.handle);
    let port = reporter
        .port_index
        .map(|index| handle.port(index).to_string());
    let of = port.unwrap_or_else(|| handle.to_string());
    format!("devlink reports that {name} of {of} is in error")
}

/// Reporters in the error state.
#[derive(Debug, Default)]
pub(crate) struct InError(BTreeSet<(Handle, Option<u32>, String)>);

impl InError {
    /// Records a reporter's state. Returns whether a failure begins.
    pub(crate) fn record_state(&mut self, reporter: &HealthReporter) -> bool {
        let which = (
            reporter.handle.clone(),
            reporter.port_index,
            reporter.name.clone(),
        );
        match reporter.state {
            HealthState::Error if self.0.len() >= IN_ERROR_MAX => !self.0.contains(&which),
            HealthState::Error => self.0.insert(which),
            HealthState::Healthy | HealthState::Other(_) => {
                self.0.remove(&which);
                false
            }
        }
    }

    /// Forgets the reporters of this devlink instance, which is gone.
    pub(crate) fn goes(&mut self, handle: &Handle) {
        self.0.retain(|(of, ..)| of != handle);
    }

    /// Forgets all states, because messages were lost.
    pub(crate) fn lost(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn of(handle: &str, port_index: Option<u32>, state: HealthState) -> HealthReporter {
        HealthReporter {
            handle: handle.parse().unwrap(),
            port_index,
            name: "fw".to_owned(),
            state,
            error_count: 1,
            recover_count: 0,
            graceful_period: None,
            auto_recover: None,
            auto_dump: None,
            dump_time: None,
        }
    }

    fn place(functions: &[&str], port: Option<&str>) -> Place {
        Place {
            functions: functions.iter().map(|one| one.parse().unwrap()).collect(),
            port: port.map(|port| port.parse().unwrap()),
        }
    }

    #[test]
    fn the_table_of_reporters_and_places() {
        let sf = |number: u32, nic: &str| {
            let own = format!("auxiliary/sf.{number}");
            place(&[&own, nic], Some(&format!("{nic}/{number}")))
        };
        let (own, near, far) = (
            sf(1, "pci/0000:01:00.0"),
            sf(2, "pci/0000:01:00.0"),
            sf(3, "pci/0000:02:00.0"),
        );
        for (reporter, port, to_near, to_far) in [
            // The NIC as a whole, which both devices depend on, or one of them.
            (
                "pci/0000:01:00.0",
                None,
                FailureAction::Both,
                FailureAction::FailOver,
            ),
            (
                "auxiliary/sf.1",
                None,
                FailureAction::FailOver,
                FailureAction::FailOver,
            ),
            (
                "auxiliary/sf.1",
                Some(0),
                FailureAction::FailOver,
                FailureAction::FailOver,
            ),
            (
                "pci/0000:01:00.0",
                Some(1),
                FailureAction::FailOver,
                FailureAction::FailOver,
            ),
            // Ports and functions of others, among them the backup's.
            (
                "pci/0000:01:00.0",
                Some(2),
                FailureAction::Untouched,
                FailureAction::Untouched,
            ),
            (
                "pci/0000:02:00.0",
                None,
                FailureAction::Untouched,
                FailureAction::Untouched,
            ),
            (
                "auxiliary/sf.2",
                None,
                FailureAction::Untouched,
                FailureAction::Untouched,
            ),
        ] {
            let reporter = of(reporter, port, HealthState::Error);
            assert_eq!(action_for(&reporter, &own, &near), to_near, "{reporter:?}");
            assert_eq!(action_for(&reporter, &own, &far), to_far, "{reporter:?}");
        }
        // The parents of a missing device are unknown.
        let whole = of("pci/0000:01:00.0", None, HealthState::Error);
        assert_eq!(
            action_for(&whole, &Place::default(), &far),
            FailureAction::Untouched
        );
        assert!(reason(&whole).contains("fw of pci/0000:01:00.0"));
    }

    #[test]
    fn a_place_is_read_from_the_device_up() {
        let root = std::env::temp_dir().join(format!("bellhop-place-{}", std::process::id()));
        let nic = root.join("devices/pci0000:00/0000:01:00.0");
        let function = nic.join("sf.4");
        fs::create_dir_all(function.join("web.net0")).unwrap();
        fs::create_dir_all(root.join("bus/vdpa/devices")).unwrap();
        for (directory, bus) in [
            (&nic, "pci"),
            (&function, "auxiliary"),
            (&function.join("web.net0"), "vdpa"),
        ] {
            symlink(format!("../bus/{bus}"), directory.join("subsystem")).unwrap();
        }
        let device = root.join("bus/vdpa/devices/web.net0");
        symlink(function.join("web.net0"), device).unwrap();
        let made: MadeNic = serde_json::from_value(serde_json::json!({
            "version": 1, "name": "web.net0", "from": "pci/0000:01:00.0", "state": "made",
            "steps": [{ "step": "activate-port", "port": "pci/0000:01:00.0/7" }],
        }))
        .unwrap();
        let read = Place::read(&root, "web.net0", Some(&made));
        let gone = Place::read(&root, "web.net1", None);
        fs::remove_dir_all(&root).unwrap();
        let functions = ["auxiliary/sf.4", "pci/0000:01:00.0"];
        assert_eq!(read, place(&functions, Some("pci/0000:01:00.0/7")));
        assert_eq!(gone, Place::default());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn a_failure_is_one_however_often_it_is_reported(
            told in vec((0..3_u32, 0..4_u8), 0..64)
        ) {
            let mut heard = InError::default();
            let mut failed = [false; 3];
            for (which, what) in told {
                let is = &mut failed[usize::try_from(which).unwrap()];
                let state = match what {
                    0 => HealthState::Healthy,
                    1 => HealthState::Other(7),
                    _ => HealthState::Error,
                };
                let begins = heard.record_state(&of("pci/0000:01:00.0", Some(which), state));
                prop_assert_eq!(begins, state == HealthState::Error && !*is);
                *is = state == HealthState::Error;
            }
        }
    }

    #[test]
    fn removed_reporters_may_fail_again_and_memory_is_bounded() {
        let one = of("pci/0000:01:00.0", None, HealthState::Error);
        let other = of("pci/0000:02:00.0", None, HealthState::Error);
        let mut heard = InError::default();
        assert!(heard.record_state(&one) && heard.record_state(&other));
        heard.goes(&one.handle);
        assert!(heard.record_state(&one) && !heard.record_state(&other));
        heard.lost();
        assert!(heard.record_state(&one));
        for index in 0..2 * u32::try_from(IN_ERROR_MAX).unwrap() {
            assert!(heard.record_state(&of("pci/0000:03:00.0", Some(index), HealthState::Error)));
        }
        assert_eq!(heard.0.len(), IN_ERROR_MAX);
        assert!(!heard.record_state(&one));
    }
}
