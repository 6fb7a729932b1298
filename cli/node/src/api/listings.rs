//! Schemas of listings: as the command line prints them with `-j`, by name.
//!
//! A [`Listing`](bellhop_common::listing::Listing) can have any members. The records here describe
//! those that `bellhop_common::management` writes, and the tests compare both.

#![cfg_attr(
    not(test),
    expect(dead_code, reason = "they describe what other code writes")
)]

use std::collections::BTreeMap;

use utoipa::ToSchema;
use utoipa::openapi::schema::{
    ArrayBuilder, KnownFormat, ObjectBuilder, OneOfBuilder, Schema, SchemaFormat, SchemaType, Type,
};

/// Management devices.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct MgmtdevListing {
    /// By name: NAME or BUS/NAME, such as `pci/0000:01:00.1`.
    mgmtdev: BTreeMap<String, MgmtdevInfo>,
}

/// A management device: a function of a NIC, or a simulator, on which vDPA devices are created.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct MgmtdevInfo {
    /// The classes of devices that can be created: `net`, `block`.
    supported_classes: Vec<String>,
    /// The most virtqueues of one device; 0 is no limit.
    max_supported_vqs: Option<u32>,
    /// Feature bits that devices can have.
    #[schema(schema_with = features)]
    dev_features: Option<Vec<serde_json::Value>>,
}

/// vDPA devices.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct VdpaDeviceListing {
    /// By name.
    dev: BTreeMap<String, VdpaDeviceInfo>,
}

/// A vDPA device with its configuration.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct VdpaDeviceDetails {
    /// The device, by name.
    dev: BTreeMap<String, VdpaDeviceInfo>,
    /// Its configuration, by name; empty for a class that the kernel does not describe.
    config: BTreeMap<String, VdpaDeviceConfig>,
}

/// A vDPA device.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct VdpaDeviceInfo {
    /// `network`, `block`.
    #[schema(rename = "type")]
    #[cfg_attr(test, serde(rename = "type"))]
    class: String,
    /// Its management device.
    mgmtdev: String,
    /// The vendor's number: a PCI vendor, or 0.
    vendor_id: Option<u32>,
    /// The number of its virtqueues.
    max_vqs: Option<u32>,
    /// The largest ring, in entries.
    max_vq_size: Option<u16>,
}

/// The configuration of a vDPA device: members of a network device, or of a block device.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct VdpaDeviceConfig {
    /// MAC address of a network device.
    #[schema(pattern = "^[0-9a-f]{2}(:[0-9a-f]{2}){5}$")]
    mac: Option<String>,
    /// Link of a network device: `up` or `down`.
    link: Option<String>,
    /// Whether the driver should announce itself.
    link_announce: Option<bool>,
    /// The most queue pairs of a network device.
    max_vq_pairs: Option<u16>,
    /// The largest payload of a network device, in bytes.
    mtu: Option<u16>,
    /// Size of a block device, in sectors of 512 bytes.
    capacity: Option<u64>,
    /// The largest segment, in bytes.
    size_max: Option<u32>,
    /// The most segments of a request.
    seg_max: Option<u32>,
    /// Size of a block, in bytes.
    blk_size: Option<u32>,
    /// Blocks in a physical block, as an exponent of 2.
    physical_block_exp: Option<u8>,
    /// Offset of the first aligned block.
    alignment_offset: Option<u8>,
    /// The smallest efficient request, in blocks.
    min_io_size: Option<u16>,
    /// The optimal request, in blocks.
    opt_io_size: Option<u32>,
    /// The number of queues of a block device.
    num_queues: Option<u16>,
    /// The largest discard, in sectors.
    max_discard_sectors: Option<u32>,
    /// The most segments of a discard.
    max_discard_seg: Option<u32>,
    /// Alignment of a discard, in sectors.
    discard_sector_alignment: Option<u32>,
    /// The largest request to write zeroes, in sectors.
    max_write_zeroes_sectors: Option<u32>,
    /// The most segments of a request to write zeroes.
    max_write_zeroes_seg: Option<u32>,
    /// Whether a block device refuses writes.
    read_only: Option<bool>,
    /// Whether a block device has a cache to flush.
    flush: Option<bool>,
    /// The negotiated features, while a driver uses the device.
    #[schema(schema_with = features)]
    negotiated_features: Option<Vec<serde_json::Value>>,
}

