//! What can go wrong with settings of virtual functions, and what the user can do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use super::settings::InvalidSetting;
use crate::netlink::exchange::{Malformed, Refusal};

/// What was asked for, as part of a sentence: "cannot …".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkOperation {
    /// An interface with its virtual functions.
    Show(String),
    /// One setting of a virtual function.
    Set {
        /// The interface of the physical function.
        interface: String,
        /// The virtual function's number.
        virtual_function: u32,
        /// What was to be set.
        setting: &'static str,
    },
}

impl fmt::Display for LinkOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Show(interface) => write!(f, "show virtual functions of {interface}"),
            Self::Set {
                interface,
                virtual_function,
                setting,
            } => write!(
                f,
                "set the {setting} of virtual function {virtual_function} of {interface}"
            ),
        }
    }
}

/// Why a request about links failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No interface can be called so.
    #[error(
        "{0:?} does not name a network interface: names have 1 to 15 bytes, without slashes and spaces"
    )]
    BadName(String),
    /// There is no such interface here.
    #[error("there is no network interface {name} in this network namespace; `ip link` lists them")]
    NoInterface {
        /// Its name.
        name: String,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// There is no such virtual function.
    #[error("{interface} has no virtual function {virtual_function}; {}", which(*count))]
    NoVirtualFunction {
        /// The interface of the physical function.
        interface: String,
        /// Its number.
        virtual_function: u32,
        /// How many there are.
        count: usize,
    },
    /// The driver of the physical function has no such setting.
    #[error(
        "cannot {operation}: its driver has no such setting (virtio_net has none at all: whoever provides that NIC sets them there)"
    )]
    NotTaken {
        /// What was asked for.
        operation: LinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The caller may not do that.
    #[error("cannot {operation}: this needs CAP_NET_ADMIN; run it as root")]
    NotPermitted {
        /// What was asked for.
        operation: LinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The kernel refused for another reason.
    #[error("cannot {operation}")]
    Refused {
        /// What was asked for.
        operation: LinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// A setting failed, and one that was made before it could not be taken back.
    #[error("the {setting} of the virtual function keeps its new value")]
    NotTakenBack {
        /// What could not be taken back.
        setting: &'static str,
        /// Why the settings were to be taken back.
        #[source]
        source: Box<LinkError>,
    },
    /// Settings that no virtual function can have.
    #[error(transparent)]
    Invalid(#[from] InvalidSetting),
    /// The kernel did not answer in time.
    #[error(
        "cannot {operation}: no answer in {} s; {}. Something holds the kernel's lock of network interfaces; its log (`dmesg`) may say what",
        patience.as_secs(),
        if *sent { "it may still be done later" } else { "it will not be done" }
    )]
    Timeout {
        /// What was asked for.
        operation: LinkOperation,
        /// How long the answer was waited for.
        patience: Duration,
        /// Whether the kernel has the request.
        sent: bool,
    },
    /// The kernel's answer makes no sense.
    #[error("cannot {operation}: the kernel's answer is malformed")]
    Malformed {
        /// What was asked for.
        operation: LinkOperation,
        /// What is wrong with it.
        #[source]
        source: Malformed,
    },
    /// There is no netlink to talk through.
    #[error("cannot talk to the kernel through netlink")]
    Socket(#[source] io::Error),
}

fn which(count: usize) -> String {
    match count {
        0 => "it has none; `bellhop vf count` makes some".to_owned(),
        1 => "it has only number 0".to_owned(),
        count => format!("they are 0 to {}", count - 1),
    }
}
