//! Other nodes: this daemon as their client in a migration between two nodes.
//!
//! ```text
//!   source's daemon                                           destination's daemon
//!   POST …/migration {"receive": …} ────────────────────────> creates NICs, a process waits
//!     with a certificate             <─────────────────────── its address, certificate and secret
//!   the VM's process      ═══ the migration protocol    ═══> that process
//!   DELETE …/migration, if it stays ────────────────────────> rolls back unless the VM is there
//! ```
//! Each side's certificate and key are for this migration only, so no VM's process has a key of the
//! node. Owns the requests to other nodes, the validation of their answers, and the addresses and
//! terms for incoming VMs.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use bellhop_api::machine::{MigrationSecret, PairedTls, Pairing, Place, ResolveRequest};
use bellhop_api::node::{Awaited, Vm, VmPhase};
use bellhop_common::client::{self, Address, Credentials, Http, MAKING, Refusal, STRANGE};
use bellhop_common::error::{Error as ClientError, ErrorKind as ClientErrorKind};
use hyper::{Method, StatusCode};
use rcgen::{CertificateParams, KeyPair};
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Serialize};
use vmm::migration::endpoint::{BadEndpoint, Endpoint};

use super::error::{Error, ErrorKind};
use super::machines::spec::{NodeMigrationRequest, ReceiveFromNode};

/// The prefix of the path of a socket that belongs to a daemon on this host.
const LOCAL: &str = "node:";

/// The name in the certificate of a source. No side checks it.
const SOURCE: &str = "source";

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

/// A key and a self-signed certificate for one migration (PEM).
struct OwnCertificate {
    certificate: String,
    key: String,
}

impl OwnCertificate {
    /// Generates one for a host of this name or address.
    fn generate(host: &str) -> Result<Self, Error> {
        let made = || {
            let key = KeyPair::generate()?;
            let certificate = CertificateParams::new([host.to_owned()])?.self_signed(&key)?;
            Ok::<_, rcgen::Error>(Self {
                certificate: certificate.pem(),
                key: key.serialize_pem(),
            })
        };
        made().map_err(Error::context(
            "cannot create a certificate for the migration",
        ))
    }

    /// The terms for this side's process, whose peer has the certificate `peer`.
    fn with_peer(self, peer: String) -> PairedTls {
        PairedTls {
            certificate: self.certificate,
            key: self.key,
            peer,
        }
    }
}

/// The place where an incoming VM is awaited, and the terms of its migration.
#[derive(Debug)]
pub(crate) struct Reception {
    /// Where the source connects.
    pub(crate) endpoint: Endpoint,
    /// The terms for the waiting process.
    pub(crate) pairing: Pairing,
    /// The socket of that process, over TCP: it listens already, so no other process can take the
    /// port.
    pub(crate) listener: Option<TcpListener>,
}

impl Reception {
    /// The answer to the daemon of the source.
    pub(crate) fn awaited(&self) -> Awaited {
        let tls = self.pairing.tls.as_ref();
        Awaited {
            listen: self.endpoint.to_string(),
            secret: self.pairing.secret,
            certificate: tls.map(|tls| tls.certificate.clone()),
        }
    }
}

/// Other nodes.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    credentials: Credentials,
    /// The name or address of this host for incoming VMs.
    host: Option<String>,
}

impl Peers {
    /// Nodes that accept this node's `credentials`.
    pub(crate) fn new(credentials: Credentials, host: Option<String>) -> Self {
        Self { credentials, host }
    }

