//! `/v1/vms`: all VMs, and the form of one.

use std::fmt;

use axum::Json;
use axum::extract::State;
use bellhop_api::Items;
use bellhop_api::machine::VmState;
use bellhop_api::node::{
    ConsolePaths, MigrationUnknown, Selector, Vm, VmNicDevice, VmObserved, VmPhase, VmQuery,
};
use vmm::http::parameters::Parameters;
use vmm::http::{ErrorBody, HttpError};

use super::state::Api;
use crate::context::Node;
use crate::error::Error;
use crate::machines::View;
use crate::machines::outgoing::remedy;
use crate::machines::record::{Phase, Record};
use crate::machines::spec::{NicSpec, VmName};

fn nic_device(node: &Node, vm: &VmName, record: &Record, nic: &NicSpec) -> VmNicDevice {
    let failed_over = record.is_on_backup(nic.id());
    let now = record.nic_now(vm, nic);
    let backup = now.on_backup(vm);
    let device = |nic| node.machines.character_device_of(vm, nic).ok();
    VmNicDevice {
        id: nic.id().to_string(),
        vdpa_device: record.made(nic.id(), failed_over).map(str::to_owned),
        character_device: device(&now),
        backup_device: backup.as_ref().and_then(device),
        failed_over,
    }
}

/// Returns none if the VM no longer exists.
pub(super) fn info(node: &Node, name: &VmName, view: View) -> Option<Vm> {
    let record = view.record?;
    let live = view.live;
    let nics = record.spec.nics().iter();
    let nics = nics.map(|nic| nic_device(node, name, &record, nic));
    let process = record.process();
    let is_stopping = live.as_ref().is_some_and(|live| live.is_stopping());
    let phase = match phase(&record, live.as_ref().map(|live| (live.api, live.state))) {
        phase @ (VmPhase::Creating | VmPhase::Deleting) => phase,
        _ if is_stopping || view.not_ended.is_some() => VmPhase::Stopping,
        phase => phase,
    };
    let said = live.as_ref().and_then(|live| live.said.as_ref());
    let alarms = said.into_iter().flat_map(|said| &said.alarms);
    let status = VmObserved {
        phase,
        pending: record.pending(),
        pid: process.and_then(|(identity, _)| Some(identity?.pid)),
        uptime_s: process.and_then(|(identity, _)| Some(identity?.age_s())),
        version: live.as_ref().and_then(|live| live.version.clone()),
        api: live.as_ref().and_then(|live| live.api),
        adopted: live.as_ref().is_some_and(|live| live.adopted),
        restarts: record.restarts,
        nic_devices: nics.collect(),
        alarms: alarms.cloned().collect(),
        console: ConsolePaths {
            socket: node.paths.console_socket(name),
            log: node.paths.console_log(name),
        },
        log: node.paths.log(name),
        migration_unknown: record.migration_unknown().map(|outgoing| MigrationUnknown {
            destination: outgoing.destination.clone(),
            reason: outgoing.reason(),
            remedy: remedy(name.as_str()),
        }),
        last_end: record.last_end,
        not_ended: view.not_ended,
    };
    Some(Vm {
        name: name.to_string(),
        // The texts of a spec came as JSON.
        spec: record.spec.members().unwrap_or_default(),
        labels: record.spec.labels,
        annotations: record.spec.annotations,
        generation: record.generation,
        status,
    })
}

fn phase(record: &Record, live: Option<(Option<u32>, Option<VmState>)>) -> VmPhase {
    match (record.phase, record.process(), live) {
        (Phase::Creating, ..) => VmPhase::Creating,
        (Phase::Deleting, ..) => VmPhase::Deleting,
        (Phase::Present, None, _) if record.outgoing.is_some() => VmPhase::MigrationUnknown,
        (Phase::Present, None, _) if record.is_on() => VmPhase::Starting,
        (Phase::Present, None, _) => VmPhase::Stopped,
        (Phase::Present, Some(_), _) if record.incoming.is_some() => VmPhase::Receiving,
        (Phase::Present, Some(_), None) => VmPhase::Starting,
        (Phase::Present, Some(_), Some((_, Some(state)))) => match state {
            VmState::NotStarted | VmState::Starting => VmPhase::Starting,
            VmState::Running => VmPhase::Running,
            VmState::Paused => VmPhase::Paused,
            VmState::Stopped => VmPhase::Stopped,
        },
        // It was not queried yet.
        (Phase::Present, Some(_), Some((None, None))) => VmPhase::Starting,
        (Phase::Present, Some(_), Some((Some(_), None))) => VmPhase::Unknown,
    }
}

/// List virtual machines
///
/// By name, with their state. The parameters select some.
#[utoipa::path(get, path = "/v1/vms", operation_id = "list_vms", params(VmQuery), responses(
    (status = 200, description = "The virtual machines", body = Items<Vm>),
    (status = 400, description = "Invalid parameter", body = ErrorBody),
))]
pub(super) async fn list(
    State(node): Api,
    Parameters(query): Parameters<VmQuery>,
) -> Result<Json<Items<Vm>>, Error> {
    let filter = Filter::of(&query)?;
    let all = node.machines.list().into_iter();
    let all = all.filter_map(|(name, view)| info(&node, &name, view));
    Ok(Json(all.filter(|vm| filter.fits(vm)).collect()))
}

/// The VMs that the list selects.
#[derive(Debug)]
struct Filter {
    labels: Option<Selector>,
    phase: Option<VmPhase>,
}

impl Filter {
    fn of(query: &VmQuery) -> Result<Self, HttpError> {
        let wrong = |name: &str, why: &dyn fmt::Display| {
            HttpError::Parameter(format!("the query parameter `{name}`: {why}"))
        };
        let labels = query.label.as_deref().map(str::parse::<Selector>);
        let phase = query.phase.as_deref().map(str::parse::<VmPhase>);
        Ok(Self {
            labels: labels.transpose().map_err(|why| wrong("label", &why))?,
            phase: phase.transpose().map_err(|why| wrong("phase", &why))?,
        })
    }

    fn fits(&self, vm: &Vm) -> bool {
        let labels = self.labels.as_ref();
        labels.is_none_or(|labels| labels.selects(&vm.labels))
            && self.phase.is_none_or(|phase| phase == vm.status.phase)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_list_has_the_items_that_match_all_parameters() {
        let vm = json!({
            "name": "web", "labels": { "tier": "web" }, "spec": {}, "status": {
                "phase": "Running", "console": { "socket": "/s", "log": "/l" }, "log": "/v",
            },
        });
        let vm: Vm = serde_json::from_value(vm).unwrap();
        let query = |label: Option<&str>, phase: Option<&str>| VmQuery {
            label: label.map(str::to_owned),
            phase: phase.map(str::to_owned),
        };
        for (label, phase, fits) in [
            (None, None, true),
            (Some("tier=web"), Some("running"), true),
            (Some("tier=web"), Some("Paused"), false),
            (Some("tier=db"), Some("Running"), false),
        ] {
            let filter = Filter::of(&query(label, phase)).unwrap();
            assert_eq!(filter.fits(&vm), fits, "{label:?} {phase:?}");
        }
        for (label, phase) in [
            (Some(""), None),
            (Some("a=b c"), None),
            (None, Some("Runing")),
        ] {
            let error = Filter::of(&query(label, phase)).unwrap_err();
            assert!(matches!(error, HttpError::Parameter(_)), "{error}");
        }
    }
}
