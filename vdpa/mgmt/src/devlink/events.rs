//! Events of instances, from the kernel's multicast group `config`.
//!
//! The queue is the socket's receive buffer, so the kernel bounds it (net.core.rmem_default).
//! Events that do not fit are lost, and the loss is reported.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::connection::Devlink;
use super::handle::{Handle, PortHandle};
use super::health::HealthReporter;
use super::instance::Instance;
use super::operation::Operation;
use super::param::Param;
use super::port::Port;
use super::rate::Rate;
use super::uapi::*;
use crate::error::Error;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::exchange;
use crate::netlink::family;
use crate::netlink::message::{Message, Protocol};
use crate::netlink::socket::Socket;

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An instance was added or changed.
    Instance(Instance),
    /// An instance was removed.
    InstanceGone(Handle),
    /// A port was added, or it or its function changed.
    Port(Box<Port>),
    /// A port was removed.
    PortGone(PortHandle),
    /// A parameter was added, or its value changed.
    Param(Param),
    /// A parameter was removed.
    ParamGone(Param),
    /// A rate was added or changed.
    Rate(Rate),
    /// A rate was removed.
    RateGone(Rate),
    /// A health reporter found a failure, or recovered from it.
    Health(HealthReporter),
}

impl Event {
    /// `None` for unsupported events: regions, traps, line cards and those of newer kernels.
    pub(super) fn of(message: &Message) -> Result<Option<Self>, Malformed> {
        let attributes = || Attributes::parse(&message.attributes);
        Ok(Some(match message.command() {
            DEVLINK_CMD_NEW => Self::Instance(Instance::of(message)?),
            DEVLINK_CMD_DEL => Self::InstanceGone(Handle::of(&attributes()?)?),
            DEVLINK_CMD_PORT_NEW => Self::Port(Box::new(Port::of(message)?)),
            DEVLINK_CMD_PORT_DEL => Self::PortGone(PortHandle::of(&attributes()?)?),
            DEVLINK_CMD_PARAM_NEW => Self::Param(Param::of(message)?),
            DEVLINK_CMD_PARAM_DEL => Self::ParamGone(Param::of(message)?),
            DEVLINK_CMD_RATE_NEW => Self::Rate(Rate::of(message)?),
            DEVLINK_CMD_RATE_DEL => Self::RateGone(Rate::of(message)?),
            DEVLINK_CMD_HEALTH_REPORTER_RECOVER => Self::Health(HealthReporter::of(message)?),
            _ => return Ok(None),
        }))
    }
}

/// An item of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// An event occurred.
    Event(Event),
    /// More events occurred than fit into the socket: list the objects again.
    Lost,
}

/// The stream of events since it was opened, of the instances of this network namespace.
#[derive(Debug)]
pub struct Events {
    socket: Socket,
    family: u16,
    /// The rest of the last datagram.
    pending: VecDeque<Message>,
}

impl Events {
    /// Opens the stream. It needs no privilege.
    ///
    /// # Errors
    /// As [`Devlink::open`].
    pub fn open() -> Result<Self, Error> {
        let operation = Operation::Connect;
        let devlink = Devlink::open()?;
        let description = devlink.family.resolve(&operation)?.messages;
        let group = DEVLINK_GENL_MCGRP_CONFIG_NAME;
        let group = family::group(&description, DEVLINK_GENL_NAME, group);
        let group = group.map_err(Error::malformed(&operation))?;
        let socket = Socket::listen(Protocol::Generic, group).map_err(Error::netlink)?;
        Ok(Self {
            socket,
            family: devlink.family.number(),
            pending: VecDeque::new(),
        })
    }

    /// Waits for the next event. `None` if no message arrived for this long; `None` as the limit
    /// waits forever.
    ///
    /// # Errors
    /// `Malformed` for an event that cannot be decoded (the stream continues after it), `Failed`.
    pub fn next(&mut self, limit: Option<Duration>) -> Result<Option<Notice>, Error> {
        let operation = Operation::List("events");
        let malformed = Error::malformed(&operation);
        self.socket.set_patience(limit).map_err(Error::netlink)?;
        loop {
            while let Some(message) = self.pending.pop_front() {
                if message.message_type == self.family
                    && let Some(event) = Event::of(&message).map_err(&malformed)?
                {
                    return Ok(Some(Notice::Event(event)));
                }
            }
            let datagram = match self.socket.receive() {
                Ok(datagram) => datagram,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    return Ok(Some(Notice::Lost));
                }
                Err(error) => return Err(Error::netlink(error)),
            };
            let messages = exchange::notifications(datagram, Protocol::Generic);
            self.pending = messages.map_err(&malformed)?.into();
        }
    }
}

impl AsFd for Events {
    /// For waiting together with other descriptors: readable when a message is there. Call
    /// [`Self::next`] with a limit of zero until there is none: one datagram may hold several.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
