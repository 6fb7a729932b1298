//! A VM's snapshots: the place for a new one, and the VM that continues from one.
//!
//! Owns the compatibility of a snapshot and the spec of its VM. [`crate::snapshots`] owns the
//! files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::http::StatusCode;
use bellhop_api::node::{SnapshotName, VmSnapshotRequest};
use bellhop_common::text::since_1970;
use vmm::config::{DiskConfig, VdpaConfig, VfioConfig, VmConfig};
use vmm::machine::milliseconds;

use super::Machines;
use super::error::no_vm;
use super::record::Record;
use super::spec::{Desired, VmName, VmSpec};
use crate::error::Error;
use crate::snapshots::{About, NewSnapshot, Snapshots};

impl Machines {
    /// The place for a new snapshot of a VM. One that the daemon keeps has the VM's spec.
    ///
    /// # Errors
    /// The request is contradictory, or the name is taken.
    pub(super) async fn place_for_snapshot(
        self: &Arc<Self>,
        vm: &VmName,
        wanted: VmSnapshotRequest,
    ) -> Result<NewSnapshot, Error> {
        let name = match (wanted.name, wanted.path) {
            (Some(name), None) => name,
            (None, Some(path)) => {
                let entry = self.find(vm)?;
                let created = self.locked(&entry, move |machines, entry| {
                    if !machines.is_jailed(entry.name())? {
                        return Ok(NewSnapshot::at(path));
                    }
                    let place = NewSnapshot::beside(&path)?;
                    machines.show_files(entry.name(), place.files())?;
                    Ok(place)
                });
                return created.await?;
            }
            _ => return Err(contradiction("give either `name` or `path`")),
        };
        let entry = self.find(vm)?;
        let created = self.locked(&entry, move |machines, entry| {
            let vm = entry.name();
            let record = entry.record().ok_or_else(|| no_vm(vm))?;
            if !record.unwanted_nics().is_empty()
                || !record.removed_disks().is_empty()
                || record.removed_functions().next().is_some()
            {
                // The snapshot would have a device that the spec no longer has.
                let message = format!("the guest of {vm} has not released a removed device yet");
                return Err(Error::conflict("wrong_state", message).hint("try again later"));
            }
            // With the settings of devices that will not exist any more.
            let spec = record.spec.elsewhere(None, &BTreeMap::new(), |nic| {
                machines.net_config(vm, &record.nic_now(vm, nic))
            })?;
            let about = About {
                vm: vm.to_string(),
                created_ms: milliseconds(since_1970()),
                spec,
                files: record.running().files().map(Path::to_owned).collect(),
            };
            let place = Snapshots::of(&machines.paths).create(&name, &about)?;
            machines.show_files(vm, place.files())?;
            Ok(place)
        });
        created.await?
    }

    /// The record of a VM that continues from a snapshot.
    ///
    /// # Errors
    /// There is no such snapshot, it is damaged, or it has other devices than `spec`.
    pub(super) fn restored(&self, spec: VmSpec, name: &SnapshotName) -> Result<Record, Error> {
        if spec.state != Desired::Running {
            let message = "a restored virtual machine runs: omit `state`";
            return Err(contradiction(message));
        }
        let snapshots = Snapshots::of(&self.paths);
        let saved = snapshots.open(name)?;
        check_devices(&spec, saved.config())?;
        check_files(&spec, &snapshots.about(name)?.files, saved.config())?;
        let path = snapshots.machine(name);
        Ok(Record::restored(spec, path, saved.config()))
    }
}

fn contradiction(message: &str) -> Error {
    Error::answered(StatusCode::UNPROCESSABLE_ENTITY, "contradiction", message)
}

/// Fails unless the spec has the devices of the snapshot: the guest uses all of them.
fn check_devices(spec: &VmSpec, saved: &VmConfig) -> Result<(), Error> {
    let nics = spec.nics().iter().map(|nic| nic.id().to_string());
    let functions = |config: &VmConfig| config.vfio.iter().map(VfioConfig::name).collect();
    for (field, devices, wanted, has) in [
        (
            "nics",
            "NICs",
            nics.collect::<BTreeSet<String>>(),
            saved.vdpa.iter().map(VdpaConfig::name).collect(),
        ),
        (
            "vfio",
            "functions",
            functions(spec.machine()),
            functions(saved),
        ),
    ] {
        if wanted != has {
            let list = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>().join(", ");
            return Err(Error::invalid(format!(
                "{field}: the snapshot has the {devices} [{}], but the spec [{}]: give the same \
                 ones, by `id`",
                list(has),
                list(wanted)
            )));
        }
    }
    let disks = saved.disks.iter().enumerate();
    let disks = disks.map(|(number, disk)| DiskConfig {
        id: Some(disk.name(number)),
        ..disk.clone()
    });
    let (has, wanted): (Vec<DiskConfig>, _) = (disks.collect(), &spec.machine().disks);
    if has.len() == wanted.len() && has.iter().all(|disk| wanted.contains(disk)) {
        return Ok(());
    }
    let message = "disks: the spec and the snapshot have different disks: give the same ones";
    Err(Error::invalid(message))
}

