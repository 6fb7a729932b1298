//! `bellhop vm migrate`.

pub(super) mod trial;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bellhop_api::machine::{
    CONNECTIONS, DOWNTIME_MS, DowntimeParts, MigrationPhase, MigrationStatus, SendConfig, TIMEOUT_S,
};
use bellhop_api::node::{Operation, OperationResult, SendToNode};
use bellhop_common::client::{Address, MAKING, Node, NodeArguments, Remotes};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;
use serde::Serialize;
use vmm::migration::endpoint::{BadEndpoint, Endpoint};

use super::{absolute, of_vm};
use crate::commands::migration_tls::TlsArguments;
use crate::commands::operation;
use crate::progress::ProgressLine;
use crate::units::{milliseconds, seconds};

/// The width of the bar, in characters.
const BAR: u64 = 30;

/// Migrate a running VM to another process or host
///
/// The guest runs while its memory is sent, and is paused for a moment at the end. If a step fails
/// before the handover, the guest keeps running here.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
To another node: the destination daemon creates the VM's NICs and a process that receives the guest.
After the migration, the source deletes its devices (`bellhop serve --help` lists the requirements):
  bellhop vm migrate web https://node2:8443 --from enp1s0f0

To a waiting process, with a vDPA device for each of the VM's NICs:
  bellhop run --receive tcp:10.0.0.2:7444 --vdpa id=net0,path=/dev/vhost-vdpa-0 \\
    --api-socket web.socket --kernel vmlinuz --initramfs initrd.img \\
    --tls-cert host.pem --tls-key host.key --tls-ca ca.pem

With --dry-run the destination only checks whether it can take the VM. It reports obstacles with
their remedies, and nothing changes. Exit code 0: the VM can migrate; 1: it cannot.

Examples:
  bellhop vm migrate web node2
  bellhop vm migrate web https://node2:8443 --detach
  bellhop vm migrate web node2 --vfio vf=0000:81:10.2
  bellhop vm migrate web tcp:10.0.0.2:7444 --tls-cert host.pem --tls-key host.key \\
    --tls-ca ca.pem
  bellhop vm migrate web unix:/run/bellhop/web.move --downtime 100ms
  bellhop vm migrate web unix:/run/bellhop/web.move --dry-run
  bellhop vm migration watch web

The migration continues if this command is interrupted, or with --detach. `bellhop vm migration`
shows, follows and cancels it, and sets the guest's location if neither host knows it. Without a
terminal the command prints a line of progress every 10 seconds, but not with -o json.")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    #[command(flatten)]
    to: To,

    #[command(flatten)]
    there: There,

    /// The maximum pause of the guest, such as 300ms or 2s; without a unit in milliseconds. The
    /// migration never reaches less than 25 ms
    #[arg(
        long,
        value_name = "DURATION",
        default_value_t = DOWNTIME_MS,
        value_parser = milliseconds(0..=u32::MAX)
    )]
    downtime: u32,

    /// The time limit for a guest that writes faster than its memory is sent, such as 90s or 10m;
    /// without a unit in seconds
    #[arg(
        long,
        value_name = "DURATION",
        default_value_t = TIMEOUT_S,
        value_parser = seconds(0..=u32::MAX)
    )]
    timeout: u32,

    /// Compare checksums of all memory before the guest resumes at the destination. If a byte
    /// differs, it stays here. The comparison pauses the guest for longer than --downtime
    #[arg(long)]
    verify_memory: bool,

    /// Connections that carry memory, 1 to 16
    #[arg(
        long,
        value_name = "N",
        default_value_t = CONNECTIONS,
        value_parser = clap::value_parser!(u16).range(1..=16)
    )]
    connections: u16,

    /// Only check whether the destination can take the VM, and at what cost
    #[arg(long)]
    dry_run: bool,

    /// Return without waiting for the end
    #[arg(long, conflicts_with = "dry_run")]
    detach: bool,

    #[command(flatten)]
    tls: TlsArguments,
}

/// The destination of a VM.
#[derive(Debug, clap::Args)]
pub(super) struct To {
    /// The other node's daemon: its name in `bellhop remote list`, https://HOST:PORT, or node:/PATH
    /// of its socket on this host; or a waiting process: unix:/PATH or tcp:HOST:PORT
    #[arg(value_name = "DESTINATION", required_unless_present = "to")]
    destination: Option<Destination>,

    #[arg(
        long,
        value_name = "DESTINATION",
        hide = true,
        conflicts_with = "destination"
    )]
    to: Option<Destination>,
}

