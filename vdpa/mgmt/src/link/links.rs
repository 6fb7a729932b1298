//! The connection: requests about network interfaces, through rtnetlink.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::time::Duration;

use netlink_packet_core::DefaultNla;

use super::error::{LinkChange, LinkError, LinkOperation};
use super::forwarding;
use super::namespace::Namespace;
use super::uapi::{
    AF_BRIDGE, AF_UNSPEC, ALTERNATIVE_NAME_MAX, IFF_UP, IFLA_ALT_IFNAME, IFLA_EXT_MASK,
    IFLA_IFNAME, IFLA_MASTER, IFLA_MTU, IFLA_NET_NS_FD, NAME_MAX, RTEXT_FILTER_BRVLAN_COMPRESSED,
    RTEXT_FILTER_SKIP_STATS, RTM_DELLINK, RTM_GETLINK, RTM_NEWLINK, RTM_SETLINK,
};
use super::vlan::{self, PortVlan, VlanId};
use super::{Link, decode};
use crate::DEFAULT_PATIENCE;
use crate::name::is_name;
use crate::netlink::exchange::{Answer, Malformed, Refusal};
use crate::netlink::message::{Mode, Protocol, Request, string, value};
use crate::netlink::worker::{CallError, Worker};

/// A connection to the network interfaces of one network namespace. All its requests go through one thread,
/// one after the other; clones share it.
#[derive(Debug, Clone)]
pub struct Links {
    worker: Arc<Worker>,
    /// Which namespace it is, for sentences.
    place: Arc<str>,
}

/// Which interface a request is about.
enum Which<'a> {
    Index(u32),
    Name(&'a str),
}

