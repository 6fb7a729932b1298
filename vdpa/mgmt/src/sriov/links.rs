//! Requests about links, through rtnetlink.

use std::time::Duration;

use netlink_packet_core::DefaultNla;

use super::error::{LinkError, LinkOperation};
use super::settings::Setting;
use super::uapi::{IFLA_VF_INFO, IFLA_VFINFO_LIST};
use super::{Link, VirtualFunction};
use crate::DEFAULT_PATIENCE;
use crate::link;
use crate::link::uapi::{
    AF_UNSPEC, IFLA_EXT_MASK, IFLA_IFNAME, RTEXT_FILTER_SKIP_STATS, RTEXT_FILTER_VF, RTM_GETLINK,
    RTM_NEWLINK, RTM_SETLINK,
};
use crate::netlink::exchange::{Answer, Malformed, Refusal};
use crate::netlink::message::{Mode, Request, nested, string, value};
use crate::netlink::worker::CallError;

/// Virtual functions through the kernel's network interfaces, those of this network namespace. All
/// requests go through one thread, one after the other.
#[derive(Debug, Clone)]
pub struct Links {
    connection: link::Links,
}

impl From<link::Links> for Links {
    /// Uses a connection that is there.
    fn from(connection: link::Links) -> Self {
        Self { connection }
    }
}

impl Links {
    /// Connects; answers are waited for [`DEFAULT_PATIENCE`].
    ///
    /// # Errors
    /// [`LinkError::Socket`] without netlink.
    pub fn open() -> Result<Self, LinkError> {
        Self::with_patience(DEFAULT_PATIENCE)
    }