impl To {
    /// The destination, resolved.
    ///
    /// # Errors
    /// None is given, or as for [`Destination::resolved`].
    pub(super) fn resolved(&self, source: &Address) -> Result<Destination, Error> {
        let given = self.destination.as_ref().or(self.to.as_ref());
        let given = given.ok_or_else(|| Error::wrong("give a destination"))?;
        given.resolved(source)
    }
}

/// The destination of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::commands) enum Destination {
    /// Another node's daemon, by its name among the remotes.
    Remote(String),
    /// Another node's daemon, by its address.
    Node(String),
    /// A waiting process.
    Endpoint(Endpoint),
}

impl Destination {
    /// The same with the address of a remote instead of its name.
    ///
    /// # Errors
    /// The user's remotes cannot be read, or none has this name, or `source`, the VM's daemon,
    /// cannot reach it.
    pub(in crate::commands) fn resolved(&self, source: &Address) -> Result<Self, Error> {
        match self {
            Self::Remote(name) => Self::of_remote(name, &Remotes::of_user()?, source),
            other => Ok(other.clone()),
        }
    }

    fn of_remote(name: &str, remotes: &Remotes, source: &Address) -> Result<Self, Error> {
        Ok(Self::Node(match remotes.get(name)?.address {
            Address::Socket(_) if !matches!(source, Address::Socket(_)) => {
                return Err(Error::wrong(format!(
                    "the remote {name} is a socket on this host, which {source} cannot reach: give \
                     https://HOST:PORT"
                )));
            }
            Address::Socket(path) => format!("node:{}", path.display()),
            address @ Address::Https { .. } => address.to_string(),
            Address::Ssh { .. } => {
                return Err(Error::wrong(format!(
                    "daemons connect to each other by https, but the remote {name} uses ssh: give \
                     https://HOST:PORT"
                )));
            }
        }))
    }
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if Remotes::is_name(text) {
            Ok(Self::Remote(text.to_owned()))
        } else if bellhop_node::is_node(text) {
            match bellhop_node::check(text) {
                Ok(()) => Ok(Self::Node(text.to_owned())),
                Err(error) => Err(error.to_string()),
            }
        } else {
            text.parse()
                .map(Self::Endpoint)
                .map_err(|error: BadEndpoint| {
                    format!(
                        "{error}, or https://HOST:PORT or node:/PATH of a node's daemon, or its \
                         name in `bellhop remote list`"
                    )
                })
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Remote(node) | Self::Node(node) => f.write_str(node),
            Self::Endpoint(endpoint) => endpoint.fmt(f),
        }
    }
}

/// The settings of a VM at another node.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub(super) struct There {
    /// To another node: the source of all NICs there, also for NICs on existing devices. Without it
    /// each NIC uses the same name as here
    #[arg(long, value_name = "NIC")]
    pub(super) from: Option<String>,

    /// To another node: another name for the VM there; needed with node:/PATH, where both daemons
    /// would give devices the same name
    #[arg(long = "as", value_name = "NAME")]
    pub(super) name_there: Option<String>,

    /// To another node: the PCI address there of the VM's VFIO function ID. Can be repeated. A
    /// function without it has the same address as here
    #[arg(long, value_name = "ID=ADDRESS", value_parser = function_there)]
    pub(super) vfio: Vec<(String, String)>,
}

/// Parses `ID=ADDRESS`.
fn function_there(text: &str) -> Result<(String, String), &'static str> {
    let parts = text.split_once('=').filter(|(id, _)| !id.is_empty());
    let (id, address) = parts.ok_or("not ID=ADDRESS, such as vf=0000:03:10.2")?;
    Ok((id.to_owned(), address.to_owned()))
}

/// The parts of the downtime in one line: `stop 1.2, memory 30.1, …`.
fn parts_line(parts: &DowntimeParts) -> String {
    let parts = [
        ("stop", parts.stop),
        ("memory", parts.memory),
        ("state", parts.state),
        ("restored", parts.ready),
        ("started", parts.go),
    ];
    let known = parts
        .iter()
        .filter_map(|(name, time)| Some(format!("{name} {:.1}", (*time)?)));
    known.collect::<Vec<_>>().join(", ")
}

/// The request to a daemon: to send a VM to another node, or to a waiting process.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::commands) enum Wanted<T> {
    Send(T),
}

