//! The steps that connect a function, each recorded before it is done.

use super::Connectivity;
use super::detach::{Attaching, Note, detach};
use super::error::ConnectivityError;
use super::kernel::Kernel;
use super::locate::Place;
use super::record::{Attached, Change, FunctionVlan, Subject, boot};
use crate::error::existing;
use crate::journal::Journal as _;
use crate::link::{Link, Links, PortVlan, VlanId};
use crate::sriov::{Vlan, VlanProtocol};

impl Attached {
    /// The connection of which these are the changes, except settings that were correct before. A
    /// record of an older program has no more.
    ///
    /// # Errors
    /// The bridge no longer exists, or the kernel cannot be asked.
    pub(crate) fn connectivity(&self, links: &Links) -> Result<Connectivity, ConnectivityError> {
        connectivity(links, self)
    }

    /// Whether it is the connection of this interface.
    pub(crate) fn is_of(&self, link: &Link) -> bool {
        matches!(&self.subject, Subject::Link { index, .. } if *index == link.index)
            && self.subject.is(link)
    }
}

impl Connectivity {
    /// Connects the function at this place. Settings that are correct already stay unchanged; the
    /// record has the changes.
    ///
    /// A representor that was up already is in the bridge's default VLAN for a moment; a new one is
    /// down.
    ///
    /// # Errors
    /// Before anything is changed: [`ConnectivityError::NoBridge`],
    /// [`ConnectivityError::NotABridge`], [`ConnectivityError::BridgeDown`],
    /// [`ConnectivityError::NoVlanFiltering`], [`ConnectivityError::OtherMaster`],
    /// [`ConnectivityError::VlanWithoutBridge`], [`ConnectivityError::LegacyMode`]. If a step
    /// fails, those before it are undone and its error is returned. If that roll-back fails too,
    /// the error is below [`ConnectivityError::NotTakenBack`].
    pub fn attach(&self, links: &Links, place: &Place) -> Result<Attached, ConnectivityError> {
        attach(links, self, place, &mut |_| Ok(()))
    }

    /// As [`Self::attach`], and passes the record to `note` before each new change, and after each
    /// undone one. So another process can undo the changes if this one is killed.
    ///
    /// # Errors
    /// As [`Self::attach`]; or [`ConnectivityError::NotNoted`] if `note` fails, after which nothing
    /// more is changed.
    pub(crate) fn attach_noting(
        &self,
        links: &Links,
        place: &Place,
        note: Note<'_>,
    ) -> Result<Attached, ConnectivityError> {
        attach(links, self, place, note)
    }

    /// As [`Self::attach_noting`], after `former`: a connection that may be incomplete, or that of
    /// another interface. Its changes are undone first, because the new record does not have them.
    ///
    /// # Errors
    /// As [`Self::attach_noting`]; or [`ConnectivityError::NotUndone`].
    pub(crate) fn attach_again(
        &self,
        links: &Links,
        former: Option<&Attached>,
        place: &Place,
        note: Note<'_>,
    ) -> Result<Attached, ConnectivityError> {
        attach_again(links, self, former, place, note)
    }

    /// Checks that the bridge exists and is suitable; nothing is changed.
    ///
    /// # Errors
    /// As [`Self::attach`] for bridges.
    pub fn check(&self, links: &Links) -> Result<(), ConnectivityError> {
        fit(links, self).map(drop)
    }
}

pub(super) fn attach(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    place: &Place,
    note: Note<'_>,
) -> Result<Attached, ConnectivityError> {
    let mut attaching;
    let outcome = match place {
        Place::Link(link) => {
            // Read its current state.
            let link = kernel.link_at(link.index)?;
            let bridge = bridge(kernel, wanted, &link)?;
            attaching = Attaching::new(kernel, Attached::of(Subject::of(&link)), note);
            attaching.connect(wanted, &link, bridge.as_ref())
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
            let subject = Subject::VirtualFunction {
                physical: physical.clone(),
                number: *number,
            };
            attaching = Attaching::new(kernel, Attached::of(subject), note);
            match wanted.vlan {
                Some(vlan) => attaching.connect_function(physical, *number, vlan),
                None => Ok(()),
            }
        }
    };
    match outcome {
        Ok(()) => Ok(attaching.attached),
        Err(error) => Err(attaching.roll_back_after(error)),
    }
}

