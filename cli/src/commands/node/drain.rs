//! `bellhop node drain`: all VMs migrate to another node.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use bellhop_api::Items;
use bellhop_api::machine::{CONNECTIONS, DOWNTIME_MS, MigrationTrial, TIMEOUT_S};
use bellhop_api::node::{Operation, Selector, SendToNode, Vm, VmPhase};
use bellhop_common::client::{Address, MAKING, Node, STRANGE, with_query};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use bellhop_common::text::printable;
use hyper::Method;
use parking_lot::Mutex;
use serde::{Deserialize as _, Serialize};

use crate::commands::operation;
use crate::commands::vm::migrate::{Destination, Wanted, at, line};
use crate::progress::ProgressLine;

/// Migrate all VMs of this node to another node
///
/// The command first cordons the node: it accepts no new VMs. Then all VMs migrate, except stopped
/// ones. A VM that cannot migrate stays here and does not delay the others.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The command ends with a table. The exit code is 0 if all VMs have moved, and otherwise that of the
first failure. You can run it again. A migration continues if the command is interrupted. After the
maintenance, `bellhop node uncordon` makes the node accept VMs again.

Examples:
  bellhop node drain --to node2 --dry-run
  bellhop node drain --to https://node2:8443 --parallel 4
  bellhop node drain --to node2 -l tier=web")]
pub(super) struct Arguments {
    /// The other node's daemon: its name in `bellhop remote list`, https://HOST:PORT, or node:/PATH
    /// of its socket on this host
    #[arg(long, value_name = "NODE", value_parser = node)]
    to: Destination,

    /// The source of all NICs there; without it each NIC uses the source with the same name as here
    #[arg(long, value_name = "NIC")]
    from: Option<String>,

    /// Only VMs with these labels, such as tier=web,env
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<Selector>,

    /// Number of VMs that migrate at a time, 1 to 16
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u8).range(1..=16)
    )]
    parallel: u8,

    /// Only check whether the VMs can move, without cordoning the node
    #[arg(long)]
    dry_run: bool,
}

/// The daemon of a node: a process that waits takes one VM only.
fn node(text: &str) -> Result<Destination, String> {
    match text.parse::<Destination>()? {
        Destination::Endpoint(_) => Err(
            "a process there waits for one VM: give https://HOST:PORT, node:/PATH or the name of a \
             remote"
                .to_owned(),
        ),
        node => Ok(node),
    }
}

/// The result for a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Moved,
    /// It could move.
    Movable,
    /// It is stopped, and stays.
    Stopped,
    Failed,
}

#[derive(Debug, Serialize)]
struct Drained {
    name: String,
    result: Outcome,
    downtime_ms: Option<f64>,
    /// Why it stays.
    reason: Option<String>,
    #[serde(skip)]
    code: Code,
}

impl Drained {
    fn new(name: String, result: Outcome) -> Self {
        Self {
            name,
            result,
            downtime_ms: None,
            reason: None,
            code: Code::Success,
        }
    }

    fn failed(name: String, reason: String, code: Code) -> Self {
        Self {
            reason: Some(reason),
            code,
            ..Self::new(name, Outcome::Failed)
        }
    }

    fn row(&self) -> [String; 4] {
        let result = match self.result {
            Outcome::Moved => "moved",
            Outcome::Movable => "movable",
            Outcome::Stopped => "stopped",
            Outcome::Failed => "failed",
        };
        let downtime = self.downtime_ms.map(|ms| format!("{ms:.1} ms"));
        let unknown = || "-".to_owned();
        [
            self.name.clone(),
            result.to_owned(),
            downtime.unwrap_or_else(unknown),
            self.reason.clone().unwrap_or_else(unknown),
        ]
    }
}

