//! Checks what both hosts must have alike, before the first byte of memory is sent.
//!
//! Owns the document that the source sends, and all reasons for which a destination refuses it. The
//! document comes from another host and is not trusted. It must not know how the document is sent.

mod functions;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use devices::pci::Slot;
use devices::virtio::pci::GuestView;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vdpa::causes::in_one_line;

use crate::Error;
use crate::byte_count::ByteCount;
use crate::config::{
    CpuAffinity, HugePageSize, MemoryConfig, NoSuchNic, VdpaConfig, VfioConfig, VmConfig,
};
use crate::machine::device_manager::DeviceManager;
use crate::machine::error::NotMovable;
use crate::machine::program::{reads, state_versions};
use crate::machine::saved::GuestFunction;
use crate::migration::protocol::Refusal;
use crate::snapshot::format::Saved as _;
use crate::snapshot::memory_image::MemoryDigest;
use crate::vcpu::{CpuidLeaf, Vcpus};

/// Maximum number of devices in a document: the slots of the PCI bus.
const DEVICES_MAX: usize = devices::pci::SLOTS as usize;

/// The destination's own configuration, which alone decides which files and devices are opened
/// here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Here<'a> {
    /// Its vDPA devices, by the names of the NICs.
    pub(super) nics: &'a [VdpaConfig],
    /// Its functions by VFIO, by name.
    pub(super) functions: &'a [VfioConfig],
    /// The files from which the guest boots.
    pub(super) kernel: Option<&'a Path>,
    pub(super) initramfs: Option<&'a Path>,
    pub(super) memory_max: MemoryMax,
    /// The placement of its memory and vCPUs.
    pub(super) hugepages: Option<HugePageSize>,
    pub(super) host_numa_node: Option<u16>,
    pub(super) cpu_affinity: &'a CpuAffinity,
    /// Whether the sender is a process of this user on this host, which can read the same files
    /// anyway.
    pub(super) same_user: bool,
}

/// The limit on guest memory here, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryMax {
    /// Configured.
    Given(u64),
    /// All free memory.
    Free(u64),
}

impl MemoryMax {
    fn bytes(self) -> u64 {
        let (Self::Given(bytes) | Self::Free(bytes)) = self;
        bytes
    }
}

impl fmt::Display for MemoryMax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given(bytes) => write!(f, "limited to {} by --max-memory", ByteCount(*bytes)),
            Self::Free(bytes) => write!(
                f,
                "limited to the {} that are free, without --max-memory",
                ByteCount(*bytes)
            ),
        }
    }
}

/// The description of a machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document {
    /// The versions of the sections of its state, by name.
    pub(super) state_versions: BTreeMap<String, u32>,
    /// The configuration, with the current NICs.
    pub(super) config: VmConfig,
    /// The CPUID of the first vCPU, as the guest sees it.
    pub(super) cpuid: Vec<CpuidLeaf>,
    pub(super) devices: Vec<DocumentDevice>,
    /// The last device address that the guest may map by its IOMMU, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) last_iova: Option<u64>,
    /// The functions by VFIO that move with the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) functions: Vec<GuestFunction>,
}

/// The properties of a device on which its driver can rely.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DocumentDevice {
    pub(super) id: String,
    /// The number of the PCI slot.
    pub(super) slot: u8,
    #[serde(rename = "relied")]
    pub(super) guest_view: GuestView,
}

/// Builds a [`Refusal`].
fn refusal(what: &str, source: String, destination: String, remedy: &str) -> Refusal {
    Refusal {
        what: what.to_owned(),
        source,
        destination,
        remedy: remedy.to_owned(),
    }
}

impl Document {
    /// Reads the document of a source.
    ///
    /// # Errors
    /// The document is not understood.
    pub(super) fn read(compat: &Value) -> Result<Self, Vec<Refusal>> {
        Self::deserialize(compat).map_err(|error| {
            vec![refusal(
                "the description of the machine",
                "from another version of Bellhop".to_owned(),
                format!("unreadable ({error})"),
                "run the same version of Bellhop on both hosts",
            )]
        })
    }

    /// Announces that the state will hold a digest of guest memory. A destination that does not
    /// know this name ignores it.
    pub(super) fn announce_digest(&mut self) {
        self.state_versions
            .insert(MemoryDigest::NAME.to_owned(), MemoryDigest::VERSION);
    }

