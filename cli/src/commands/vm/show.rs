//! `bellhop vm show`.

use bellhop_api::machine::{IommuInfo, WatchPhase};
use bellhop_api::node::{Desired, Restart, Vm, VmNicDevice, VmPhase};
use bellhop_common::client::{Node, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::tree::{Lines, Node as Branch};
use serde::Deserialize as _;
use serde_json::{Map, Value, json};

use super::spec_patch::dotted;
use super::view::{self, uptime};
use super::{of_vm, vm};

/// Show a VM: its process, NICs with queues, disks, IOMMU, console
#[derive(Debug, clap::Args)]
#[command(visible_alias = "get", after_long_help = HELP)]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

const HELP: &str = "\
For each queue of a NIC:
  kick       doorbell: a store to the device's own page, without an exit; eventfd: inside KVM;
             exit: through the VM's process
  in flight  buffers that the device has; posted, completed: buffers per second, by the driver and
             the device
  Idle, Moving, Waiting; STUCK, DRIVERSTALLED, INCONSISTENT: the state that the ring watch reports
             (`ring_watch`)

For the guest's IOMMU:
  maps, unmaps  requests that succeeded
  change sets   changes of a domain's mappings, each for one or many requests
  refused       requests that a device or a limit refused, which Linux does not report

JSON (-o json) has the VM as the API does. Its process describes its NICs, disks and IOMMU. For a
stopped VM it has the disks of the next start.

Examples:
  bellhop vm show web
  bellhop vm show web -o json | jq '.nics[].device.queues[] | select(.kick != \"Doorbell\")'";

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let all = look(node, &arguments.name)?;
    let text = || tree(&all).draw(Lines::of_locale());
    format.print(&all.json, text)
}

/// A VM with its process's reports about its devices.
struct All {
    view: Vm,
    nics: Vec<(VmNicDevice, Value)>,
    disks: Value,
    iommu: Value,
    json: Value,
}

fn look(node: &Node, name: &str) -> Result<All, Error> {
    let (view, answer) = vm(node, name)?;
    let below = |segments: &[&str]| format!("{}{}", of_vm(name), path(segments.iter().copied()));
    let mut nics = Vec::new();
    for nic in &view.status.nic_devices {
        let details = if_it_says(node.get(&below(&["nics", &nic.id])))?;
        nics.push((nic.clone(), details));
    }
    let mut disks = if_it_says(node.get(&below(&["disks"])))?;
    let disks = disks.get_mut("items").map(Value::take).unwrap_or(disks);
    let iommu = if has_iommu(&view.spec) {
        if_it_says(node.get(&below(&["iommu"])))?
    } else {
        Value::Null
    };
    let json = json!({
        "vm": answer,
        "nics": nics.iter().map(|(_, details)| details).collect::<Vec<_>>(),
        "disks": disks,
        "iommu": iommu,
    });
    Ok(All {
        view,
        nics,
        disks,
        iommu,
        json,
    })
}

/// A VM that does not run, or is about to end, reports no devices; that is not an error.
fn if_it_says(answer: Result<Value, Error>) -> Result<Value, Error> {
    match answer {
        Err(error) if error.refusal().is_some() => Ok(Value::Null),
        answer => answer,
    }
}

/// Whether the guest has an IOMMU: its own, or one for its devices.
fn has_iommu(spec: &Map<String, Value>) -> bool {
    let lists = ["nics", "disks"].into_iter();
    let devices = lists.filter_map(|list| spec.get(list)?.as_array());
    let mut devices = devices.flatten();
    spec.get("iommu").is_some_and(|iommu| !iommu.is_null())
        || devices.any(|device| device.get("iommu") == Some(&Value::Bool(true)))
}

fn iommu_line(iommu: &IommuInfo) -> String {
    let IommuInfo {
        mappings,
        kicks,
        change_sets,
        maps,
        unmaps,
        refused,
        last_refusal,
    } = iommu;
    let mut text = format!(
        "iommu: {mappings} mappings, {maps} maps, {unmaps} unmaps, {kicks} kicks, {change_sets} \
         change sets, {refused} refused"
    );
    if let Some(last) = last_refusal {
        text.push_str(&format!("; last {last}"));
    }
    text
}

