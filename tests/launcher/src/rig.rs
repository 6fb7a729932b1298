//! Rigs: the hardware of the lab host and the modules that it loads for it.
//!
//! This module owns the table from a rig to QEMU arguments, kernel parameters, modules and links. A
//! new rig is a new variant here and nothing elsewhere.

use crate::agent::protocol::Module;
use crate::error::Result;
use crate::link_backend::LinkBackend;
use crate::setup::root::Root;
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Virtual functions of the SR-IOV rig's NIC.
pub const VIRTUAL_FUNCTIONS: usize = 4;

/// Queue pairs of each virtual function, where the cable supports that many.
pub const QUEUE_PAIRS: usize = 4;

/// Interrupt vectors of a virtual function: two for each queue pair, one for
/// its control queue, one for its configuration.
const VECTORS: usize = 2 * QUEUE_PAIRS + 2;

/// The number of memory pieces that vhost_vdpa keeps for one address space: 4 GiB in pieces of the
/// smallest size.
const IOTLB_ENTRIES: u32 = 1 << 20;

/// Links of the SR-IOV rig: QEMU's names for the network ends of the virtual functions.
const LINKS: [&str; VIRTUAL_FUNCTIONS] = ["vf0", "vf1", "vf2", "vf3"];

/// The igb NIC of the SR-IOV rig, its root port and its network end.
const IGB: &str = "igb";

/// PCI slot of NICs that no test can use. On `sim` it holds one without an IOMMU, on `sriov` two
/// functions (0 and 1) in one IOMMU group.
pub const PLAIN_SLOT: u8 = 0x10;

/// QEMU's hub that the NICs of [`PLAIN_SLOT`] are connected to.
pub const PLAIN_HUB: u8 = 8;

/// The first virtual function that offers packed rings. Earlier ones have only split rings, so that
/// guests use both formats, alone and together.
pub const FIRST_PACKED_FUNCTION: usize = 2;

/// A lab host's equipment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Rig {
    /// The kernel's vDPA simulator, network and block; no devices of QEMU's.
    #[default]
    Sim,
    /// The lab NIC (tests/kmod): every ability of a vDPA device, by parameter.
    Labnic,
    /// A virtio NIC with four virtual functions behind an Intel IOMMU, vp_vdpa
    /// for them, all on one switch.
    Sriov,
    /// Only what Debian's kernel has: VDUSE, taps and bridges; no device of QEMU's.
    Vduse,
}

/// What QEMU needs for a rig's devices.
#[derive(Debug, Default)]
pub struct Equipment {
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Descriptors that the arguments name and that QEMU must inherit.
    pub descriptors: Vec<OwnedFd>,
}

impl Rig {
    /// The rig that an integration test target runs on, by its name.
    pub fn of_test(target: &str) -> Self {
        let is = |rig: &str| {
            ["hardware_", "rings_", "mgmt_", "api_", "migration_"]
                .iter()
                .any(|area| {
                    target
                        .strip_prefix(area)
                        .is_some_and(|topic| topic.starts_with(rig))
                })
        };
        if is("sriov") {
            Self::Sriov
        } else if is("labnic") {
            Self::Labnic
        } else {
            Self::Sim
        }
    }

