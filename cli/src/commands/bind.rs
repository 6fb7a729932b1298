//! `bellhop bind`: shows and changes the driver of a vDPA device or a PCI function.

mod netns;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{Entry, Format, Layout, Listing};
use vdpa_mgmt::Error as MgmtError;
use vdpa_mgmt::bus::{Bus, BusDevice, Netdev};
use vdpa_mgmt::pci::{Address, Function, Pci};

use bellhop_common::management::vf::function_entry;

use crate::confirm::Confirmation;
use crate::plan;

/// Show or change the driver of a vDPA device or PCI function
///
/// With vhost_vdpa, a vDPA device is /dev/vhost-vdpa-N for guests. With virtio_vdpa, it is a
/// network interface or disk of this host.
///
/// A PCI function with its NIC's driver is a network interface. With vp-vdpa (virtio NICs) it can
/// get vDPA devices. With vfio-pci, programs use it directly.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
A device gets a new N in /dev/vhost-vdpa-N with each binding, so the command prints it. A device
that a process has open is not touched: the command names the process. A PCI function loses its vDPA
devices when it gets another driver. If the new driver rejects the device, the old one gets it back.

With --netns the network interface of the device moves to a container's network namespace and is
set up there. vhost_vdpa takes the device back, also while the container uses it. If the namespace
ends first, the interface returns to this host by itself, down, under its name or as devN.

Examples:
  bellhop bind nic0                    show its driver, and /dev/vhost-vdpa-N
  bellhop bind /dev/vhost-vdpa-3       show the device with this file
  bellhop bind nic0 virtio_vdpa        give it to this host
  bellhop bind nic0 vhost_vdpa         give it back to guests
  bellhop bind nic0 virtio_vdpa --netns web --link-name eth0
  bellhop bind pci/0000:01:00.1        show the driver and IOMMU group of a PCI function
  bellhop bind pci/0000:01:00.1 vp-vdpa --dry-run
  bellhop bind pci/0000:01:00.1 vp-vdpa
  bellhop bind pci/0000:01:00.1 virtio-pci

Changing the driver needs root.")]
pub(crate) struct Arguments {
    /// The device: its name, /dev/vhost-vdpa-N, or pci/ADDRESS
    #[arg(value_name = "DEV")]
    device: String,

    /// The driver: vhost_vdpa or virtio_vdpa; for PCI functions vp-vdpa, vfio-pci or the NIC's own
    #[arg(value_name = "DRIVER")]
    driver: Option<String>,

    #[command(flatten)]
    netns: netns::NetnsArguments,

    /// Check, and print the steps without running them
    #[arg(long, requires = "driver")]
    dry_run: bool,

    #[command(flatten)]
    confirmation: Confirmation,
}

/// The word for an unbound device.
const NO_DRIVER: &str = "none";

/// Binds the device if requested, and prints its driver.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let driver = arguments.driver.as_deref();
    let namespace = arguments.netns.namespace(&arguments.device, driver)?;
    if let Some(driver) = driver {
        let change = Change::find(&arguments.device, driver)?;
        if arguments.dry_run {
            let mut steps = change.steps();
            let namespace = namespace.iter();
            steps.extend(namespace.map(|to| format!("move its interface to {}", to.name())));
            return plan::print(&steps, format);
        }
        if !change.deletes.is_empty() {
            arguments.confirmation.ask(change.question())?;
        }
    }
    let entry = match (arguments.device.strip_prefix("pci/"), namespace) {
        (Some(address), _) => pci(read(address)?, driver)?,
        (None, Some(namespace)) => {
            let bus = Bus::default();
            let device = find(&bus, &arguments.device)?;
            let link = arguments.netns.give(&bus, &device, &namespace)?;
            let entry = entry(&bus.device(&device.name)?);
            netns::describe(entry, &namespace, &link)
        }
        (None, None) => vdpa(&arguments.device, driver)?,
    };
    Listing {
        section: "bind",
        layout: Layout::Line,
        entries: vec![entry],
    }
    .print(format)
}

/// A device and its new driver.
#[derive(Debug)]
struct Change {
    device: String,
    /// The driver, unless the device has it.
    driver: Option<String>,
    /// Objects that are deleted with the former driver.
    deletes: Vec<String>,
}

