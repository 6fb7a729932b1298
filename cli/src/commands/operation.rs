//! `bellhop operation`: long requests to the node daemon. Also follows operations for other
//! subcommands.

use std::thread;
use std::time::{Duration, Instant};

use bellhop_api::Items;
use bellhop_api::node::{Operation, OperationKind, OperationPhase, OperationResult};
use bellhop_common::client::{Node, NodeArguments, Refusal, STRANGE, path, with_query};
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use bellhop_common::text::{printable, utc};
use hyper::{Method, StatusCode};
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::units::seconds;

/// The interval of queries of an operation.
const PERIOD: Duration = Duration::from_millis(200);

/// List, show, wait for and cancel operations of the daemon
///
/// Migrations, snapshots and upgrades of VMs are operations, and so is a creation through the API
/// with `wait=false`. The daemon keeps the last 1000 that have ended.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop operation list --vm web --phase running
  bellhop operation show 1795297500123456
  bellhop operation wait 1795297500123456 --timeout 60s
  bellhop operation cancel 1795297500123456")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List operations, the oldest first
    #[command(
        visible_alias = "ls",
        after_long_help = "\
Examples:
  bellhop operation list
  bellhop operation list --kind migration --phase failed -o json"
    )]
    List(List),
    /// Show an operation, its progress and its result
    #[command(
        visible_alias = "get",
        after_long_help = "\
Examples:
  bellhop operation show 1795297500123456"
    )]
    Show(Id),
    /// Wait for the end of an operation
    #[command(after_long_help = "\
The exit code is 0 if the operation is done, and 6 after the time limit. A failed operation gives
the code of its error, and a cancelled one gives 1.

Examples:
  bellhop operation wait 1795297500123456 --timeout 10m")]
    Wait(Wait),
    /// Cancel an operation
    ///
    /// Only a migration can be cancelled, and only before the handover of the guest.
    #[command(after_long_help = "\
Examples:
  bellhop operation cancel 1795297500123456 && bellhop operation wait 1795297500123456")]
    Cancel(Id),
}

#[derive(Debug, clap::Args)]
struct List {
    /// Only this kind: migration, snapshot, upgrade or create
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,

    /// Only operations on this VM
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,

    /// Only this phase: running, done, failed or cancelled
    #[arg(long, value_name = "PHASE")]
    phase: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Id {
    /// The operation's ID
    #[arg(value_name = "ID")]
    id: String,
}

#[derive(Debug, clap::Args)]
struct Wait {
    #[command(flatten)]
    id: Id,

    /// Time limit, such as 90s or 10m; without a unit in seconds
    #[arg(
        long,
        alias = "time-limit",
        value_name = "DURATION",
        default_value_t = 3600,
        value_parser = seconds(0..=86_400)
    )]
    timeout: u32,
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let node = arguments.node.connect()?;
    carry_out(&arguments.command, &node, format)
}

fn carry_out(command: &Command, node: &Node, format: Format) -> Result<Code, Error> {
    match command {
        Command::List(List { kind, vm, phase }) => {
            let values = [("kind", kind), ("target", vm), ("phase", phase)];
            let values = values.map(|(key, value)| (key, value.clone()));
            let all: Items<Value> = node.get(&with_query("/v1/operations", values))?;
            let rows = all.items.iter().map(|one| read(one).map(|one| row(&one)));
            let rows = rows.collect::<Result<Vec<_>, _>>()?;
            format.print_table(&all.items, || table(rows))
        }
        Command::Show(Id { id }) => {
            let answer: Value = node.get(&of(id))?;
            let operation = read(&answer)?;
            format.print(&answer, || text(&operation))
        }
        Command::Wait(Wait { id, timeout }) => {
            let limit = Duration::from_secs((*timeout).into());
            let operation = follow(node, &id.id, limit, |_| ())?;
            result(operation.clone())?;
            format.print(&operation, || text(&operation))
        }
        Command::Cancel(Id { id }) => {
            node.change(Method::DELETE, &of(id))?;
            format.print_done(&json!({ "id": id, "cancelled": true }))
        }
    }
}

