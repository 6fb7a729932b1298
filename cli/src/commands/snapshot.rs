//! `bellhop snapshot`: the snapshots of VMs that the node daemon keeps.

use bellhop_api::node::Snapshot;
use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use bellhop_common::text::utc;
use serde_json::json;

use super::vm::each;
use crate::confirm::Confirmation;

/// List and delete snapshots of VMs
///
/// `bellhop vm snapshot` writes one and `bellhop vm restore` creates a VM that continues from it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm snapshot web before-the-update
  bellhop snapshot list
  bellhop vm restore web before-the-update
  bellhop snapshot delete before-the-update")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List snapshots
    #[command(
        visible_alias = "ls",
        after_long_help = "\
Columns:
  SIZE    on the disk
  FORMAT  the version of its format; - while it is being written, or if it is damaged
  PATH    with -o wide: its directory on the node, for `bellhop run --restore`

Examples:
  bellhop snapshot list
  bellhop snapshot list -o json"
    )]
    List,
    /// Delete snapshots
    ///
    /// VMs that were restored from them are not affected.
    #[command(
        visible_aliases = ["rm", "remove"],
        after_long_help = "\
Examples:
  bellhop snapshot delete before-the-update"
    )]
    Delete(Delete),
}

#[derive(Debug, clap::Args)]
struct Delete {
    /// The snapshots
    #[arg(value_name = "SNAPSHOT", required = true)]
    names: Vec<String>,

    #[command(flatten)]
    confirmation: Confirmation,
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let node = arguments.node.connect()?;
    carry_out(&arguments.command, &node, format)
}

fn carry_out(command: &Command, node: &Node, format: Format) -> Result<Code, Error> {
    match command {
        Command::List => {
            let all = node.list_snapshots().send()?.items;
            format.print_table(&all, || table(&all))
        }
        Command::Delete(Delete {
            names,
            confirmation,
        }) => {
            let list = names.join(", ");
            confirmation.ask(format!("Delete the snapshots {list}?"))?;
            each(names, |name| {
                node.delete_snapshot(name).send()?;
                format.print_done(&json!({ "name": name, "deleted": true }))
            })
        }
    }
}

fn table(snapshots: &[Snapshot]) -> Table {
    let unknown = || "-".to_owned();
    let rows = snapshots.iter().map(|one| {
        let Snapshot {
            name,
            vm,
            created_ms,
            bytes,
            format,
            path,
        } = one;
        [
            name.to_string(),
            vm.clone().unwrap_or_else(unknown),
            created_ms.map_or_else(unknown, |ms| utc(ms / 1000)),
            format!("{} MiB", bytes >> 20),
            format.map_or_else(unknown, |format| format.to_string()),
            path.to_string_lossy().into_owned(),
        ]
    });
    Table::new(["NAME", "VM", "TIME", "SIZE", "FORMAT", "PATH"], rows).with_wide(1)
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::FakeDaemon;
    use clap::Parser as _;

    use super::*;

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
    fn snapshots_are_listed_and_deleted() {
        let one = json!({ "name": "a", "vm": "web", "created_ms": 1_795_297_500_123_u64,
            "bytes": 3 << 20, "format": 3, "path": "/s/a", "of a later version": 1 });
        let damaged = json!({ "name": "b", "vm": null, "created_ms": null, "bytes": 0,
            "format": null, "path": "/s/b" });
        let fake = FakeDaemon::default().answer(200, &json!({ "items": [one, damaged] }));
        assert_eq!(ran(&["ls"], &fake).unwrap(), Code::Success);
        assert_eq!(fake.asked(), ["GET /v1/snapshots"]);
        let read = |value| serde_json::from_value(value).unwrap();
        let text = table(&[read(one), read(damaged)]).draw(true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1],
            "a     web  2026-11-21T21:45:00Z  3 MiB  3       /s/a"
        );
        assert_eq!(
            lines[2],
            "b     -    -                     0 MiB  -       /s/b"
        );

        let refusal = json!({ "code": "no_such_snapshot", "message": "no" });
        let fake = FakeDaemon::default()
            .answer(404, &refusal)
            .answer(204, &serde_json::Value::Null);
        assert_eq!(ran(&["rm", "a", "b"], &fake).unwrap(), Code::NotThere);
        let asked = ["DELETE /v1/snapshots/a", "DELETE /v1/snapshots/b"];
        assert_eq!(fake.asked(), asked);
    }
}