    /// The rig's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sim => "sim",
            Self::Labnic => "labnic",
            Self::Sriov => "sriov",
            Self::Vduse => "vduse",
        }
    }

    /// QEMU's machine type with its options.
    pub fn machine(self) -> &'static str {
        match self {
            Self::Sim | Self::Labnic | Self::Vduse => "q35",
            // On KVM, interrupt remapping needs the I/O APIC in QEMU.
            Self::Sriov => "q35,kernel-irqchip=split",
        }
    }

    /// Creates what QEMU needs for the rig's devices.
    ///
    /// # Errors
    /// Those of [`LinkBackend::lay`].
    pub fn equip(self, root: &Root) -> Result<Equipment> {
        match self {
            Self::Sim => Ok(Equipment {
                arguments: plain_nic(0, ""),
                ..Equipment::default()
            }),
            Self::Labnic | Self::Vduse => Ok(Equipment::default()),
            Self::Sriov => sriov(LinkBackend::lay(root, VIRTUAL_FUNCTIONS + 1, QUEUE_PAIRS)?),
        }
    }

    /// Names of the links that the outside can set up and down.
    pub fn links(self) -> &'static [&'static str] {
        match self {
            Self::Sim | Self::Labnic | Self::Vduse => &[],
            Self::Sriov => &LINKS,
        }
    }

    /// QEMU's arguments for the igb NIC that a test can plug. Its port is on the same switch. It is
    /// absent at first, because its functions would disturb the other tests.
    pub fn igb(self) -> Option<Value> {
        let port = format!("{IGB}-port");
        let igb = json!({ "driver": "igb", "id": IGB, "bus": port, "netdev": IGB });
        (self == Self::Sriov).then_some(igb)
    }

    /// Additions to the lab host's kernel command line.
    pub fn kernel_parameters(self) -> &'static str {
        match self {
            Self::Sim | Self::Labnic | Self::Vduse => "",
            // Debian's kernel translates only on request.
            Self::Sriov => "intel_iommu=on iommu.passthrough=0",
        }
    }

    /// Modules that the lab host loads at start. `built` is the directory of the modules that the
    /// lab builds itself.
    pub fn modules(self, built: &Path) -> Vec<Module> {
        let stock = |name: &str| Module::Stock(name.to_owned(), Vec::new());
        // One entry for each contiguous piece of a pinned guest. Their number varies by chance, and
        // with the kernel's default limit some guests do not start.
        let vhost_vdpa = || {
            Module::Stock(
                "vhost_vdpa".to_owned(),
                vec![format!("max_iotlb_entries={IOTLB_ENTRIES}")],
            )
        };
        let file_with = |name: &str, parameters: String| {
            Module::File(built.join(name).to_string_lossy().into_owned(), parameters)
        };
        let file = |name: &str| file_with(name, String::new());
        match self {
            Self::Sim => vec![
                vhost_vdpa(),
                file("vringh.ko"),
                file_with("vdpa_sim.ko", Mapping::DEFAULT.parameters()),
                file("vdpa_sim_net.ko"),
                file("vdpa_sim_blk.ko"),
                stock("vduse"),
            ],
            Self::Labnic => vec![
                vhost_vdpa(),
                file("vringh.ko"),
                file("labnic.ko"),
                stock("vduse"),
            ],
            Self::Vduse => ["vduse", "vhost_vdpa", "tun"].map(stock).into(),
            Self::Sriov => vec![
                // First: there are no virtual functions before the physical function's driver runs.
                stock("virtio_net"),
                vhost_vdpa(),
                file("vp_vdpa.ko"),
                stock("vduse"),
                // All of VFIO with iommufd: a stock module does not fit to them.
                stock("irqbypass"),
                file("iommufd.ko"),
                file("vfio.ko"),
                file("vfio_iommu_type1.ko"),
                file("vfio-pci-core.ko"),
                file("vfio-pci.ko"),
                file("bellhop_vfio_mig.ko"),
            ],
        }
    }
}

/// The MAC address of a virtual function. The addresses are in 02:00:5e:00:54:00/40, which nothing
/// else in the lab uses.
pub fn vf_mac(index: usize) -> String {
    format!("02:00:5e:00:54:{:02x}", index + 1)
}

/// A virtio NIC without a cable, a function of [`PLAIN_SLOT`].
fn plain_nic(function: u8, options: &str) -> Vec<String> {
    let id = format!("plain{function}");
    vec![
        "-netdev".to_owned(),
        format!("hubport,id={id},hubid={PLAIN_HUB}"),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev={id},romfile=,addr={PLAIN_SLOT:#x}.{function:#x}{options}"),
    ]
}

/// One NIC with virtual functions. The physical function comes last on the command line: QEMU
/// requires the virtual functions before it.
fn sriov(link_backend: LinkBackend) -> Result<Equipment> {
    let mut arguments: Vec<String> = [
        "-device",
        "intel-iommu,intremap=on,device-iotlb=on,caching-mode=on",
        "-device",
        "pcie-root-port,id=nic-port,chassis=1,slot=1",
    ]
    .map(str::to_owned)
    .into();
    for (index, link) in LINKS.iter().enumerate() {
        let packed = if index < FIRST_PACKED_FUNCTION {
            "off"
        } else {
            "on"
        };
        arguments.extend([
            "-netdev".to_owned(),
            link_backend.netdev(index, link)?,
            "-device".to_owned(),
            format!(
                "virtio-net-pci,bus=nic-port,addr=0x0.{:#x},sriov-pf=pf,netdev={link},mac={},\
                 iommu_platform=on,ats=on,page-per-vq=on,mq=on,vectors={VECTORS},packed={packed}",
                index + 1,
                vf_mac(index)
            ),
        ]);
    }
    arguments.extend([
        "-netdev".to_owned(),
        link_backend.netdev(VIRTUAL_FUNCTIONS, IGB)?,
        "-device".to_owned(),
        format!("pcie-root-port,id={IGB}-port,chassis=2,slot=2"),
    ]);
    // Without access control (ACS) two functions of one slot share a group.
    arguments.extend(plain_nic(
        0,
        ",multifunction=on,disable-legacy=on,iommu_platform=on",
    ));
    arguments.extend(plain_nic(1, ",disable-legacy=on,iommu_platform=on"));
    arguments.extend(
        [
            "-netdev",
            "hubport,id=pf-net,hubid=9",
            "-device",
            "virtio-net-pci,bus=nic-port,addr=0x0.0x0,id=pf,netdev=pf-net,iommu_platform=on,ats=on,\
             mq=on,romfile=",
        ]
        .map(str::to_owned),
    );
    Ok(Equipment {
        arguments,
        descriptors: link_backend.into_descriptors(),
    })
}

/// How the simulator maps a guest's memory: parameters of `vdpa_sim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// Shared virtual addresses instead of pinned pages.
    pub use_va: bool,
    /// One mapping operation for a whole table.
    pub batch_mapping: bool,
}

