//! What can go wrong with giving a device to a container, and what the user can do about it.

use std::io;
use std::time::Duration;

use crate::bus::BusError;
use crate::link::{LinkError, NamespaceError};

/// Why a device did not become a container's interface.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// It would stay where it is.
    #[error("the network namespace {0} is this one: leave it out, or name the container's")]
    SameNamespace(String),
    /// The name is another interface's.
    #[error(
        "the network namespace {namespace} has an interface {name} already; choose another name"
    )]
    NameTaken {
        /// The name.
        name: String,
        /// The namespace.
        namespace: String,
    },
    /// It was given away before.
    #[error(
        "{0} is an interface in another network namespace already; `bellhop bind {0} vhost_vdpa` takes it back from there"
    )]
    Elsewhere(String),
    /// No interface came.
    #[error(
        "{name} became no network interface in {} s: it needs the driver virtio_net (`modprobe virtio_net`), and a device of class net",
        limit.as_secs()
    )]
    NoNetdev {
        /// The device.
        name: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// The device is another one.
    #[error("{name} has the address {}, not {}; `bellhop dev config show` lists addresses", is.map_or_else(|| "unknown".to_owned(), address), address(*wanted))]
    Mac {
        /// The device.
        name: String,
        /// The address that it should have.
        wanted: [u8; 6],
        /// The address that it has.
        is: Option<[u8; 6]>,
    },
    /// The bus refused.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// A request about interfaces failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The namespace cannot be used.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// Namespaces cannot be told apart.
    #[error("cannot look at a network namespace")]
    Compare(#[source] io::Error),
    /// It failed, and the device is not as it was before.
    #[error("{name} is not as it was before ({problem}); `bellhop bind {name}` shows how it is")]
    NotTakenBack {
        /// The device.
        name: String,
        /// What failed of the way back.
        problem: Box<ContainerError>,
        /// Why it was to be taken back.
        #[source]
        source: Box<ContainerError>,
    },
}

fn address(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
