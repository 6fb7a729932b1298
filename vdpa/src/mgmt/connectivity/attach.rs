//! The steps that connect a function, each in the record before it is made.

use std::io;

use super::Connectivity;
use super::detach;
use super::error::ConnectivityError;
use super::kernel::Kernel;
use super::place::Place;
use super::record::{Attached, Change, FunctionVlan, Subject};
use crate::mgmt::link::{Link, Links, PortVlan, VlanId};
use crate::mgmt::sriov::{self, Vlan, VlanProtocol};

impl Connectivity {
    /// Connects what is at this place. What is so already is left as it is; the record has the rest.
    ///
    /// A representor that was up already is in the bridge's default VLAN for a moment: one that was just made is down.
    ///
    /// # Errors
    /// Before anything is changed: [`ConnectivityError::NoBridge`], [`ConnectivityError::NotABridge`],
    /// [`ConnectivityError::BridgeDown`], [`ConnectivityError::NoVlanFiltering`],
    /// [`ConnectivityError::OtherMaster`], [`ConnectivityError::VlanWithoutBridge`],
    /// [`ConnectivityError::LegacyMode`]. If a step fails, those before it are undone and its error
    /// is returned, below [`ConnectivityError::NotTakenBack`] if the undoing fails.
    pub fn attach(&self, links: &Links, place: &Place) -> Result<Attached, ConnectivityError> {
        attach(links, self, place, &mut |_| Ok(()))
    }

    /// As [`Self::attach`], and hands the record to `note` each time before something is changed that is
    /// new in it, so that another process can undo what this one was killed in.
    ///
    /// # Errors
    /// As [`Self::attach`], and [`ConnectivityError::NotNoted`] if `note` fails, which nothing is changed after.
    pub fn attach_noting(
        &self,
        links: &Links,
        place: &Place,
        note: &mut dyn FnMut(&Attached) -> io::Result<()>,
    ) -> Result<Attached, ConnectivityError> {
        attach(links, self, place, note)
    }

    /// Whether there is such a bridge, fit for that; nothing is changed.
    ///
    /// # Errors
    /// As [`Self::attach`] for bridges.
    pub fn check(&self, links: &Links) -> Result<(), ConnectivityError> {
        fit(links, self).map(drop)
    }
}

/// A record that grows, noted before what is new in it is done.
struct Journal<'a> {
    attached: Attached,
    note: &'a mut dyn FnMut(&Attached) -> io::Result<()>,
}

impl Journal<'_> {
    fn push(&mut self, change: Change) -> Result<(), ConnectivityError> {
        self.attached.changes.push(change);
        (self.note)(&self.attached).map_err(ConnectivityError::NotNoted)
    }
}

pub(super) fn attach(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    place: &Place,
    note: &mut dyn FnMut(&Attached) -> io::Result<()>,
) -> Result<Attached, ConnectivityError> {
    let mut journal;
    let outcome = match place {
        Place::Link(link) => {
            // As it is now.
            let link = kernel.link_at(link.index)?;
            let bridge = bridge(kernel, wanted, &link)?;
            let attached = Attached::of(Subject::of(&link));
            journal = Journal { attached, note };
            connect(kernel, wanted, &link, bridge.as_ref(), &mut journal)
        }
        Place::VirtualFunction { physical, number } => {
            let refused = |what| ConnectivityError::LegacyMode {
                physical: physical.clone(),
                number: *number,
                what,
            };
            if wanted.bridge.is_some() {
                return Err(refused("bridge"));
            }
            if wanted.mtu.is_some() {
                return Err(refused("mtu"));
            }
            let attached = Attached::of(Subject::VirtualFunction {
                physical: physical.clone(),
                number: *number,
            });
            journal = Journal { attached, note };
            match wanted.vlan {
                Some(vlan) => connect_function(kernel, physical, *number, vlan, &mut journal),
                None => Ok(()),
            }
        }
    };
    let attached = journal.attached;
    let Err(error) = outcome else {
        return Ok(attached);
    };
    // What others changed meanwhile is theirs.
    match detach::detach(kernel, &attached, attached.boot.as_deref()) {
        Ok(_) => Err(error),
        Err(ConnectivityError::NotUndone { link, problems }) => {
            Err(ConnectivityError::NotTakenBack {
                link,
                problems,
                source: Box::new(error),
            })
        }
        Err(other) => Err(ConnectivityError::NotTakenBack {
            link: attached.subject.to_string(),
            problems: crate::causes::in_one_line(&other),
            source: Box::new(error),
        }),
    }
}