    /// Prepares for an incoming VM, at `socket` if the sender is on this host. Otherwise it is a
    /// free port, and `certificate` is the source's.
    ///
    /// # Errors
    /// This daemon has no address for migrations, or its host has no free port. Or the source has
    /// no certificate.
    pub(crate) fn place(
        &self,
        socket: Option<&Path>,
        certificate: Option<String>,
    ) -> Result<Reception, Error> {
        let mut secret = MigrationSecret::default();
        let filled = SystemRandom::new().fill(&mut secret.0);
        filled.map_err(|_| Error::failed("the kernel returns no random numbers"))?;
        if let Some(socket) = socket {
            return Ok(Reception {
                endpoint: Endpoint::Unix(socket.to_owned()),
                pairing: Pairing { secret, tls: None },
                listener: None,
            });
        }
        let host = self.host.as_ref().ok_or_else(|| {
            let message = "this daemon receives no VMs over a network: start it with \
                           --migration-host";
            Error::conflict("no_migration_host", message)
        })?;
        let source = certificate.ok_or_else(|| {
            Error::invalid(
                "a migration over a network needs the source's certificate (`certificate`)",
            )
        })?;
        let no_port = || {
            format!(
                "cannot listen for incoming VMs at {host}: check that --migration-host names this \
                 host"
            )
        };
        let listener = TcpListener::bind((host.as_str(), 0)).map_err(Error::context(no_port()))?;
        let port = listener.local_addr().map_err(Error::context(no_port()))?;
        Ok(Reception {
            endpoint: Endpoint::Tcp {
                host: host.clone(),
                port: port.port(),
            },
            pairing: Pairing {
                secret,
                tls: Some(OwnCertificate::generate(host)?.with_peer(source)),
            },
            listener: Some(listener),
        })
    }

    /// Requests another node to wait for a VM. Returns where it waits, and the terms for the VM's
    /// process. Blocks.
    ///
    /// # Errors
    /// Then nothing is left at that node, or it cleans up by itself.
    pub(crate) fn receive(
        &self,
        peer: &Peer,
        mut wanted: ReceiveFromNode,
    ) -> Result<(Endpoint, Pairing), Error> {
        let address = address(&peer.node)?;
        let own = match &address {
            Address::Https { .. } => Some(OwnCertificate::generate(SOURCE)?),
            _ => None,
        };
        wanted.certificate = own.as_ref().map(|own| own.certificate.clone());
        let failed = |error| failed(peer, error);
        let node = self.connect(peer, &address)?;
        let body = NodeMigrationRequest::Receive(Box::new(wanted));
        let sent = node.send(Method::POST, &migration_of(peer), &body, MAKING);
        let (_, answer) = sent.map_err(failed)?;
        let awaited = Awaited::deserialize(&answer).map_err(ClientError::context(STRANGE));
        agreed(peer, own, awaited.map_err(failed)?)
    }

