//! The plan of a VM's creation: the checks and the steps of [`Machines::put`], without a step.
//!
//! Changes neither the host nor a record.

use std::sync::Arc;

use bellhop_api::node::Plan;
use vdpa_mgmt::nic::Nics;

use super::Machines;
use super::condition::Condition;
use super::spec::{Desired, ExistingDevice, NicSource, NicSpec, VmName, VmSpec};
use super::steps::Host as _;
use super::vm_entry::VmEntry;
use crate::error::Error;

impl Machines {
    /// The steps that [`Self::put`] would take.
    ///
    /// # Errors
    /// The condition does not hold, or the VM cannot be created as far as that is known before the
    /// first step.
    pub(crate) async fn plan(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        spec: VmSpec,
    ) -> Result<Plan, Error> {
        spec.check(vm)?;
        let work = move |machines: &Self, entry: &VmEntry| machines.plan_now(entry, &spec);
        self.request_if(self.place(vm), condition, work).await
    }

    fn plan_now(&self, entry: &VmEntry, spec: &VmSpec) -> Result<Plan, Error> {
        let vm = entry.name();
        drop(self.admit()?);
        self.reserve(entry, spec)?;
        self.check(vm, spec)?;
        let mut steps = vec![format!("create the directories of {vm}")];
        for nic in spec.nics() {
            steps.extend(self.steps_of(vm, nic)?);
        }
        for function in &spec.machine().vfio {
            if let Some(former) = self.check_function(function)? {
                steps.push(format!("bind {} to vfio-pci", former.function));
            }
        }
        steps.extend(start_steps(spec));
        Ok(Plan { steps })
    }

    /// The steps for a NIC and its backup, each as if it were the only one.
    fn steps_of(&self, vm: &VmName, nic: &NicSpec) -> Result<Vec<String>, Error> {
        let id = nic.id();
        let mut steps = Vec::new();
        let own = (Some(nic.source()), "NIC", nic.request(vm));
        let backup = (nic.backup(), "backup of NIC", nic.backup_request(vm, None));
        for (source, what, request) in [own, backup] {
            if let Some(request) = request {
                let others: Vec<_> = self.created_nics().into_values().collect();
                let planned = Nics::open()?.plan_steps(&request, &others)?;
                steps.extend(planned.iter().map(|step| format!("{what} {id}: {step}")));
            } else if let Some(NicSource::There(device)) = source {
                let device = match device {
                    ExistingDevice::Path(path) => path.display().to_string(),
                    ExistingDevice::Name(name) => name.clone(),
                };
                steps.push(format!("{what} {id}: use {device}"));
            }
        }
        Ok(steps)
    }
}

/// The steps of a start, if the VM should run.
fn start_steps(spec: &VmSpec) -> Vec<String> {
    if spec.state == Desired::Stopped {
        return Vec::new();
    }
    let machine = spec.machine();
    let (cpus, memory) = (machine.cpus.get(), machine.memory.size);
    let kernel = machine.kernel.display();
    vec![
        "start a process for the VM".to_owned(),
        format!("boot {kernel} with {cpus} vCPUs and {memory} of memory"),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::context::Node;

    fn spec(value: Value) -> VmSpec {
        serde_json::from_value(value).unwrap()
    }

    #[tokio::test]
    async fn a_plan_is_checked_and_changes_nothing() {
        let name = format!("node-plan-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let (node, said) = Node::with_changes(&directory);
        let machines = &node.machines;
        let vm: VmName = "web".parse().unwrap();
        for (wanted, code) in [
            (json!({"kernel": "/nonexistent"}), "unusable"),
            (json!({"kernel": "relative"}), "invalid_body"),
        ] {
            let plan = machines.plan(&vm, Condition::Absent, spec(wanted));
            let error = plan.await.unwrap_err();
            assert_eq!(error.answer().1, code, "{error}");
        }
        assert!(machines.list().is_empty() && said.lock().is_empty());
        let stopped = spec(json!({"kernel": "/nonexistent", "state": "Stopped"}));
        machines
            .put(&vm, Condition::Absent, stopped.clone(), None)
            .await
            .unwrap();
        let plan = machines.plan(&vm, Condition::Absent, stopped);
        let error = plan.await.unwrap_err();
        assert_eq!(error.answer().1, "vm_exists");
        drop(node);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn only_a_vm_that_should_run_is_booted() {
        let running = spec(json!({"kernel": "/k", "cpus": 2, "memory": "1G"}));
        let wanted = "boot /k with 2 vCPUs and 1G of memory";
        assert_eq!(start_steps(&running).last().unwrap(), wanted);
        let stopped = spec(json!({"kernel": "/k", "state": "Stopped"}));
        assert!(start_steps(&stopped).is_empty());
    }
}