    /// Whether the state will hold a digest of the guest's memory.
    pub(super) fn announces_digest(&self) -> bool {
        self.state_versions.contains_key(MemoryDigest::NAME)
    }

    /// Checks everything that needs no machine, and gives NICs and boot files their paths on this
    /// host. Afterwards the configuration names no file or device that would be opened on the
    /// source's behalf.
    ///
    /// # Errors
    /// All reasons that are known at this point.
    pub(super) fn prepare(&mut self, here: &Here<'_>) -> Result<(), Vec<Refusal>> {
        let nics = here.nics;
        let mut refusals = Vec::new();
        for (section, ours) in state_versions() {
            let version = self.state_versions.get(&section).copied();
            if !reads(&section, Some(ours), version) {
                refusals.push(refusal(
                    &format!("the state section `{section}`"),
                    version.map_or_else(
                        || "absent".to_owned(),
                        |version| format!("version {version}"),
                    ),
                    format!("version {ours}"),
                    "run the same or adjacent versions of Bellhop on the two hosts",
                ));
            }
        }
        for nic in nics {
            refusals.extend(self.compare_setting(nic));
            if let Err(NoSuchNic { id, has }) = self.config.replace_nic(nic.clone()) {
                refusals.push(refusal(
                    &format!("the NIC {id}"),
                    "absent".to_owned(),
                    "given a device".to_owned(),
                    &format!("the machine's NICs: {}", has.join(", ")),
                ));
            }
        }
        // Of two NICs with one name, only the first got its path here.
        let mut names = BTreeSet::new();
        for id in self.config.vdpa.iter().map(VdpaConfig::name) {
            if let Some(id) = names.replace(id) {
                refusals.push(refusal(
                    &format!("the NIC {id}"),
                    "present twice".to_owned(),
                    "not possible".to_owned(),
                    "",
                ));
            }
        }
        self.place_functions(here.functions, &mut refusals);
        if let Err(error) = check_movable(&self.config) {
            refusals.push(refusal(
                "the disks",
                "there".to_owned(),
                error.to_string(),
                "unplug them at the source first",
            ));
        }
        // This host decides which of its devices a guest gets.
        for nic in &self.config.vdpa {
            let id = nic.name();
            if nics.iter().all(|ours| ours.name() != id) {
                refusals.push(refusal(
                    &format!("the NIC {id}"),
                    "there".to_owned(),
                    "given no device".to_owned(),
                    &format!(
                        "name one where the destination waits: --vdpa \
                         id={id},path=/dev/vhost-vdpa-N"
                    ),
                ));
            }
        }
        self.place_memory_and_vcpus(here, &mut refusals);
        self.place_boot_files(here, &mut refusals);
        if self.devices.len().saturating_add(self.functions.len()) > DEVICES_MAX {
            refusals.push(refusal(
                "the list of devices",
                "too long for any machine".to_owned(),
                format!("limited to {DEVICES_MAX}"),
                "",
            ));
        }
        if refusals.is_empty() {
            Ok(())
        } else {
            Err(refusals)
        }
    }

    /// Compares `iommu` of a NIC, which decides its slot and its features.
    fn compare_setting(&self, nic: &VdpaConfig) -> Option<Refusal> {
        let id = nic.name();
        let mut theirs = self.config.vdpa.iter();
        let theirs = theirs.find(|theirs| theirs.name() == id)?;
        let [on, off] = ["with iommu=on", "without iommu=on"].map(str::to_owned);
        let (source, destination, change) = match (theirs.iommu, nic.iommu) {
            (true, false) => (on, off, "add iommu=on to"),
            (false, true) => (off, on, "leave iommu=on out of"),
            _ => return None,
        };
        let remedy = format!("{change} its --vdpa where the destination waits");
        let what = format!("the NIC {id}");
        Some(refusal(&what, source, destination, &remedy))
    }

