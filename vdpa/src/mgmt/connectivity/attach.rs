//! The steps that connect a function, each in the record before it is made.

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
        attach(links, self, place)
    }
}

pub(super) fn attach(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    place: &Place,
) -> Result<Attached, ConnectivityError> {
    let mut attached;
    let outcome = match place {
        Place::Link(link) => {
            // As it is now.
            let link = kernel.link_at(link.index)?;
            let bridge = bridge(kernel, wanted, &link)?;
            attached = Attached::of(Subject::of(&link));
            connect(
                kernel,
                wanted,
                &link,
                bridge.as_ref(),
                &mut attached.changes,
            )
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
            attached = Attached::of(Subject::VirtualFunction {
                physical: physical.clone(),
                number: *number,
            });
            match wanted.vlan {
                Some(vlan) => {
                    connect_function(kernel, physical, *number, vlan, &mut attached.changes)
                }
                None => Ok(()),
            }
        }
    };
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
            problems: super::error::told(&other),
            source: Box::new(error),
        }),
    }
}

/// The bridge that is asked for, if it is fit for that.
fn bridge(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    link: &Link,
) -> Result<Option<Link>, ConnectivityError> {
    let Some(name) = &wanted.bridge else {
        return match wanted.vlan {
            Some(vlan) => Err(ConnectivityError::VlanWithoutBridge {
                link: link.name.clone(),
                vlan,
            }),
            None => Ok(None),
        };
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

fn connect(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    link: &Link,
    bridge: Option<&Link>,
    changes: &mut Vec<Change>,
) -> Result<(), ConnectivityError> {
    if let Some(mtu) = wanted.mtu
        && mtu != link.mtu
    {
        changes.push(Change::Mtu {
            before: link.mtu,
            after: mtu,
        });
        kernel.set_mtu(link, mtu)?;
    }
    if let Some(bridge) = bridge {
        if link.master.is_none() {
            changes.push(Change::Bridge {
                index: bridge.index,
            });
            kernel.set_master(link, bridge)?;
        }
        if let Some(vlan) = wanted.vlan {
            enter_vlan(kernel, link, bridge.index, vlan, changes)?;
        }
    }
    if !link.up {
        changes.push(Change::Up);
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
    changes: &mut Vec<Change>,
) -> Result<(), ConnectivityError> {
    let now = kernel.vlans(link)?;
    let after = PortVlan::access(vlan);
    let before = now.iter().copied().find(|one| one.vlan == vlan);
    if before != Some(after) {
        changes.push(Change::VlanAdded {
            bridge,
            before,
            after,
            former_pvid: now.iter().copied().find(|one| one.pvid && one.vlan != vlan),
        });
        kernel.add_vlan(link, after)?;
    }
    for other in now.into_iter().filter(|one| one.vlan != vlan) {
        changes.push(Change::VlanRemoved {
            bridge,
            before: other,
        });
        kernel.remove_vlan(link, other.vlan)?;
    }
    Ok(())
}

fn connect_function(
    kernel: &impl Kernel,
    physical: &str,
    number: u32,
    vlan: VlanId,
    changes: &mut Vec<Change>,
) -> Result<(), ConnectivityError> {
    let after = Vlan::new(vlan.get(), 0, VlanProtocol::Dot1Q).map_err(sriov::LinkError::from)?;
    let before = kernel.function_vlan(physical, number)?;
    if before != Some(after) {
        changes.push(Change::FunctionVlan {
            before: before.map(FunctionVlan::from),
            after: after.into(),
        });
        kernel.set_function_vlan(physical, number, after)?;
    }
    Ok(())
}