/// The path of a VM's migration in the API.
pub(in crate::commands) fn at(name: &str) -> String {
    format!("{}/migration", of_vm(name))
}

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let destination = &arguments.to.resolved(which.address())?;
    let wanted = SendToNode {
        destination: destination.to_string(),
        name: arguments.there.name_there.clone(),
        from: arguments.there.from.clone(),
        vfio: arguments.there.vfio.iter().cloned().collect(),
        downtime_ms: arguments.downtime,
        timeout_s: arguments.timeout,
        connections: arguments.connections,
        verify_memory: arguments.verify_memory,
        dry_run: arguments.dry_run,
    };
    match destination {
        Destination::Remote(_) | Destination::Node(_) if arguments.tls.is_given() => {
            Err(Error::wrong(
                "--tls-cert, --tls-key, --tls-ca, --plaintext and --migration-secret are for \
                 waiting processes (tcp:HOST:PORT): two daemons agree on their own",
            ))
        }
        Destination::Remote(_) | Destination::Node(_) => {
            migrate(arguments, destination, &wanted, node, format)
        }
        Destination::Endpoint(_) if arguments.there != There::default() => Err(Error::wrong(
            "--from, --as and --vfio are for other nodes' daemons (https://HOST:PORT, \
             node:/PATH): a waiting process already has its devices",
        )),
        Destination::Endpoint(endpoint) => {
            // The VM's process has another working directory.
            let tls = arguments.tls.clone();
            let tls = tls.map_paths(|path| absolute(path, which.address()))?;
            let wanted = SendConfig {
                pairing: tls.pairing()?,
                ..wanted.to_endpoint(endpoint.clone(), tls.files()?, tls.plaintext)
            };
            migrate(arguments, destination, &wanted, node, format)
        }
    }
}

/// Requests the migration or its dry run, and follows it to its end.
fn migrate(
    arguments: &Arguments,
    destination: &Destination,
    wanted: &impl Serialize,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let (name, at) = (&arguments.name, at(&arguments.name));
    let wanted = Wanted::Send(wanted);
    if arguments.dry_run {
        return trial::execute(node, &at, &wanted, format);
    }
    if arguments.detach {
        let (_, answer) = node.send(Method::POST, &at, &wanted, MAKING)?;
        let text = || {
            format!(
                "{}: `bellhop vm migration watch {0}` follows it\n",
                printable(name)
            )
        };
        return format.print(&answer, text);
    }
    let destination = destination.to_string();
    followed(name, Some(&destination), format, |look| {
        operation::carry_through(node, &at, &wanted, MAKING, Duration::MAX, look)
    })
}

/// Shows the progress of a migration that `follow` follows to its end, and prints the result.
pub(super) fn followed(
    name: &str,
    destination: Option<&str>,
    format: Format,
    follow: impl FnOnce(&mut dyn FnMut(&Operation)) -> Result<OperationResult, Error>,
) -> Result<Code, Error> {
    let mut progress = if format.is_text() {
        ProgressLine::with_lines()
    } else {
        ProgressLine::new()
    };
    let moved = follow(&mut |operation| {
        let state = operation.result.as_ref();
        if let Some(status) = state.and_then(|state| state.migration.as_ref()) {
            progress.show(line(name, status));
        }
    });
    drop(progress);
    let moved = moved?;
    let text = || match &moved.migration {
        Some(status) => summary(name, destination.unwrap_or(&status.peer), status),
        None => format!(
            "{} runs at {} now; its process here ended before it reported the downtime\n",
            printable(name),
            printable(destination.unwrap_or("its destination")),
        ),
    };
    format.print(&moved.migration, text)
}

/// One line: a bar over the memory of this round.
pub(in crate::commands) fn line(name: &str, status: &MigrationStatus) -> String {
    let name = printable(name);
    if status.phase != MigrationPhase::Copy || status.ram_bytes == 0 {
        return format!("{name}: {}", status.phase);
    }
    let left = status.left_bytes.min(status.ram_bytes);
    let done = (status.ram_bytes - left).saturating_mul(BAR) / status.ram_bytes;
    let bar: String = (0..BAR)
        .map(|place| if place < done { '#' } else { '.' })
        .collect();
    let mut line = format!(
        "{name}: [{bar}] round {}, {} MiB left, {} MiB/s, guest writes {} MiB/s",
        status.rounds,
        left >> 20,
        status.bytes_per_second >> 20,
        status.dirty_bytes_per_second >> 20,
    );
    if let Some(downtime) = status.forecast_downtime_ms {
        line.push_str(&format!(", would be paused for {downtime} ms"));
    }
    if status.throttle_percent != 0 {
        line.push_str(&format!(", throttled {} %", status.throttle_percent));
    }
    line
}