    /// This host decides how much memory it gives, of which kind and from which node, and which of
    /// its CPUs the guest may occupy. Otherwise a source could tie up resources that are reserved
    /// for others.
    fn place_memory_and_vcpus(&mut self, here: &Here<'_>, refusals: &mut Vec<Refusal>) {
        let size = self.config.memory.size;
        if size.bytes() > here.memory_max.bytes() {
            refusals.push(refusal(
                "the guest's memory",
                ByteCount(size.bytes()).to_string(),
                here.memory_max.to_string(),
                "allow more where the destination waits: --max-memory SIZE",
            ));
        }
        let memory = MemoryConfig {
            size,
            hugepages: here.hugepages,
            host_numa_node: here.host_numa_node,
        };
        if (memory, here.cpu_affinity) != (self.config.memory, &self.config.cpu_affinity) {
            tracing::info!(
                theirs = ?(self.config.memory, &self.config.cpu_affinity),
                here = ?(memory, here.cpu_affinity),
                "placing the guest's memory and vCPUs by this host's settings"
            );
        }
        self.config.memory = memory;
        self.config.cpu_affinity = here.cpu_affinity.clone();
    }

    /// The guest's next reboot reads these files into its memory. A source, whose guest can reboot
    /// at will, could read any file of this host by naming it. So a file that a source names is
    /// never opened, unless the source is a process of the same user on this host.
    fn place_boot_files(&mut self, here: &Here<'_>, refusals: &mut Vec<Refusal>) {
        let theirs = [
            Some(self.config.kernel.clone()),
            self.config.initramfs.clone(),
        ];
        let ours = [here.kernel, here.initramfs];
        let names = [("kernel", "--kernel"), ("initramfs", "--initramfs")];
        let mut placed = [None, None];
        for (((name, flag), place), (theirs, ours)) in names
            .into_iter()
            .zip(&mut placed)
            .zip(theirs.into_iter().zip(ours))
        {
            let mut refuse = |source: String, destination: String, remedy: &str| {
                refusals.push(refusal(
                    &format!("the guest's {name}"),
                    source,
                    destination,
                    remedy,
                ));
            };
            match (theirs, ours) {
                (None, None) => {}
                (None, Some(ours)) => refuse(
                    "absent".to_owned(),
                    ours.display().to_string(),
                    &format!("leave {flag} out where the destination waits"),
                ),
                (Some(theirs), None) if here.same_user => *place = Some(theirs),
                (Some(theirs), None) => refuse(
                    theirs.display().to_string(),
                    "not given".to_owned(),
                    &format!(
                        "name the file for the guest's next reboot where the destination waits: \
                         {flag} PATH"
                    ),
                ),
                (Some(theirs), Some(ours)) => {
                    if let Err(error) = look_at(ours) {
                        refuse(
                            theirs.display().to_string(),
                            format!("{}, which is unreadable ({error})", ours.display()),
                            &format!(
                                "give a readable file where the destination waits: {flag} PATH"
                            ),
                        );
                    }
                    *place = Some(ours.to_owned());
                }
            }
        }
        let [kernel, initramfs] = placed;
        self.config.kernel = kernel.unwrap_or_default();
        self.config.initramfs = initramfs;
    }

    /// Returns the slot of each device whose slot number is valid. Building the machine detects two
    /// devices in one slot.
    pub(super) fn slots(&self) -> BTreeMap<String, Slot> {
        let devices = self.devices.iter().map(|device| (&device.id, device.slot));
        let functions = self.functions.iter().map(|one| (&one.id, one.slot));
        let slots = devices.chain(functions).filter_map(|(id, number)| {
            let slot = Slot::new(number).filter(|slot| *slot != Slot::HOST_BRIDGE)?;
            Some((id.clone(), slot))
        });
        slots.collect()
    }