fn tree(all: &All) -> Branch {
    let (view, status) = (&all.view, &all.view.status);
    let mut children = Vec::new();
    children.push(Branch::new(process(view)));
    if let Some(why) = &status.not_ended {
        children.push(Branch::new(format!("stop pending: {why}")));
    }
    if let Some(unknown) = &status.migration_unknown {
        let remedy = Branch::new(unknown.remedy.clone());
        children.push(Branch::new(unknown.reason.clone()).with(vec![remedy]));
    }
    children.push(Branch::new(machine(&view.spec)));
    let restart: Restart = view.desired("restart").unwrap_or_default();
    let mut policy = format!("restart {restart}");
    if status.restarts > 0 {
        policy.push_str(&format!(", started again {} times", status.restarts));
    }
    if let Some(end) = &status.last_end {
        policy.push_str(&format!(", last end {}: {}", end.reason, end.detail));
    }
    children.push(Branch::new(policy));
    for (what, values) in [("labels", &view.labels), ("annotations", &view.annotations)] {
        let pairs = values.iter().map(|(key, value)| format!("{key}={value}"));
        let pairs: Vec<_> = pairs.collect();
        if !pairs.is_empty() {
            children.push(Branch::new(format!("{what} {}", pairs.join(", "))));
        }
    }
    let pending: Vec<_> = status.pending.iter().map(|field| dotted(field)).collect();
    if !pending.is_empty() {
        let pending = pending.join(", ");
        children.push(Branch::new(format!("changed at the next start: {pending}")));
    }
    if let Ok(iommu) = IommuInfo::deserialize(&all.iommu) {
        children.push(Branch::new(iommu_line(&iommu)));
    }
    for (nic, details) in &all.nics {
        children.push(nic_branch(view, nic, details));
    }
    for disk in all.disks.as_array().into_iter().flatten() {
        let state = word(disk, "state").unwrap_or_default();
        let file = word(disk, "path").unwrap_or_default();
        let id = word(disk, "id").unwrap_or_default();
        let devices = queues(disk);
        children.push(Branch::new(format!("disk {id}: {file} {state}")).with(devices));
    }
    let functions = view.spec.get("vfio").and_then(Value::as_array);
    for function in functions.into_iter().flatten().filter_map(Value::as_object) {
        let id = function.get("id").or_else(|| function.get("host"));
        let id = id.map(shown).unwrap_or_default();
        children.push(Branch::new(format!("vfio {id}: {}", as_asked(function))));
    }
    let console = &status.console;
    let (socket, log) = (console.socket.display(), console.log.display());
    children.push(Branch::new(format!("console: socket {socket}, log {log}")));
    children.push(Branch::new(format!(
        "messages: log {}",
        status.log.display()
    )));
    let state: Desired = view.desired("state").unwrap_or_default();
    let wanted = match (state, status.phase) {
        (Desired::Running, VmPhase::Running) | (Desired::Stopped, VmPhase::Stopped) => {
            String::new()
        }
        (state, _) => format!(" (to be {state})"),
    };
    Branch::new(format!("{}: {}{wanted}", view.name, status.phase)).with(children)
}

fn process(view: &Vm) -> String {
    let Some(pid) = view.status.pid else {
        return "no process".to_owned();
    };
    let mut text = format!("process {pid}");
    if let Some(version) = &view.status.version {
        text.push_str(&format!(", bellhop {version}"));
    }
    if let Some(uptime) = uptime(view) {
        text.push_str(&format!(", up {uptime}"));
    }
    if view.status.adopted {
        text.push_str(", started by an earlier daemon");
    }
    text
}

fn machine(spec: &Map<String, Value>) -> String {
    let cpus = spec.get("cpus").map(shown).unwrap_or_default();
    let memory = spec.get("memory").map(|memory| {
        let size = memory.get("size").unwrap_or(memory);
        let pages = word(memory, "hugepages").map(|size| format!(" in huge pages of {size}"));
        shown(size) + &pages.unwrap_or_default()
    });
    let kernel = spec.get("kernel").and_then(Value::as_str);
    let kernel = kernel.unwrap_or_default();
    let vcpus = if cpus == "1" { "vCPU" } else { "vCPUs" };
    format!("{cpus} {vcpus}, {}, {kernel}", memory.unwrap_or_default())
}