fn of(id: &str) -> String {
    path(["v1", "operations", id])
}

fn read(answer: &Value) -> Result<Operation, Error> {
    Operation::deserialize(answer).map_err(Error::context(STRANGE))
}

/// Begins an operation at `path`, and follows it to its end.
pub(crate) fn carry_through(
    node: &Node,
    path: &str,
    body: &impl serde::Serialize,
    begin: Duration,
    limit: Duration,
    look: impl FnMut(&Operation),
) -> Result<OperationResult, Error> {
    let (_, begun) = node.send(Method::POST, path, body, begin)?;
    result(follow(node, &read(&begun)?.id, limit, look)?)
}

/// Follows the last migration of a VM to its end.
pub(crate) fn follow_migration(
    node: &Node,
    vm: &str,
    look: impl FnMut(&Operation),
) -> Result<OperationResult, Error> {
    let query = [("kind", "migration"), ("target", vm)];
    let query = query.map(|(key, value)| (key, Some(value.to_owned())));
    let all: Items<Operation> = node.get(&with_query("/v1/operations", query))?;
    let none = || Error::not_there(format!("the daemon has no migration of {vm}"));
    let last = all.items.last().ok_or_else(none)?;
    result(follow(node, &last.id, Duration::MAX, look)?)
}

/// Follows an operation to its end or the time limit. `look` receives each state.
fn follow(
    node: &Node,
    id: &str,
    limit: Duration,
    mut look: impl FnMut(&Operation),
) -> Result<Operation, Error> {
    let start = Instant::now();
    loop {
        let operation: Operation = node.get(&of(id))?;
        look(&operation);
        if operation.phase.is_end() || start.elapsed() >= limit {
            return Ok(operation);
        }
        thread::sleep(PERIOD);
    }
}

/// The result of an operation.
fn result(operation: Operation) -> Result<OperationResult, Error> {
    let what = format!("the {} of {}", operation.kind, printable(&operation.target));
    match (operation.phase, operation.error) {
        (OperationPhase::Done, _) => Ok(operation.result.unwrap_or_default()),
        (OperationPhase::Failed, Some(body)) => {
            let status = StatusCode::from_u16(body.status);
            let refusal = Refusal {
                status: status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
                body: Box::new(body),
            };
            Err(refusal.into())
        }
        (OperationPhase::Cancelled, _) => Err(Error::failed(format!("{what} was cancelled"))),
        _ => {
            let message = format!(
                "{what} has not ended within the time limit: `bellhop operation wait {}` waits \
                 longer",
                printable(&operation.id)
            );
            Err(Error::new(ErrorKind::TimedOut, message))
        }
    }
}

fn progress(operation: &Operation) -> Option<String> {
    let progress = operation.progress.as_ref()?;
    let percent = u128::from(progress.done.min(progress.total)) * 100;
    Some(format!("{} %", percent.checked_div(progress.total.into())?))
}

fn row(operation: &Operation) -> [String; 6] {
    [
        operation.id.clone(),
        operation.kind.to_string(),
        operation.target.clone(),
        operation.phase.to_string(),
        progress(operation).unwrap_or_else(|| "-".to_owned()),
        utc(operation.created_ms / 1000),
    ]
}

/// A row for each operation.
pub(crate) fn table_of(operations: &[Operation]) -> Table {
    table(operations.iter().map(row).collect())
}

fn table(rows: Vec<[String; 6]>) -> Table {
    Table::new(["ID", "KIND", "VM", "PHASE", "PROGRESS", "BEGAN"], rows)
}

