//! Management of vDPA devices: lists, creates, describes and deletes the devices of this machine.
//!
//! ```text
//!   Connection ── requests of the family "vdpa" ──> netlink (a thread) ──> kernel
//!     MgmtDevice, VdpaDevice, DeviceConfig, VendorStats <── attributes, checked
//!   bus::Bus ──> /sys/bus/vdpa: name, driver, /dev/vhost-vdpa-N; binding
//!   uevent::Uevents <── devices and drivers: added, removed, bound
//!   pci::Pci ──> /sys/bus/pci: a function's driver, IOMMU group, virtual functions; binding
//!   link::Links ──> network interfaces, bridges, namespaces (rtnetlink)
//!   connectivity ──> a function's representor on a bridge, in a VLAN, and back
//!   announce ──> a guest's new place, announced by the host: to the bridge, and in a frame
//!   container ──> a device as network interface of a container's namespace (virtio_vdpa), and back
//!   devlink::Devlink ── requests of the family "devlink" ──> netlink
//!               ──> ports, subfunctions, eswitch, rates
//!   sriov ──> the number of virtual functions (sysfs), and their settings (rtnetlink)
//!   nic ──> all of these in one call: from a NIC to a vDPA device and back, with records
//!   journal ──> the order of record, step and undoing
//!   topology ──> all of it as one tree, with the users of each object (/proc)
//! ```
//!
//! The crate owns the kernel requests outside `/dev/vhost-vdpa-N`. Those are the generic netlink
//! families of include/uapi/linux/vdpa.h and devlink.h, and the vdpa bus in sysfs. The PCI
//! functions and virtual functions under such devices are here too. The use of a device, its rings
//! and guest memory are not. A VMM does not depend on this crate: it needs no right to manage
//! devices, so it has no code for it.
//!
//! ```no_run
//! use vdpa_mgmt::{Connection, NewDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let connection = Connection::open()?;
//! let device = NewDevice::new("nic0", "vdpasim_net".parse()?)?
//!     .mac(Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]))?
//!     .mtu(Some(1500))?;
//! connection.add(&device)?;
//! println!("{:?}", connection.config("nic0")?);
//! connection.delete("nic0")?;
//! # Ok(())
//! # }
//! ```

pub mod announce;
pub mod bus;
mod config;
mod connection;
pub mod connectivity;
pub mod container;
#[cfg(test)]
#[path = "../../../tests/fuzz/shared/corpus.rs"]
mod corpus;
mod device;
pub mod devlink;
mod error;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
pub mod journal;
pub mod link;
mod name;
mod netlink;
mod new_device;
pub mod nic;
pub mod pci;
pub mod sriov;
mod sysfs;
pub mod topology;
mod uapi;
pub mod uevent;
mod vendor_stats;

pub use config::{BlkConfig, ClassConfig, DeviceConfig, NetConfig};
pub use connection::{Connection, DEFAULT_PATIENCE};
pub use device::{MgmtDevice, VdpaDevice};
pub use error::{Error, ErrorKind};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::decode_anything;
pub use name::MgmtDeviceName;
pub use netlink::error::Refusal;
pub use new_device::NewDevice;
pub use vendor_stats::{QueueType, VendorStats};