impl Links {
    /// Connects to the interfaces of the caller's network namespace; answers are waited for [`DEFAULT_PATIENCE`].
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
        Self::connect(patience).map_err(LinkError::Socket)
    }

    /// The same, with the kernel's own answer.
    pub(crate) fn connect(patience: Duration) -> io::Result<Self> {
        let worker = Worker::start(Protocol::Route, patience)?;
        Ok(Self::of(worker, "this network namespace"))
    }

    /// Connects to the interfaces of another network namespace. Only the connection's thread enters it.
    ///
    /// # Errors
    /// [`LinkError::Namespace`] if it cannot be entered, or as [`Self::open`].
    pub fn in_namespace(namespace: &Namespace) -> Result<Self, LinkError> {
        let entered = namespace.duplicate()?;
        let worker =
            Worker::start_after(Protocol::Route, DEFAULT_PATIENCE, move || entered.enter())
                .map_err(LinkError::Socket)??;
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
    /// [`LinkError`].
    pub fn links(&self) -> Result<Vec<Link>, LinkError> {
        let operation = LinkOperation::List;
        let attributes = vec![filter(RTEXT_FILTER_SKIP_STATS)];
        let header = header(AF_UNSPEC, 0, 0, 0);
        let answer = self.ask(&operation, RTM_GETLINK, header, Mode::Dump, attributes)?;
        let malformed = |source| LinkError::Malformed {
            operation: operation.clone(),
            source,
        };
        let mut seen = HashSet::new();
        let mut links = Vec::new();
        for message in &answer.messages {
            if message.message_type != RTM_NEWLINK {
                continue;
            }
            let link = Link::of(message).map_err(malformed)?;
            if seen.insert(link.index) {
                links.push(link);
            }
        }
        Ok(links)
    }

    /// The interface that is called so, by its name or an alternative one.
    ///
    /// # Errors
    /// [`LinkError::BadName`], [`LinkError::NoLink`], or another one.
    pub fn link(&self, name: &str) -> Result<Link, LinkError> {
        if !is_any_name(name) {
            return Err(LinkError::BadName(name.to_owned()));
        }
        self.show(&Which::Name(name))
    }

    /// The interface with this index.
    ///
    /// # Errors
    /// [`LinkError::NoLink`], or another one.
    pub fn link_at(&self, index: u32) -> Result<Link, LinkError> {
        self.show(&Which::Index(index))
    }

    fn show(&self, which: &Which<'_>) -> Result<Link, LinkError> {
        let mut attributes = vec![filter(RTEXT_FILTER_SKIP_STATS)];
        let (index, name) = match which {
            Which::Index(index) => (*index, format!("with index {index}")),
            Which::Name(name) => {
                let kind = match name.len() > NAME_MAX {
                    true => IFLA_ALT_IFNAME,
                    false => IFLA_IFNAME,
                };
                attributes.push(string(kind, name));
                (0, (*name).to_owned())
            }
        };
        let operation = LinkOperation::Show(name);
        let header = header(AF_UNSPEC, index, 0, 0);
        let answer = self.ask(&operation, RTM_GETLINK, header, Mode::Do, attributes)?;
        only(&answer).map_err(|source| LinkError::Malformed { operation, source })
    }

    /// Sets it up.
    ///
    /// # Errors
    /// [`LinkError::NoLink`], [`LinkError::NotPermitted`], [`LinkError::Refused`], or another one.
    pub fn set_up(&self, link: &Link) -> Result<(), LinkError> {
        let header = header(AF_UNSPEC, link.index, IFF_UP, IFF_UP);
        self.change(link, LinkChange::Up, RTM_SETLINK, header, Vec::new())
    }

    /// Sets it down.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn set_down(&self, link: &Link) -> Result<(), LinkError> {
        let header = header(AF_UNSPEC, link.index, 0, IFF_UP);
        self.change(link, LinkChange::Down, RTM_SETLINK, header, Vec::new())
    }

    /// Sets its MTU, in bytes.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn set_mtu(&self, link: &Link, mtu: u32) -> Result<(), LinkError> {
        let attributes = vec![value(IFLA_MTU, &mtu.to_ne_bytes())];
        self.set(link, LinkChange::Mtu(mtu), attributes)
    }

    /// Makes it a port of `master`, such as a bridge. It leaves what it was a port of.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn set_master(&self, link: &Link, master: &Link) -> Result<(), LinkError> {
        let attributes = vec![value(IFLA_MASTER, &master.index.to_ne_bytes())];
        self.set(link, LinkChange::Join(master.name.clone()), attributes)
    }

    /// Makes it a port of nothing.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn clear_master(&self, link: &Link) -> Result<(), LinkError> {
        let attributes = vec![value(IFLA_MASTER, &0_u32.to_ne_bytes())];
        self.set(link, LinkChange::Leave, attributes)
    }

    /// Gives it another name.
    ///
    /// # Errors
    /// [`LinkError::BadName`], [`LinkError::NameTaken`], or as [`Self::set_up`].
    pub fn rename(&self, link: &Link, name: &str) -> Result<(), LinkError> {
        check_interface_name(name)?;
        let attributes = vec![string(IFLA_IFNAME, name)];
        self.set(link, LinkChange::Rename(name.to_owned()), attributes)
    }

    /// Moves it into a network namespace, where it has this name; none keeps the one it has. The kernel sets it down.
    /// The interface is returned as it is there.
    ///
    /// # Errors
    /// [`LinkError::BadName`]; [`LinkError::NameTaken`] if the name is another interface's there;
    /// [`LinkError::Namespace`]; or as [`Self::set_up`].
    pub fn move_to(
        &self,
        link: &Link,
        namespace: &Namespace,
        name: Option<&str>,
    ) -> Result<Link, LinkError> {
        let name = name.unwrap_or(&link.name);
        check_interface_name(name)?;
        let change = LinkChange::Move {
            namespace: namespace.to_string(),
            name: name.to_owned(),
        };
        let there = Self::in_namespace(namespace)?;
        // The kernel moves first and renames then, so a name that is taken would be found out too late.
        match there.link(name) {
            Ok(_) => {
                return Err(LinkError::NameTaken {
                    operation: operation(link, change),
                    place: there.place.to_string(),
                });
            }
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(error),
        }
        let descriptor = namespace.duplicate()?;
        let file = descriptor.as_fd().as_raw_fd();
        let mut attributes = vec![value(IFLA_NET_NS_FD, &file.to_ne_bytes())];
        if name != link.name {
            attributes.push(string(IFLA_IFNAME, name));
        }
        let moved = self.set(link, change, attributes);
        if matches!(moved, Err(LinkError::Timeout { sent: true, .. })) {
            // The kernel looks at the descriptor once it has its lock. Until then its number must not become that of
            // another namespace; when that is, nobody says, so it stays open.
            std::mem::forget(descriptor);
        }
        moved.map_err(|error| match error {
            // Taken since it was looked at, or the old name is.
            LinkError::NameTaken { operation, .. } => LinkError::NameTaken {
                operation,
                place: there.place.to_string(),
            },
            error => error,
        })?;
        there.link(name)
    }

    /// The VLANs that a port of a bridge is in, by number. None if it is no such port.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn vlans(&self, link: &Link) -> Result<Vec<PortVlan>, LinkError> {
        let all = self.vlans_of_all(std::slice::from_ref(link))?;
        Ok(all.into_iter().next().unwrap_or_default())
    }

    /// The VLANs that each of these ports is in, by one question.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(crate) fn vlans_of_all(&self, ports: &[Link]) -> Result<Vec<Vec<PortVlan>>, LinkError> {
        let names: Vec<&str> = ports.iter().map(|port| port.name.as_str()).collect();
        let operation = LinkOperation::ShowVlans(names.join(", "));
        // The kernel knows no request about one port.
        let attributes = vec![filter(RTEXT_FILTER_BRVLAN_COMPRESSED)];
        let header = header(AF_BRIDGE, 0, 0, 0);
        let answer = self.ask(&operation, RTM_GETLINK, header, Mode::Dump, attributes)?;
        let all = ports.iter().map(|port| vlans_of(&answer, port.index));
        all.collect::<Result<_, _>>()
            .map_err(|source| LinkError::Malformed { operation, source })
    }

    /// Has a bridge learn that an address is behind this port of it, in this VLAN, as from a frame that came in by the port: what
    /// it knew of the address before is forgotten. A bridge that looks at no VLANs has none.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn learn(&self, port: &Link, mac: [u8; 6], vlan: Option<VlanId>) -> Result<(), LinkError> {
        let operation = operation(port, LinkChange::Learn(mac));
        let request = forwarding::learn(port.index, mac, vlan);
        self.send(&operation, request).map(drop)
    }

    /// Puts a port of a bridge into a VLAN. If it is the VLAN of frames without a tag, another one is that no longer.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn add_vlan(&self, link: &Link, vlan: PortVlan) -> Result<(), LinkError> {
        let change = LinkChange::AddVlan(vlan.vlan);
        let header = header(AF_BRIDGE, link.index, 0, 0);
        self.change(link, change, RTM_SETLINK, header, vec![vlan.attribute()])
    }

    /// Takes a port of a bridge out of a VLAN.
    ///
    /// # Errors
    /// As [`Self::set_up`].
    pub fn remove_vlan(&self, link: &Link, vlan: VlanId) -> Result<(), LinkError> {
        let change = LinkChange::RemoveVlan(vlan);
        let header = header(AF_BRIDGE, link.index, 0, 0);
        let vlan = PortVlan {
            vlan,
            pvid: false,
            untagged: false,
        };
        self.change(link, change, RTM_DELLINK, header, vec![vlan.attribute()])
    }

    fn set(
        &self,
        link: &Link,
        change: LinkChange,
        attributes: Vec<DefaultNla>,
    ) -> Result<(), LinkError> {
        let header = header(AF_UNSPEC, link.index, 0, 0);
        self.change(link, change, RTM_SETLINK, header, attributes)
    }

    fn change(
        &self,
        link: &Link,
        change: LinkChange,
        message_type: u16,
        header: Vec<u8>,
        attributes: Vec<DefaultNla>,
    ) -> Result<(), LinkError> {
        let operation = operation(link, change);
        self.ask(&operation, message_type, header, Mode::Do, attributes)
            .map(drop)
    }

    fn ask(
        &self,
        operation: &LinkOperation,
        message_type: u16,
        header: Vec<u8>,
        mode: Mode,
        attributes: Vec<DefaultNla>,
    ) -> Result<Answer, LinkError> {
        let request = Request {
            message_type,
            header,
            mode,
            attributes,
        };
        self.send(operation, request)
    }

    fn send(&self, operation: &LinkOperation, request: Request) -> Result<Answer, LinkError> {
        self.call(request).map_err(|error| {
            let operation = operation.clone();
            match error {
                CallError::Refused(refusal) => refused(operation, &self.place, refusal),
                CallError::Malformed(source) => LinkError::Malformed { operation, source },
                CallError::Socket(source) => LinkError::Socket(source),
                CallError::Interrupted => LinkError::Interrupted { operation },
                CallError::Timeout { sent } => LinkError::Timeout {
                    operation,
                    patience: self.worker.patience(),
                    sent,
                },
            }
        })
    }

    /// Sends any request of rtnetlink's about links.
    pub(crate) fn call(&self, request: Request) -> Result<Answer, CallError> {
        self.worker.call(request)
    }

    /// How long an answer is waited for.
    pub(crate) fn patience(&self) -> Duration {
        self.worker.patience()
    }
}