/// The bridge that is asked for, if it is fit for that link.
fn bridge(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    link: &Link,
) -> Result<Option<Link>, ConnectivityError> {
    let Some(bridge) = fit(kernel, wanted)? else {
        return match wanted.vlan {
            Some(vlan) => Err(ConnectivityError::VlanWithoutBridge {
                link: link.name.clone(),
                vlan,
            }),
            None => Ok(None),
        };
    };
    if let Some(master) = link.master
        && master != bridge.index
    {
        let name = kernel.link_at(master).map(|master| master.name);
        return Err(ConnectivityError::OtherMaster {
            link: link.name.clone(),
            master: name.unwrap_or_else(|_| format!("another interface (index {master})")),
        });
    }
    Ok(Some(bridge))
}

/// The bridge that is asked for, if it is one, up, and looks at VLANs where one is asked for.
fn fit(kernel: &impl Kernel, wanted: &Connectivity) -> Result<Option<Link>, ConnectivityError> {
    let Some(name) = &wanted.bridge else {
        return Ok(None);
    };
    let bridge = match kernel.link(name) {
        Err(error) if error.is_missing() => return Err(ConnectivityError::NoBridge(name.clone())),
        found => found?,
    };
    if !bridge.is_bridge() {
        return Err(ConnectivityError::NotABridge {
            name: bridge.name,
            kind: bridge.kind,
        });
    }
    if let (Some(vlan), false) = (wanted.vlan, bridge.vlan_filtering == Some(true)) {
        return Err(ConnectivityError::NoVlanFiltering {
            bridge: bridge.name,
            vlan,
        });
    }
    if !bridge.up {
        return Err(ConnectivityError::BridgeDown(bridge.name));
    }
    Ok(Some(bridge))
}

fn connect(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    link: &Link,
    bridge: Option<&Link>,
    journal: &mut Journal<'_>,
) -> Result<(), ConnectivityError> {
    if let Some(mtu) = wanted.mtu
        && mtu != link.mtu
    {
        journal.push(Change::Mtu {
            before: link.mtu,
            after: mtu,
        })?;
        kernel.set_mtu(link, mtu)?;
    }
    if let Some(bridge) = bridge {
        if link.master.is_none() {
            journal.push(Change::Bridge {
                index: bridge.index,
            })?;
            kernel.set_master(link, bridge)?;
        }
        if let Some(vlan) = wanted.vlan {
            enter_vlan(kernel, link, bridge.index, vlan, journal)?;
        }
    }
    if !link.up {
        journal.push(Change::Up)?;
        kernel.set_up(link)?;
    }
    Ok(())
}

/// Puts a port into this VLAN, and takes it out of all others: mostly the bridge's default one.
fn enter_vlan(
    kernel: &impl Kernel,
    link: &Link,
    bridge: u32,
    vlan: VlanId,
    journal: &mut Journal<'_>,
) -> Result<(), ConnectivityError> {
    let now = kernel.vlans(link)?;
    let after = PortVlan::access(vlan);
    let before = now.iter().copied().find(|one| one.vlan == vlan);
    if before != Some(after) {
        journal.push(Change::VlanAdded {
            bridge,
            before,
            after,
            former_pvid: now.iter().copied().find(|one| one.pvid && one.vlan != vlan),
        })?;
        kernel.add_vlan(link, after)?;
    }
    for other in now.into_iter().filter(|one| one.vlan != vlan) {
        journal.push(Change::VlanRemoved {
            bridge,
            before: other,
        })?;
        kernel.remove_vlan(link, other.vlan)?;
    }
    Ok(())
}

fn connect_function(
    kernel: &impl Kernel,
    physical: &str,
    number: u32,
    vlan: VlanId,
    journal: &mut Journal<'_>,
) -> Result<(), ConnectivityError> {
    let after = Vlan::new(vlan.get(), 0, VlanProtocol::Dot1Q).map_err(sriov::LinkError::from)?;
    let before = kernel.function_vlan(physical, number)?;
    if before != Some(after) {
        journal.push(Change::FunctionVlan {
            before: before.map(FunctionVlan::from),
            after: after.into(),
        })?;
        kernel.set_function_vlan(physical, number, after)?;
    }
    Ok(())
}