/// PCI functions with SR-IOV, and virtual functions.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct FunctionListing {
    /// By name: `pci/ADDRESS`.
    vf: BTreeMap<String, FunctionInfo>,
}

/// A PCI function; `total_vfs` is of physical ones, `pf` and its settings are of virtual ones.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct FunctionInfo {
    /// The most virtual functions that it can have.
    total_vfs: Option<u32>,
    /// The number of virtual functions that it has.
    vfs: Option<u32>,
    /// Its physical function.
    pf: Option<String>,
    /// Its number on the physical function, from 0.
    vf: Option<u32>,
    /// Its network interfaces, with commas between them.
    netdev: Option<String>,
    /// Its driver.
    driver: Option<String>,
    /// The only driver that it can be bound to.
    driver_override: Option<String>,
    /// Its NUMA node.
    numa_node: Option<u32>,
    /// Its IOMMU group.
    iommu_group: Option<u32>,
    /// Other functions in that group, with commas between them.
    shares_group_with: Option<String>,
    /// The vDPA devices on it, with commas between them.
    vdpa: Option<String>,
    /// MAC address.
    #[schema(pattern = "^[0-9a-f]{2}(:[0-9a-f]{2}){5}$")]
    mac: Option<String>,
    /// VLAN that its frames are put into.
    #[schema(minimum = 1, maximum = 4095)]
    vlan: Option<u16>,
    /// Priority in that VLAN.
    #[schema(maximum = 7)]
    qos: Option<u8>,
    /// Protocol of that VLAN: `802.1Q` or `802.1ad`.
    proto: Option<String>,
    /// The highest transmit rate, in Mbit/s; 0 is no limit.
    max_tx_rate: Option<u32>,
    /// The guaranteed transmit rate, in Mbit/s.
    min_tx_rate: Option<u32>,
    /// Whether frames with another source address are dropped.
    spoofchk: Option<bool>,
    /// Its link: `auto`, `enable` or `disable`.
    link_state: Option<String>,
    /// Whether it may change its address and receive all frames.
    trust: Option<bool>,
    /// Whether it may read the RSS configuration.
    query_rss_en: Option<bool>,
}

/// Ports of NICs.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct PortListing {
    /// By handle: BUS/DEVICE/INDEX.
    port: BTreeMap<String, PortInfo>,
}

/// A port, with the members of its flavour.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct PortInfo {
    /// Its type: `notset`, `auto`, `eth` or `ib`.
    #[schema(rename = "type")]
    #[cfg_attr(test, serde(rename = "type"))]
    port_type: Option<String>,
    /// The type that it should have, if it differs.
    des_type: Option<String>,
    /// Its network interface.
    netdev: Option<String>,
    /// Its InfiniBand device.
    ibdev: Option<String>,
    /// Its flavour, such as `physical`, `pcipf`, `pcivf` or `pcisf`.
    flavour: Option<String>,
    /// The number on the front panel.
    port: Option<u32>,
    /// The group of ports that it was split from.
    split_group: Option<u32>,
    /// The controller.
    controller: Option<u32>,
    /// The physical function.
    pfnum: Option<u32>,
    /// The virtual function.
    vfnum: Option<u32>,
    /// The subfunction.
    sfnum: Option<u32>,
    /// Whether the function is on another host.
    external: Option<bool>,
    /// Whether it can be split.
    splittable: Option<bool>,
    /// The number of its lanes.
    lanes: Option<u32>,
    /// The function behind it.
    function: Option<PortFunctionInfo>,
}