pub(super) fn connectivity(
    kernel: &impl Kernel,
    attached: &Attached,
) -> Result<Connectivity, ConnectivityError> {
    let mut wanted = Connectivity::default();
    for change in &attached.changes {
        match change {
            Change::Mtu { after, .. } => wanted.mtu = Some(*after),
            Change::Bridge { index } => wanted.bridge = Some(kernel.link_at(*index)?.name),
            Change::VlanAdded { after, .. } => wanted.vlan = Some(after.vlan),
            Change::VlanRemoved { .. } | Change::Up | Change::FunctionVlan { .. } => {}
        }
    }
    Ok(wanted)
}

pub(super) fn attach_again(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    former: Option<&Attached>,
    place: &Place,
    note: Note<'_>,
) -> Result<Attached, ConnectivityError> {
    if let Some(former) = former {
        // Settings that others have changed since stay.
        detach(kernel, former, boot().as_deref())?;
    }
    attach(kernel, wanted, place, note)
}

/// The requested bridge, if it is suitable for that link.
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

/// The requested bridge, if it is one, is up, and filters VLANs when one is requested.
fn fit(kernel: &impl Kernel, wanted: &Connectivity) -> Result<Option<Link>, ConnectivityError> {
    let Some(name) = &wanted.bridge else {
        return Ok(None);
    };
    let bridge = existing(kernel.link(name))?;
    let bridge = bridge.ok_or_else(|| ConnectivityError::NoBridge(name.clone()))?;
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

impl<K: Kernel> Attaching<'_, K> {
    fn change<E: Into<ConnectivityError>>(
        &mut self,
        change: Change,
        make: impl FnOnce(&K) -> Result<(), E>,
    ) -> Result<(), ConnectivityError> {
        let kernel = self.kernel;
        self.step(change, || make(kernel).map_err(E::into).into())
    }

    fn connect(
        &mut self,
        wanted: &Connectivity,
        link: &Link,
        bridge: Option<&Link>,
    ) -> Result<(), ConnectivityError> {
        if let Some(after) = wanted.mtu
            && after != link.mtu
        {
            let before = link.mtu;
            self.change(Change::Mtu { before, after }, |kernel| {
                kernel.set_mtu(link, after)
            })?;
        }
        if let Some(bridge) = bridge {
            let index = bridge.index;
            if link.master.is_none() {
                self.change(Change::Bridge { index }, |kernel| {
                    kernel.set_master(link, bridge)
                })?;
            }
            if let Some(vlan) = wanted.vlan {
                self.enter_vlan(link, index, vlan)?;
            }
        }
        if link.up {
            return Ok(());
        }
        self.change(Change::Up, |kernel| kernel.set_up(link))
    }

    /// Adds a port to this VLAN, and removes it from all others: usually the bridge's default one.
    fn enter_vlan(
        &mut self,
        link: &Link,
        bridge: u32,
        vlan: VlanId,
    ) -> Result<(), ConnectivityError> {
        let now = self.kernel.vlans(link)?;
        let after = PortVlan::access(vlan);
        let before = now.iter().copied().find(|one| one.vlan == vlan);
        if before != Some(after) {
            let added = Change::VlanAdded {
                bridge,
                before,
                after,
                former_pvid: now.iter().copied().find(|one| one.pvid && one.vlan != vlan),
            };
            self.change(added, |kernel| kernel.add_vlan(link, after))?;
        }
        for before in now.into_iter().filter(|one| one.vlan != vlan) {
            self.change(Change::VlanRemoved { bridge, before }, |kernel| {
                kernel.remove_vlan(link, before.vlan)
            })?;
        }
        Ok(())
    }

    fn connect_function(
        &mut self,
        physical: &str,
        number: u32,
        vlan: VlanId,
    ) -> Result<(), ConnectivityError> {
        let after = Vlan::new(vlan.get(), 0, VlanProtocol::Dot1Q)?;
        let before = self.kernel.function_vlan(physical, number)?;
        if before == Some(after) {
            return Ok(());
        }
        let change = Change::FunctionVlan {
            before: before.map(FunctionVlan::from),
            after: after.into(),
        };
        self.change(change, |kernel| {
            kernel.set_function_vlan(physical, number, after)
        })
    }
}
