//! What can go wrong with devlink, and what the user can do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use super::handle::{BadHandle, Handle, PortHandle};
use super::rate::RateObject;
use crate::netlink::exchange::{Malformed, Refusal};

/// What was asked for, as part of a sentence: "cannot …".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DevlinkOperation {
    /// The kernel's devlink itself.
    Connect,
    /// All of something: instances, ports, ….
    List(&'static str),
    /// Something of an instance.
    Show {
        /// What.
        what: &'static str,
        /// The instance.
        handle: Handle,
    },
    /// One port.
    ShowPort(PortHandle),
    /// A new port.
    AddPort {
        /// The instance that gets it.
        handle: Handle,
        /// The subfunction's number, unless the driver chooses it.
        sfnum: Option<u32>,
    },
    /// A port's end.
    DeletePort(PortHandle),
    /// What a port's function is to be.
    SetFunction {
        /// The port.
        port: PortHandle,
        /// What was to be set.
        setting: &'static str,
    },
    /// The eswitch's modes.
    SetEswitch(Handle),
    /// One parameter.
    ShowParam {
        /// The instance.
        handle: Handle,
        /// The parameter's name.
        name: String,
    },
    /// A parameter's value.
    SetParam {
        /// The instance.
        handle: Handle,
        /// The parameter's name.
        name: String,
    },
    /// A reload.
    Reload(Handle),
    /// One rate object.
    ShowRate(RateObject),
    /// A new rate node.
    AddRate(RateObject),
    /// A rate object's limits.
    SetRate(RateObject),
    /// A rate node's end.
    DeleteRate(RateObject),
    /// A health reporter's recovery.
    Recover {
        /// The instance.
        handle: Handle,
        /// The reporter's name.
        reporter: String,
    },
}

impl fmt::Display for DevlinkOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("find the kernel's devlink"),
            Self::List(what) => write!(f, "list devlink {what}"),
            Self::Show { what, handle } => write!(f, "show the {what} of {handle}"),
            Self::ShowPort(port) => write!(f, "show the port {port}"),
            Self::AddPort { handle, .. } => write!(f, "add a port to {handle}"),
            Self::DeletePort(port) => write!(f, "delete the port {port}"),
            Self::SetFunction { port, setting } => {
                write!(f, "set the {setting} of the function of the port {port}")
            }
            Self::SetEswitch(handle) => write!(f, "set the eswitch of {handle}"),
            Self::ShowParam { handle, name } => {
                write!(f, "show the parameter {name} of {handle}")
            }
            Self::SetParam { handle, name } => write!(f, "set the parameter {name} of {handle}"),
            Self::Reload(handle) => write!(f, "reload {handle}"),
            Self::ShowRate(object) => write!(f, "show the rate of {object}"),
            Self::AddRate(object) => write!(f, "add the rate node {object}"),
            Self::SetRate(object) => write!(f, "set the rate of {object}"),
            Self::DeleteRate(object) => write!(f, "delete the rate node {object}"),
            Self::Recover { handle, reporter } => {
                write!(f, "recover the health reporter {reporter} of {handle}")
            }
        }
    }
}

impl DevlinkOperation {
    /// The instance that it is about.
    pub(super) fn handle(&self) -> Option<&Handle> {
        match self {
            Self::Connect | Self::List(_) => None,
            Self::Show { handle, .. }
            | Self::AddPort { handle, .. }
            | Self::SetEswitch(handle)
            | Self::ShowParam { handle, .. }
            | Self::SetParam { handle, .. }
            | Self::Reload(handle)
            | Self::Recover { handle, .. } => Some(handle),
            Self::ShowPort(port) | Self::DeletePort(port) | Self::SetFunction { port, .. } => {
                Some(port.handle())
            }
            Self::ShowRate(object)
            | Self::AddRate(object)
            | Self::SetRate(object)
            | Self::DeleteRate(object) => Some(object.handle()),
        }
    }

    /// Whether drivers do it in switchdev mode only.
    pub(super) fn needs_switchdev(&self) -> bool {
        matches!(
            self,
            Self::AddPort { .. } | Self::AddRate(_) | Self::SetRate(_)
        )
    }

    /// The port that it is about, which must be there already.
    pub(super) fn port(&self) -> Option<&PortHandle> {
        match self {
            Self::ShowPort(port) | Self::DeletePort(port) | Self::SetFunction { port, .. } => {
                Some(port)
            }
            Self::ShowRate(RateObject::Leaf(port)) | Self::SetRate(RateObject::Leaf(port)) => {
                Some(port)
            }
            _ => None,
        }
    }
}

/// Settings that cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRequest {
    /// An address of a group, or none.
    #[error("a function needs a unicast MAC address, not {}", mac(address))]
    NotUnicast {
        /// The address.
        address: [u8; 6],
    },
    /// There is nothing to set.
    #[error("nothing is to be set: give at least one value")]
    Nothing,
    /// The least rate is above the greatest.
    #[error("tx_share {share} is above tx_max {max} (bytes per second; 0 is no limit)")]
    Rates {
        /// The rate that is sure.
        share: u64,
        /// The greatest rate.
        max: u64,
    },
    /// A name that no parameter has.
    #[error("{0:?} does not name a parameter")]
    ParamName(String),
    /// A name that no health reporter has.
    #[error("{0:?} does not name a health reporter")]
    ReporterName(String),
    /// A string that no parameter holds.
    #[error("a parameter's text has at most 31 bytes, without NUL")]
    LongText,
}