/// Drains `node`, the daemon at `address`.
pub(super) fn execute(
    arguments: &Arguments,
    address: &Address,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let to = arguments.to.resolved(address)?.to_string();
    if !arguments.dry_run {
        // Before the list, so that no VM arrives after it.
        node.put_cordon().send()?;
    }
    let label = arguments.selector.as_ref().map(ToString::to_string);
    let all: Items<Vm> = node.get(&with_query("/v1/vms", [("label", label)]))?;
    let all = all.items.into_iter();
    let (stopped, up): (Vec<_>, Vec<_>) = all.partition(|vm| vm.status.phase == VmPhase::Stopped);
    let stopped = stopped.into_iter();
    let stopped = stopped.map(|vm| Drained::new(vm.name, Outcome::Stopped));
    let done: Mutex<Vec<Drained>> = Mutex::new(stopped.collect());
    let waiting = Mutex::new(up.into_iter());
    let work = || {
        loop {
            let Some(vm) = waiting.lock().next() else {
                return;
            };
            let drained = drain(arguments, &to, vm.name, node, format);
            done.lock().push(drained);
        }
    };
    thread::scope(|scope| {
        for _ in 0..arguments.parallel {
            scope.spawn(work);
        }
    });
    let mut done: Vec<Drained> = done.into_inner();
    done.sort_by(|one, other| one.name.cmp(&other.name));
    let heading = ["NAME", "RESULT", "DOWNTIME", "REASON"];
    format.print_table(&done, || Table::new(heading, done.iter().map(Drained::row)))?;
    let mut codes = done.iter().map(|one| one.code);
    let failure = codes.find(|code| *code != Code::Success);
    Ok(failure.unwrap_or(Code::Success))
}

/// Migrates one VM, or asks whether it could.
fn drain(arguments: &Arguments, to: &str, name: String, node: &Node, format: Format) -> Drained {
    let say = |what: &str| {
        if format.is_text() {
            eprintln!("{}: {}", printable(&name), printable(what));
        }
    };
    let wanted = SendToNode {
        destination: to.to_owned(),
        name: None,
        from: arguments.from.clone(),
        vfio: BTreeMap::new(),
        downtime_ms: DOWNTIME_MS,
        timeout_s: TIMEOUT_S,
        connections: CONNECTIONS,
        verify_memory: false,
        dry_run: arguments.dry_run,
    };
    let wanted = Wanted::Send(wanted);
    if arguments.dry_run {
        return match ask(node, &at(&name), &wanted) {
            Ok(trial) if trial.movable => Drained::new(name, Outcome::Movable),
            Ok(trial) => {
                let obstacles = trial.obstacles.into_iter();
                let reasons: Vec<String> = obstacles.map(|one| one.reason).collect();
                Drained::failed(name, reasons.join("; "), Code::Failed)
            }
            Err(error) => Drained::failed(name, error.to_string(), error.code()),
        };
    }
    say("migrates");
    let mut progress = format.is_text().then(ProgressLine::of_several);
    let look = |operation: &Operation| {
        let state = operation.result.as_ref();
        let status = state.and_then(|state| state.migration.as_ref());
        if let (Some(status), Some(progress)) = (status, &mut progress) {
            progress.show(line(&name, status));
        }
    };
    let moved = operation::carry_through(node, &at(&name), &wanted, MAKING, Duration::MAX, look);
    match moved {
        Ok(result) => {
            say("moved");
            let status = result.migration;
            Drained {
                downtime_ms: status.and_then(|status| status.downtime_ms),
                ..Drained::new(name, Outcome::Moved)
            }
        }
        Err(error) => {
            say(&format!("stays: {error}"));
            Drained::failed(name, error.to_string(), error.code())
        }
    }
}