pub(super) fn summary(name: &str, destination: &str, status: &MigrationStatus) -> String {
    format!(
        "{} runs at {} now: its guest was paused for {:.1} ms ({}); {} rounds, {} MiB on the wire, \
         {} of {} pages zero, {:.1} s in all\n",
        printable(name),
        printable(destination),
        status.downtime_ms.unwrap_or(0.0),
        parts_line(&status.downtime_parts_ms),
        status.rounds,
        status.sent_bytes >> 20,
        status.zero_pages,
        status.pages.saturating_add(status.zero_pages),
        std::time::Duration::from_millis(status.elapsed_ms).as_secs_f64(),
    )
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::Remote;
    use serde_json::json;

    use super::*;

    fn status() -> MigrationStatus {
        let answer = json!({
            "phase": "Copy", "rounds": 2, "elapsed_ms": 1500, "ram_bytes": 256_u64 << 20,
            "sent_bytes": 64 << 20, "pages": 100, "zero_pages": 900, "left_bytes": 64 << 20,
            "bytes_per_second": 50 << 20,
            "dirty_bytes_per_second": 3 << 20, "throttle_percent": 20, "forecast_downtime_ms": 400,
            "downtime_ms": 12.3, "downtime_parts_ms": { "stop": 1.5, "memory": 8.0, "state": null },
            "error": null, "direction": "Send", "peer": "tcp:b:1",
        });
        serde_json::from_value(answer).unwrap()
    }

    #[test]
    fn a_line_shows_the_progress() {
        let status = status();
        let text = line("web", &status);
        for part in [
            "[######################........]",
            "round 2",
            "64 MiB left",
            "50 MiB/s",
            "writes 3 MiB/s",
            "400 ms",
            "20 %",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let text = summary("web", "tcp:b:1", &status);
        assert!(text.contains("900 of 1000 pages zero"), "{text}");
        assert!(text.contains("12.3 ms (stop 1.5, memory 8.0)"), "{text}");
    }

    #[test]
    fn nodes_and_waiting_processes_are_distinguished() {
        let node: Destination = "https://node2:8443".parse().unwrap();
        assert_eq!(node, Destination::Node("https://node2:8443".to_owned()));
        let socket: Destination = "node:/run/b/node.socket".parse().unwrap();
        assert!(matches!(socket, Destination::Node(_)));
        for text in ["tcp:b:7444", "unix:/run/web.move"] {
            let waits: Destination = text.parse().unwrap();
            assert!(matches!(waits, Destination::Endpoint(_)), "{text}");
            assert_eq!(waits.to_string(), text);
        }
        let name: Destination = "node2".parse().unwrap();
        assert_eq!(name, Destination::Remote("node2".to_owned()));
        for bad in [
            "",
            "node 2",
            "https://node2",
            "node:socket",
            "http://node2:1",
        ] {
            assert!(bad.parse::<Destination>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_remotes_name_becomes_its_address() {
        let mut remotes = Remotes::default();
        for (name, address) in [
            ("far", "https://node2:8443"),
            ("near", "/run/b/node.socket"),
            ("by-ssh", "ssh://node3"),
        ] {
            let address = address.parse().unwrap();
            let remote = Remote {
                address,
                ..Remote::local()
            };
            remotes.add(name, remote).unwrap();
        }
        let here = Remote::local().address;
        for (name, node) in [
            ("far", "https://node2:8443"),
            ("near", "node:/run/b/node.socket"),
            ("local", "node:/run/bellhop/node.socket"),
        ] {
            let node = Destination::Node(node.to_owned());
            assert_eq!(Destination::of_remote(name, &remotes, &here).unwrap(), node);
        }
        for name in ["by-ssh", "lost"] {
            Destination::of_remote(name, &remotes, &here).unwrap_err();
        }
        // A socket of this host is another one on the host of the source.
        let far = "https://node1:8443".parse().unwrap();
        Destination::of_remote("local", &remotes, &far).unwrap_err();
    }

    #[test]
    fn nonsense_from_a_daemon_is_not_drawn() {
        let mut status = status();
        status.left_bytes = u64::MAX;
        assert!(line("web", &status).contains("[......"));
        status.ram_bytes = 0;
        line("web", &status);
    }
}
