//! Other nodes, as this one's daemon deals with them when a machine moves between two of them.
//!
//! ```text
//!   source's daemon                                           destination's daemon
//!   POST …/migration {"receive": …} ────────────────────────> NICs are made, a process waits
//!                                    <─────────────────────── where it waits
//!   the machine's process ═══ the protocol of migrations ═══> that process
//!   DELETE …/migration, if it stays ────────────────────────> all is taken back, unless the machine has come
//! ```
//! Owns what is asked of them, and what of their answers is believed; and where machines are waited for here. It must not know
//! the steps of a machine's life.

use std::net::TcpListener;
use std::path::Path;

use bellhop_api::node::{Awaited, VmInfo, VmPhase};
use hyper::{Method, StatusCode};
use serde::{Deserialize, Serialize};
use vmm::migration::endpoint::{BadEndpoint, Endpoint};
use vmm::migration::tls::TlsFiles;

use super::machines::spec::{NodeMigrationRequest, ReceiveFromNode, VmName, VmSpec};
use crate::client::{self, Address, ClientError, Credentials, Http};

/// What a socket's path begins with where a daemon on this host is meant.
const LOCAL: &str = "node:";
/// How long another node may take to make NICs and start a process.
const MAKING: std::time::Duration = std::time::Duration::from_secs(600);
/// How long it may take to take them back, or to say what it has.
const SOON: std::time::Duration = std::time::Duration::from_secs(60);

/// Another node, and the machine's name there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peer {
    /// Its daemon: `https://HOST:PORT`, or `node:/PATH` of a socket on this host.
    pub(crate) node: String,
    /// The machine's name there.
    pub(crate) name: String,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (as {})", self.node, self.name)
    }
}

/// Whether this names a node's daemon, and not a process that waits.
pub(crate) fn is_node(destination: &str) -> bool {
    destination.starts_with(LOCAL) || destination.starts_with("https:")
}

/// Why another node does not take a machine.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// Not a node.
    #[error(
        "{0:?} is no node's daemon: say https://HOST:PORT, or node:/PATH of a socket on this host"
    )]
    Address(String),
    /// It refuses, and says why.
    #[error("the node {node} does not take it, and says of itself: {reason}")]
    Refused {
        /// Which.
        node: String,
        /// In its words.
        reason: String,
        /// What helps, in its words.
        remedy: Option<String>,
    },
    /// It cannot be asked.
    #[error("the node {node} cannot be asked")]
    Client {
        /// Which.
        node: String,
        /// Why.
        #[source]
        source: Box<ClientError>,
    },
    /// What it says is no place where a machine is waited for.
    #[error("the node {node} names a place that cannot be used")]
    Endpoint {
        /// Which.
        node: String,
        /// What is wrong with it.
        #[source]
        source: BadEndpoint,
    },
    /// A socket on another host, or a network where none is needed.
    #[error("the node {node} says {endpoint}, which is no way from here to there")]
    Strange {
        /// Which.
        node: String,
        /// What it says.
        endpoint: Endpoint,
    },
    /// There is nothing to protect the guest with.
    #[error(
        "this daemon has no certificates for machines that move: start it with --migration-host, --migration-cert, \
         --migration-key and --migration-ca"
    )]
    NoCertificates,
    /// No port.
    #[error(
        "no machine can be waited for at {host}; is --migration-host a name or an address of this host?"
    )]
    Port {
        /// Where.
        host: String,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
}

impl PeerError {
    /// Whether the other node may have done what it was asked for, although its answer is none.
    pub(crate) fn may_have_been_heard(&self) -> bool {
        matches!(
            self,
            Self::Client { .. } | Self::Endpoint { .. } | Self::Strange { .. }
        )
    }

    /// Whether it is the other node that does not want it: a finding for who only asks.
    pub(crate) fn obstacle(&self) -> Option<(String, Option<String>)> {
        match self {
            Self::Refused { reason, remedy, .. } => Some((reason.clone(), remedy.clone())),
            Self::NoCertificates => Some((self.to_string(), None)),
            _ => None,
        }
    }
}

/// How machines reach this host, and are protected on their way.
#[derive(Debug, Clone)]
pub(crate) struct Road {
    /// The name or address of this host that its certificate is for.
    pub(crate) host: String,
    /// Shown to other hosts, as source and as destination.
    pub(crate) tls: TlsFiles,
}

/// Other nodes.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    credentials: Credentials,
    road: Option<Road>,
}

impl Peers {
    /// Those that let this one in with `credentials`.
    pub(crate) fn new(credentials: Credentials, road: Option<Road>) -> Self {
        Self { credentials, road }
    }

    /// What protects a machine on its way to or from there.
    pub(crate) fn tls(&self, endpoint: &Endpoint) -> Option<&TlsFiles> {
        match endpoint {
            Endpoint::Unix(_) => None,
            Endpoint::Tcp { .. } => self.road.as_ref().map(|road| &road.tls),
        }
    }

    /// Where a machine can be waited for: on `socket` if who sends it is on this host, else on a free port.
    ///
    /// # Errors
    /// [`PeerError::NoCertificates`], [`PeerError::Port`].
    pub(crate) fn place(&self, socket: Option<&Path>) -> Result<Endpoint, PeerError> {
        if let Some(socket) = socket {
            return Ok(Endpoint::Unix(socket.to_owned()));
        }
        let road = self.road.as_ref().ok_or(PeerError::NoCertificates)?;
        // Somebody may take the port before the process has it: then that one does not start, and nothing has changed.
        let port = TcpListener::bind((road.host.as_str(), 0))
            .and_then(|listener| listener.local_addr())
            .map_err(|source| PeerError::Port {
                host: road.host.clone(),
                source,
            })?
            .port();
        Ok(Endpoint::Tcp {
            host: road.host.clone(),
            port,
        })
    }