fn text(operation: &Operation) -> String {
    let Operation {
        id,
        kind,
        target,
        phase,
        ..
    } = operation;
    let mut lines = vec![
        format!("{id}: {kind} of {target}: {phase}"),
        format!("  requested by {}", operation.requested_by),
        format!("  began {}", utc(operation.created_ms / 1000)),
    ];
    let ended = operation.ended_ms.map(|ended| utc(ended / 1000));
    lines.extend(ended.map(|ended| format!("  ended {ended}")));
    if *kind == OperationKind::Migration {
        lines.extend(progress(operation).map(|done| format!("  memory copied: {done}")));
    }
    if let Some(error) = &operation.error {
        lines.push(format!("  error: {}", error.message));
        lines.extend(error.causes.iter().map(|cause| format!("    {cause}")));
    }
    let lines = lines.iter().map(|line| printable(line) + "\n");
    lines.collect()
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::FakeDaemon;
    use clap::Parser as _;
    use serde_json::json;

    use super::*;

    fn operation(phase: &str, more: &Value) -> Value {
        let mut operation = json!({
            "id": "17", "kind": "migration", "target": "web", "phase": phase,
            "progress": { "done": 30, "total": 40, "unit": "bytes" },
            "created_ms": 1_795_297_500_123_u64, "ended_ms": null,
            "requested_by": "uid 0\u{1b}", "request_id": "r", "of a later version": 1,
        });
        let fields = operation.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        operation
    }

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        format: Format,

        #[command(subcommand)]
        command: Command,
    }

    fn ran(words: &[&str], fake: &FakeDaemon) -> Result<Code, Error> {
        let line = Line::try_parse_from(std::iter::once(&"x").chain(words)).unwrap();
        carry_out(&line.command, &fake.node(), line.format)
    }

    #[test]
    fn operations_are_listed_by_filters_and_shown() {
        let one = operation("running", &json!({}));
        let fake = FakeDaemon::default().answer(200, &json!({ "items": [one] }));
        let words = ["ls", "--vm", "web&x", "--phase", "running"];
        assert_eq!(ran(&words, &fake).unwrap(), Code::Success);
        let asked = "GET /v1/operations?target=web%26x&phase=running";
        assert_eq!(fake.asked(), [asked]);
        let one = read(&one).unwrap();
        let text = table(vec![row(&one)]).draw(true);
        let line = "17  migration  web  running  75 %      2026-11-21T21:45:00Z";
        assert_eq!(text.lines().nth(1), Some(line), "{text}");
        let text = super::text(&one);
        assert!(
            text.starts_with("17: migration of web: running\n"),
            "{text}"
        );
        assert!(text.contains("  requested by uid 0?\n"), "{text}");
        let later = operation(
            "of a later version",
            &json!({ "kind": "of a later version" }),
        );
        assert_eq!(row(&read(&later).unwrap())[3], "unknown");
    }

    #[test]
    fn an_end_is_waited_for_and_decides_the_exit_code() {
        let error = json!({ "code": "not_moved", "message": "it stays", "status": 409 });
        for (phase, more, code) in [
            ("done", json!({}), None),
            ("failed", json!({ "error": error }), Some(Code::Conflict)),
            ("cancelled", json!({}), Some(Code::Failed)),
        ] {
            let fake = FakeDaemon::default()
                .answer(200, &operation("running", &json!({})))
                .answer(200, &operation(phase, &more));
            let ended = ran(&["wait", "17"], &fake);
            assert_eq!(ended.err().map(|error| error.code()), code, "{phase}");
            assert_eq!(fake.asked(), ["GET /v1/operations/17"; 2]);
        }
        let fake = FakeDaemon::default().answer(200, &operation("running", &json!({})));
        let late = ran(&["wait", "17", "--timeout", "0"], &fake).unwrap_err();
        assert_eq!(late.code(), Code::TimedOut);
        assert!(late.to_string().contains("operation wait 17"), "{late}");
    }

    #[test]
    fn a_migration_is_cancelled() {
        let fake = FakeDaemon::default().answer(202, &operation("running", &json!({})));
        assert_eq!(ran(&["cancel", "17"], &fake).unwrap(), Code::Success);
        assert_eq!(fake.asked(), ["DELETE /v1/operations/17"]);
    }
}
