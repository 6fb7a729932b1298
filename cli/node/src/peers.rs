//! Other nodes: this daemon as their client in a migration between two nodes.
//!
//! ```text
//!   source's daemon                                           destination's daemon
//!   POST …/migration {"receive": …} ────────────────────────> creates NICs, a process waits
//!                                    <─────────────────────── its address
//!   the VM's process      ═══ the migration protocol    ═══> that process
//!   DELETE …/migration, if it stays ────────────────────────> rolls back unless the VM is there
//! ```
//! Owns the requests to them, the validation of their answers, and the addresses for incoming VMs.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use bellhop_api::node::{Awaited, Vm, VmPhase};
use bellhop_common::client::{self, Address, Credentials, Http, MAKING, Refusal, STRANGE};
use bellhop_common::error::{Error as ClientError, ErrorKind as ClientErrorKind};
use hyper::{Method, StatusCode};
use serde::{Deserialize, Serialize};
use vmm::migration::endpoint::{BadEndpoint, Endpoint};
use vmm::migration::tls::TlsFiles;

use super::error::{Error, ErrorKind};
use super::machines::spec::{NodeMigrationRequest, ReceiveFromNode};

/// The prefix of the path of a socket that belongs to a daemon on this host.
const LOCAL: &str = "node:";

/// How long the source's daemon waits until the destination's daemon reports the arrival.
const ARRIVAL: Duration = Duration::from_secs(10);

/// The interval of the queries in that time.
const ARRIVAL_POLL: Duration = Duration::from_millis(100);

/// Another node, and the VM's name there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Its daemon: `https://HOST:PORT`, or `node:/PATH` of a socket on this host.
    pub(crate) node: String,
    /// The VM's name there.
    pub(crate) name: String,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (as {})", self.node, self.name)
    }
}

/// Whether this names a node's daemon, and not a waiting process.
#[must_use]
pub fn is_node(destination: &str) -> bool {
    destination.starts_with(LOCAL) || destination.starts_with("https:")
}

fn no_certificates() -> Error {
    Error::new(
        ErrorKind::NoCertificates,
        "this daemon has no certificates for migrations: start it with --migration-host, \
         --migration-cert, --migration-key and --migration-ca",
    )
}

/// The address and the TLS files for migrations to and from this host.
#[derive(Debug, Clone)]
pub struct Road {
    /// The name or address of this host in its certificate.
    pub host: String,
    /// Presented to other hosts, as source and as destination.
    pub tls: TlsFiles,
}

/// Other nodes.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    credentials: Credentials,
    road: Option<Road>,
}

impl Peers {
    /// Nodes that accept this node's `credentials`.
    pub(crate) fn new(credentials: Credentials, road: Option<Road>) -> Self {
        Self { credentials, road }
    }

    /// The TLS files for a migration to or from this endpoint.
    pub(crate) fn tls(&self, endpoint: &Endpoint) -> Option<&TlsFiles> {
        match endpoint {
            Endpoint::Unix(_) => None,
            Endpoint::Tcp { .. } => self.road.as_ref().map(|road| &road.tls),
        }
    }

    /// The endpoint for an incoming VM: `socket` if the sender is on this host, otherwise a free
    /// port.
    ///
    /// # Errors
    /// This daemon has no certificates, or its host has no free port.
    pub(crate) fn place(&self, socket: Option<&Path>) -> Result<Endpoint, Error> {
        if let Some(socket) = socket {
            return Ok(Endpoint::Unix(socket.to_owned()));
        }
        let road = self.road.as_ref().ok_or_else(no_certificates)?;
        // Another process may take the port before the VM's process binds it. Then that process
        // fails to start, and nothing has changed.
        let port = TcpListener::bind((road.host.as_str(), 0))
            .and_then(|listener| listener.local_addr())
            .map_err(Error::context(format!(
                "cannot listen for incoming VMs at {}: check that --migration-host names this host",
                road.host
            )))?
            .port();
        Ok(Endpoint::Tcp {
            host: road.host.clone(),
            port,
        })
    }

    /// Requests another node to wait for a VM. Blocks.
    ///
    /// # Errors
    /// Then nothing is left at that node, or it cleans up by itself.
    pub(crate) fn receive(&self, peer: &Peer, wanted: ReceiveFromNode) -> Result<Endpoint, Error> {
        let address = address(&peer.node)?;
        let far = matches!(address, Address::Https { .. });
        if far && self.road.is_none() {
            return Err(no_certificates());
        }
        let failed = |error| failed(peer, error);
        let node = self.connect(peer, &address)?;
        let body = NodeMigrationRequest::Receive(Box::new(wanted));
        let sent = node.send(Method::POST, &migration_of(peer), &body, MAKING);
        let (_, answer) = sent.map_err(failed)?;
        let awaited = Awaited::deserialize(&answer).map_err(ClientError::context(STRANGE));
        let awaited = awaited.map_err(failed)?;
        believed(peer, far, &awaited.listen)
    }

    /// Notifies another node that a VM does not arrive. Blocks.
    ///
    /// # Errors
    /// The node is unreachable, or the VM has arrived.
    pub(crate) fn withdraw(&self, peer: &Peer) -> Result<(), Error> {
        let node = self.connect(peer, &address(&peer.node)?)?;
        match node.change(Method::DELETE, &migration_of(peer)) {
            Ok(_) => Ok(()),
            Err(error) => match error.refusal() {
                Some(refusal) if refusal.status == StatusCode::NOT_FOUND => Ok(()),
                _ => Err(failed(peer, error)),
            },
        }
    }