fn nic_branch(vm: &Vm, nic: &VmNicDevice, details: &Value) -> Branch {
    let mut text = format!("nic {}:", nic.id);
    match &nic.character_device {
        Some(path) => text.push_str(&format!(" {}", path.display())),
        None => text.push_str(" no device"),
    }
    if let Some(device) = &nic.vdpa_device {
        text.push_str(&format!(" vDPA device {device}"));
    }
    if nic.failed_over {
        text.push_str(", its backup: its own device has failed");
    } else if let Some(backup) = &nic.backup_device {
        text.push_str(&format!(", backup {}", backup.display()));
    }
    if let Some(address) = word(details, "address") {
        text.push_str(&format!(" at {address} in the guest"));
    }
    let mut children = Vec::new();
    if let Some(asked) = view::nic(vm, &nic.id) {
        children.push(Branch::new(as_asked(asked)));
    }
    let device = details.get("device").unwrap_or(&Value::Null);
    if device.get("broken") == Some(&Value::Bool(true)) {
        children.push(Branch::new("BROKEN: the guest's driver must reset it"));
    } else if device.get("driver_ok") == Some(&Value::Bool(false)) {
        children.push(Branch::new("no driver in the guest uses it"));
    }
    Branch::new(text).with(children).with(queues(details))
}

/// `from=…,bridge=…`, in the form of the option.
fn as_asked(nic: &Map<String, Value>) -> String {
    let pairs = nic.iter().filter(|(key, _)| *key != "id");
    let pairs: Vec<String> = pairs
        .map(|(key, value)| match value {
            // The backup: an existing device, or the source of a created one.
            Value::Object(one) => (key, one.values().map(shown).collect()),
            value => (key, shown(value)),
        })
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    pairs.join(",")
}

/// The queues of a device that its driver uses.
fn queues(details: &Value) -> Vec<Branch> {
    let queues = details.pointer("/device/queues").and_then(Value::as_array);
    let queues = queues.into_iter().flatten();
    let used = queues.filter(|queue| queue.get("enabled") == Some(&Value::Bool(true)));
    used.map(|queue| Branch::new(queue_line(queue))).collect()
}

fn queue_line(queue: &Value) -> String {
    let number = |key: &str| queue.get(key).map(shown).unwrap_or_default();
    let kick = word(queue, "kick").unwrap_or_default().to_lowercase();
    let mut text = format!(
        "queue {}: {} entries, kick {kick}",
        number("index"),
        number("size")
    );
    let Some(watch) = queue.get("watch").filter(|watch| !watch.is_null()) else {
        return text;
    };
    let state = word(watch, "state").unwrap_or_default();
    let is_alarm = WatchPhase::deserialize(&watch["state"]).is_ok_and(WatchPhase::is_alarm);
    text.push_str(", ");
    text.push_str(&if is_alarm {
        state.to_uppercase()
    } else {
        state.to_owned()
    });
    for (key, unit) in [
        ("in_flight", "in flight"),
        ("posted_per_s", "posted/s"),
        ("completed_per_s", "completed/s"),
    ] {
        if let Some(value) = watch.get(key).filter(|value| !value.is_null()) {
            text.push_str(&format!(", {} {unit}", shown(value)));
        }
    }
    for (key, what) in [
        ("stuck_for_s", "s without progress"),
        ("stall_kicks", "stall kicks"),
    ] {
        if let Some(value) = watch
            .get(key)
            .and_then(Value::as_u64)
            .filter(|&value| value > 0)
        {
            text.push_str(&format!(", {value} {what}"));
        }
    }
    text
}

fn word<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key)?.as_str()
}

/// A text without quotes; anything else as JSON.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

#[cfg(test)]
pub(super) fn text(node: &Node, name: &str) -> Result<String, Error> {
    Ok(tree(&look(node, name)?).draw(Lines::Boxes))
}