fn ask(node: &Node, at: &str, wanted: &impl Serialize) -> Result<MigrationTrial, Error> {
    let (_, answer) = node.send(Method::POST, at, wanted, MAKING)?;
    MigrationTrial::deserialize(answer).map_err(Error::context(STRANGE))
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::Remote;
    use bellhop_common::client::fake::{self, FakeDaemon};
    use clap::Parser as _;
    use serde_json::{Value, json};

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn ran(words: &[&str], fake: &FakeDaemon) -> Result<Code, Error> {
        let line = ["x", "--to", "https://b:1"];
        let arguments = Line::try_parse_from(line.iter().chain(words))
            .unwrap()
            .arguments;
        let here = Remote::local().address;
        execute(&arguments, &here, &fake.node(), Format::default())
    }

    fn vms() -> Value {
        let vm = |name: &str, phase: &str| {
            fake::vm(&json!({ "name": name, "status": { "phase": phase } }))
        };
        json!({ "items": [vm("a", "Running"), vm("b", "Stopped"), vm("c", "Paused")] })
    }

    fn migration(phase: &str, more: &Value) -> Value {
        let mut operation = json!({
            "id": "17", "kind": "migration", "target": "a", "phase": phase, "created_ms": 1,
            "requested_by": "uid 0", "request_id": "r",
        });
        let fields = operation.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        operation
    }

    #[test]
    fn a_vm_that_stays_does_not_keep_the_others() {
        let failed =
            json!({ "error": { "code": "not_moved", "message": "it stays", "status": 502 } });
        let fake = FakeDaemon::default()
            .answer(204, &Value::Null)
            .answer(200, &vms())
            .answer(202, &migration("running", &json!({})))
            .answer(200, &migration("failed", &failed))
            .answer(202, &migration("running", &json!({})))
            .answer(200, &migration("done", &json!({})));
        assert_eq!(ran(&["-l", "env"], &fake).unwrap(), Code::Failed);
        let asked = fake.asked();
        assert_eq!(asked[0], "PUT /v1/cordon");
        assert_eq!(asked[1], "GET /v1/vms?label=env");
        let to = r#"/migration {"send":{"destination":"https://b:1""#;
        assert!(
            asked[2].starts_with(&format!("POST /v1/vms/a{to}")),
            "{asked:?}"
        );
        assert!(
            asked[4].starts_with(&format!("POST /v1/vms/c{to}")),
            "{asked:?}"
        );
        assert_eq!(asked.len(), 6);
    }

    #[test]
    fn a_dry_run_changes_nothing() {
        let trial = |movable: bool| {
            let obstacles = json!([{ "reason": "no kernel", "remedy": null }]);
            json!({ "destination": "https://b:1", "movable": movable,
                "obstacles": if movable { json!([]) } else { obstacles } })
        };
        for (movable, code) in [(true, Code::Success), (false, Code::Failed)] {
            let fake = FakeDaemon::default()
                .answer(200, &vms())
                .answer(200, &trial(true))
                .answer(200, &trial(movable));
            assert_eq!(ran(&["--dry-run", "--parallel", "2"], &fake).unwrap(), code);
            let asked = fake.asked();
            assert_eq!(asked.len(), 3, "{asked:?}");
            let trials = asked.iter().skip(1);
            assert!(trials.clone().all(|one| one.contains(r#""dry_run":true"#)));
        }
        for bad in ["--parallel=0", "--parallel=17"] {
            assert!(Line::try_parse_from(["x", "--to", "https://b:1", bad]).is_err());
        }
    }

    #[test]
    fn the_destination_is_a_node_by_name_or_address() {
        for (to, node) in [
            ("local", "node:/run/bellhop/node.socket"),
            ("node:/run/b/node.socket", "node:/run/b/node.socket"),
        ] {
            let trial = json!({ "destination": node, "movable": true, "obstacles": [] });
            let fake = FakeDaemon::default()
                .answer(200, &vms())
                .answer(200, &trial)
                .answer(200, &trial);
            let line = ["x", "--dry-run", "--to", to];
            let arguments = Line::try_parse_from(line).unwrap().arguments;
            let here = Remote::local().address;
            execute(&arguments, &here, &fake.node(), Format::default()).unwrap();
            let wanted = format!(r#""destination":"{node}""#);
            assert!(fake.asked()[1].contains(&wanted), "{to}");
            // Nothing is asked of a daemon that cannot reach it.
            if to == "local" {
                let far = "https://b:1".parse().unwrap();
                let fake = FakeDaemon::default();
                execute(&arguments, &far, &fake.node(), Format::default()).unwrap_err();
                assert!(fake.asked().is_empty());
            }
        }
        for bad in ["tcp:b:7444", "unix:/run/b.move", "http://b:1", ""] {
            assert!(Line::try_parse_from(["x", "--to", bad]).is_err(), "{bad}");
        }
    }
}
