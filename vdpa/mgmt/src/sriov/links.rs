//! Requests about links, through rtnetlink.

use std::time::Duration;

use super::settings::Setting;
use super::{Link, VirtualFunction};
use crate::DEFAULT_PATIENCE;
use crate::error::{Error, ErrorKind};
use crate::link::{self, request};
use crate::netlink::error::Refusal;
use crate::netlink::exchange::Answer;
use crate::netlink::message::Request;

/// Virtual functions through the kernel's network interfaces, those of this network namespace. One
/// thread sends all requests, one after the other.
#[derive(Debug, Clone)]
pub struct Links {
    connection: link::Links,
}

impl From<link::Links> for Links {
    /// Uses an existing connection.
    fn from(connection: link::Links) -> Self {
        Self { connection }
    }
}

impl Links {
    /// Connects; waits for each answer up to [`DEFAULT_PATIENCE`].
    ///
    /// # Errors
    /// `Failed` without netlink.
    pub fn open() -> Result<Self, Error> {
        Self::with_patience(DEFAULT_PATIENCE)
    }

    /// Connects; waits for each answer up to `patience`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with_patience(patience: Duration) -> Result<Self, Error> {
        let connection = link::Links::with_patience(patience)?;
        Ok(Self { connection })
    }

    /// An interface with the settings of its virtual functions.
    ///
    /// # Errors
    /// `NotFound`, `BadName`, or another one.
    pub fn link(&self, interface: &str) -> Result<Link, Error> {
        if !link::is_interface_name(interface) {
            let message = format!(
                "{interface:?} does not name a network interface: names have 1 to 15 bytes, \
                 without slashes and spaces"
            );
            return Err(Error::new(ErrorKind::BadName, message));
        }
        let operation = format!("show virtual functions of {interface}");
        let request = request::show_virtual_functions(interface);
        let answer = self.call(&operation, interface, false, request)?;
        link::only(&answer, Link::of).map_err(Error::malformed(&operation))
    }

    /// Applies settings to a virtual function, in this order. If one fails, those before it are
    /// restored, except those whose former value the driver does not report.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `NotSupported` if the driver has no such setting;
    /// `NotFound`, `NotPermitted`, or another one. If a setting keeps its new value, `NotUndone`
    /// replaces the failure.
    pub fn set(
        &self,
        interface: &str,
        virtual_function: u32,
        settings: &[Setting],
    ) -> Result<(), Error> {
        for setting in settings {
            setting.check()?;
        }
        let link = self.link(interface)?;
        let listed = &link.virtual_functions;
        let now = listed.iter().find(|one| one.index == virtual_function);
        // A driver that reports nothing may still accept a setting, so it is tried. The link does
        // not show the number of functions: virtio's always reports 0.
        let none = || {
            let which = which(listed.len());
            let message =
                format!("{interface} has no virtual function {virtual_function}; {which}");
            Error::new(ErrorKind::NotFound, message)
        };
        if now.is_none() && !listed.is_empty() {
            return Err(none());
        }
        for (done, setting) in settings.iter().enumerate() {
            if let Err(error) = self.send(&link, virtual_function, setting) {
                let errno = error.refusal().map(Refusal::errno);
                if errno == Some(libc::EINVAL) && listed.is_empty() {
                    return Err(none());
                }
                let before = settings.get(..done).unwrap_or_default();
                return Err(self.restore(&link, virtual_function, before, now, error));
            }
        }
        Ok(())
    }

    /// Restores settings, the last one first. Returns the error to report.
    fn restore(
        &self,
        link: &Link,
        virtual_function: u32,
        settings: &[Setting],
        now: Option<&VirtualFunction>,
        error: Error,
    ) -> Error {
        let mut reported = error;
        for setting in settings.iter().rev() {
            let former = now.and_then(|now| setting.former(now));
            let back = former.map(|former| self.send(link, virtual_function, &former));
            if !matches!(back, Some(Ok(()))) {
                if let Some(Err(error)) = back {
                    tracing::debug!(%error, "cannot roll back a setting");
                }
                let setting = setting.name();
                let message = format!("the {setting} of the virtual function keeps its new value");
                reported = Error::new(ErrorKind::NotUndone, message).because(reported);
            }
        }
        reported
    }

    fn send(&self, link: &Link, virtual_function: u32, setting: &Setting) -> Result<(), Error> {
        let operation = format!(
            "set the {} of virtual function {virtual_function} of {}",
            setting.name(),
            link.name
        );
        let setting = setting.attribute(virtual_function);
        let request = request::set_virtual_function(link.index, setting);
        self.call(&operation, &link.name, true, request).map(drop)
    }

    /// Sends a request that shows the interface, or sets something of it.
    fn call(
        &self,
        operation: &str,
        interface: &str,
        sets: bool,
        request: Request,
    ) -> Result<Answer, Error> {
        self.connection.call(request).map_err(|error| {
            let refused = |refusal| refused(operation, interface, sets, refusal);
            link::TEXTS.explain(&operation, error, self.connection.patience(), refused)
        })
    }
}

/// A refusal with its remedy.
pub(super) fn refused(operation: &str, interface: &str, sets: bool, source: Refusal) -> Error {
    let (kind, message) = match source.errno() {
        libc::EPERM | libc::EACCES => (
            ErrorKind::NotPermitted,
            format!("cannot {operation}: this needs CAP_NET_ADMIN; run it as root"),
        ),
        libc::ENODEV => (
            ErrorKind::NotFound,
            format!(
                "there is no network interface {interface} in this network namespace; `ip link` \
                 lists them"
            ),
        ),
        libc::EOPNOTSUPP if sets => (
            ErrorKind::NotSupported,
            format!(
                "cannot {operation}: its driver has no such setting (virtio_net has none at all: \
                 the provider of that NIC sets them there)"
            ),
        ),
        _ => (ErrorKind::Refused, format!("cannot {operation}")),
    };
    Error::new(kind, message).because(source)
}

fn which(count: usize) -> String {
    match count {
        0 => "it has none; `bellhop vf count` creates some".to_owned(),
        1 => "it has only number 0".to_owned(),
        count => format!("they are 0 to {}", count - 1),
    }
}