/// Fails if the snapshot names a file that this daemon did not record for it, and the client does
/// not name.
fn check_files(spec: &VmSpec, recorded: &[PathBuf], saved: &VmConfig) -> Result<(), Error> {
    let known = |file: &Path| {
        recorded.iter().any(|known| known == file) || spec.machine().files().any(|one| one == file)
    };
    match saved.files().find(|file| !known(file)) {
        None => Ok(()),
        Some(file) => Err(Error::invalid(format!(
            "the snapshot names the file {}, but neither its description nor the spec does: give \
             a spec with this kernel, initramfs or disk if the guest may use it",
            file.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::context::Node;
    use crate::machines::condition::Condition;

    fn spec(more: &Value) -> VmSpec {
        let mut spec = json!({ "kernel": "/nonexistent" });
        let fields = spec.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn a_spec_has_the_devices_of_its_snapshot() {
        let saved = json!({
            "kernel": "/k",
            "vdpa": [{ "path": "/dev/vhost-vdpa-3", "id": "net0" }],
            "disks": [{ "path": "/a" }, { "path": "/b", "id": "data" }],
            "vfio": [{ "host": "0000:03:10.1", "id": "vf" }],
        });
        let saved: VmConfig = serde_json::from_value(saved).unwrap();
        let nics = json!([{ "id": "net0", "from": "eth0" }]);
        let disks = json!([{ "path": "/b", "id": "data" }, { "path": "/a", "id": "disk0" }]);
        // Any function of this host, with the name of the one of the snapshot.
        let vfio = json!([{ "host": "0000:81:00.2", "id": "vf" }]);
        let devices = json!({ "nics": nics, "disks": disks, "vfio": vfio });
        let same = spec(&devices);
        check_devices(&same, &saved).unwrap();
        for (field, other) in [
            ("nics", json!([])),
            ("nics", json!([{ "id": "net1", "from": "eth0" }])),
            ("disks", json!([])),
            (
                "disks",
                json!([{ "path": "/a" }, { "path": "/c", "id": "data" }]),
            ),
            ("vfio", json!([])),
            ("vfio", json!([{ "host": "0000:03:10.1" }])),
        ] {
            let mut devices = devices.clone();
            devices[field] = other;
            let error = check_devices(&spec(&devices), &saved).unwrap_err();
            assert!(error.to_string().starts_with(field), "{error}");
        }
        let record = Record::restored(same.clone(), "/s".into(), &saved);
        assert_eq!(record.pending(), ["/spec/kernel"]);
        let mut next = devices.clone();
        next["kernel"] = json!("/k");
        let next = spec(&next);
        assert_eq!(Record::restored(next, "/s".into(), &saved).running, None);
    }

    #[test]
    fn a_snapshot_names_only_files_of_its_vm() {
        let saved = json!({ "kernel": "/k", "initramfs": "/i", "disks": [{ "path": "/a" }] });
        let saved: VmConfig = serde_json::from_value(saved).unwrap();
        let next = |more: &Value| spec(more);
        let disks = json!([{ "path": "/a", "id": "disk0" }]);
        let other = next(&json!({ "disks": disks }));
        let recorded = ["/k", "/i"].map(PathBuf::from);
        check_files(&other, &recorded, &saved).unwrap();
        let error = check_files(&other, &recorded[..1], &saved).unwrap_err();
        assert!(error.to_string().contains("the file /i,"), "{error}");
        let same = next(&json!({ "kernel": "/k", "initramfs": "/i", "disks": disks }));
        check_files(&same, &[], &saved).unwrap();
    }

    #[tokio::test]
    async fn a_snapshot_that_cannot_be_restored_leaves_nothing() {
        let name = format!("node-restore-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let node = Node::below(&directory);
        let snapshots = Snapshots::of(&node.paths);
        let broken: SnapshotName = "broken".parse().unwrap();
        let about = About {
            vm: "web".to_owned(),
            created_ms: 1,
            spec: spec(&json!({})),
            files: Vec::new(),
        };
        let new = snapshots.create(&broken, &about).unwrap();
        std::fs::create_dir(new.path()).unwrap();
        let machine = new.complete().unwrap();
        std::fs::write(machine.join("state"), b"\x89BELLHOP and more").unwrap();
        std::fs::File::create(machine.join("memory"))
            .unwrap()
            .set_len(16 << 20)
            .unwrap();
        let vm: VmName = "web".parse().unwrap();
        for (from, more, expected) in [
            ("broken", json!({}), (422, "unusable")),
            (
                "broken",
                json!({ "state": "Stopped" }),
                (422, "contradiction"),
            ),
            ("other", json!({}), (404, "no_such_snapshot")),
        ] {
            let from = Some(from.parse().unwrap());
            let put = node.machines.put(&vm, Condition::None, spec(&more), from);
            let (status, code) = put.await.unwrap_err().answer();
            assert_eq!((status.as_u16(), code), expected);
            assert!(node.machines.list().is_empty());
        }
        assert_eq!(snapshots.list().unwrap().len(), 1);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