    /// Has another node wait for a machine. Blocks.
    ///
    /// # Errors
    /// [`PeerError`]; nothing is left there then, or goes by itself.
    pub(crate) fn receive(&self, peer: &Peer, spec: VmSpec) -> Result<Endpoint, PeerError> {
        let address = address(&peer.node)?;
        let far = matches!(address, Address::Https { .. });
        if far && self.road.is_none() {
            return Err(PeerError::NoCertificates);
        }
        let failed = |error| failed(peer, error);
        let node = self.connect(&address).map_err(failed)?;
        let wanted = ReceiveFromNode { spec };
        let body = NodeMigrationRequest::Receive(Box::new(wanted));
        let sent = node.send(Method::POST, &migration_of(peer), &body, MAKING);
        let (_, answer) = sent.map_err(failed)?;
        let awaited =
            Awaited::deserialize(&answer).map_err(|error| failed(ClientError::Answer(error)))?;
        believed(peer, far, &awaited.listen)
    }

    /// Tells another node that a machine does not come. Blocks.
    ///
    /// # Errors
    /// It cannot be told, or the machine has come.
    pub(crate) fn withdraw(&self, peer: &Peer) -> Result<(), PeerError> {
        let node = self
            .connect(&address(&peer.node)?)
            .map_err(|error| failed(peer, error))?;
        match node.change_within(Method::DELETE, &migration_of(peer), SOON) {
            Ok(_) => Ok(()),
            Err(ClientError::Refused(refusal)) if refusal.status == StatusCode::NOT_FOUND => Ok(()),
            Err(error) => Err(failed(peer, error)),
        }
    }

    /// Whether another node has the machine. Blocks.
    ///
    /// # Errors
    /// It cannot be asked.
    pub(crate) fn has(&self, peer: &Peer) -> Result<bool, PeerError> {
        let node = self
            .connect(&address(&peer.node)?)
            .map_err(|error| failed(peer, error))?;
        let path = client::path(["v1", "vms", &peer.name]);
        match node.change_within(Method::GET, &path, SOON) {
            // One that still waits for it does not have it.
            Ok((_, machine)) => {
                let machine = VmInfo::deserialize(&machine);
                let machine = machine.map_err(|error| failed(peer, ClientError::Answer(error)))?;
                Ok(machine.phase != VmPhase::Receiving)
            }
            Err(ClientError::Refused(refusal)) if refusal.is_not_there() => Ok(false),
            Err(error) => Err(failed(peer, error)),
        }
    }

    fn connect(&self, address: &Address) -> Result<client::Node, ClientError> {
        Ok(client::Node::new(Http::new(address, &self.credentials)?))
    }
}

/// Where a node's daemon is.
fn address(node: &str) -> Result<Address, PeerError> {
    let bad = || PeerError::Address(node.to_owned());
    match node.strip_prefix(LOCAL) {
        Some(path) if Path::new(path).is_absolute() => Ok(Address::Socket(path.into())),
        Some(_) => Err(bad()),
        None => match node.parse() {
            Ok(address @ Address::Https { .. }) => Ok(address),
            _ => Err(bad()),
        },
    }
}

/// Whether a node's daemon can be there.
///
/// # Errors
/// [`PeerError::Address`].
pub(crate) fn check(node: &str) -> Result<(), PeerError> {
    address(node).map(drop)
}

fn migration_of(peer: &Peer) -> String {
    client::path(["v1", "vms", &peer.name, "migration"])
}

/// A place that another node names, if it can be the one.
fn believed(peer: &Peer, far: bool, listen: &str) -> Result<Endpoint, PeerError> {
    let endpoint: Endpoint = listen.parse().map_err(|source| PeerError::Endpoint {
        node: peer.node.clone(),
        source,
    })?;
    match (&endpoint, far) {
        (Endpoint::Unix(_), false) | (Endpoint::Tcp { .. }, true) => Ok(endpoint),
        _ => Err(PeerError::Strange {
            node: peer.node.clone(),
            endpoint,
        }),
    }
}

fn failed(peer: &Peer, error: ClientError) -> PeerError {
    let node = peer.node.clone();
    match error {
        ClientError::Refused(refusal) => PeerError::Refused {
            node,
            reason: refusal.reason(),
            remedy: refusal.hint().map(str::to_owned),
        },
        source => PeerError::Client {
            node,
            source: Box::new(source),
        },
    }
}

/// The name that a machine is to have there, if another than here is wanted.
pub(crate) fn name_there(wanted: Option<&VmName>, here: &VmName) -> String {
    wanted.unwrap_or(here).to_string()
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
    fn nodes_are_told_from_processes_that_wait() {
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
            assert!(matches!(address(bad), Err(PeerError::Address(_))), "{bad}");
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
        assert!(matches!(peers.place(None), Err(PeerError::NoCertificates)));
        let spec = serde_json::from_value(serde_json::json!({ "kernel": "/k" })).unwrap();
        let refused = peers.receive(&peer(), spec).unwrap_err();
        assert!(matches!(refused, PeerError::NoCertificates), "{refused}");
        assert!(refused.obstacle().is_some());
    }
}
