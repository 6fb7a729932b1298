//! `bellhop vf`: shows, creates and configures virtual functions of NICs.

mod settings;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::management::vf::{self, Physical};
use vdpa_mgmt::pci::{Address, Function, Pci};
use vdpa_mgmt::sriov::Links;

use crate::confirm::Confirmation;
use crate::plan;

/// Show and change virtual functions (SR-IOV) and their limits
///
/// A virtual function is a NIC of its own on a part of another one. With a vDPA driver it is a
/// management device, which creates vDPA devices.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
PF, the physical function, is a network interface or pci/ADDRESS.

From a NIC to a device for guests, and back (a virtio NIC; mlx5_vdpa needs no `bind`):
  bellhop vf count enp1s0 4                     create four virtual functions
  bellhop vf set enp1s0 0 mac 52:54:00:12:34:56 vlan 100 spoofchk on
  bellhop vf show enp1s0                        show their addresses, drivers, IOMMU groups
  bellhop bind pci/0000:01:00.1 vp-vdpa         bind the first to a vDPA driver
  bellhop dev add name nic0 mgmtdev pci/0000:01:00.1
  bellhop dev del nic0
  bellhop vf count enp1s0 0                     delete all

The command takes nothing away from a process that uses it; it names the process. Changes need
root.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show NICs with SR-IOV, and their virtual functions
    #[command(visible_aliases = ["list", "ls", "get"], after_long_help = SHOW_HELP)]
    Show {
        /// The physical function, or a virtual one: a network interface or pci/ADDRESS
        #[arg(value_name = "PF")]
        physical: Option<String>,
    },
    /// Set the number of a NIC's virtual functions
    ///
    /// The kernel changes a number only from 0 and to 0, so the command first deletes existing
    /// virtual functions. None may be in use.
    #[command(after_long_help = "\
Examples:
  bellhop vf count enp1s0 4 --dry-run
  bellhop vf count enp1s0 4
  bellhop vf count pci/0000:01:00.0 0")]
    Count {
        /// The physical function: a network interface or pci/ADDRESS
        #[arg(value_name = "PF")]
        physical: String,
        /// The number; 0 deletes all
        #[arg(value_name = "N")]
        count: u32,
        /// Check, and print the steps without running them
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        confirmation: Confirmation,
    },
    /// Configure a virtual function, as `ip link set PF vf N` does
    #[command(
        override_usage = "bellhop vf set PF N [mac MACADDR] [vlan VLANID [qos QOS] \
                          [proto PROTOCOL]] [rate RATE | max_tx_rate RATE] [min_tx_rate RATE] \
                          [spoofchk on|off] [state auto|enable|disable] [trust on|off]",
        after_long_help = settings::HELP
    )]
    Set {
        /// The physical function: a network interface or pci/ADDRESS
        #[arg(value_name = "PF")]
        physical: String,
        /// The virtual function's number, from 0
        #[arg(value_name = "N")]
        virtual_function: u32,
        /// Pairs of a word and its value
        #[arg(value_name = "WORD VALUE", required = true, num_args = 1..)]
        words: Vec<String>,
    },
}

const SHOW_HELP: &str = "\
Fields:
  netdev         network interfaces
  driver         the function's driver: the NIC's, vp-vdpa, vfio-pci, …
  driver_override  the only driver that may bind it, if one was set
  numa_node      the nearest NUMA node: put guests there
  iommu_group    its IOMMU group; shares_group_with names the other functions of that group, which
                 only one program can use together
  vdpa           vDPA devices on it
  mac, vlan, …   as the physical function's driver reports, in the words of `bellhop vf set`; a
                 driver without such settings (virtio_net) reports none

Examples:
  bellhop vf show
  bellhop vf show enp1s0 -jp";

/// Runs the subcommand, and prints its result.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let pci = Pci::default();
    let listing = match &arguments.command {
        Command::Show { physical: None } => vf::all()?,
        Command::Show {
            physical: Some(physical),
        } => vf::one(physical)?,
        Command::Count {
            physical,
            count,
            dry_run,
            confirmation,
        } => {
            let Physical::Function(function) = Physical::find(&pci, physical)? else {
                let message = format!(
                    "cannot count the virtual functions of {physical}: it is not a function of the \
                     PCI bus"
                );
                return Err(Error::failed(message));
            };
            let address = function.address;
            let function = pci.check_virtual_functions(address, *count)?;
            let now = function.virtual_functions.len();
            if *dry_run {
                return plan::print(&count_steps(address, now, *count), format);
            }
            if now != 0 && u32::try_from(now) != Ok(*count) {
                confirmation.ask(format!("Delete all {now} virtual functions of {address}?"))?;
            }
            let function = pci.set_virtual_functions(address, *count)?;
            vf::of_function(&pci, &function)?
        }
        Command::Set {
            physical,
            virtual_function,
            words,
        } => {
            let interface = match Physical::find(&pci, physical)? {
                Physical::Function(function) => physical_interface(*function)?,
                Physical::Interface(name) => name,
            };
            let links = Links::open()?;
            let now = || settings::rates_now(&links, &interface, *virtual_function);
            let settings = settings::read(words, now)?;
            links.set(&interface, *virtual_function, &settings)?;
            // `ip link` prints nothing for people.
            if format.is_text() {
                return Ok(Code::Success);
            }
            vf::one(physical)?
        }
    };
    listing.print(format)
}

/// The steps from `now` virtual functions to `count`.
fn count_steps(address: Address, now: usize, count: u32) -> Vec<String> {
    if u32::try_from(now) == Ok(count) {
        return Vec::new();
    }
    let delete = (now != 0).then(|| format!("delete all {now} virtual functions of {address}"));
    let create = (count != 0).then(|| format!("create {count} virtual functions of {address}"));
    delete.into_iter().chain(create).collect()
}

/// The interface of a physical function, through which its virtual functions are configured.
fn physical_interface(function: Function) -> Result<String, Error> {
    function.check_physical()?;
    let first = function.netdevs.into_iter().next();
    first.ok_or_else(|| {
        let message = format!(
            "{} has no network interface in this network namespace: bind it to its NIC's driver, \
             or run the command in the interface's namespace",
            function.address
        );
        Error::failed(message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_goes_by_zero() {
        let address = "0000:01:00.0".parse().unwrap();
        let [delete, create] = [
            "delete all 4 virtual functions of 0000:01:00.0",
            "create 2 virtual functions of 0000:01:00.0",
        ];
        assert_eq!(count_steps(address, 4, 2), [delete, create]);
        assert_eq!(count_steps(address, 4, 0), [delete]);
        assert_eq!(count_steps(address, 0, 2), [create]);
        assert!(count_steps(address, 2, 2).is_empty());
    }
}
