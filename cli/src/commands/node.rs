//! `bellhop node`: the node as a whole.

mod drain;
mod proxy;

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::thread;
use std::time::{Duration, Instant};

use bellhop_api::Items;
use bellhop_api::machine::WantedState;
use bellhop_api::node::{AfterGrace, GRACE_PERIOD_MAX_S, Vm, VmPhase, VmStateChange};
use bellhop_common::client::{MAKING, Node, NodeArguments, path};
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use super::vm::until;
use crate::units::seconds;

/// The time limit for VMs that the daemon ends after the guests' time limit.
const ENDING: Duration = Duration::from_secs(30);

/// Manage this node as a whole
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop node drain --to node2
  bellhop node uncordon
  bellhop node shutdown-guests --timeout 5m")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Drain(drain::Arguments),
    /// Stop placing new VMs on this node
    ///
    /// The daemon refuses to create VMs and to receive them from other nodes, also after its
    /// restart. Existing VMs are not affected. `bellhop version` shows whether the node is
    /// cordoned.
    #[command(after_long_help = "\
Examples:
  bellhop node cordon")]
    Cordon,
    /// Accept new VMs on this node again
    #[command(after_long_help = "\
Examples:
  bellhop node uncordon")]
    Uncordon,
    ShutdownGuests(ShutdownGuests),
    /// Connect standard input and output to the daemon's socket
    #[command(hide = true)]
    Proxy,
}

/// Power off the guests of all VMs before the host shuts down
///
/// The daemon sends the request to all guests at once. It ends VMs whose guests have not powered
/// off within the time limit. After the next boot of the host, VMs that should run start again.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The unit bellhop-guests.service runs this command when the host shuts down. Until the next boot no
restart policy starts a VM. `bellhop vm start` starts one that you need earlier. The daemon ends a
paused VM at once, because its guest cannot power off.

Examples:
  bellhop node shutdown-guests
  bellhop node shutdown-guests --timeout 5m")]
struct ShutdownGuests {
    /// Time limit for the guests, such as 90s or 10m; without a unit in seconds
    #[arg(
        long,
        alias = "time-limit",
        value_name = "DURATION",
        default_value_t = 120,
        value_parser = seconds(1..=GRACE_PERIOD_MAX_S)
    )]
    timeout: u32,
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let which = arguments.node.resolved()?;
    match &arguments.command {
        Command::Drain(arguments) => {
            drain::execute(arguments, which.address(), &which.connect()?, format)
        }
        Command::Cordon => {
            which.connect()?.put_cordon().send()?;
            format.print_done(&json!({ "cordoned": true }))
        }
        Command::Uncordon => {
            which.connect()?.delete_cordon().send()?;
            format.print_done(&json!({ "cordoned": false }))
        }
        Command::ShutdownGuests(arguments) => {
            shut_down(&which.connect()?, arguments.timeout, format)
        }
        Command::Proxy => proxy::execute(which.address()),
    }
}

fn shut_down(node: &Node, limit: u32, format: Format) -> Result<Code, Error> {
    let start = Instant::now();
    let mut waiting = Vec::new();
    // Whether each VM is off.
    let mut off = BTreeMap::new();
    let say = |name: &str, what: &str| {
        if format.is_text() {
            say(name, what);
        }
    };
    for (name, asked) in ask(node, limit)? {
        match asked {
            Ok(true) => {
                say(&name, "asked to power off");
                waiting.push(name);
            }
            Ok(false) => {
                say(&name, "stopped");
                off.insert(name, true);
            }
            // It was deleted meanwhile.
            Err(error) if error.code() == Code::NotThere => {}
            Err(error) => {
                say(&name, "cannot stop it");
                error.in_words().print();
                off.insert(name, false);
            }
        }
    }
    let limit = Duration::from_secs(limit.into());
    let mut is_over = false;
    until(limit.saturating_add(ENDING), || {
        let all: Items<Vm> = node.get("/v1/vms")?;
        let elapsed = start.elapsed();
        if elapsed >= limit && !is_over {
            is_over = true;
            for name in &waiting {
                say(name, "has not powered off in time; the daemon ends it");
            }
        }
        waiting.retain(|name| {
            let now = all.items.iter().find(|vm| vm.name == *name);
            let runs = now.is_some_and(|vm| vm.status.pid.is_some());
            if !runs {
                say(name, &format!("off ({} s)", elapsed.as_secs()));
                off.insert(name.clone(), true);
            }
            runs
        });
        Ok(waiting.is_empty().then_some(()))
    })?;
    let failed = off.values().any(|off| !off);
    off.extend(waiting.iter().map(|name| (name.clone(), false)));
    let states = off.iter();
    let states = states.map(|(name, off)| json!({ "name": name, "off": off }));
    format.print_done(&states.collect::<Vec<Value>>())?;
    if !waiting.is_empty() {
        let message = format!(
            "these VMs are still running: {}",
            printable(&waiting.join(", "))
        );
        let hint = "`bellhop vm stop --force NAME` ends one";
        return Err(Error::new(ErrorKind::TimedOut, message).hint(hint));
    }
    Ok(if failed { Code::Failed } else { Code::Success })
}

