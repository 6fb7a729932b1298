//! The connection: requests about network interfaces, through rtnetlink.

use std::collections::HashSet;
use std::fmt;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::time::Duration;

use netlink_packet_route::link::LinkAttribute;

use super::namespace::Namespace;
use super::request::{self, NAME_MAX};
use super::vlan::{self, PortVlan, VlanId};
use super::{Link, decode};
use crate::DEFAULT_PATIENCE;
use crate::error::{self, Error, ErrorKind, Texts, existing};
use crate::name::is_name;
use crate::netlink::error::{CallError, Malformed, Refusal};
use crate::netlink::exchange::Answer;
use crate::netlink::message::{Message, Protocol, Request};
use crate::netlink::worker::Worker;

pub(crate) const TEXTS: Texts = Texts {
    listed: "interfaces",
    holder: "A task holds the kernel's lock of network interfaces; the kernel log (`dmesg`) may \
             name it",
};

/// A connection to the network interfaces of one network namespace. One thread sends all its
/// requests, one after the other; clones share it.
#[derive(Debug, Clone)]
pub struct Links {
    worker: Arc<Worker>,
    /// The namespace, for messages.
    place: Arc<str>,
}

impl Links {
    /// Connects to the interfaces of the caller's network namespace; waits for each answer up to
    /// [`DEFAULT_PATIENCE`].
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
        let worker = Worker::start(Protocol::Route, patience)?;
        Ok(Self::of(worker, "this network namespace"))
    }

    /// Connects to the interfaces of another network namespace. Only the connection's thread enters
    /// it.
    ///
    /// # Errors
    /// `Failed` if the namespace cannot be entered, or as [`Self::open`].
    pub fn in_namespace(namespace: &Namespace) -> Result<Self, Error> {
        let entered = namespace.duplicate()?;
        let worker =
            Worker::start_after(Protocol::Route, DEFAULT_PATIENCE, move || entered.enter())?;
        Ok(Self::of(
            worker,
            &format!("the network namespace {namespace}"),
        ))
    }

    fn of(worker: Worker, place: &str) -> Self {
        Self {
            worker: Arc::new(worker),
            place: place.into(),
        }
    }

    /// All interfaces, in the kernel's order.
    ///
    /// # Errors
    /// [`Error`].
    pub fn links(&self) -> Result<Vec<Link>, Error> {
        let operation = Operation::new("list network interfaces", None);
        let answer = self.send(&operation, request::list())?;
        let mut seen = HashSet::new();
        let mut links = Vec::new();
        for message in &answer.messages {
            if message.message_type != libc::RTM_NEWLINK {
                continue;
            }
            let link = Link::of(message).map_err(Error::malformed(&operation))?;
            if seen.insert(link.index) {
                links.push(link);
            }
        }
        Ok(links)
    }

    /// The interface with this name, also an alternative one.
    ///
    /// # Errors
    /// `BadName`, `NotFound`, or another one.
    pub fn link(&self, name: &str) -> Result<Link, Error> {
        if !is_any_name(name) {
            return Err(bad_name(name));
        }
        self.show(name, request::show_name(name))
    }

    /// The interface with this index.
    ///
    /// # Errors
    /// `NotFound`, or another one.
    pub fn link_at(&self, index: u32) -> Result<Link, Error> {
        let name = format!("with index {index}");
        self.show(&name, request::show_index(index))
    }

    fn show(&self, name: &str, request: Request) -> Result<Link, Error> {
        let text = format!("show the network interface {name}");
        let operation = Operation::new(text, Some(name));
        let answer = self.send(&operation, request)?;
        only(&answer, Link::of).map_err(Error::malformed(&operation))
    }

    /// Sets the interface up.
    ///
    /// # Errors
    /// `NotFound`, `NotPermitted`, `Refused`, or another one.
    pub fn set_up(&self, link: &Link) -> Result<(), Error> {
        let text = format!("set {} up", link.name);
        self.change(link, text, request::set_up(link.index, true))
    }

    /// Sets the interface down.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn set_down(&self, link: &Link) -> Result<(), Error> {
        let text = format!("set {} down", link.name);
        self.change(link, text, request::set_up(link.index, false))
    }

    /// Sets the interface's MTU, in bytes.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn set_mtu(&self, link: &Link, mtu: u32) -> Result<(), Error> {
        let text = format!("set the MTU of {} to {mtu}", link.name);
        let attributes = vec![LinkAttribute::Mtu(mtu)];
        self.change(link, text, request::set(link.index, attributes))
    }

    /// Makes the interface a port of `master`, such as a bridge. It leaves its former master.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn set_master(&self, link: &Link, master: &Link) -> Result<(), Error> {
        let text = format!("make {} a port of {}", link.name, master.name);
        let attributes = vec![LinkAttribute::Controller(master.index)];
        self.change(link, text, request::set(link.index, attributes))
    }

    /// Removes the interface from its master.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn clear_master(&self, link: &Link) -> Result<(), Error> {
        let text = format!("detach {} from its master", link.name);
        let attributes = vec![LinkAttribute::Controller(0)];
        self.change(link, text, request::set(link.index, attributes))
    }

    /// Renames the interface.
    ///
    /// # Errors
    /// `BadName`, `NameTaken`, or as [`Self::set_up`].
    pub fn rename(&self, link: &Link, name: &str) -> Result<(), Error> {
        check_interface_name(name)?;
        let attributes = vec![LinkAttribute::IfName(name.to_owned())];
        let operation = Operation {
            new_name_in: Some(&self.place),
            ..Operation::new(format!("rename {} to {name}", link.name), Some(&link.name))
        };
        self.send(&operation, request::set(link.index, attributes))
            .map(drop)
    }

    /// Moves the interface to a network namespace, under this name; `None` keeps its name. The
    /// kernel sets it down. Returns the interface in its new namespace.
    ///
    /// # Errors
    /// `BadName`; `NameTaken` if another interface there has the name; or as [`Self::in_namespace`]
    /// and [`Self::set_up`].
    pub fn move_to(
        &self,
        link: &Link,
        namespace: &Namespace,
        name: Option<&str>,
    ) -> Result<Link, Error> {
        let name = name.unwrap_or(&link.name);
        check_interface_name(name)?;
        let there = Self::in_namespace(namespace)?;
        let mut text = format!("move {} into the network namespace {namespace}", link.name);
        if name != link.name {
            text.push_str(&format!(" as {name}"));
        }
        let operation = Operation {
            new_name_in: Some(&there.place),
            ..Operation::new(text, Some(&link.name))
        };
        // The kernel moves first and then renames, so it would detect a taken name too late.
        if existing(there.link(name))?.is_some() {
            return Err(operation.name_taken(&there.place));
        }
        let descriptor = namespace.duplicate()?;
        let file = descriptor.as_fd().as_raw_fd();
        let mut attributes = vec![LinkAttribute::NetNsFd(file)];
        if name != link.name {
            attributes.push(LinkAttribute::IfName(name.to_owned()));
        }
        let moved = self.send(&operation, request::set(link.index, attributes));
        let unknown = ErrorKind::NoAnswer { sent: true };
        if moved.as_ref().is_err_and(|error| error.kind() == unknown) {
            // The kernel reads the descriptor once it has its lock. Until then its number must not
            // be reused for another namespace. That time is unknown, so it stays open.
            std::mem::forget(descriptor);
        }
        moved?;
        there.link(name)
    }

    /// The VLANs of a bridge's port, by number. Empty if the interface is not such a port.
    ///
    /// # Errors
    /// [`Error`].
    pub fn vlans(&self, link: &Link) -> Result<Vec<PortVlan>, Error> {
        let all = self.vlans_of_all(std::slice::from_ref(link))?;
        Ok(all.into_iter().next().unwrap_or_default())
    }

    /// The VLANs of each of these ports, by one request.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn vlans_of_all(&self, ports: &[Link]) -> Result<Vec<Vec<PortVlan>>, Error> {
        let names: Vec<&str> = ports.iter().map(|port| port.name.as_str()).collect();
        let text = format!("show the VLANs of {}", names.join(", "));
        let operation = Operation::new(text, None);
        let answer = self.send(&operation, request::list_vlans())?;
        let all = ports.iter().map(|port| vlans_of(&answer, port.index));
        all.collect::<Result<_, _>>()
            .map_err(Error::malformed(&operation))
    }

    /// Makes a bridge learn that an address is behind this port, in this VLAN, as from a received
    /// frame. The bridge forgets the address's former port. A bridge without VLAN filtering has no
    /// VLANs.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn learn(&self, port: &Link, mac: [u8; 6], vlan: Option<VlanId>) -> Result<(), Error> {
        let text = format!("make the bridge of {} learn {}", port.name, error::mac(mac));
        self.change(port, text, request::learn(port.index, mac, vlan))
    }

    /// Adds a port of a bridge to a VLAN. If that becomes the VLAN of untagged frames, it replaces
    /// the former one.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn add_vlan(&self, link: &Link, vlan: PortVlan) -> Result<(), Error> {
        let text = format!("put {} into VLAN {}", link.name, vlan.vlan);
        self.change(link, text, request::add_vlan(link.index, vlan))
    }

    /// Removes a port of a bridge from a VLAN.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn remove_vlan(&self, link: &Link, vlan: VlanId) -> Result<(), Error> {
        let text = format!("remove {} from VLAN {vlan}", link.name);
        self.change(link, text, request::remove_vlan(link.index, vlan))
    }

    fn change(&self, link: &Link, text: String, request: Request) -> Result<(), Error> {
        let operation = Operation::new(text, Some(&link.name));
        self.send(&operation, request).map(drop)
    }

    fn send(&self, operation: &Operation<'_>, request: Request) -> Result<Answer, Error> {
        self.call(request).map_err(|error| {
            let refused = |refusal| operation.refused(&self.place, refusal);
            TEXTS.explain(operation, error, self.patience(), refused)
        })
    }

    /// Sends any rtnetlink request about links.
    pub(crate) fn call(&self, request: Request) -> Result<Answer, CallError> {
        self.worker.call(request)
    }

    /// Maximum time to wait for an answer.
    pub(crate) fn patience(&self) -> Duration {
        self.worker.patience()
    }
}

