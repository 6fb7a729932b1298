//! `bellhop vm compat`.

use bellhop_api::machine::{CONNECTIONS, DOWNTIME_MS, TIMEOUT_S};
use bellhop_api::node::SendToNode;
use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::migrate::{Destination, There, To, Wanted, trial};
use super::of_vm;

/// Check whether a running VM can migrate to another node
///
/// The destination daemon creates the VM's NICs, checks whether the guest can continue there, and
/// deletes them again. The guest does not notice. The output has obstacles and the expected cost.
/// Exit code 0: the VM can migrate; 1: it cannot.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm compat web node2
  bellhop vm compat web https://node2:8443 --from enp6s0f0np0 -o json

For a waiting process, use `bellhop vm migrate NAME ENDPOINT --dry-run`.")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    #[command(flatten)]
    to: To,

    #[command(flatten)]
    there: There,
}

/// Accepts only the address of another node's daemon.
fn node(destination: Destination) -> Result<String, Error> {
    match destination {
        Destination::Remote(node) | Destination::Node(node) => Ok(node),
        Destination::Endpoint(endpoint) => Err(Error::wrong(format!(
            "for a waiting process, use `bellhop vm migrate NAME {endpoint} --dry-run`"
        ))),
    }
}

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    source: &Node,
    format: Format,
) -> Result<Code, Error> {
    let at = format!("{}/migration", of_vm(&arguments.name));
    let wanted = SendToNode {
        destination: node(arguments.to.resolved(which.address())?)?,
        name: arguments.there.name_there.clone(),
        from: arguments.there.from.clone(),
        vfio: arguments.there.vfio.iter().cloned().collect(),
        downtime_ms: DOWNTIME_MS,
        timeout_s: TIMEOUT_S,
        connections: CONNECTIONS,
        verify_memory: false,
        dry_run: true,
    };
    trial::execute(source, &at, &Wanted::Send(wanted), format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_waits_is_none_of_its_nodes() {
        let node = |text: &str| node(text.parse().unwrap());
        assert_eq!(node("https://node2:8443").unwrap(), "https://node2:8443");
        for endpoint in ["unix:/run/move", "tcp:b:7444"] {
            let error = node(endpoint).unwrap_err().to_string();
            assert!(error.contains("--dry-run"), "{error}");
        }
    }
}