/// A VM, and whether its guest was requested to power off; otherwise it is stopped.
type Asked = (String, Result<bool, Error>);

/// Requests the guests of all running VMs to power off, at once: one that does not answer delays no
/// other.
fn ask(node: &Node, limit: u32) -> Result<Vec<Asked>, Error> {
    let all: Items<Vm> = node.get("/v1/vms")?;
    let change = VmStateChange {
        grace_period_s: Some(limit),
        then: Some(AfterGrace::Hard),
        until_reboot: true,
        ..WantedState::Stopped.into()
    };
    let stop = |name: &str| {
        let at = format!("{}?wait=false", path(["v1", "vms", name, "state"]));
        let answer = node.send(Method::PUT, &at, &change, MAKING);
        answer.map(|(status, _)| status == StatusCode::ACCEPTED)
    };
    let is_up = |vm: &Vm| vm.status.pid.is_some() || vm.status.phase == VmPhase::Starting;
    Ok(thread::scope(|scope| {
        let up = all.items.into_iter().filter(is_up);
        let asked: Vec<_> = up
            .map(|vm| {
                let name = vm.name.clone();
                (vm.name, scope.spawn(move || stop(&name)))
            })
            .collect();
        let join = |(name, asked): (String, thread::ScopedJoinHandle<'_, _>)| {
            let died = |_| Err(Error::failed("the request was not finished"));
            (name, asked.join().unwrap_or_else(died))
        };
        asked.into_iter().map(join).collect()
    }))
}

/// Reports the result of a VM. A closed pipe must not stop the shutdown.
fn say(name: &str, what: &str) {
    let _ = writeln!(io::stdout(), "{}: {what}", printable(name));
}

#[cfg(test)]
mod tests {
    use super::*;
    use bellhop_common::client::fake::{self, FakeDaemon};

    const REQUEST: &str =
        r#"{"state":"Stopped","grace_period_s":1,"then":"hard","until_reboot":true}"#;

    fn vm(name: &str, pid: Option<u32>, phase: &str) -> Value {
        fake::vm(&json!({"name": name, "status": {"pid": pid, "phase": phase}}))
    }

    #[test]
    fn all_guests_are_asked_and_waited_for() {
        let [a, b] = [vm("a", Some(7), "Running"), vm("b", Some(8), "Paused")];
        let c = vm("c", None, "Starting");
        let d = vm("d", None, "Stopped");
        let off = |name| vm(name, None, "Stopped");
        let fake = FakeDaemon::default()
            .answer(200, &json!({"items": [a, b, c, d]}))
            .answer(202, &a)
            .answer(202, &b)
            .answer(202, &c)
            .answer(200, &json!({"items": [a, b, off("c"), d]}))
            .answer(200, &json!({"items": [off("a"), d]}));
        assert_eq!(
            shut_down(&fake.node(), 1, Format::default()).unwrap(),
            Code::Success
        );
        let asked = fake.asked();
        assert_eq!(asked.len(), 6);
        for name in ["a", "b", "c"] {
            let request = format!("PUT /v1/vms/{name}/state?wait=false {REQUEST}");
            assert!(asked[1..4].contains(&request), "{asked:?}");
        }
    }

    #[test]
    fn a_vm_that_cannot_be_stopped_does_not_keep_the_others() {
        let a = vm("a", Some(7), "Receiving");
        let refusal = json!({"code": "arriving", "message": "no", "causes": [], "request_id": "1"});
        let fake = FakeDaemon::default()
            .answer(200, &json!({"items": [a]}))
            .answer(409, &refusal)
            .answer(200, &json!({"items": [a]}));
        assert_eq!(
            shut_down(&fake.node(), 1, Format::default()).unwrap(),
            Code::Failed
        );
    }
}