    /// Whether another node has the VM, whose process here reports that it has moved. Blocks, up
    /// to [`ARRIVAL`], while that node's daemon still waits for it: the daemon queries its
    /// process at intervals.
    ///
    /// # Errors
    /// The node is unreachable.
    pub(crate) fn has(&self, peer: &Peer) -> Result<bool, Error> {
        let node = self.connect(peer, &address(&peer.node)?)?;
        let path = client::path(["v1", "vms", &peer.name]);
        let start = Instant::now();
        loop {
            match node.get::<Vm>(&path) {
                Ok(vm) if vm.status.phase != VmPhase::Receiving => return Ok(true),
                Ok(_) if start.elapsed() < ARRIVAL => std::thread::sleep(ARRIVAL_POLL),
                Ok(_) => return Ok(false),
                Err(error) if error.refusal().is_some_and(Refusal::is_not_there) => {
                    return Ok(false);
                }
                Err(error) => return Err(failed(peer, error)),
            }
        }
    }

    fn connect(&self, peer: &Peer, address: &Address) -> Result<client::Node, Error> {
        let http = Http::new(address, &self.credentials);
        http.map(client::Node::new)
            .map_err(|error| failed(peer, error))
    }
}

/// The address of a node's daemon.
fn address(node: &str) -> Result<Address, Error> {
    let bad = || {
        Error::invalid(format!(
            "{node:?} is not the address of a daemon: give https://HOST:PORT, or node:/PATH of a \
             socket on this host"
        ))
    };
    match node.strip_prefix(LOCAL) {
        Some(path) if Path::new(path).is_absolute() => Ok(Address::Socket(path.into())),
        Some(_) => Err(bad()),
        None => match node.parse() {
            Ok(address @ Address::Https { .. }) => Ok(address),
            _ => Err(bad()),
        },
    }
}

/// Checks the form of a node's address.
///
/// # Errors
/// It is not the address of a daemon.
pub fn check(node: &str) -> Result<(), Error> {
    address(node).map(drop)
}

fn migration_of(peer: &Peer) -> String {
    client::path(["v1", "vms", &peer.name, "migration"])
}

/// Validates an endpoint that another node returned.
fn believed(peer: &Peer, far: bool, listen: &str) -> Result<Endpoint, Error> {
    let node = &peer.node;
    let bad = |message| Error::new(ErrorKind::UnclearThere("bad_answer"), message);
    let endpoint: Endpoint = listen.parse().map_err(|source: BadEndpoint| {
        bad(format!("the node {node} returned an invalid address")).because(source)
    })?;
    match (&endpoint, far) {
        (Endpoint::Unix(_), false) | (Endpoint::Tcp { .. }, true) => Ok(endpoint),
        _ => Err(bad(format!(
            "the node {node} returned the address {endpoint}, which is not reachable from here"
        ))),
    }
}

fn failed(peer: &Peer, error: ClientError) -> Error {
    let node = &peer.node;
    match error.kind() {
        ClientErrorKind::Refused(refusal) => {
            let (reason, remedy) = (refusal.reason(), refusal.hint().map(str::to_owned));
            let message = format!("the node {node} refuses it: {reason}");
            Error::new(ErrorKind::RefusedThere(reason, remedy), message)
        }
        _ => {
            let message = format!("cannot reach the node {node}");
            Error::new(ErrorKind::UnclearThere("no_answer"), message).because(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> Peer {
        Peer {
            node: "https://b:1".to_owned(),
            name: "web".to_owned(),
        }
    }

    #[test]
    fn nodes_are_distinguished_from_waiting_processes() {
        for (text, node) in [
            ("node:/run/b/node.socket", true),
            ("https://b:7443", true),
            ("unix:/run/web.move", false),
            ("tcp:b:7444", false),
            ("", false),
        ] {
            assert_eq!(is_node(text), node, "{text}");
            assert_eq!(address(text).is_ok(), node, "{text}");
        }
        for bad in ["node:run/b", "node:", "https://b", "http://b:1", "https:b"] {
            assert_eq!(
                address(bad).unwrap_err().answer().1,
                "invalid_body",
                "{bad}"
            );
        }
    }

    #[test]
    fn another_node_names_no_place_but_one_between_the_two() {
        for (listen, far, good) in [
            ("tcp:b:7444", true, true),
            ("unix:/run/x", false, true),
            ("unix:/run/x", true, false),
            ("tcp:127.0.0.1:22", false, false),
            ("nonsense", true, false),
            ("", false, false),
        ] {
            assert_eq!(
                believed(&peer(), far, listen).is_ok(),
                good,
                "{listen} {far}"
            );
        }
    }

    #[test]
    fn without_certificates_no_machine_goes_over_a_network() {
        let peers = Peers::default();
        let socket = Path::new("/run/x");
        assert!(matches!(peers.place(Some(socket)), Ok(Endpoint::Unix(_))));
        let refused = peers.place(None).unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::NoCertificates));
        let body = serde_json::json!({ "vm": { "spec": { "kernel": "/k" } } });
        let wanted: ReceiveFromNode = serde_json::from_value(body).unwrap();
        let refused = peers.receive(&peer(), wanted).unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::NoCertificates));
    }
}
