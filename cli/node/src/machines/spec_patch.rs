//! Changes of a VM's spec, also while the VM runs.
//!
//! ```text
//!   VM ─> JSON ─> merge patch ─> read and checked as a new one ─> recorded ─> [NICs made anew]
//! ```
//! The daemon reads restart policy, labels and annotations from the record on each use. The VM's
//! process has all other members, and receives changes at its start. Until then the record keeps
//! the VM that the process runs. NICs and disks of a running VM have requests of their own.
//!
//! Owns the time at which each member can change.

use std::sync::Arc;

use bellhop_api::merge_patch;
use bellhop_api::node::{Applied, SpecChange};
use serde_json::{Map, Value};

use super::condition::Condition;
use super::error::{migrating, vm_runs};
use super::host::check_files;
use super::record::Record;
use super::requests::check_location_known;
use super::spec::{Desired, VmBody, VmName, VmPatch, VmSpec, refused};
use super::steps::Host as _;
use super::vm_entry::VmEntry;
use super::{Change, Machines};
use crate::error::Error;

/// Members that the daemon reads from the record.
const NOW: [&str; 3] = ["/spec/restart", "/labels", "/annotations"];

impl Machines {
    /// Changes a VM's spec by a merge patch. With `dry_run` it only returns the changes.
    ///
    /// # Errors
    /// The change failed; the VM is as before.
    pub(crate) async fn patch_spec(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        patch: Map<String, Value>,
        dry_run: bool,
    ) -> Result<Vec<SpecChange>, Error> {
        let work =
            move |machines: &Self, entry: &VmEntry| machines.patch_spec_now(entry, patch, dry_run);
        self.request_if(self.find(vm)?, condition, work).await
    }

    fn patch_spec_now(
        &self,
        entry: &VmEntry,
        patch: Map<String, Value>,
        dry_run: bool,
    ) -> Result<Vec<SpecChange>, Error> {
        let vm = entry.name();
        let mut record = self.changeable(entry)?;
        check_location_known(vm, &record)?;
        if record.outgoing.is_some() {
            return Err(migrating(vm));
        }
        let (spec, condition, changes) = patched(vm, &record.spec, patch)?;
        condition.check(vm, Some(&record))?;
        spec.check(vm)?;
        let has_other_host_devices =
            spec.nics() != record.spec.nics() || spec.machine().vfio != record.spec.machine().vfio;
        check_devices(vm, &record, &spec)?;
        if has_other_host_devices {
            self.check(vm, &spec)?;
            self.reserve(entry, &spec)?;
        } else if spec.machine() != record.spec.machine() {
            check_files(spec.machine())?;
        }
        if !dry_run && !changes.is_empty() {
            if has_other_host_devices {
                self.lifecycle(entry)
                    .replace(&mut record, Record::new(spec))?;
            } else {
                self.lifecycle(entry).change_spec(&mut record, spec)?;
            }
            let fields = changes.iter().map(|change| change.field.clone()).collect();
            self.publish(vm, Change::SpecChanged(fields));
        }
        Ok(changes)
    }
}

/// Fails if the change concerns devices that a process has, or is about to have.
fn check_devices(vm: &VmName, record: &Record, spec: &VmSpec) -> Result<(), Error> {
    let (machine, former) = (spec.machine(), record.spec.machine());
    let same_devices = spec.nics() == record.spec.nics()
        && machine.disks == former.disks
        && machine.vfio == former.vfio;
    let is_off = record.process().is_none() && record.spec.state == Desired::Stopped;
    if is_off || same_devices {
        return Ok(());
    }
    let hint = "PUT and DELETE /v1/vms/{name}/nics/{id}, /v1/vms/{name}/disks/{id} and \
                /v1/vms/{name}/vfio/{id} add and remove them while it runs";
    Err(vm_runs(vm, "change devices in the spec of", hint))
}

/// The patched spec, the condition in the patch, and the changes.
fn patched(
    vm: &VmName,
    spec: &VmSpec,
    patch: Map<String, Value>,
) -> Result<(VmSpec, Condition, Vec<SpecChange>), Error> {
    let patch = Value::Object(patch);
    VmPatch::check(&patch)?;
    let before = json(spec.clone())?;
    let mut after = before.clone();
    merge_patch::apply(&mut after, &patch);
    let (next, condition) = VmBody::read(after)?.for_vm(vm, Condition::None)?;
    if next.state != spec.state {
        let reason = "PUT /v1/vms/{name}/state starts and stops it".to_owned();
        return Err(refused("/spec/state", reason));
    }
    let after = json(next.clone())?;
    let members = merge_patch::pointers(&merge_patch::between(&before, &after));
    let change = |field: String| {
        let value = |of: &Value| of.pointer(&field).cloned().unwrap_or_default();
        let applied = if NOW.iter().any(|member| field.starts_with(member)) {
            Applied::Now
        } else {
            Applied::NextStart
        };
        SpecChange {
            from: value(&before),
            to: value(&after),
            applied,
            field,
        }
    };
    let changes = members.into_iter().map(change).collect();
    Ok((next, condition, changes))
}

