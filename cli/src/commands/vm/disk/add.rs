//! `bellhop vm disk add`.

use bellhop_api::Items;
use bellhop_common::client::{Address, MAKING, Node, NodeArguments, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;
use serde_json::Value;
use vmm::config::DiskConfig;

use crate::commands::vm::arguments::{absolute, free_id};

/// Add a disk to a VM, also while it runs
///
/// The guest of a running VM finds it by itself. For a stopped VM, the daemon only checks the
/// image.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
OPTIONS are those of `bellhop vm create --disk`:
  path=FILE      the image, raw: a regular file or a block device; it has one writer, or any
                 number of readers
  id=NAME        its name, up to 20 characters, which the guest sees as its serial number
                 (default: the first free one of disk0, disk1, …)
  readonly=on    the guest cannot write
  iommu=on       the guest's IOMMU decides which memory the disk reaches
  stall_kick=on      if a queue hangs, kick it and interrupt the guest's driver once
  bps=SIZE       the most bytes that the guest may read and write in a second, such as 100M
  iops=N         the most requests in a second
  burst=SECONDS  for how long unused bytes and requests are saved up (default: 1)
The command prints the id.

Examples:
  bellhop vm disk add web path=/var/lib/images/data.img
  bellhop vm disk add web path=/dev/vg0/logs,id=logs
  bellhop vm disk add web path=tools.img,id=tools,readonly=on")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    vm: String,

    /// The image, and its settings
    #[arg(value_name = "OPTIONS")]
    disk: DiskConfig,
}

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let (id, answer) = add(arguments, which.address(), node)?;
    format.print(&answer, || format!("{}\n", printable(&id)))
}

fn add(arguments: &Arguments, at: &Address, node: &Node) -> Result<(String, Value), Error> {
    let all = ["v1", "vms", arguments.vm.as_str(), "disks"];
    let mut disk = arguments.disk.clone();
    disk.path = absolute(&disk.path, at)?;
    let id = match &disk.id {
        Some(id) => id.clone(),
        None => {
            let there: Items<Value> = node.get(&path(all))?;
            let taken = there
                .items
                .iter()
                .filter_map(|disk| Some(disk.get("id")?.as_str()?.to_owned()));
            free_id("disk", &taken.collect::<Vec<_>>())
        }
    };
    disk.id = Some(id.clone());
    let one = path(all.into_iter().chain([id.as_str()]));
    let (_, answer) = node.send(Method::PUT, &one, &disk, MAKING)?;
    Ok((id, answer))
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::FakeDaemon;
    use clap::Parser;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn a_disk_has_its_id_or_the_first_that_is_free() {
        let node: Address = "/run/bellhop/node.socket".parse().unwrap();
        let there = json!({ "items": [{ "id": "disk0" }, { "id": "data" }] });
        for (options, taken, wanted) in [
            ("path=/a.img", true, "disk1"),
            ("path=/a.img,id=data", false, "data"),
        ] {
            let line = Line::try_parse_from(["add", "web", options]).unwrap();
            let mut fake = FakeDaemon::default();
            if taken {
                fake = fake.answer(200, &there);
            }
            let fake = fake.answer(201, &json!({}));
            let (id, _) = add(&line.arguments, &node, &fake.node()).unwrap();
            assert_eq!(id, wanted);
            let body =
                json!({ "path": "/a.img", "id": id, "readonly": false, "stall_kick": false });
            let asked = fake.asked();
            let put = asked.last().unwrap();
            let (head, sent) = put.split_once(" {").unwrap();
            assert_eq!(head, format!("PUT /v1/vms/web/disks/{wanted}"));
            let sent: Value = serde_json::from_str(&format!("{{{sent}")).unwrap();
            assert_eq!(sent, body);
        }
    }

    #[test]
    fn invalid_disks_are_refused_at_once() {
        for bad in [
            "",
            "/a,path",
            "id=a",
            "path=/a,what=1",
            "path=/a,readonly=x",
        ] {
            Line::try_parse_from(["add", "web", bad]).unwrap_err();
        }
    }
}
