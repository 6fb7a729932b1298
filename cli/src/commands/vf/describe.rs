//! Physical and virtual functions as entries of a listing.

use vdpa_mgmt::Error;
use vdpa_mgmt::pci::{Function, Pci};
use vdpa_mgmt::sriov::{Link, VirtualFunction};

use crate::listing::Entry;
use crate::text::address;

/// A function of the PCI bus: its interfaces, its driver, where it is, what is on it.
pub(crate) fn function_entry(pci: &Pci, function: &Function) -> Result<Entry, Error> {
    let entry = Entry::new(name(function));
    described(entry, pci, function)
}

/// A physical function, then its virtual ones with what its driver lets them do.
pub(super) fn function_and_virtual_ones(
    pci: &Pci,
    function: &Function,
    link: Option<&Link>,
) -> Result<Vec<Entry>, Error> {
    let count = u64::try_from(function.virtual_functions.len()).unwrap_or(u64::MAX);
    let entry = Entry::new(name(function))
        .with_number("total_vfs", function.total_vfs)
        .with_number("vfs", function.total_vfs.map(|_| count));
    let mut entries = vec![described(entry, pci, function)?];
    for &(index, address) in &function.virtual_functions {
        let one = match pci.function(address) {
            Ok(one) => one,
            // Gone meanwhile.
            Err(error) if error.is_missing() => continue,
            Err(error) => return Err(error),
        };
        let entry = Entry::new(name(&one))
            .with_text("pf", name(function))
            .with_number("vf", Some(index));
        let entry = described(entry, pci, &one)?;
        let settings = link.and_then(|link| {
            let mut functions = link.virtual_functions.iter();
            functions.find(|one| one.index == index)
        });
        entries.push(match settings {
            Some(settings) => with_settings(entry, settings),
            None => entry,
        });
    }
    Ok(entries)
}

/// The virtual functions of an interface that is not on the PCI bus.
pub(super) fn link(link: &Link) -> Vec<Entry> {
    let count = u64::try_from(link.virtual_functions.len()).unwrap_or(u64::MAX);
    let physical = Entry::new(&link.name).with_number("vfs", Some(count));
    let virtual_ones = link.virtual_functions.iter().map(|one| {
        let entry = Entry::new(format!("{}/vf{}", link.name, one.index))
            .with_text("pf", &link.name)
            .with_number("vf", Some(one.index));
        with_settings(entry, one)
    });
    std::iter::once(physical).chain(virtual_ones).collect()
}

/// As an argument names it.
pub(super) fn name(function: &Function) -> String {
    format!("pci/{}", function.address)
}

fn described(entry: Entry, pci: &Pci, function: &Function) -> Result<Entry, Error> {
    let shared: Vec<String> = pci
        .shares_group_with(function)?
        .iter()
        .map(|address| format!("pci/{address}"))
        .collect();
    Ok(entry
        .with_joined("netdev", &function.netdevs)
        .with_some("driver", function.driver.as_deref())
        .with_some("driver_override", function.driver_override.as_deref())
        .with_number("numa_node", function.numa_node)
        .with_number("iommu_group", function.iommu_group)
        .with_joined("shares_group_with", &shared)
        .with_joined("vdpa", &function.vdpa_devices))
}

/// In the words, and with the JSON keys, of `ip link`; `mac` as elsewhere in Bellhop.
fn with_settings(entry: Entry, settings: &VirtualFunction) -> Entry {
    let vlan = settings.vlan.filter(|vlan| vlan.id() != 0);
    entry
        .with_some("mac", settings.mac.map(|mac| address(&mac)))
        .with_number("vlan", vlan.map(|vlan| vlan.id()))
        .with_number("qos", vlan.map(|vlan| vlan.qos()))
        .with_some("proto", vlan.map(|vlan| vlan.protocol().to_string()))
        .with_number("max_tx_rate", settings.rates.map(|rates| rates.max))
        .with_number("min_tx_rate", settings.rates.map(|rates| rates.min))
        .with_switch("spoofchk", settings.spoof_check)
        .with_some(
            "link_state",
            settings.link_state.map(|state| state.to_string()),
        )
        .with_switch("trust", settings.trust)
        .with_switch("query_rss_en", settings.query_rss)
}