    /// Returns the reasons for which the guest cannot resume on the vCPUs and devices built for it.
    pub(super) fn compare(&self, vcpus: &Vcpus, device_manager: &DeviceManager) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        if let Err(error) = vcpus.check_cpuid(&self.cpuid) {
            refusals.push(refusal(
                "the processor",
                "as the guest sees it".to_owned(),
                in_one_line(&error),
                "move to a host whose processor has the same features; a machine with a baseline \
                 (--cpu x86-64-v2) also moves to others",
            ));
        }
        refusals.extend(self.compare_iommu(device_manager.last_iova()));
        self.compare_functions(device_manager, &mut refusals);
        let here = device_manager.devices();
        for device in &here {
            if self.devices.iter().all(|there| there.id != device.id) {
                refusals.push(refusal(
                    &format!("device {}", device.id),
                    "absent".to_owned(),
                    "there".to_owned(),
                    "",
                ));
            }
        }
        for DocumentDevice { id, guest_view, .. } in &self.devices {
            let taken = device_manager.named(id).map(|here| here.adopt(guest_view));
            match taken {
                Some(Ok(())) => {}
                Some(Err(error)) => refusals.push(refusal(
                    &format!("device {id}"),
                    "as the guest sees it".to_owned(),
                    format!("incompatible ({})", in_one_line(&error)),
                    remedy(&error),
                )),
                None => refusals.push(refusal(
                    &format!("device {id}"),
                    "there".to_owned(),
                    "absent".to_owned(),
                    "",
                )),
            }
        }
        refusals
    }

    /// Compares the addresses of the guest's IOMMU, which its driver has read.
    fn compare_iommu(&self, here: Option<u64>) -> Option<Refusal> {
        let last = |last: Option<u64>| {
            last.map_or_else(
                || "absent".to_owned(),
                |last| format!("with addresses up to {last:#x}"),
            )
        };
        (self.last_iova != here).then(|| {
            refusal(
                "the guest's IOMMU",
                last(self.last_iova),
                last(here),
                "give the guest NICs there that reach the same addresses, with iommu=on as here",
            )
        })
    }
}

/// Returns the remedy, as a command line for the destination.
fn remedy(error: &devices::Error) -> &'static str {
    match error.kind() {
        devices::ErrorKind::MissingFeatures => {
            "create the device with them there: bellhop dev add … device_features …"
        }
        devices::ErrorKind::OtherQueueCount => {
            "create the device with as many queue pairs there: bellhop dev add … max_vqp …"
        }
        _ => "",
    }
}

/// Checks that a file that this host named can be read later. A file that is not regular is not
/// opened: that could block, or have side effects.
fn look_at(path: &Path) -> io::Result<()> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    // The file may have changed since the check: never block.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path);
    file.map(drop)
}

/// Reports that the machine cannot be built here.
pub(super) fn unbuildable(error: &Error) -> Refusal {
    refusal(
        "the machine",
        "built".to_owned(),
        format!("impossible to build ({})", in_one_line(error)),
        "",
    )
}

/// Checks whether a machine with this configuration can move.
///
/// # Errors
/// [`NotMovable`].
pub(super) fn check_movable(config: &VmConfig) -> Result<(), NotMovable> {
    match config.disks.iter().enumerate().next() {
        Some((number, disk)) => Err(NotMovable::Disk(disk.name(number))),
        None => Ok(()),
    }
}