/// The requested operation.
pub(super) struct Operation<'a> {
    /// As part of a sentence: "cannot …".
    pub(super) text: String,
    /// The interface that it is about.
    pub(super) link: Option<&'a str>,
    /// The namespace in which the interface gets a new name.
    pub(super) new_name_in: Option<&'a str>,
}

impl<'a> Operation<'a> {
    pub(super) fn new(text: impl Into<String>, link: Option<&'a str>) -> Self {
        Self {
            text: text.into(),
            link,
            new_name_in: None,
        }
    }

    fn name_taken(&self, place: &str) -> Error {
        let message = format!(
            "cannot {self}: {place} has another interface of that name; choose another name"
        );
        Error::new(ErrorKind::NameTaken, message)
    }

    /// A refusal with its remedy.
    pub(super) fn refused(&self, place: &str, source: Refusal) -> Error {
        let (kind, message) = match (source.errno(), self.link, self.new_name_in) {
            (libc::EPERM | libc::EACCES, _, _) => (
                ErrorKind::NotPermitted,
                format!("cannot {self}: this needs CAP_NET_ADMIN; run it as root"),
            ),
            (libc::ENODEV, Some(name), _) => (
                ErrorKind::NotFound,
                format!(
                    "there is no network interface {name} in {place}; `ip link` lists them there"
                ),
            ),
            // Taken since the check, or the old name is.
            (libc::EEXIST, _, Some(place)) => return self.name_taken(place),
            _ => (ErrorKind::Refused, format!("cannot {self}")),
        };
        Error::new(kind, message).because(source)
    }
}