fn operation(link: &Link, change: LinkChange) -> LinkOperation {
    LinkOperation::Change {
        link: link.name.clone(),
        change,
    }
}

fn filter(mask: u32) -> DefaultNla {
    value(IFLA_EXT_MASK, &mask.to_ne_bytes())
}

/// `struct ifinfomsg`: family u8, padding u8, type u16 (0: any), index i32, flags u32, and which flags to change u32.
pub(crate) fn header(family: u8, index: u32, flags: u32, change: u32) -> Vec<u8> {
    let mut header = vec![family, 0, 0, 0];
    for number in [index, flags, change] {
        header.extend(number.to_ne_bytes());
    }
    header
}

/// Whether an interface can have this name (`dev_valid_name` of net/core/dev.c; no control characters either).
pub(crate) fn is_interface_name(text: &str) -> bool {
    text.len() <= NAME_MAX && is_any_name(text)
}

/// Whether an interface can have this as an alternative name.
fn is_any_name(text: &str) -> bool {
    text.len() <= ALTERNATIVE_NAME_MAX
        && is_name(text)
        && !text.contains(|c: char| c.is_whitespace() || c == ':')
}

fn check_interface_name(name: &str) -> Result<(), LinkError> {
    // The kernel would put a number for this.
    match is_interface_name(name) && !name.contains('%') {
        true => Ok(()),
        false => Err(LinkError::BadName(name.to_owned())),
    }
}

