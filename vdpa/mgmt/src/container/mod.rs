//! Moves a vDPA network device into a container's network namespace as an interface, and back.
//!
//! ```text
//!   vhost_vdpa ──bind virtio_vdpa──> interface ──> address and MTU ──> moved, named ──> up
//!       ^                                └────────────────┴──────────────────┴─fails──┐
//!       └────── the old driver again: unbinding ends the interface wherever it is <───┘
//! ```
//!
//! The way back is [`super::bus::Bus::bind`] with `vhost_vdpa`: Linux deletes the interface in
//! whatever namespace it is, up or down. Deleting a namespace does not delete it. The kernel moves
//! it to the initial namespace, down, under its name or, if that is taken, as `devN`
//! (`default_device_exit_net`, net/core/dev.c). This module owns the order of steps. It does not
//! depend on containers or on the namespace's origin.

use std::thread;
use std::time::{Duration, Instant};

use super::bus::{Bus, Netdev};
use super::error::{self, Error, ErrorKind, existing};
use super::link::{Link, Links, Namespace};

/// The bus driver that creates a network interface for a device.
pub const VIRTIO_VDPA: &str = "virtio_vdpa";

/// Maximum time for the interface to appear: if `virtio_net` is not loaded, udev loads it then.
const NETDEV_LIMIT: Duration = Duration::from_secs(10);

/// Interval between reads of sysfs meanwhile.
const NETDEV_INTERVAL: Duration = Duration::from_millis(5);

/// The settings of the interface in the namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Its name there; `None` keeps its current one.
    pub link_name: Option<String>,
    /// The Ethernet address that the device must have: a check that it is the right one.
    pub mac: Option<[u8; 6]>,
    /// Its MTU, in bytes; `None` keeps that of the device.
    pub mtu: Option<u32>,
}

/// Moves the vDPA device called `name` into the namespace as a network interface, sets that up, and
/// returns it. To be called in the initial network namespace, where its interface appears.
///
/// # Errors
/// [`Error`]. Nothing has changed if the namespace or the name there is unsuitable, or if a process
/// has the device open. Otherwise the device has its former driver again, or `NotUndone` has the
/// reason why not.
pub fn give(
    bus: &Bus,
    name: &str,
    namespace: &Namespace,
    settings: &Settings,
) -> Result<Link, Error> {
    let here = Namespace::current()?;
    if namespace.is_same(&here)? {
        return Err(unusable(format!(
            "the network namespace {namespace} is this one: leave it out, or name the container's"
        )));
    }
    let links = Links::open()?;
    let before = bus.device(name)?;
    let there = Links::in_namespace(namespace)?;
    if let Some(link_name) = &settings.link_name
        && existing(there.link(link_name))?.is_some()
    {
        let message = format!(
            "the network namespace {namespace} has an interface {link_name} already; \
             choose another name"
        );
        return Err(Error::new(ErrorKind::NameTaken, message));
    }
    let is_bound = before.driver.as_deref() == Some(VIRTIO_VDPA);
    if !is_bound {
        bus.bind(name, VIRTIO_VDPA)?;
    } else if bus.netdev(name)? == Netdev::Elsewhere {
        return Err(unusable(format!(
            "{name} is already an interface in another network namespace; `bellhop bind {name} \
             vhost_vdpa` reclaims it"
        )));
    }
    let mut steps = Steps {
        links: &links,
        there: &there,
        was: None,
        moved: None,
    };
    let error = match steps.carry_out(bus, name, namespace, settings) {
        Ok(link) => return Ok(link),
        Err(error) => error,
    };
    let undone = if is_bound {
        steps.undo(&here)
    } else {
        // The interface disappears with the driver, wherever it is.
        match &before.driver {
            Some(driver) => bus.bind(name, driver).map(drop),
            None => bus.unbind(name).map(drop),
        }
    };
    Err(match undone {
        Ok(()) => error,
        Err(problem) => {
            let message =
                format!("cannot restore {name} ({problem}); `bellhop bind {name}` shows its state");
            Error::new(ErrorKind::NotUndone, message).because(error)
        }
    })
}

fn unusable(message: String) -> Error {
    Error::new(ErrorKind::Unusable, message)
}

/// The steps on the interface, and its former state.
struct Steps<'a> {
    links: &'a Links,
    there: &'a Links,
    was: Option<Link>,
    moved: Option<Link>,
}

impl Steps<'_> {
    fn carry_out(
        &mut self,
        bus: &Bus,
        name: &str,
        namespace: &Namespace,
        settings: &Settings,
    ) -> Result<Link, Error> {
        let link = self.links.link_at(wait(bus, name)?)?;
        self.was = Some(link.clone());
        if let Some(mac) = settings.mac
            && link.mac != Some(mac)
        {
            let is = link.mac.map_or_else(|| "unknown".to_owned(), error::mac);
            return Err(unusable(format!(
                "{name} has the address {is}, not {}; `bellhop dev config show` lists addresses",
                error::mac(mac)
            )));
        }
        if let Some(mtu) = settings.mtu
            && link.mtu != mtu
        {
            self.links.set_mtu(&link, mtu)?;
        }
        let moved = self
            .links
            .move_to(&link, namespace, settings.link_name.as_deref())?;
        self.moved = Some(moved.clone());
        self.there.set_up(&moved)?;
        // Its current state: up, and perhaps with a carrier.
        self.there.link_at(moved.index)
    }

    /// Restores the interface of a device that had the driver before.
    fn undo(&self, here: &Namespace) -> Result<(), Error> {
        let Some(was) = &self.was else {
            return Ok(());
        };
        let link = match &self.moved {
            Some(moved) => self.there.move_to(moved, here, Some(&was.name))?,
            None => self.links.link_at(was.index)?,
        };
        if link.mtu != was.mtu {
            self.links.set_mtu(&link, was.mtu)?;
        }
        if was.up && !link.up {
            self.links.set_up(&link)?;
        }
        Ok(())
    }
}

/// Waits for the interface of a newly bound device, and returns its index.
fn wait(bus: &Bus, name: &str) -> Result<u32, Error> {
    let deadline = Instant::now() + NETDEV_LIMIT;
    loop {
        match bus.netdev(name)? {
            Netdev::Here { index, .. } => return Ok(index),
            _ if Instant::now() >= deadline => {
                return Err(unusable(format!(
                    "{name} did not become a network interface in {} s: it needs the driver \
                     virtio_net (`modprobe virtio_net`), and a device of class net",
                    NETDEV_LIMIT.as_secs()
                )));
            }
            _ => thread::sleep(NETDEV_INTERVAL),
        }
    }
}
