//! `/v1/vms`: all virtual machines, and how one is shown.

use std::path::PathBuf;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::Api;
use crate::node::context::Node;
use crate::node::machines::View;
use crate::node::machines::departure::{Departure, remedy};
use crate::node::machines::record::{LastEnd, Phase, Record};
use crate::node::machines::spec::{Desired, NicSpec, Restart, VmName};
use crate::node::machines::vmm::VmmState;

/// What a virtual machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub(super) enum VmPhase {
    /// It is being made.
    Creating,
    /// It is to run, and does not yet.
    Starting,
    /// Its process waits for it to come from another node, or it is on its way.
    Receiving,
    /// Its vCPUs run.
    Running,
    /// Its vCPUs are parked.
    Paused,
    /// It has no process.
    Stopped,
    /// It has no process, was being sent elsewhere when that ended, and its guest may run there: nobody starts it until somebody
    /// says where the guest is.
    MayBeElsewhere,
    /// It has a process that does not say what it does, or in words of another version.
    Unknown,
    /// It is being taken away, or what is left of it is.
    Deleting,
}

/// A NIC of a virtual machine.
#[derive(Debug, Serialize, ToSchema)]
struct VmNic {
    /// Its name.
    id: String,
    /// The vDPA device that was made for it, and that it is on.
    device: Option<String>,
    /// The character device that it is on, if there is one now.
    #[schema(value_type = Option<String>)]
    path: Option<PathBuf>,
    /// The character device that stands by for that one, if there is one now.
    #[schema(value_type = Option<String>)]
    failover: Option<PathBuf>,
    /// Whether it is on the device that stood by, until it is moved back, or the machine was stopped.
    failed_over: bool,
}

impl VmNic {
    fn new(node: &Node, vm: &VmName, record: &Record, nic: &NicSpec) -> Self {
        let failed_over = record.is_on_stand_by(nic.id());
        let now = record.nic_now(vm, nic);
        let stand_by = now.on_stand_by(vm);
        let device = |nic| node.machines.character_device(vm, nic);
        Self {
            id: nic.id().to_string(),
            device: record.made(nic.id(), failed_over).map(str::to_owned),
            path: device(&now),
            failover: stand_by.as_ref().and_then(device),
            failed_over,
        }
    }
}

/// Where a virtual machine's console is.
#[derive(Debug, Serialize, ToSchema)]
struct ConsolePaths {
    /// The Unix socket on which one client at a time reads and writes; it is there while the machine has a process.
    #[schema(value_type = String)]
    socket: PathBuf,
    /// What the guest has written.
    #[schema(value_type = String)]
    log: PathBuf,
}

/// Why a virtual machine may be elsewhere.
#[derive(Debug, Serialize, ToSchema)]
struct MayBeElsewhere {
    /// Where it was being sent.
    destination: String,
    /// What is known, in a sentence.
    reason: String,
    /// What somebody has to do, in a sentence.
    remedy: String,
}

impl MayBeElsewhere {
    fn new(vm: &VmName, departure: &Departure) -> Self {
        Self {
            destination: departure.destination.clone(),
            reason: departure.reason(),
            remedy: remedy(vm.as_str()),
        }
    }
}

/// A virtual machine at one moment.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct VmInfo {
    /// Its name.
    #[schema(value_type = String)]
    name: VmName,
    /// What it does.
    phase: VmPhase,
    /// What it is to do.
    state: Desired,
    /// What happens when it ends by itself.
    restart: Restart,
    /// The process that runs it.
    pid: Option<u32>,
    /// How long that process has run, in seconds.
    uptime_s: Option<u64>,
    /// The version of Bellhop that runs it.
    version: Option<String>,
    /// The level of that one's API.
    api: Option<u32>,
    /// Whether an earlier daemon has started its process.
    adopted: bool,
    /// How often it was started again by its restart policy.
    restarts: u64,
    /// How it ended the last time.
    last_end: Option<LastEnd>,
    /// Why it is not started, in the phase MayBeElsewhere; null in all others.
    #[schema(required)]
    may_be_elsewhere: Option<MayBeElsewhere>,
    /// Its NICs.
    nics: Vec<VmNic>,
    /// Its serial console.
    console: ConsolePaths,
    /// What its process has to say.
    #[schema(value_type = String)]
    log: PathBuf,
}

impl VmInfo {
    /// None: there is no such machine any more.
    pub(super) fn new(node: &Node, name: &VmName, view: View) -> Option<Self> {
        let record = view.record?;
        let live = view.live;
        let nics = record.spec.nics().iter();
        let nics = nics.map(|nic| VmNic::new(node, name, &record, nic));
        let process = record.process();
        Some(Self {
            name: name.clone(),
            phase: phase(&record, live.as_ref().map(|live| (live.api, live.state))),
            state: record.spec.state,
            restart: record.spec.restart,
            pid: process.and_then(|(identity, _)| Some(identity?.pid)),
            uptime_s: process.and_then(|(identity, _)| Some(identity?.age_s())),
            version: live.as_ref().and_then(|live| live.version.clone()),
            api: live.as_ref().and_then(|live| live.api),
            adopted: live.as_ref().is_some_and(|live| live.adopted),
            restarts: record.restarts,
            nics: nics.collect(),
            console: ConsolePaths {
                socket: node.paths.console_socket(name),
                log: node.paths.console_log(name),
            },
            log: node.paths.log(name),
            may_be_elsewhere: record
                .may_be_elsewhere()
                .map(|departure| MayBeElsewhere::new(name, departure)),
            last_end: record.last_end,
        })
    }
}

fn phase(record: &Record, live: Option<(Option<u32>, Option<VmmState>)>) -> VmPhase {
    match (record.phase, record.process(), live) {
        (Phase::Creating, ..) => VmPhase::Creating,
        (Phase::Deleting, ..) => VmPhase::Deleting,
        (Phase::Present, None, _) if record.departure.is_some() => VmPhase::MayBeElsewhere,
        (Phase::Present, None, _) if record.spec.state == Desired::Running => VmPhase::Starting,
        (Phase::Present, None, _) => VmPhase::Stopped,
        (Phase::Present, Some(_), _) if record.arrival.is_some() => VmPhase::Receiving,
        (Phase::Present, Some(_), None) => VmPhase::Starting,
        (Phase::Present, Some(_), Some((_, Some(state)))) => match state {
            VmmState::NotStarted | VmmState::Starting => VmPhase::Starting,
            VmmState::Running => VmPhase::Running,
            VmmState::Paused => VmPhase::Paused,
            VmmState::Stopped => VmPhase::Stopped,
        },
        // It has not been asked yet.
        (Phase::Present, Some(_), Some((None, None))) => VmPhase::Starting,
        (Phase::Present, Some(_), Some((Some(_), None))) => VmPhase::Unknown,
    }
}

/// All virtual machines, by name
#[utoipa::path(get, path = "/v1/vms", operation_id = "list_vms", responses(
    (status = 200, description = "All virtual machines", body = Vec<VmInfo>),
))]
pub(super) async fn list(State(node): Api) -> Json<Vec<VmInfo>> {
    let all = node.machines.list().into_iter();
    let all = all.filter_map(|(name, view)| VmInfo::new(&node, &name, view));
    Json(all.collect())
}
