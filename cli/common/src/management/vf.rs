//! Physical and virtual functions as listings.

use vdpa_mgmt::Error;
use vdpa_mgmt::pci::{Function, Pci};
use vdpa_mgmt::sriov::{Link, Links, VirtualFunction};

use crate::listing::{Entry, Layout, Listing};
use crate::text::address;

fn listing(entries: Vec<Entry>) -> Listing {
    Listing {
        section: "vf",
        layout: Layout::Line,
        entries,
    }
}

/// A listing of a physical function and its virtual functions.
///
/// # Errors
/// The kernel does not answer, or a file of sysfs cannot be read.
pub fn of_function(pci: &Pci, function: &Function) -> Result<Listing, Error> {
    Ok(listing(describe_function(pci, function)?))
}

/// A listing of all SR-IOV functions with their virtual functions.
///
/// # Errors
/// The kernel does not answer, or a file of sysfs cannot be read.
pub fn all() -> Result<Listing, Error> {
    let pci = Pci::default();
    let mut entries = Vec::new();
    for function in pci.physical_functions()? {
        entries.extend(describe_function(&pci, &function)?);
    }
    Ok(listing(entries))
}

/// A listing of the named function (a network interface or pci/ADDRESS) and its virtual functions.
///
/// # Errors
/// The name is not that of a function, or as for [`all`].
pub fn one(text: &str) -> Result<Listing, Error> {
    let pci = Pci::default();
    let entries = match Physical::find(&pci, text)? {
        Physical::Function(function) => match function.physical_function {
            // A virtual function, as its physical function describes it.
            Some(physical) => {
                let mut entries = describe_function(&pci, &pci.function(physical)?)?;
                let name = name(&function);
                entries.retain(|entry| entry.name() == name);
                entries
            }
            None => describe_function(&pci, &function)?,
        },
        Physical::Interface(name) => link(&Links::open()?.link(&name)?),
    };
    Ok(listing(entries))
}

/// A physical function from the command line.
#[derive(Debug)]
pub enum Physical {
    /// A function of the PCI bus.
    Function(Box<Function>),
    /// An interface of another bus.
    Interface(String),
}

impl Physical {
    /// Finds the function of `text`: a network interface or pci/ADDRESS.
    ///
    /// # Errors
    /// The text is not an address, or there is no such function.
    pub fn find(pci: &Pci, text: &str) -> Result<Self, Error> {
        let address = match text.strip_prefix("pci/") {
            Some(address) => Some(address.parse()?),
            None => pci.behind(text)?,
        };
        Ok(match address {
            Some(address) => {
                let mut function = pci.function(address)?;
                // One function can have several interfaces; the named one comes first.
                function.netdevs.sort_by_key(|name| name != text);
                Self::Function(Box::new(function))
            }
            None => Self::Interface(text.to_owned()),
        })
    }
}

/// A physical function and its virtual functions.
fn describe_function(pci: &Pci, function: &Function) -> Result<Vec<Entry>, Error> {
    let link: Option<Link> = match function.netdevs.first() {
        Some(interface) => match Links::open()?.link(interface) {
            Ok(link) => Some(link),
            // The function was removed or renamed meanwhile.
            Err(error) if error.is_missing() => None,
            Err(error) => return Err(error),
        },
        None => None,
    };
    function_and_virtual_ones(pci, function, link.as_ref())
}

/// A PCI function: its interfaces, its driver, its location, its devices.
///
/// # Errors
/// A file of sysfs cannot be read.
pub fn function_entry(pci: &Pci, function: &Function) -> Result<Entry, Error> {
    let entry = Entry::new(name(function));
    described(entry, pci, function)
}

/// A physical function, then its virtual functions with the settings of its driver.
fn function_and_virtual_ones(
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
            // It was removed meanwhile.
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
fn link(link: &Link) -> Vec<Entry> {
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

/// The name in the form of an argument.
fn name(function: &Function) -> String {
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