impl Change {
    /// Checks whether the device can get the driver.
    fn find(device: &str, driver: &str) -> Result<Self, Error> {
        let (device, former, deletes) = match device.strip_prefix("pci/") {
            Some(address) => {
                let function = Pci::default().check_bind(read(address)?, driver)?;
                let deletes = deleted_with_driver(&function);
                (function.address.to_string(), function.driver, deletes)
            }
            None => {
                let bus = Bus::default();
                let device = find(&bus, device)?;
                let device = bus.check_bind(&device.name, driver)?;
                let deletes = match bus.netdev(&device.name)? {
                    Netdev::Here { name, .. } => vec![format!("network interface {name}")],
                    Netdev::Elsewhere => {
                        vec!["network interface in another network namespace".to_owned()]
                    }
                    Netdev::None => Vec::new(),
                };
                (device.name, device.driver, deletes)
            }
        };
        let is_bound = former.as_deref() == Some(driver);
        Ok(Self {
            device,
            driver: (!is_bound).then(|| driver.to_owned()),
            deletes: if is_bound { Vec::new() } else { deletes },
        })
    }

    fn steps(&self) -> Vec<String> {
        let device = &self.device;
        let deletes = self.deletes.iter();
        let bind = self.driver.iter();
        deletes
            .map(|what| format!("delete {what}"))
            .chain(bind.map(|driver| format!("bind {device} to {driver}")))
            .collect()
    }

    fn question(&self) -> String {
        let deletes = self.deletes.join(", ");
        let device = &self.device;
        format!("Take {device} from its driver? That deletes: {deletes}.")
    }
}

/// The objects that the kernel deletes when the function loses its driver.
fn deleted_with_driver(function: &Function) -> Vec<String> {
    let netdevs = function.netdevs.iter();
    let devices = function.vdpa_devices.iter();
    let functions = function.virtual_functions.iter();
    netdevs
        .map(|name| format!("network interface {name}"))
        .chain(devices.map(|name| format!("vDPA device {name}")))
        .chain(functions.map(|(_, address)| format!("virtual function {address}")))
        .collect()
}

fn read(address: &str) -> Result<Address, Error> {
    address
        .parse::<Address>()
        .map_err(Error::from)
        .map_err(Error::blame_arguments)
}

fn vdpa(device: &str, driver: Option<&str>) -> Result<Entry, Error> {
    let bus = Bus::default();
    let mut device = find(&bus, device)?;
    if let Some(driver) = driver {
        device = bus.bind(&device.name, driver)?;
    }
    Ok(entry(&device))
}

fn pci(address: Address, driver: Option<&str>) -> Result<Entry, MgmtError> {
    let pci = Pci::default();
    let function: Function = match driver {
        Some(driver) => pci.bind(address, driver)?,
        None => pci.function(address)?,
    };
    let entry = function_entry(&pci, &function)?;
    Ok(match function.driver {
        Some(_) => entry,
        None => entry.with_text("driver", NO_DRIVER),
    })
}

fn find(bus: &Bus, text: &str) -> Result<BusDevice, Error> {
    let number = text
        .strip_prefix("/dev/vhost-vdpa-")
        .and_then(|number| number.parse().ok());
    match number {
        Some(number) => bus.behind(number)?.ok_or_else(|| {
            Error::failed(format!(
                "no vDPA device is behind {text}; `bellhop dev show` lists them"
            ))
        }),
        None => Ok(bus.device(text)?),
    }
}

fn entry(device: &BusDevice) -> Entry {
    let path = device.path().map(|path| path.display().to_string());
    Entry::new(&device.name)
        .with_text("driver", device.driver.as_deref().unwrap_or(NO_DRIVER))
        .with_some("path", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_losses_of_an_unbound_function_are_named() {
        let function = Function {
            address: "0000:01:00.0".parse().unwrap(),
            driver: Some("virtio-pci".to_owned()),
            driver_override: None,
            physical_function: None,
            virtual_functions: vec![(0, "0000:01:00.1".parse().unwrap())],
            total_vfs: Some(4),
            iommu_group: None,
            numa_node: None,
            netdevs: vec!["enp1s0".to_owned()],
            vdpa_devices: vec!["nic0".to_owned()],
        };
        let mut change = Change {
            device: "0000:01:00.0".to_owned(),
            driver: Some("vp-vdpa".to_owned()),
            deletes: deleted_with_driver(&function),
        };
        assert_eq!(
            change.question(),
            "Take 0000:01:00.0 from its driver? That deletes: network interface enp1s0, \
             vDPA device nic0, virtual function 0000:01:00.1."
        );
        assert_eq!(change.steps().len(), 4);
        change.deletes.clear();
        assert_eq!(change.steps(), ["bind 0000:01:00.0 to vp-vdpa"]);
        change.driver = None;
        assert!(change.steps().is_empty());
    }
}