/// Whether two configurations describe the same machine, regardless of notation.
pub(super) fn same_machine(one: &VmConfig, other: &VmConfig) -> bool {
    match (serde_json::to_value(one), serde_json::to_value(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::LazyLock;

    const KERNEL: &str = "/theirs/kernel";
    const INITRAMFS: &str = "/theirs/initramfs";

    pub(super) fn document(config: &str) -> Document {
        Document {
            state_versions: state_versions(),
            config: serde_json::from_str(config).unwrap(),
            cpuid: Vec::new(),
            devices: Vec::new(),
            last_iova: None,
            functions: Vec::new(),
        }
    }

    #[test]
    fn the_iommu_has_the_same_addresses_on_both_hosts() {
        let mut machine = machine(&[]);
        assert!(machine.compare_iommu(None).is_none());
        let refused = machine.compare_iommu(Some(0xffff)).unwrap();
        assert_eq!(refused.source, "absent");
        assert_eq!(refused.destination, "with addresses up to 0xffff");
        machine.last_iova = Some(0xffff);
        assert!(machine.compare_iommu(Some(0xffff)).is_none());
        for other in [None, Some(0xfff)] {
            let refused = machine.compare_iommu(other).unwrap();
            assert!(refused.remedy.contains("iommu=on"));
        }
        // A source without an IOMMU says nothing about it.
        let json = serde_json::to_value(document(r#"{"kernel": "k"}"#)).unwrap();
        assert!(json.get("last_iova").is_none());
    }

    fn machine(nics: &[&str]) -> Document {
        let nics: Vec<String> = nics
            .iter()
            .map(|path| format!(r#"{{"path": "{path}", "id": "net0"}}"#))
            .collect();
        document(&format!(
            r#"{{"kernel": "{KERNEL}", "initramfs": "{INITRAMFS}", "vdpa": [{}]}}"#,
            nics.join(",")
        ))
    }

    fn here<'a>(nics: &'a [VdpaConfig], kernel: &'a str, initramfs: &'a str) -> Here<'a> {
        let path = |text: &'a str| (!text.is_empty()).then(|| Path::new(text));
        Here {
            nics,
            functions: &[],
            kernel: path(kernel),
            initramfs: path(initramfs),
            memory_max: MemoryMax::Given(1 << 30),
            hugepages: None,
            host_numa_node: None,
            cpu_affinity: &ANYWHERE,
            same_user: false,
        }
    }

    static ANYWHERE: LazyLock<CpuAffinity> = LazyLock::new(CpuAffinity::default);

    fn nics() -> Vec<VdpaConfig> {
        vec!["path=/ours/vdpa,id=net0".parse().unwrap()]
    }

    /// Returns a readable file.
    fn ours() -> String {
        concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").to_owned()
    }

    pub(super) fn what(refusals: &[Refusal]) -> Vec<&str> {
        refusals
            .iter()
            .map(|refusal| refusal.what.as_str())
            .collect()
    }

    #[test]
    fn nothing_that_is_opened_comes_from_the_source() {
        let (nics, ours) = (nics(), ours());
        let mut document = machine(&["/theirs/vdpa"]);
        document.prepare(&here(&nics, &ours, &ours)).unwrap();
        let text = serde_json::to_string(&document.config).unwrap();
        assert!(
            !text.contains("/theirs") && text.contains("/ours/vdpa"),
            "{text}"
        );
    }

    #[test]
    fn a_source_takes_no_more_memory_than_it_is_given() {
        let (nics, ours) = (nics(), ours());
        let gib = 1 << 30;
        for (max, said) in [
            (
                MemoryMax::Given(8 * gib),
                "limited to 8 GiB by --max-memory",
            ),
            (
                MemoryMax::Free(3 * gib),
                "limited to the 3 GiB that are free",
            ),
            (MemoryMax::Given(0), "limited to 0 bytes"),
        ] {
            let mut document = machine(&["/theirs/vdpa"]);
            document.config.memory = "1T".parse().unwrap();
            let here = Here {
                memory_max: max,
                ..here(&nics, &ours, &ours)
            };
            let refusals = document.prepare(&here).unwrap_err();
            assert_eq!(what(&refusals), ["the guest's memory"]);
            assert_eq!(refusals[0].source, "1 TiB");
            assert!(refusals[0].destination.starts_with(said), "{refusals:?}");
            assert!(
                refusals[0].remedy.contains("--max-memory SIZE"),
                "{refusals:?}"
            );
        }
        let mut document = machine(&["/theirs/vdpa"]);
        document.config.memory = "1G".parse().unwrap();
        document.prepare(&here(&nics, &ours, &ours)).unwrap();
    }

    #[test]
    fn a_source_places_nothing_on_this_host() {
        let (nics, ours) = (nics(), ours());
        let mut document = machine(&["/theirs/vdpa"]);
        document.config.memory = "size=64M,hugepages=1G,host_numa_node=7".parse().unwrap();
        document.config.cpu_affinity = "0-3".parse().unwrap();
        document.prepare(&here(&nics, &ours, &ours)).unwrap();
        assert_eq!(document.config.memory, "64M".parse().unwrap());
        assert!(document.config.cpu_affinity.is_empty());

        let affinity = "1".parse().unwrap();
        let mut document = machine(&["/theirs/vdpa"]);
        document.config.memory = "64M".parse().unwrap();
        let here = Here {
            hugepages: Some(HugePageSize::Size2M),
            host_numa_node: Some(1),
            cpu_affinity: &affinity,
            ..here(&nics, &ours, &ours)
        };
        document.prepare(&here).unwrap();
        let placed = "size=64M,hugepages=2M,host_numa_node=1".parse().unwrap();
        assert_eq!(document.config.memory, placed);
        assert_eq!(document.config.cpu_affinity, affinity);
    }

    #[test]
    fn a_part_of_the_state_that_is_not_read_here_is_refused_before_anything_is_opened() {
        let (nics, ours) = (nics(), ours());
        for (part, step, taken) in [
            ("vcpu", 0, true),
            ("vcpu", 1, false),
            ("virtio-vdpa", 0, true),
            ("virtio-vdpa", u32::MAX, false),
            ("virtio-vdpa", 1, false),
            ("virtio-pci", 1, false),
            ("format", u32::MAX, false),
            ("format", 1, false),
        ] {
            let mut document = machine(&["/theirs/vdpa"]);
            let version = document.state_versions.get_mut(part).unwrap();
            *version = version.wrapping_add(step);
            let prepared = document.prepare(&here(&nics, &ours, &ours));
            match prepared {
                Ok(()) => assert!(taken, "{part} {step}"),
                Err(refusals) => {
                    assert!(!taken, "{part} {step} {refusals:?}");
                    assert_eq!(what(&refusals), [format!("the state section `{part}`")]);
                }
            }
        }
        // A document that knows none of the devices.
        let mut document = machine(&["/theirs/vdpa"]);
        document
            .state_versions
            .retain(|part, _| !part.starts_with("virtio-"));
        document.prepare(&here(&nics, &ours, &ours)).unwrap();
    }

    #[test]
    fn a_nic_is_behind_the_iommu_on_both_hosts_or_on_none() {
        let ours = ours();
        for (there, here_too, remedy) in [
            (true, true, None),
            (false, false, None),
            (true, false, Some("add iommu=on")),
            (false, true, Some("leave iommu=on out")),
        ] {
            let mut document = machine(&["/theirs/vdpa"]);
            document.config.vdpa[0].iommu = there;
            let mut nics = nics();
            nics[0].iommu = here_too;
            let prepared = document.prepare(&here(&nics, &ours, &ours));
            let Some(remedy) = remedy else {
                prepared.unwrap();
                continue;
            };
            let refusals = prepared.unwrap_err();
            assert_eq!(what(&refusals), ["the NIC net0"]);
            assert_ne!(refusals[0].source, refusals[0].destination);
            assert!(refusals[0].remedy.starts_with(remedy), "{refusals:?}");
        }
    }

    #[test]
    fn of_two_nics_with_one_name_neither_is_opened() {
        let (nics, ours) = (nics(), ours());
        let mut document = machine(&["/theirs/1", "/theirs/2"]);
        let refusals = document.prepare(&here(&nics, &ours, &ours)).unwrap_err();
        assert_eq!(what(&refusals), ["the NIC net0"]);
        assert_eq!(refusals[0].source, "present twice");
    }

    #[test]
    fn a_source_on_another_host_names_no_file_that_the_guest_boots_from() {
        let (nics, ours) = (nics(), ours());
        for (kernel, initramfs, missing) in [
            ("", "", &["the guest's kernel", "the guest's initramfs"][..]),
            (&ours, "", &["the guest's initramfs"]),
            ("", &ours, &["the guest's kernel"]),
        ] {
            let mut document = machine(&["/theirs/vdpa"]);
            let refusals = document
                .prepare(&here(&nics, kernel, initramfs))
                .unwrap_err();
            assert_eq!(what(&refusals), missing);
            for refusal in refusals {
                assert!(refusal.remedy.contains("PATH"), "{refusal}");
            }
        }
        // A file that this host names must exist: otherwise its absence shows only at the reboot.
        let mut document = machine(&["/theirs/vdpa"]);
        let refusals = document
            .prepare(&here(&nics, "/nonexistent", &ours))
            .unwrap_err();
        assert_eq!(what(&refusals), ["the guest's kernel"]);
        let mut document = machine(&["/theirs/vdpa"]);
        let refusals = document
            .prepare(&here(&nics, "/dev/null", &ours))
            .unwrap_err();
        assert!(refusals[0].destination.contains("regular"), "{refusals:?}");
        // A file that the machine never had.
        let mut document = machine(&["/theirs/vdpa"]);
        document.config.initramfs = None;
        let refusals = document.prepare(&here(&nics, &ours, &ours)).unwrap_err();
        assert_eq!(what(&refusals), ["the guest's initramfs"]);
    }

    #[test]
    fn a_source_of_this_user_on_this_host_may_name_them_and_they_stay_closed() {
        let nics = nics();
        let mut document = machine(&["/theirs/vdpa"]);
        let here = Here {
            same_user: true,
            ..here(&nics, "", "")
        };
        // The files need not even exist.
        document.prepare(&here).unwrap();
        assert_eq!(document.config.kernel, Path::new(KERNEL));
        assert_eq!(
            document.config.initramfs.as_deref(),
            Some(Path::new(INITRAMFS))
        );
    }
}