impl fmt::Display for Operation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Whether an interface can have this name (`dev_valid_name` of net/core/dev.c; no control
/// characters either).
pub(crate) fn is_interface_name(text: &str) -> bool {
    text.len() <= NAME_MAX && is_any_name(text)
}

/// The longest alternative name, in bytes: ALTIFNAMSIZ without the NUL.
const ALTERNATIVE_NAME_MAX: usize = 127;

/// Whether an interface can have this as an alternative name.
fn is_any_name(text: &str) -> bool {
    text.len() <= ALTERNATIVE_NAME_MAX
        && is_name(text)
        && !text.contains(|c: char| c.is_whitespace() || c == ':')
}

fn check_interface_name(name: &str) -> Result<(), Error> {
    // The kernel would replace it by a number.
    if is_interface_name(name) && !name.contains('%') {
        return Ok(());
    }
    Err(bad_name(name))
}

fn bad_name(name: &str) -> Error {
    let message = format!(
        "{name:?} does not name a network interface: names have 1 to 15 bytes, without slashes, \
         colons and spaces"
    );
    Error::new(ErrorKind::BadName, message)
}

/// The link of an answer, which has exactly one.
pub(crate) fn only<T>(
    answer: &Answer,
    of: impl Fn(&Message) -> Result<T, Malformed>,
) -> Result<T, Malformed> {
    let mut found = answer
        .messages
        .iter()
        .filter(|message| message.message_type == libc::RTM_NEWLINK);
    match (found.next(), found.next()) {
        (Some(message), None) => of(message),
        _ => Err(Malformed::new(
            "answer",
            "it does not have exactly one link",
        )),
    }
}

/// The VLANs of one port in an answer about all. A port with its own switch (of a NIC) comes twice,
/// the second time without VLANs.
pub(super) fn vlans_of(answer: &Answer, index: u32) -> Result<Vec<PortVlan>, Malformed> {
    let mut vlans: Vec<PortVlan> = Vec::new();
    for message in &answer.messages {
        if message.message_type == libc::RTM_NEWLINK && decode::header(message)?.index == index {
            let more = vlan::of_message(&message.attributes)?;
            if vlans.is_empty() {
                vlans = more;
            } else if !more.is_empty() {
                return Err(Malformed::new(
                    "answer",
                    "it lists the VLANs of a port twice",
                ));
            }
        }
    }
    Ok(vlans)
}
