//! The tree: the parts of a topology, and their form for programs.
//!
//! This module reads no files. The written form omits unknown values; lists are always present.

use std::fmt;
use std::path::PathBuf;

use serde::{Serialize, Serializer};
use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET};

use super::management::ManagementState;
use super::processes::DeviceHolder;
use crate::error;
use crate::name::MgmtDeviceName;
use crate::pci::Address;

/// The vDPA topology of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Topology {
    /// The state of the kernel's vDPA management. Unless it responds, there are no management
    /// devices, and vDPA devices are at their position in sysfs.
    pub management: ManagementState,
    /// Whether all processes could be inspected. If not, a device without holders may have one.
    pub all_processes_seen: bool,
    /// NICs with SR-IOV, and functions that are related to vDPA; by address.
    pub physical_functions: Vec<PhysicalFunction>,
    /// Management devices on no PCI function: simulators, VDUSE, platform devices.
    pub mgmtdevs: Vec<ManagementDevice>,
    /// vDPA devices on no PCI function, with an unknown management device.
    pub vdpa_devices: Vec<Device>,
}

impl Topology {
    /// Whether the tree is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.physical_functions.is_empty()
            && self.mgmtdevs.is_empty()
            && self.vdpa_devices.is_empty()
    }

    /// All vDPA devices, at any place of the tree.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        let on_functions = self.physical_functions.iter().flat_map(|physical| {
            let virtual_ones = physical.virtual_functions.iter();
            let functions = virtual_ones
                .map(|one| &one.function)
                .chain([&physical.function]);
            let subfunctions = physical.subfunctions.iter();
            functions
                .map(|one| (&one.mgmtdevs, &one.vdpa_devices))
                .chain(subfunctions.map(|one| (&one.mgmtdevs, &one.vdpa_devices)))
        });
        on_functions
            .chain([(&self.mgmtdevs, &self.vdpa_devices)])
            .flat_map(|(mgmtdevs, devices)| {
                let managed = mgmtdevs.iter().flat_map(|one| &one.vdpa_devices);
                managed.chain(devices)
            })
    }
}

/// A function of the PCI bus with the devices on it. From sysfs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PciFunction {
    /// Its address, such as `pci/0000:01:00.0`. A devlink instance of it has the same name.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    #[serde(rename = "function", serialize_with = "handle")]
    pub address: Address,
    /// Its driver; none if unbound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Its network interfaces in this network namespace, without representors.
    pub netdevs: Vec<String>,
    /// Its NUMA node, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Its IOMMU group; none without an IOMMU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iommu_group: Option<u32>,
    /// The file of its IOMMU group, while a VFIO driver has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vfio: Option<VfioGroup>,
    /// The management devices on it (one, or none).
    pub mgmtdevs: Vec<ManagementDevice>,
    /// vDPA devices on it with an unknown management device.
    pub vdpa_devices: Vec<Device>,
}

/// The file by which a program uses a function through VFIO. From sysfs and `/proc`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VfioGroup {
    /// `/dev/vfio/N`, with the number of the IOMMU group.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// The processes that have it open, by PID.
    pub holders: Vec<DeviceHolder>,
}

/// A physical function with its virtual functions and subfunctions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PhysicalFunction {
    /// The function itself.
    #[serde(flatten)]
    pub function: PciFunction,
    /// The number of virtual functions it can have. Absent without SR-IOV, and for a virtual
    /// function whose physical function is not visible (passed through to this virtual machine).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_vfs: Option<u32>,
    /// The switch in the NIC, if its driver names one (`phys_switch_id`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub switch_id: Option<String>,
    /// Its virtual functions, by number.
    pub virtual_functions: Vec<VirtualFunction>,
    /// Its subfunctions, by name.
    pub subfunctions: Vec<Subfunction>,
    /// Representors of functions that are not on this machine, or not there yet.
    pub representors: Vec<Representor>,
}

/// A virtual function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VirtualFunction {
    /// Its number on its physical function, from 0.
    #[serde(rename = "vf")]
    pub index: u32,
    /// The function itself.
    #[serde(flatten)]
    pub function: PciFunction,
    /// Its port on the NIC's switch, in this network namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub representor: Option<Representor>,
}

/// A subfunction, or another device of the auxiliary bus with vDPA devices on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Subfunction {
    /// Its name on the auxiliary bus, such as `mlx5_core.sf.2`.
    #[serde(rename = "auxiliary")]
    pub name: String,
    /// The number from its creation, if its driver reports it.
    #[serde(rename = "sf", skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    /// Its driver; none if unbound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Its network interfaces in this network namespace.
    pub netdevs: Vec<String>,
    /// Its port on the NIC's switch, in this network namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub representor: Option<Representor>,
    /// The management devices on it (one, or none).
    pub mgmtdevs: Vec<ManagementDevice>,
    /// vDPA devices on it with an unknown management device.
    pub vdpa_devices: Vec<Device>,
}

/// A network interface that is the port of a virtual function or subfunction on a NIC's switch.
/// From `/sys/class/net`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Representor {
    /// Its name.
    pub netdev: String,
    /// The port's name in the driver: `pf0vf1`, `c1pf0sf88`.
    pub port_name: String,
    /// Its state (`operstate`): `up`, `down`, `lowerlayerdown`, …
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// The bridge or bond that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub master: Option<String>,
}

/// The tap of a software NIC. From `/proc/PID/fdinfo` of the process that serves the NIC, and
/// `/sys/class/net`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Tap {
    /// Its name.
    pub netdev: String,
    /// Its state (`operstate`): `up`, `down`, …
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// The bridge that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub master: Option<String>,
}