fn mac(address: &[u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}

/// Why a request to the kernel's devlink failed.
#[derive(Debug, thiserror::Error)]
pub enum DevlinkError {
    /// The kernel has no devlink.
    #[error(
        "this kernel has no devlink: it is there once a NIC driver that has it is loaded (such as \
         `modprobe mlx5_core`), unless the kernel was built without it (CONFIG_NET_DEVLINK)"
    )]
    NoFamily,
    /// The caller may not do that.
    #[error("cannot {operation}: this needs CAP_NET_ADMIN; run it as root")]
    NotPermitted {
        /// What was asked for.
        operation: DevlinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// There is no such instance here.
    #[error(
        "there is no devlink instance {handle} in this network namespace; `bellhop port show` lists \
         those with ports (a driver without devlink has none)"
    )]
    NoInstance {
        /// Its name.
        handle: Handle,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The instance has no such port.
    #[error("there is no port {port}; `bellhop port show` lists them")]
    NoPort {
        /// Its name.
        port: PortHandle,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// There is no such rate node.
    #[error("there is no rate node {object}; `bellhop port function rate show` lists them")]
    NoRate {
        /// Its name.
        object: RateObject,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The embedded switch does not switch.
    #[error(
        "cannot {operation}: its eswitch is in legacy mode; switch it over first with `devlink dev \
         eswitch set {} mode switchdev` (links of its functions go down meanwhile)",
        operation.handle().map(ToString::to_string).unwrap_or_default()
    )]
    NotSwitchdev {
        /// What was asked for.
        operation: DevlinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// There is a subfunction of that number already.
    #[error(
        "{handle} has a subfunction {sfnum} already; choose another sfnum (`bellhop port show` lists \
         those that are taken), or none if the driver chooses itself"
    )]
    SfnumTaken {
        /// The instance.
        handle: Handle,
        /// The number.
        sfnum: u32,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// There is a rate node of that name already.
    #[error("there is a rate node {object} already; `bellhop port function rate show` lists them")]
    NodeTaken {
        /// Its name.
        object: RateObject,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The driver cannot do that.
    #[error("cannot {operation}: its driver does not support that")]
    NotSupported {
        /// What was asked for.
        operation: DevlinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The kernel refused for another reason.
    #[error("cannot {operation}")]
    Refused {
        /// What was asked for.
        operation: DevlinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The instance has no such parameter.
    #[error(
        "{handle} has no parameter {name}; `devlink dev param show {handle}` lists those that it has"
    )]
    NoParam {
        /// The instance.
        handle: Handle,
        /// The parameter's name.
        name: String,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The parameter is of another type.
    #[error("the parameter {name} of {handle} is {expected}, not {given}")]
    ParamType {
        /// The instance.
        handle: Handle,
        /// The parameter's name.
        name: String,
        /// What it is: "a u32".
        expected: &'static str,
        /// What was to be set.
        given: &'static str,
    },
    /// The parameter has no value of this configuration mode.
    #[error("the parameter {name} of {handle} cannot be set as {cmode}")]
    ParamMode {
        /// The instance.
        handle: Handle,
        /// The parameter's name.
        name: String,
        /// The mode that was asked for.
        cmode: super::Cmode,
    },
    /// No such thing can exist.
    #[error(transparent)]
    BadHandle(#[from] BadHandle),
    /// Settings that cannot be sent.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// The kernel did not answer in time.
    #[error(
        "cannot {operation}: no answer in {} s; {}. A driver is still at work on it; the kernel's log \
         (`dmesg`) may say on what",
        patience.as_secs(),
        if *sent { "it may still be done later" } else { "it will not be done" }
    )]
    Timeout {
        /// What was asked for.
        operation: DevlinkOperation,
        /// How long the answer was waited for.
        patience: Duration,
        /// Whether the kernel has the request.
        sent: bool,
    },
    /// A list changed each time that it was read.
    #[error("cannot {operation}: they come and go too fast; try again")]
    Interrupted {
        /// What was asked for.
        operation: DevlinkOperation,
    },
    /// The kernel's answer makes no sense.
    #[error("cannot {operation}: the kernel's answer is malformed")]
    Malformed {
        /// What was asked for.
        operation: DevlinkOperation,
        /// What is wrong with it.
        #[source]
        source: Malformed,
    },
    /// There is no netlink to talk through.
    #[error("cannot talk to the kernel through netlink")]
    Socket(#[source] io::Error),
}

impl DevlinkError {
    /// The same about the whole instance, if it is one about a part that is not there.
    pub(super) fn of_instance(self) -> Self {
        match self {
            Self::NoPort { port, source } => Self::NoInstance {
                handle: port.handle().clone(),
                source,
            },
            Self::NoRate { object, source } => Self::NoInstance {
                handle: object.handle().clone(),
                source,
            },
            other => other,
        }
    }
}