/// The link of an answer, which has exactly one.
pub(super) fn only(answer: &Answer) -> Result<Link, Malformed> {
    let mut found = answer
        .messages
        .iter()
        .filter(|message| message.message_type == RTM_NEWLINK);
    match (found.next(), found.next()) {
        (Some(message), None) => Link::of(message),
        _ => Err(Malformed::new(
            "answer",
            "it does not have exactly one link",
        )),
    }
}

/// The VLANs of one port in an answer about all. A port with an own switch (of a NIC) comes twice, the second time
/// without VLANs.
pub(super) fn vlans_of(answer: &Answer, index: u32) -> Result<Vec<PortVlan>, Malformed> {
    let mut vlans: Vec<PortVlan> = Vec::new();
    for message in &answer.messages {
        if message.message_type == RTM_NEWLINK && decode::index(message)? == index {
            let more = vlan::of_message(&message.attributes)?;
            match vlans.is_empty() {
                true => vlans = more,
                false if more.is_empty() => {}
                false => return Err(Malformed::new("answer", "it tells VLANs of a port twice")),
            }
        }
    }
    Ok(vlans)
}

/// A refusal with its remedy.
pub(super) fn refused(operation: LinkOperation, place: &str, source: Refusal) -> LinkError {
    match (source.errno(), operation) {
        (libc::EPERM | libc::EACCES, operation) => LinkError::NotPermitted { operation, source },
        (libc::ENODEV, LinkOperation::Show(name) | LinkOperation::Change { link: name, .. }) => {
            LinkError::NoLink {
                name,
                place: place.to_owned(),
                source,
            }
        }
        (
            libc::EEXIST,
            operation @ LinkOperation::Change {
                change: LinkChange::Rename(_) | LinkChange::Move { .. },
                ..
            },
        ) => LinkError::NameTaken {
            operation,
            place: place.to_owned(),
        },
        (_, operation) => LinkError::Refused { operation, source },
    }
}