/// A management device. From netlink.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ManagementDevice {
    /// Its name.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    #[serde(serialize_with = "text")]
    pub name: MgmtDeviceName,
    /// The classes of devices that it can create.
    pub supported_classes: Vec<Class>,
    /// The most queues of one device. VDUSE reports 0, which means no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_supported_vqs: Option<u32>,
    /// Its devices, by name.
    pub vdpa_devices: Vec<Device>,
}

/// A vDPA device. Class, sizes and configuration are from netlink, the rest is from sysfs and
/// `/proc`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = TopologyDevice))]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its class.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
    /// The number of its virtqueues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_vqs: Option<u32>,
    /// The largest ring, in entries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_vq_size: Option<u16>,
    /// The MAC address of a network device.
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "mac_address"
    )]
    #[cfg_attr(
        feature = "schema",
        schema(value_type = Option<String>, pattern = "^[0-9a-f]{2}(:[0-9a-f]{2}){5}$")
    )]
    pub mac: Option<[u8; 6]>,
    /// The MTU of a network device, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Its bus driver, `vhost_vdpa` or `virtio_vdpa`; none if unbound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// `/dev/vhost-vdpa-N`, while `vhost_vdpa` drives it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub path: Option<PathBuf>,
    /// Its network interfaces in this network namespace, while `virtio_vdpa` drives it.
    pub netdevs: Vec<String>,
    /// Its tap, if a process serves it with one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<Tap>,
    /// The processes that have the character device open, by PID: one VMM, and any process with a
    /// copy of its descriptor.
    pub holders: Vec<DeviceHolder>,
    /// Why its interrupts cannot be posted on this host; absent if no obstacle is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub posting_obstacle: Option<PostingObstacle>,
    /// Its queues.
    pub queues: Vec<Queue>,
}

/// A virtqueue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = TopologyQueue))]
pub struct Queue {
    /// Its index.
    pub index: u32,
    /// Whether its holder has mapped its doorbell.
    pub doorbell: Doorbell,
    /// Whether its interrupts reach a guest's processor without the host.
    pub posted_interrupt: PostedInterrupt,
}

/// Whether a queue's holder has mapped its doorbell, the page in which a store is a kick. The
/// holder's memory map shows it.
///
/// * `mapped`: a holder has mapped it
/// * `not_mapped`: no holder has mapped it
/// * `unknown`: no process has the device, or a memory map cannot be read
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Doorbell {
    /// A holder has mapped it.
    Mapped,
    /// All holders are known, and none has.
    NotMapped,
    /// No process has the device open, or a holder's memory map may not be read.
    Unknown,
}

/// Whether a queue's interrupts are posted. Linux reports no posted interrupts; only obstacles are
/// known ([`PostingObstacle`]).
///
/// * `no`: they cannot be posted
/// * `unknown`: no obstacle is known
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PostedInterrupt {
    /// They cannot be posted.
    No,
    /// No obstacle is known.
    Unknown,
}

/// Why no interrupt of a device can be posted to a guest's processor.
///
/// * `software`: the device is on no PCI function
/// * `kvm`: KVM does not use the processor's virtual interrupt controller
/// * `iommu`: an IOMMU of this machine cannot post
/// * `command_line`: the kernel's command line turns it off
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PostingObstacle {
    /// The device is on no PCI function: it has no interrupt of its own.
    Software,
    /// KVM does not use the processor's virtual interrupt controller
    /// (`kvm_intel.enable_apicv=N`, `kvm_amd.avic=N`).
    Kvm,
    /// An IOMMU of this machine cannot post (VT-d: capability PI; AMD: GAMSup).
    Iommu,
    /// The kernel's command line has `intremap=off` or `intremap=nopost`.
    CommandLine,
}

/// A class of devices by virtio device type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A network device. Written as `network`.
    Network,
    /// A block device. Written as `block`.
    Block,
    /// Another device type. Written as its number.
    Other(u32),
}

impl Class {
    /// The class of a virtio device type.
    #[must_use]
    pub fn of(device_id: u32) -> Self {
        match device_id {
            VIRTIO_ID_NET => Self::Network,
            VIRTIO_ID_BLOCK => Self::Block,
            other => Self::Other(other),
        }
    }

    /// The classes in a mask of virtio device types. Bit 0 is no device type.
    pub(super) fn of_mask(mask: u64) -> Vec<Self> {
        (1..u64::BITS)
            .filter(|bit| mask & 1 << bit != 0)
            .map(Self::of)
            .collect()
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network => f.write_str("network"),
            Self::Block => f.write_str("block"),
            Self::Other(device_id) => write!(f, "{device_id}"),
        }
    }
}

#[cfg(feature = "schema")]
impl utoipa::PartialSchema for Class {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Type};
        let name = ObjectBuilder::new().schema_type(Type::String);
        let number = ObjectBuilder::new()
            .schema_type(Type::Integer)
            .minimum(Some(0_u32))
            .maximum(Some(u32::MAX));
        OneOfBuilder::new()
            .item(name.description(Some("`network` or `block`")))
            .item(number.description(Some("The virtio device type of another class")))
            .description(Some("Class of vDPA devices"))
            .into()
    }
}

#[cfg(feature = "schema")]
impl utoipa::ToSchema for Class {
    fn name() -> std::borrow::Cow<'static, str> {
        "DeviceClass".into()
    }
}

impl Serialize for Class {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Other(device_id) => serializer.serialize_u32(*device_id),
            named => serializer.collect_str(named),
        }
    }
}

fn handle<S: Serializer>(address: &Address, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("pci/{address}"))
}

fn text<S: Serializer>(value: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn mac_address<S: Serializer>(mac: &Option<[u8; 6]>, serializer: S) -> Result<S::Ok, S::Error> {
    match mac {
        Some(mac) => serializer.serialize_str(&error::mac(*mac)),
        None => serializer.serialize_none(),
    }
}
