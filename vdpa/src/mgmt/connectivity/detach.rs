//! The way back: each change of a record undone while it is still as it was made, the last one first.

use super::error::ConnectivityError;
use super::kernel::Kernel;
use super::record::{Attached, Change, FunctionVlan, LeftAlone, Subject};
use crate::causes::in_one_line;
use crate::mgmt::link::{Link, PortVlan};
use crate::mgmt::sriov::{self, Vlan};

type Undone = Result<Option<LeftAlone>, ConnectivityError>;

pub(super) fn detach(
    kernel: &impl Kernel,
    attached: &Attached,
    boot: Option<&str>,
) -> Result<Vec<LeftAlone>, ConnectivityError> {
    let gone = || vec![LeftAlone::Gone(attached.subject.to_string())];
    if attached.changes.is_empty() {
        return Ok(Vec::new());
    }
    if attached.boot.as_deref() != boot {
        return Ok(gone());
    }
    let mut left_alone = Vec::new();
    let mut problems: Vec<String> = Vec::new();
    for change in attached.changes.iter().rev() {
        let undone = match &attached.subject {
            Subject::Link { index, .. } => {
                // As it is after the step before.
                match kernel.link_at(*index) {
                    Ok(link) if attached.subject.is(&link) => {
                        undo(kernel, &link, change, &attached.changes)
                    }
                    Ok(_) => return Ok(gone()),
                    Err(error) if error.is_missing() => return Ok(gone()),
                    Err(error) => Err(error.into()),
                }
            }
            Subject::VirtualFunction { physical, number } => {
                match undo_function(kernel, physical, *number, change) {
                    Err(ConnectivityError::VirtualFunction(
                        sriov::LinkError::NoInterface { .. }
                        | sriov::LinkError::NoVirtualFunction { .. },
                    )) => return Ok(gone()),
                    undone => undone,
                }
            }
        };
        match undone {
            Ok(one) => left_alone.extend(one),
            Err(error) => problems.push(in_one_line(&error)),
        }
    }
    if problems.is_empty() {
        return Ok(left_alone);
    }
    Err(ConnectivityError::NotUndone {
        link: attached.subject.to_string(),
        problems: problems.join("; "),
    })
}

fn undo(kernel: &impl Kernel, link: &Link, change: &Change, all: &[Change]) -> Undone {
    match change {
        Change::Up => {
            if link.up {
                kernel.set_down(link)?;
            }
            Ok(None)
        }
        Change::Mtu { before, after } => {
            if link.mtu == *after {
                kernel.set_mtu(link, *before)?;
            } else if link.mtu != *before {
                return Ok(Some(LeftAlone::Mtu {
                    link: link.name.clone(),
                    now: link.mtu,
                }));
            }
            Ok(None)
        }
        Change::Bridge { index } => match link.master {
            None => Ok(None),
            Some(now) if now == *index => {
                kernel.clear_master(link)?;
                Ok(None)
            }
            Some(now) => Ok(Some(LeftAlone::Master {
                link: link.name.clone(),
                now,
            })),
        },
        // VLANs of another bridge are not those that were changed; a port that left has none.
        Change::VlanAdded { bridge, .. } | Change::VlanRemoved { bridge, .. }
            if link.master != Some(*bridge) =>
        {
            Ok(None)
        }
        Change::VlanAdded {
            before,
            after,
            former_pvid,
            ..
        } => {
            let undone = leave_vlan(kernel, link, *before, *after)?;
            if let Some(former) = former_pvid {
                make_pvid_again(kernel, link, *former)?;
            }
            Ok(undone)
        }
        Change::VlanRemoved { before, .. } => put_back(kernel, link, *before, all),
        Change::FunctionVlan { .. } => Ok(None),
    }
}

/// Takes a port out of the VLAN that it was put into, or makes it there what it was.
fn leave_vlan(
    kernel: &impl Kernel,
    link: &Link,
    before: Option<PortVlan>,
    after: PortVlan,
) -> Undone {
    let now = kernel.vlans(link)?;
    let now = now.into_iter().find(|one| one.vlan == after.vlan);
    if now == before {
        return Ok(None);
    }
    // It may be the VLAN of untagged frames no longer: the former one was put back before.
    match (now, before) {
        (Some(now), None) if now.untagged == after.untagged => {
            kernel.remove_vlan(link, after.vlan)?;
        }
        (Some(now), Some(before)) if now.untagged == after.untagged => {
            kernel.add_vlan(link, before)?;
        }
        _ => {
            return Ok(Some(LeftAlone::Vlan {
                link: link.name.clone(),
                vlan: after.vlan,
            }));
        }
    }
    Ok(None)
}

/// Frames without a tag are in this VLAN again, if the port is still in it and they are in no other.
fn make_pvid_again(
    kernel: &impl Kernel,
    link: &Link,
    former: PortVlan,
) -> Result<(), ConnectivityError> {
    let now = kernel.vlans(link)?;
    let is_there = now
        .iter()
        .any(|one| one.vlan == former.vlan && one.untagged == former.untagged);
    if is_there && !now.iter().any(|one| one.pvid) {
        kernel.add_vlan(link, former)?;
    }
    Ok(())
}

/// Puts a port back into a VLAN that it was taken out of.
fn put_back(kernel: &impl Kernel, link: &Link, before: PortVlan, all: &[Change]) -> Undone {
    let now = kernel.vlans(link)?;
    let left_alone = Some(LeftAlone::Vlan {
        link: link.name.clone(),
        vlan: before.vlan,
    });
    if let Some(now) = now.iter().find(|one| one.vlan == before.vlan) {
        return Ok(left_alone.filter(|_| *now != before));
    }
    // It would take untagged frames from a VLAN that somebody chose since.
    let ours = all.iter().any(|change| match change {
        Change::VlanAdded { after, .. } => now.iter().any(|one| one.pvid && one.vlan == after.vlan),
        _ => false,
    });
    if before.pvid && !ours && now.iter().any(|one| one.pvid) {
        return Ok(left_alone);
    }
    kernel.add_vlan(link, before)?;
    Ok(None)
}

fn undo_function(kernel: &impl Kernel, physical: &str, number: u32, change: &Change) -> Undone {
    let Change::FunctionVlan { before, after } = change else {
        return Ok(None);
    };
    let now = kernel.function_vlan(physical, number)?;
    let kept = now.map(FunctionVlan::from);
    match now {
        Some(vlan) if kept == *before && kept != Some(*after) => {
            tracing::debug!(?vlan, "the VLAN is as it was");
            return Ok(None);
        }
        Some(vlan) if kept != Some(*after) => {
            return Ok(Some(LeftAlone::FunctionVlan {
                physical: physical.to_owned(),
                number,
                now: vlan.id(),
            }));
        }
        _ => {}
    }
    // A driver that did not tell had none.
    let before = match before {
        Some(before) => Vlan::try_from(*before).map_err(sriov::LinkError::from)?,
        None => Vlan::NONE,
    };
    match kernel.set_function_vlan(physical, number, before) {
        // A driver that tells no VLAN and has no such setting did not make it either.
        Err(sriov::LinkError::NotTaken { .. }) if now.is_none() => Ok(None),
        set => Ok(set.map(|()| None)?),
    }
}