    /// Connects; answers are waited for this long.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with_patience(patience: Duration) -> Result<Self, LinkError> {
        let connection = link::Links::connect(patience).map_err(LinkError::Socket)?;
        Ok(Self { connection })
    }

    /// An interface with the settings of its virtual functions.
    ///
    /// # Errors
    /// [`LinkError::NoInterface`], [`LinkError::BadName`], or another one.
    pub fn link(&self, interface: &str) -> Result<Link, LinkError> {
        if !link::is_interface_name(interface) {
            return Err(LinkError::BadName(interface.to_owned()));
        }
        let operation = LinkOperation::Show(interface.to_owned());
        let mask = RTEXT_FILTER_VF | RTEXT_FILTER_SKIP_STATS;
        let attributes = vec![
            string(IFLA_IFNAME, interface),
            value(IFLA_EXT_MASK, &mask.to_ne_bytes()),
        ];
        let answer = self.call(&operation, RTM_GETLINK, 0, attributes)?;
        only(&answer).map_err(|source| LinkError::Malformed { operation, source })
    }

    /// Sets what a virtual function may do, in this order. If one setting fails, those before it are
    /// made again as they were; what the driver does not tell can't be.
    ///
    /// # Errors
    /// [`LinkError::Invalid`] before anything is sent; [`LinkError::NotTaken`] if the driver has no such
    /// setting, [`LinkError::NoVirtualFunction`], [`LinkError::NotPermitted`];
    /// [`LinkError::NotTakenBack`] over the failure if something keeps its new value; or another one.
    pub fn set(
        &self,
        interface: &str,
        virtual_function: u32,
        settings: &[Setting],
    ) -> Result<(), LinkError> {
        for setting in settings {
            setting.check()?;
        }
        let link = self.link(interface)?;
        let listed = &link.virtual_functions;
        let now = listed.iter().find(|one| one.index == virtual_function);
        // A driver that tells nothing may still take something, so then it is asked. How many
        // there are cannot be known from the link: virtio's says 0 always.
        let none = || LinkError::NoVirtualFunction {
            interface: interface.to_owned(),
            virtual_function,
            count: listed.len(),
        };
        if now.is_none() && !listed.is_empty() {
            return Err(none());
        }
        for (done, setting) in settings.iter().enumerate() {
            if let Err(error) = self.send(&link, virtual_function, setting) {
                if matches!(&error, LinkError::Refused { source, .. }
                    if source.errno() == libc::EINVAL && listed.is_empty())
                {
                    return Err(none());
                }
                let before = settings.get(..done).unwrap_or_default();
                return Err(self.take_back(&link, virtual_function, before, now, error));
            }
        }
        Ok(())
    }

    /// Makes settings as they were, the last one first. Returns what is to be reported.
    fn take_back(
        &self,
        link: &Link,
        virtual_function: u32,
        settings: &[Setting],
        now: Option<&VirtualFunction>,
        error: LinkError,
    ) -> LinkError {
        let mut reported = error;
        for setting in settings.iter().rev() {
            let former = now.and_then(|now| setting.former(now));
            let back = former.map(|former| self.send(link, virtual_function, &former));
            if !matches!(back, Some(Ok(()))) {
                if let Some(Err(error)) = back {
                    tracing::debug!(%error, "a setting cannot be taken back");
                }
                reported = LinkError::NotTakenBack {
                    setting: setting.name(),
                    source: Box::new(reported),
                };
            }
        }
        reported
    }

    fn send(&self, link: &Link, virtual_function: u32, setting: &Setting) -> Result<(), LinkError> {
        let operation = LinkOperation::Set {
            interface: link.name.clone(),
            virtual_function,
            setting: setting.name(),
        };
        let information = nested(IFLA_VF_INFO, &[setting.attribute(virtual_function)]);
        let attributes = vec![nested(IFLA_VFINFO_LIST, &[information])];
        self.call(&operation, RTM_SETLINK, link.index, attributes)
            .map(drop)
    }

    /// Asks about the link with this index, or about the one that the attributes name.
    fn call(
        &self,
        operation: &LinkOperation,
        message_type: u16,
        index: i32,
        attributes: Vec<DefaultNla>,
    ) -> Result<Answer, LinkError> {
        let request = Request {
            message_type,
            header: link::header(AF_UNSPEC, index.cast_unsigned(), 0, 0),
            mode: Mode::Do,
            attributes,
        };
        let answer = self.connection.call(request);
        let operation = operation.clone();
        answer.map_err(|error| match error {
            CallError::Refused(refusal) => refused(operation, refusal),
            CallError::Malformed(source) => LinkError::Malformed { operation, source },
            CallError::Socket(source) => LinkError::Socket(source),
            // Of dumps only.
            CallError::Interrupted => LinkError::Malformed {
                operation,
                source: Malformed::new("answer", "it is marked as interrupted"),
            },
            CallError::Timeout { sent } => LinkError::Timeout {
                operation,
                patience: self.connection.patience(),
                sent,
            },
        })
    }
}

/// The link of an answer, which has exactly one.
pub(super) fn only(answer: &Answer) -> Result<Link, Malformed> {
    let mut found = answer
        .messages
        .iter()
        .filter(|message| message.message_type == RTM_NEWLINK);
    match (found.next(), found.next()) {
        (Some(message), None) => {
            // It may have another name: interfaces can have several.
            Link::of(message)
        }
        _ => Err(Malformed::new(
            "answer",
            "it does not have exactly one link",
        )),
    }
}

/// A refusal with its remedy.
pub(super) fn refused(operation: LinkOperation, source: Refusal) -> LinkError {
    match (source.errno(), operation) {
        (libc::EPERM | libc::EACCES, operation) => LinkError::NotPermitted { operation, source },
        (
            libc::ENODEV,
            LinkOperation::Show(name)
            | LinkOperation::Set {
                interface: name, ..
            },
        ) => LinkError::NoInterface { name, source },
        (libc::EOPNOTSUPP, operation @ LinkOperation::Set { .. }) => {
            LinkError::NotTaken { operation, source }
        }
        (_, operation) => LinkError::Refused { operation, source },
    }
}
