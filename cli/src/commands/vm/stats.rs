//! `bellhop vm stats`: the counters of the queues of a VM's NICs.

use bellhop_api::machine::{NicInfo, QueueInfo};
use bellhop_common::client::{Node, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use serde::Serialize;

use super::vm;

/// Show the queues of a VM's NICs: buffers in flight and rates
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Columns:
  KICK       as in `bellhop vm show`
  STATE      the state that the ring watch reports (`ring_watch`); - without it
  IN_FLIGHT  buffers that the device has
  POSTED_PER_S, COMPLETED_PER_S  buffers per second, by the driver and by the device
  POSTED, COMPLETED, STUCK_FOR_S, STALL_KICKS  with -o wide: all buffers so far, seconds without
             progress, and how often Bellhop kicked the queue because of that

Examples:
  bellhop vm stats web
  watch -n 1 bellhop vm stats web
  bellhop vm stats web -o csv --columns nic,queue,completed")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

/// A queue that the guest's driver uses.
#[derive(Debug, Serialize)]
struct Queue {
    nic: String,
    #[serde(flatten)]
    info: QueueInfo,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let queues = look(&arguments.name, node)?;
    format.print_table(&queues, || table(&queues))
}

/// The queues of a VM, a row each.
pub(crate) fn of_vm(name: &str, node: &Node) -> Result<Table, Error> {
    Ok(table(&look(name, node)?))
}

fn look(name: &str, node: &Node) -> Result<Vec<Queue>, Error> {
    let mut queues = Vec::new();
    for nic in vm(node, name)?.0.status.nic_devices {
        let info: NicInfo = node.get(&path(["v1", "vms", name, "nics", &nic.id]))?;
        let all = info.device.into_iter().flat_map(|device| device.queues);
        queues.extend(all.filter(|queue| queue.enabled).map(|info| Queue {
            nic: nic.id.clone(),
            info,
        }));
    }
    Ok(queues)
}

fn table(queues: &[Queue]) -> Table {
    let rows = queues.iter().map(|Queue { nic, info }| {
        let watch = info.watch.as_ref();
        let of = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |it| it.to_string());
        [
            nic.clone(),
            info.index.to_string(),
            format!("{:?}", info.kick).to_lowercase(),
            watch.map_or_else(|| "-".to_owned(), |watch| format!("{:?}", watch.state)),
            of(watch.and_then(|watch| Some(watch.in_flight?.into()))),
            of(watch.map(|watch| watch.posted_per_s.into())),
            of(watch.map(|watch| watch.completed_per_s.into())),
            of(watch.map(|watch| watch.posted)),
            of(watch.map(|watch| watch.completed)),
            of(watch.map(|watch| watch.stuck_for_s)),
            of(watch.map(|watch| watch.stall_kicks)),
        ]
    });
    let heading = [
        "NIC",
        "QUEUE",
        "KICK",
        "STATE",
        "IN_FLIGHT",
        "POSTED_PER_S",
        "COMPLETED_PER_S",
        "POSTED",
        "COMPLETED",
        "STUCK_FOR_S",
        "STALL_KICKS",
    ];
    Table::new(heading, rows).with_wide(4)
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::{self, FakeDaemon};
    use serde_json::json;

    use super::*;

    #[test]
    fn queues_in_use_have_a_line_each() {
        let vm = fake::vm(&json!({"status": {"nic_devices": [{"id": "net0"}]}}));
        let watch = json!({"state": "Moving", "in_flight": 3, "posted_per_s": 10,
            "completed_per_s": 11, "stuck_for_s": 0, "stall_kicks": 1,
            "posted": 100, "completed": 97});
        let queue = |index: u16, enabled: bool, watch| {
            json!({"index": index, "size": 256, "max_size": 256, "enabled": enabled,
                   "kick": "Doorbell", "watch": watch})
        };
        let nic = json!({"id": "net0", "state": "Plugged", "path": "/d", "doorbell": "auto",
            "device": {"status": 15, "driver_ok": true, "broken": false, "features_offered": [],
                "queues": [queue(0, true, watch), queue(1, true, json!(null)),
                           queue(2, false, json!(null))]}});
        let fake = FakeDaemon::default().answer(200, &vm).answer(200, &nic);
        let queues = look("web", &fake.node()).unwrap();
        let wanted = "\
net0  0  doorbell  Moving  3  10  11  100  97  0  1
net0  1  doorbell  -       -  -   -   -    -   -  -
";
        assert_eq!(table(&queues).draw(false), wanted);
        let json = serde_json::to_value(&queues).unwrap();
        assert_eq!(
            (&json[0]["nic"], &json[0]["watch"]["posted"]),
            (&json!("net0"), &json!(100))
        );
    }
}