/// The function behind a port.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct PortFunctionInfo {
    /// Its hardware address.
    hw_addr: Option<String>,
    /// `inactive` or `active`.
    state: Option<String>,
    /// Whether a driver has it: `detached` or `attached`.
    opstate: Option<String>,
    /// RoCE: `enable` or `disable`.
    roce: Option<String>,
    /// Live migration: `enable` or `disable`.
    migratable: Option<String>,
    /// IPsec crypto offload: `enable` or `disable`.
    ipsec_crypto: Option<String>,
    /// IPsec packet offload: `enable` or `disable`.
    ipsec_packet: Option<String>,
    /// The most event queues.
    max_io_eqs: Option<u32>,
    /// Its own devlink instance, by handle.
    nested_devlink: Option<BTreeMap<String, NestedDevlinkInfo>>,
}

/// A devlink instance of a function.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct NestedDevlinkInfo {
    /// The network namespace that it is in, if that is another one.
    #[schema(schema_with = namespace)]
    netnsid: Option<serde_json::Value>,
}

/// NICs of the host.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct HostNicListing {
    /// By name, which is the name of the vDPA device, too.
    nic: BTreeMap<String, HostNicInfo>,
}

/// A NIC of the host: a vDPA device and all that was created for it.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct HostNicInfo {
    /// The NIC that it was created from.
    from: String,
    /// `made`, `making` or `removing`.
    state: String,
    /// Its owner, such as a virtual machine of the daemon.
    owner: Option<String>,
    /// The physical function.
    pf: Option<String>,
    /// The number of virtual functions that were created.
    vfs: Option<u32>,
    /// The virtual function on the physical one, from 0.
    vf: Option<u32>,
    /// The function that was bound to a driver.
    function: Option<String>,
    /// That driver.
    driver: Option<String>,
    /// The port of the subfunction, or of a NIC without hardware.
    port: Option<String>,
    /// The queue of the port of a NIC without hardware.
    queue: Option<u16>,
    /// The share of a processor that each queue pair of a NIC without hardware may spend on
    /// polling, in percent.
    poll: Option<u8>,
    /// The subfunction.
    sfnum: Option<u32>,
    /// The management device.
    mgmtdev: Option<String>,
    /// The network interface that represents it on the bridge.
    representor: Option<String>,
    /// `false` if the vDPA device is missing.
    exists: Option<bool>,
    /// The character device.
    path: Option<String>,
    /// The driver of the vDPA bus, if it has no character device.
    bus_driver: Option<String>,
    /// MAC address.
    #[schema(pattern = "^[0-9a-f]{2}(:[0-9a-f]{2}){5}$")]
    mac: Option<String>,
    /// The largest payload, in bytes.
    mtu: Option<u16>,
    /// The most queue pairs.
    max_vq_pairs: Option<u16>,
}

/// Whether a host is ready for virtual machines on vDPA NICs.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct DoctorReport {
    /// Whether no requirement is missing.
    fit: bool,
    /// The findings, by group.
    findings: Vec<DoctorFinding>,
    /// The next commands on this host, from its devices, NICs and kernel to a virtual machine.
    next: Vec<String>,
}

/// A finding about a host.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Serialize, serde::Deserialize))]
pub(super) struct DoctorFinding {
    /// Its group, such as `kernel`.
    group: String,
    /// The name of the checked object.
    name: String,
    /// `ok`, `warning`, `missing` or `unknown`.
    state: String,
    /// The result, one sentence.
    found: String,
    /// The fix: commands, or lines for a file.
    remedy: Vec<String>,
}

fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::new(Type::String))
}

fn number() -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::Integer))
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::UInt32)))
        .minimum(Some(0_u32))
}

/// Features by name; the number of the bit for one without a name.
fn features() -> Schema {
    let feature = OneOfBuilder::new().item(text()).item(number());
    ArrayBuilder::new()
        .items(feature)
        .description(Some("Features by name; the number of a bit without one"))
        .build()
        .into()
}

fn namespace() -> Schema {
    OneOfBuilder::new()
        .item(number())
        .item(text().description(Some("`unknown`")))
        .description(Some("The ID of its network namespace"))
        .build()
        .into()
}

