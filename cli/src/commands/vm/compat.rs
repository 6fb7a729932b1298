//! `bellhop vm compat`.

use bellhop_api::machine::{CONNECTIONS, DOWNTIME_MS, TIMEOUT_S};
use bellhop_api::node::SendToNode;
use bellhop_common::client::Node;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::migrate::{Destination, There, Wanted, trial};
use super::of_vm;

/// Say whether a running VM could move to another node, what is in the way, and what that would cost
///
/// The other node makes what the VM needs there, is asked whether the guest could go on with it, and takes it back. The guest does
/// not notice. Exit code 0: the VM can move; 1: it cannot.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm compat web --to https://node2:8443
  bellhop vm compat web --to https://node2:8443 --from enp6s0f0np0 -o json

To a process that waits, `bellhop vm migrate NAME --to ENDPOINT --dry-run` asks the same.")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// The other node's daemon: https://HOST:PORT, or node:/PATH of its socket on this host
    #[arg(long, value_name = "NODE", value_parser = node)]
    to: Destination,

    #[command(flatten)]
    there: There,
}

/// Accepts only the address of another node's daemon.
fn node(text: &str) -> Result<Destination, String> {
    match text.parse()? {
        node @ Destination::Node(_) => Ok(node),
        Destination::Endpoint(_) => Err(format!(
            "a process that waits is asked by `bellhop vm migrate NAME --to {text} --dry-run`"
        )),
    }
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let at = format!("{}/migration", of_vm(&arguments.name));
    let wanted = SendToNode {
        destination: arguments.to.to_string(),
        name: arguments.there.name_there.clone(),
        from: arguments.there.from.clone(),
        downtime_ms: DOWNTIME_MS,
        timeout_s: TIMEOUT_S,
        connections: CONNECTIONS,
        verify_memory: false,
        dry_run: true,
    };
    trial::execute(node, &at, &Wanted::Send(wanted), format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_waits_is_none_of_its_nodes() {
        assert!(matches!(
            node("https://node2:8443"),
            Ok(Destination::Node(_))
        ));
        for endpoint in ["unix:/run/move", "tcp:b:7444"] {
            assert!(node(endpoint).unwrap_err().contains("--dry-run"));
        }
        assert!(node("").is_err());
    }
}
