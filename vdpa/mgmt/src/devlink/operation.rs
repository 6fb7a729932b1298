//! The operations of devlink, and the meaning of a refusal for each.

use std::fmt;

use super::handle::{Handle, PortHandle};
use super::rate_object::RateObject;
use crate::error::{Error, ErrorKind};
use crate::netlink::error::Refusal;

/// The operation that failed, as part of a sentence: "cannot …".
#[derive(Debug)]
pub(super) enum Operation<'a> {
    Connect,
    List(&'static str),
    Show {
        what: &'static str,
        handle: &'a Handle,
    },
    ShowPort(&'a PortHandle),
    AddPort {
        handle: &'a Handle,
        sfnum: Option<u32>,
    },
    DeletePort(&'a PortHandle),
    SetFunction {
        port: &'a PortHandle,
        setting: &'static str,
    },
    SetEswitch(&'a Handle),
    ShowParam {
        handle: &'a Handle,
        name: &'a str,
    },
    SetParam {
        handle: &'a Handle,
        name: &'a str,
    },
    Reload(&'a Handle),
    ShowRate(&'a RateObject),
    AddRate(&'a RateObject),
    SetRate(&'a RateObject),
    DeleteRate(&'a RateObject),
    Recover {
        handle: &'a Handle,
        reporter: &'a str,
    },
}

impl fmt::Display for Operation<'_> {
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

impl<'a> Operation<'a> {
    /// The instance that it is about.
    pub(super) fn handle(&self) -> Option<&'a Handle> {
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

    /// Whether drivers support it in switchdev mode only.
    pub(super) fn needs_switchdev(&self) -> bool {
        matches!(
            self,
            Self::AddPort { .. } | Self::AddRate(_) | Self::SetRate(_)
        )
    }

    /// The existing port that it is about.
    pub(super) fn port(&self) -> Option<&'a PortHandle> {
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

/// A refusal with its remedy.
pub(super) fn refused(operation: &Operation<'_>, source: Refusal) -> Error {
    use ErrorKind as Kind;
    use Operation as Of;
    let (kind, message) = match (source.errno(), operation) {
        (libc::EPERM | libc::EACCES, _) => (
            Kind::NotPermitted,
            format!("cannot {operation}: this needs CAP_NET_ADMIN; run it as root"),
        ),
        (
            libc::ENODEV,
            Of::ShowRate(object @ RateObject::Node(_))
            | Of::SetRate(object @ RateObject::Node(_))
            | Of::DeleteRate(object),
        ) => (
            Kind::NotFound,
            format!("there is no rate node {object}; `bellhop port function rate show` lists them"),
        ),
        // The kernel returns the same errno for an instance and for its port; `connection.rs`
        // distinguishes them.
        (libc::ENODEV, _) => match (operation.port(), operation.handle()) {
            (Some(port), _) => (
                Kind::NotFound,
                format!("there is no port {port}; `bellhop port show` lists them"),
            ),
            (None, Some(handle)) => return no_instance(handle, source),
            (None, None) => (Kind::Refused, format!("cannot {operation}")),
        },
        (
            libc::EEXIST,
            Of::AddPort {
                handle,
                sfnum: Some(sfnum),
            },
        ) => (
            Kind::NameTaken,
            format!(
                "{handle} has a subfunction {sfnum} already; choose another sfnum (`bellhop port \
                 show` lists the taken ones), or none if the driver chooses itself"
            ),
        ),
        (libc::EEXIST, Of::AddRate(object)) => (
            Kind::NameTaken,
            format!(
                "there is a rate node {object} already; `bellhop port function rate show` lists \
                 them"
            ),
        ),
        (libc::EINVAL, Of::ShowParam { handle, name }) => (
            Kind::NoParam,
            format!(
                "{handle} has no parameter {name}; `devlink dev param show {handle}` lists its \
                 parameters"
            ),
        ),
        (libc::EOPNOTSUPP, _) => (
            Kind::NotSupported,
            format!("cannot {operation}: its driver does not support that"),
        ),
        _ => (Kind::Refused, format!("cannot {operation}")),
    };
    Error::new(kind, message).because(source)
}

/// There is no such instance.
pub(super) fn no_instance(handle: &Handle, source: Refusal) -> Error {
    let message = format!(
        "there is no devlink instance {handle} in this network namespace; `bellhop port show` \
         lists those with ports (a driver without devlink has none)"
    );
    Error::new(ErrorKind::NotFound, message).because(source)
}

/// The eswitch of the instance is in legacy mode.
pub(super) fn not_switchdev(operation: &Operation<'_>, handle: &Handle, source: Refusal) -> Error {
    let message = format!(
        "cannot {operation}: its eswitch is in legacy mode; switch it over first with `devlink dev \
         eswitch set {handle} mode switchdev` (links of its functions go down meanwhile)"
    );
    Error::new(ErrorKind::Refused, message).because(source)
}

/// The values cannot be sent.
pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

/// There is nothing to set.
pub(super) fn nothing() -> Error {
    invalid("no value to set: give at least one")
}