#[cfg(test)]
mod tests {
    use bellhop_common::management::{dev, mgmtdev, port};
    use serde::Serialize;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};
    use vdpa_mgmt::devlink::{
        Capabilities, Flavour, Handle, NestedDevlink, PciNumbers, Port, PortFunction,
    };
    use vdpa_mgmt::{BlkConfig, ClassConfig, DeviceConfig, MgmtDevice, NetConfig, VdpaDevice};

    use super::*;

    fn strip_nulls(value: &mut Value) {
        if let Value::Object(fields) = value {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(strip_nulls);
        }
    }

    /// Checks that the serialized value has only the members of the record, with their types.
    #[track_caller]
    fn is_described<T: Serialize + DeserializeOwned>(written: &impl Serialize) -> Value {
        let written = serde_json::to_value(written).unwrap();
        let read: T = serde_json::from_value(written.clone()).unwrap();
        let mut read = serde_json::to_value(read).unwrap();
        strip_nulls(&mut read);
        assert_eq!(read, written);
        written
    }

    #[test]
    fn findings_about_a_host_are_as_described() {
        let report =
            bellhop_diagnostics::doctor::report(&bellhop_diagnostics::doctor::Host::this());
        let written = is_described::<DoctorReport>(&report);
        assert!(!written["findings"].as_array().unwrap().is_empty());
    }

    #[test]
    fn management_devices_are_as_described() {
        let device = |name: &str, features| MgmtDevice {
            name: name.parse().unwrap(),
            supported_classes: 6,
            max_supported_vqs: Some(3),
            supported_features: features,
        };
        let all = [
            device("pci/0000:01:00.1", Some(u64::MAX)),
            device("vduse", None),
        ];
        let written = is_described::<MgmtdevListing>(&mgmtdev::listing(&all));
        let classes = &written["mgmtdev"]["vduse"]["supported_classes"];
        assert_eq!(*classes, json!(["net", "block"]));
    }

    #[test]
    fn devices_are_as_described() {
        let device = VdpaDevice {
            name: "nic0".to_owned(),
            mgmtdev: "vdpasim_net".parse().unwrap(),
            device_id: 1,
            vendor_id: Some(0),
            max_vqs: Some(3),
            max_vq_size: Some(256),
            min_vq_size: None,
        };
        let written = is_described::<VdpaDeviceListing>(&dev::listing(&[device]));
        assert_eq!(written["dev"]["nic0"]["type"], "network");
    }

    #[test]
    fn configurations_are_as_described() {
        #[derive(serde::Serialize, serde::Deserialize)]
        struct Configs {
            config: BTreeMap<String, VdpaDeviceConfig>,
        }
        let net = NetConfig {
            mac: Some([0x52, 0x54, 0, 0, 0, 1]),
            mtu: Some(1500),
            max_vq_pairs: Some(2),
            ..NetConfig::default()
        };
        let of = |class, name: &str| DeviceConfig {
            name: name.to_owned(),
            class,
            device_id: 1,
            negotiated_features: Some(1 << 5 | 1 << 60),
            device_features: None,
        };
        let configs = [
            of(ClassConfig::Net(net), "nic0"),
            of(ClassConfig::Block(BlkConfig::default()), "disk0"),
        ];
        is_described::<Configs>(&dev::config_listing(&configs));
    }

    #[test]
    fn ports_are_as_described() {
        let devlink = NestedDevlink {
            handle: Handle::new("auxiliary", "mlx5_core.sf.2").unwrap(),
            namespace: Some(-1),
        };
        let function = PortFunction {
            hw_addr: Some(vec![0; 6]),
            capabilities: Capabilities {
                roce: Some(true),
                ..Capabilities::default()
            },
            max_io_eqs: Some(8),
            devlink: Some(devlink),
            ..PortFunction::default()
        };
        let pci = PciNumbers {
            controller: Some(0),
            pfnum: 0,
            external: Some(false),
        };
        let port = Port {
            handle: Handle::new("pci", "0000:06:00.0").unwrap().port(32768),
            port_type: None,
            desired_type: None,
            netdev: None,
            ibdev: None,
            flavour: Some(Flavour::PciSf { pci, sfnum: 88 }),
            splittable: Some(false),
            lanes: None,
            function: Some(function),
        };
        is_described::<PortListing>(&port::listing(&[port]));
    }
}