impl Mapping {
    /// The lab host's choice and the kernel's default.
    pub const DEFAULT: Self = Self::new(true, true);

    /// Pinned pages: as a device with a table of its own in the NIC.
    pub const PINNED: Self = Self::new(false, true);

    /// Pinned pages, and each change costs only itself: as a device behind an IOMMU of the host. By
    /// default the simulator copies all mappings at each change. An emulated guest that unmaps at
    /// once then takes seconds for a hundred frames.
    pub const PINNED_ONE_BY_ONE: Self = Self::new(false, false);

    /// All four combinations.
    pub const ALL: [Self; 4] = [
        Self::new(false, false),
        Self::new(false, true),
        Self::new(true, false),
        Self::new(true, true),
    ];

    const fn new(use_va: bool, batch_mapping: bool) -> Self {
        Self {
            use_va,
            batch_mapping,
        }
    }

    /// The parameters of `vdpa_sim` for this mapping. The simulator keeps an entry for each
    /// contiguous piece of pinned memory, as vhost_vdpa does. A guest's IOMMU has at most 65,536.
    pub fn parameters(self) -> String {
        self.parameters_with(131_072)
    }

    /// Like [`Self::parameters`], with another limit of entries.
    pub fn parameters_with(self, entries: u32) -> String {
        format!(
            "use_va={} batch_mapping={} max_iotlb_entries={entries}",
            u8::from(self.use_va),
            u8::from(self.batch_mapping)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_find_their_rig() {
        assert_eq!(Rig::of_test("hardware_sriov"), Rig::Sriov);
        assert_eq!(Rig::of_test("hardware_sriov_mq"), Rig::Sriov);
        assert_eq!(Rig::of_test("hardware_labnic_doorbells"), Rig::Labnic);
        assert_eq!(Rig::of_test("rings_labnic_netdev"), Rig::Labnic);
        assert_eq!(Rig::of_test("rings_sriov_netdev"), Rig::Sriov);
        assert_eq!(Rig::of_test("mgmt_sriov"), Rig::Sriov);
        assert_eq!(Rig::of_test("mgmt_dev"), Rig::Sim);
        assert_eq!(Rig::of_test("rings_netdev"), Rig::Sim);
        assert_eq!(Rig::of_test("mgmt_sriov_dev"), Rig::Sriov);
        assert_eq!(Rig::of_test("mgmt_dev"), Rig::Sim);
        assert_eq!(Rig::of_test("migration_sriov_snapshot"), Rig::Sriov);
        assert_eq!(Rig::of_test("boot_lab"), Rig::Sim);
        assert_eq!(Rig::of_test("api_vm"), Rig::Sim);
        assert_eq!(Rig::of_test("api_labnic_ring_watch"), Rig::Labnic);
        assert_eq!(Rig::of_test("migration_labnic_swap"), Rig::Labnic);
    }

    #[test]
    fn every_link_has_a_function() {
        let sockets = std::iter::repeat_with(std::os::unix::net::UnixDatagram::unbound)
            .take(VIRTUAL_FUNCTIONS + 1)
            .map(|socket| socket.unwrap().into())
            .collect();
        let equipment = sriov(LinkBackend::Pairs(sockets)).unwrap();
        assert_eq!(equipment.descriptors.len(), VIRTUAL_FUNCTIONS + 1);
        for (index, link) in Rig::Sriov.links().iter().enumerate() {
            let words = [
                format!("netdev={link},"),
                format!("addr=0x0.0x{},", index + 1),
            ];
            assert!(
                equipment
                    .arguments
                    .iter()
                    .any(|one| words.iter().all(|word| one.contains(word.as_str()))),
                "{link}"
            );
        }
        assert!(Rig::Sim.links().is_empty());
    }
}