    /// Notifies another node that a VM does not arrive, because its guest is here. Blocks.
    ///
    /// # Errors
    /// The node is unreachable, or the VM has arrived.
    pub(crate) fn withdraw(&self, peer: &Peer) -> Result<(), Error> {
        let node = self.connect(peer, &address(&peer.node)?)?;
        let path = migration_of(peer);
        let Err(error) = node.change(Method::DELETE, &path) else {
            return Ok(());
        };
        match error.refusal() {
            Some(refusal) if refusal.status == StatusCode::NOT_FOUND => Ok(()),
            Some(refusal) if refusal.body.code == "has_come" => {
                // Its process there may have ended without a report. Then that node waits for a
                // report of where the guest is.
                let report = ResolveRequest {
                    resolve: Place::There,
                };
                let sent = node.send(Method::PATCH, &path, &report, MAKING);
                sent.map(drop).map_err(|error| failed(peer, error))
            }
            _ => Err(failed(peer, error)),
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

/// Validates the answer of another node. Over a network this side has its `own` certificate.
fn agreed(
    peer: &Peer,
    own: Option<OwnCertificate>,
    awaited: Awaited,
) -> Result<(Endpoint, Pairing), Error> {
    let node = &peer.node;
    let bad = |message| Error::new(ErrorKind::UnclearThere("bad_answer"), message);
    let endpoint: Endpoint = awaited.listen.parse().map_err(|source: BadEndpoint| {
        bad(format!("the node {node} returned an invalid address")).because(source)
    })?;
    let tls = match (&endpoint, own, awaited.certificate) {
        (Endpoint::Unix(_), None, _) => None,
        (Endpoint::Tcp { .. }, Some(own), Some(theirs)) => Some(own.with_peer(theirs)),
        (Endpoint::Tcp { .. }, Some(_), None) => {
            return Err(bad(format!(
                "the node {node} returned no certificate: run the same Bellhop on both"
            )));
        }
        _ => {
            return Err(bad(format!(
                "the node {node} returned the address {endpoint}, which is not reachable from here"
            )));
        }
    };
    let secret = awaited.secret;
    Ok((endpoint, Pairing { secret, tls }))
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

    fn awaited(listen: &str, certificate: Option<&str>) -> Awaited {
        Awaited {
            listen: listen.to_owned(),
            secret: MigrationSecret([1; 32]),
            certificate: certificate.map(str::to_owned),
        }
    }

    fn own() -> OwnCertificate {
        OwnCertificate::generate(SOURCE).unwrap()
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
            let answer = awaited(listen, far.then_some("theirs"));
            let agreed = agreed(&peer(), far.then(own), answer);
            assert_eq!(agreed.is_ok(), good, "{listen} {far}");
        }
        let naked = agreed(&peer(), Some(own()), awaited("tcp:b:7444", None));
        assert!(naked.unwrap_err().to_string().contains("no certificate"));
        let old = serde_json::json!({ "listen": "tcp:b:7444" });
        assert!(serde_json::from_value::<Awaited>(old).is_err());
    }

    #[test]
    fn the_terms_of_both_sides_match_and_are_for_one_migration() {
        let there = Peers::new(Credentials::default(), Some("127.0.0.1".to_owned()));
        let pair = || {
            let own = own();
            let place = there.place(None, Some(own.certificate.clone())).unwrap();
            let (endpoint, here) = agreed(&peer(), Some(own), place.awaited()).unwrap();
            assert_eq!(endpoint, place.endpoint);
            assert_eq!(here.secret, place.pairing.secret);
            let (here_tls, there_tls) = (here.tls.unwrap(), place.pairing.tls.clone().unwrap());
            assert_eq!(here_tls.certificate, there_tls.peer);
            assert_eq!(here_tls.peer, there_tls.certificate);
            for terms in [&here_tls, &there_tls] {
                vmm::migration::tls::Tls::paired(terms).unwrap();
            }
            (place, there_tls)
        };
        let ((one, first), (other, second)) = (pair(), pair());
        assert_ne!(one.pairing.secret, other.pairing.secret);
        assert_ne!(one.pairing.secret, MigrationSecret::default());
        assert_ne!((first.key, first.peer), (second.key, second.peer));
    }

    #[test]
    fn the_port_of_an_incoming_machine_is_never_free() {
        let peers = Peers::new(Credentials::default(), Some("127.0.0.1".to_owned()));
        let place = peers.place(None, Some(own().certificate)).unwrap();
        let Endpoint::Tcp { host, port } = &place.endpoint else {
            panic!("{}", place.endpoint);
        };
        // The socket for the process is bound already, so the port cannot change hands.
        let taken = TcpListener::bind((host.as_str(), *port)).unwrap_err();
        assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
        std::net::TcpStream::connect((host.as_str(), *port)).unwrap();
        let listener = place.listener.unwrap();
        assert_eq!(listener.local_addr().unwrap().port(), *port);
        listener.accept().unwrap();
    }

    #[test]
    fn without_an_address_or_a_certificate_no_machine_comes_over_a_network() {
        let socket = Path::new("/run/x");
        let near = Peers::default().place(Some(socket), None).unwrap();
        assert!(matches!(near.endpoint, Endpoint::Unix(_)));
        assert!(near.pairing.tls.is_none() && near.listener.is_none());
        let code = |peers: &Peers, certificate: Option<&str>| {
            let place = peers.place(None, certificate.map(str::to_owned));
            place.unwrap_err().answer().1
        };
        assert_eq!(code(&Peers::default(), Some("c")), "no_migration_host");
        let peers = Peers::new(Credentials::default(), Some("127.0.0.1".to_owned()));
        assert_eq!(code(&peers, None), "invalid_body");
    }
}