fn json(spec: VmSpec) -> Result<Value, Error> {
    serde_json::to_value(VmBody::from(spec)).map_err(Error::context("cannot encode the VM as JSON"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::condition::tag;
    use super::super::record::Step;
    use super::super::spec::Restart;
    use super::*;
    use crate::context::Node;

    fn spec() -> VmSpec {
        let spec = json!({
            "kernel": "/k", "memory": { "size": "1G", "hugepages": "2M" }, "restart": "Never",
            "labels": { "tier": "web" }, "disks": [{ "path": "/d" }],
            "nics": [{ "id": "net0", "from": "eth0" }],
        });
        serde_json::from_value(spec).unwrap()
    }

    fn patch(patch: Value) -> Result<(VmSpec, Vec<SpecChange>), Error> {
        let Value::Object(patch) = patch else {
            panic!("no object");
        };
        let (spec, _, changes) = patched(&"web".parse().unwrap(), &spec(), patch)?;
        Ok((spec, changes))
    }

    /// One line for each change.
    fn lines(wanted: Value) -> Vec<String> {
        let (_, changes) = patch(wanted).unwrap();
        let line = |change: &SpecChange| {
            let SpecChange {
                field, from, to, ..
            } = change;
            format!("{field} {from} {to} {:?}", change.applied)
        };
        changes.iter().map(line).collect()
    }

    #[test]
    fn each_changed_member_is_named_with_its_time() {
        let wanted = json!({
            "spec": { "memory": { "size": "2G" }, "restart": "always", "initramfs": "/i" },
            "labels": { "tier": null, "a/b": "c" }, "annotations": { "note": "x" },
        });
        let changes = [
            r#"/annotations/note null "x" Now"#,
            r#"/labels/a~1b null "c" Now"#,
            r#"/labels/tier "web" null Now"#,
            r#"/spec/initramfs null "/i" NextStart"#,
            r#"/spec/memory/size "1G" "2G" NextStart"#,
            r#"/spec/restart "Never" "Always" Now"#,
        ];
        let mut found = lines(wanted);
        found.sort();
        assert_eq!(found, changes);
        for all in [json!({ "tier": null }), Value::Null] {
            let gone = lines(json!({ "labels": all }));
            assert_eq!(gone, [r#"/labels/tier "web" null Now"#]);
        }
    }

    #[test]
    fn equivalent_specs_are_no_change() {
        for same in [
            json!({}),
            json!({ "spec": { "memory": { "size": "1024M" }, "cmdline": null, "cpus": 1 } }),
            json!({ "spec": { "disks": [{ "path": "/d", "readonly": false }] } }),
            json!({
                "spec": { "nics": [{ "id": "net0", "from": "eth0" }] }, "labels": { "x": null },
            }),
            json!({ "name": "web", "status": {}, "spec": { "state": "Running" } }),
        ] {
            assert_eq!(lines(same.clone()), Vec::<String>::new(), "{same}");
        }
        let (size_alone, _) = patch(json!({ "spec": { "memory": "2G" } })).unwrap();
        assert_eq!(size_alone.machine().memory.hugepages, None);
    }

    #[test]
    fn invalid_members_are_refused_by_their_path() {
        let many: Map<String, Value> = (0..33)
            .map(|number| (format!("a{number}"), json!("")))
            .collect();
        let of_spec = |member: &str, value: Value| json!({ "spec": { member: value } });
        for (wrong, place, words) in [
            (of_spec("vcpus", json!(2)), "/spec", "unknown field `vcpus`"),
            (
                of_spec("vcpus", Value::Null),
                "/spec",
                "unknown field `vcpus`",
            ),
            (
                of_spec("kernel", Value::Null),
                "/spec",
                "missing field `kernel`",
            ),
            (json!({ "spec": null }), "", "missing field `spec`"),
            (json!({ "name": "db" }), "/name", "web"),
            (of_spec("cpus", json!(0)), "/spec/cpus", "0 vCPUs"),
            (
                of_spec("memory", json!({ "size": "x" })),
                "/spec/memory/size",
                "",
            ),
            (
                of_spec("memory", json!({ "pages": null })),
                "/spec/memory",
                "unknown field `pages`",
            ),
            (
                of_spec("state", json!("Stopped")),
                "/spec/state",
                "PUT /v1/vms/{name}/state",
            ),
            (of_spec("restart", json!("Often")), "/spec/restart", "Often"),
            (json!({ "labels": { "tier": 1 } }), "/labels/tier", "string"),
            (
                json!({ "labels": { "a b": "c" } }),
                "/labels",
                "is not a key",
            ),
            (json!({ "labels": many }), "/labels", "too many"),
            (json!({ "labels": "web" }), "/labels", "map"),
            (
                json!({ "annotations": { "a": "x".repeat(1025) } }),
                "/annotations",
                "512",
            ),
        ] {
            let error = patch(wrong.clone()).unwrap_err();
            let fields = vmm::http::Problem::fields(&error);
            let message = error.to_string();
            assert_eq!(fields[0].pointer, place, "{wrong}: {message}");
            assert!(message.contains(words), "{wrong}: {message}");
        }
    }

    #[test]
    fn a_process_keeps_its_start_configuration() {
        let mut record = Record::new(spec());
        let next = |wanted: Value| patch(wanted).unwrap().0;
        let larger = next(json!({
            "spec": { "memory": { "size": "2G" } }, "labels": { "tier": "db" },
        }));
        record.change_spec(larger.clone());
        assert_eq!(record.pending(), Vec::<String>::new(), "it does not run");
        let mut record = Record::new(spec());
        record.steps_mut().push(Step::Process {
            identity: None,
            boot: "b".to_owned(),
        });
        record.change_spec(larger);
        record.change_spec(next(
            json!({ "spec": { "memory": { "size": "2G" }, "cpus": 2 } }),
        ));
        assert_eq!(record.pending(), ["/spec/cpus", "/spec/memory/size"]);
        assert_eq!(record.running(), &spec().fixed());
        // The change survives the daemon, and ends with the process.
        let kept = serde_json::to_value(&record).unwrap();
        let kept: Record = serde_json::from_value(kept).unwrap();
        assert_eq!(kept.running, record.running);
        record.change_spec(spec());
        assert_eq!(record.running, None, "as it runs");
        let mut kept = kept;
        kept.forget_process();
        assert_eq!(kept.running, None);
    }

    #[tokio::test]
    async fn a_patch_is_recorded_with_its_generation_or_changes_nothing() {
        let name = format!("node-spec-patch-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let (node, said) = Node::with_changes(&directory);
        let machines = &node.machines;
        let vm: VmName = "web".parse().unwrap();
        let spec = json!({ "kernel": "/nonexistent", "state": "Stopped" });
        let spec = serde_json::from_value(spec).unwrap();
        machines
            .put(&vm, Condition::Absent, spec, None)
            .await
            .unwrap();
        let patch = |condition: Condition, patch: Value, dry_run| {
            let patch = patch.as_object().cloned().unwrap_or_default();
            machines.patch_spec(&vm, condition, patch, dry_run)
        };
        let at = |generation: u64| Condition::At(vec![tag(generation)]);

        let generation = || machines.show(&vm).unwrap().record.unwrap().generation;
        let always = json!({ "generation": 1, "spec": { "restart": "Always" } });
        let trial = patch(at(1), always.clone(), true).await.unwrap();
        assert_eq!((generation(), trial.len()), (1, 1));
        let changed = patch(at(1), always.clone(), false).await.unwrap();
        assert_eq!(generation(), 2);
        assert_eq!(changed, trial);
        let same = json!({ "spec": { "restart": "Always" } });
        let again = patch(Condition::None, same.clone(), false).await.unwrap();
        assert_eq!((generation(), again.len()), (2, 0));
        for (condition, wanted, code) in [
            (at(1), same, "generation_conflict"),
            (Condition::None, always, "generation_conflict"),
            (at(2), json!({ "spec": { "cpus": 2 } }), "unusable"),
            (at(2), json!({ "spec": { "kernel": "k" } }), "invalid_body"),
        ] {
            let error = patch(condition, wanted.clone(), false).await.unwrap_err();
            assert_eq!(error.answer().1, code, "{wanted}: {error}");
        }
        let record = machines.show(&vm).unwrap().record.unwrap();
        assert_eq!(record.generation, 2);
        assert_eq!(record.spec.restart, Restart::Always);
        let fields = vec!["/spec/restart".to_owned()];
        assert_eq!(*said.lock(), [Change::Created, Change::SpecChanged(fields)]);
        drop(node);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn devices_of_running_vms_stay() {
        let vm: VmName = "web".parse().unwrap();
        let mut record = Record::new(spec());
        let other = |wanted: Value| patch(wanted).unwrap().0;
        let nics = other(json!({ "spec": { "nics": [] } }));
        let disks = other(json!({ "spec": { "disks": [] } }));
        for spec in [&nics, &disks] {
            // Its desired state is running, although it does not run.
            let error = check_devices(&vm, &record, spec).unwrap_err();
            assert_eq!(error.answer().1, "vm_runs");
        }
        check_devices(&vm, &record, &other(json!({ "spec": { "cpus": 2 } }))).unwrap();
        record.spec.state = Desired::Stopped;
        check_devices(&vm, &record, &nics).unwrap();
        check_devices(&vm, &record, &disks).unwrap();
    }
}
