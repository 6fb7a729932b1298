//! `bellhop version`: this command's version, and that of the node daemon.

use bellhop_api::node::Version;
use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use serde::Serialize;

/// Print the versions of this command and of the node daemon
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The API level grows with each change that affects clients. In JSON the daemon is null if the command
cannot reach it.

Examples:
  bellhop version
  bellhop version -j | jq -r .daemon.api
  bellhop version --node https://node2:8443")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,
}

#[derive(Debug, Serialize)]
struct Versions {
    client: Client,
    daemon: Option<Version>,
}

#[derive(Debug, Serialize)]
struct Client {
    version: &'static str,
    /// The level of the node daemon's API.
    api: u32,
}

/// Prints the versions.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let (versions, absent) = ask(&arguments.node.connect()?)?;
    let text = || text(&versions, absent.as_ref());
    format.print(&versions, text)
}

/// The versions, and the error if the daemon's is unknown.
fn ask(node: &Node) -> Result<(Versions, Option<Error>), Error> {
    let (daemon, absent) = match node.get("/v1/version") {
        Ok(version) => (Some(version), None),
        Err(error) if matches!(error.kind(), ErrorKind::NoDaemon) => (None, Some(error)),
        Err(error) => return Err(error),
    };
    let client = Client {
        version: env!("CARGO_PKG_VERSION"),
        api: bellhop_node::API_LEVEL,
    };
    Ok((Versions { client, daemon }, absent))
}

fn text(versions: &Versions, absent: Option<&Error>) -> String {
    let Client { version, api } = versions.client;
    let daemon = match (&versions.daemon, absent) {
        (Some(daemon), _) => format!(
            "bellhop {}, API level {}, process {}, socket {}{}",
            printable(&daemon.version),
            daemon.api,
            daemon.pid,
            printable(&daemon.socket),
            if daemon.cordoned { ", cordoned" } else { "" }
        ),
        (None, Some(error)) => printable(&error.to_string()),
        (None, None) => "unknown".to_owned(),
    };
    format!("client: bellhop {version}, API level {api}\ndaemon: {daemon}\n")
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::FakeDaemon;
    use serde_json::json;

    use super::*;

    #[test]
    fn client_and_daemon_have_versions() {
        let answer = json!({"version": "9.8", "api": 7, "pid": 42, "socket": "/run/s", "new": 1});
        let (versions, absent) = ask(&FakeDaemon::default().answer(200, &answer).node()).unwrap();
        let daemon = "daemon: bellhop 9.8, API level 7, process 42, socket /run/s\n";
        assert!(text(&versions, absent.as_ref()).ends_with(daemon));
        let json = serde_json::to_value(&versions).unwrap();
        assert_eq!(json["client"]["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(json["daemon"]["api"], 7);
    }

    #[test]
    fn no_daemon_is_no_error_and_a_refusal_is_one() {
        let nowhere = "/nonexistent/node.socket".parse().unwrap();
        let http = bellhop_common::client::Http::new(&nowhere, &Default::default()).unwrap();
        let (versions, absent) = ask(&Node::new(http)).unwrap();
        assert!(
            text(&versions, absent.as_ref())
                .contains("cannot reach the node daemon at /nonexistent")
        );
        assert!(versions.daemon.is_none());
        let refusal = json!({"code": "role", "message": "no"});
        ask(&FakeDaemon::default().answer(403, &refusal).node()).unwrap_err();
    }
}
