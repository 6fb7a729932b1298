//! `/v1/vms`: all virtual machines, and how one is shown.

use axum::Json;
use axum::extract::State;
use bellhop_api::Items;
use bellhop_api::machine::VmState;
use bellhop_api::node::{ConsolePaths, MayBeElsewhere, VmInfo, VmNic, VmPhase};

use super::state::Api;
use crate::context::Node;
use crate::machines::View;
use crate::machines::departure::remedy;
use crate::machines::record::{Phase, Record};
use crate::machines::spec::{NicSpec, VmName};

fn nic_info(node: &Node, vm: &VmName, record: &Record, nic: &NicSpec) -> VmNic {
    let failed_over = record.is_on_stand_by(nic.id());
    let now = record.nic_now(vm, nic);
    let stand_by = now.on_stand_by(vm);
    let device = |nic| node.machines.character_device_of(vm, nic).ok();
    VmNic {
        id: nic.id().to_string(),
        device: record.made(nic.id(), failed_over).map(str::to_owned),
        path: device(&now),
        failover: stand_by.as_ref().and_then(device),
        mac: nic.mac(),
        failed_over,
    }
}

/// None: there is no such machine any more.
pub(super) fn info(node: &Node, name: &VmName, view: View) -> Option<VmInfo> {
    let record = view.record?;
    let live = view.live;
    let nics = record.spec.nics().iter();
    let nics = nics.map(|nic| nic_info(node, name, &record, nic));
    let process = record.process();
    let phase = if live.as_ref().is_some_and(|live| live.is_stopping()) {
        VmPhase::Stopping
    } else {
        phase(&record, live.as_ref().map(|live| (live.api, live.state)))
    };
    let said = live.as_ref().and_then(|live| live.said.as_ref());
    let alarms = said.into_iter().flat_map(|said| &said.alarms);
    Some(VmInfo {
        name: name.to_string(),
        generation: record.generation,
        phase,
        state: record.spec.state,
        restart: record.spec.restart,
        pid: process.and_then(|(identity, _)| Some(identity?.pid)),
        uptime_s: process.and_then(|(identity, _)| Some(identity?.age_s())),
        version: live.as_ref().and_then(|live| live.version.clone()),
        api: live.as_ref().and_then(|live| live.api),
        adopted: live.as_ref().is_some_and(|live| live.adopted),
        vcpus: record.spec.machine().cpus,
        memory: record.spec.machine().memory.size,
        restarts: record.restarts,
        nics: nics.collect(),
        alarms: alarms.cloned().collect(),
        console: ConsolePaths {
            socket: node.paths.console_socket(name),
            log: node.paths.console_log(name),
        },
        log: node.paths.log(name),
        may_be_elsewhere: record.may_be_elsewhere().map(|departure| MayBeElsewhere {
            destination: departure.destination.clone(),
            reason: departure.reason(),
            remedy: remedy(name.as_str()),
        }),
        last_end: record.last_end,
    })
}

fn phase(record: &Record, live: Option<(Option<u32>, Option<VmState>)>) -> VmPhase {
    match (record.phase, record.process(), live) {
        (Phase::Creating, ..) => VmPhase::Creating,
        (Phase::Deleting, ..) => VmPhase::Deleting,
        (Phase::Present, None, _) if record.departure.is_some() => VmPhase::MayBeElsewhere,
        (Phase::Present, None, _) if record.is_on() => VmPhase::Starting,
        (Phase::Present, None, _) => VmPhase::Stopped,
        (Phase::Present, Some(_), _) if record.arrival.is_some() => VmPhase::Receiving,
        (Phase::Present, Some(_), None) => VmPhase::Starting,
        (Phase::Present, Some(_), Some((_, Some(state)))) => match state {
            VmState::NotStarted | VmState::Starting => VmPhase::Starting,
            VmState::Running => VmPhase::Running,
            VmState::Paused => VmPhase::Paused,
            VmState::Stopped => VmPhase::Stopped,
        },
        // It has not been asked yet.
        (Phase::Present, Some(_), Some((None, None))) => VmPhase::Starting,
        (Phase::Present, Some(_), Some((Some(_), None))) => VmPhase::Unknown,
    }
}

/// List virtual machines
///
/// By name, with their state.
#[utoipa::path(get, path = "/v1/vms", operation_id = "list_vms", responses(
    (status = 200, description = "All virtual machines", body = Items<VmInfo>),
))]
pub(super) async fn list(State(node): Api) -> Json<Items<VmInfo>> {
    let all = node.machines.list().into_iter();
    let all = all.filter_map(|(name, view)| info(&node, &name, view));
    Json(all.collect())
}
