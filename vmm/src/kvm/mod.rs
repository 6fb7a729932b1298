//! The host's KVM: opens it, creates a virtual machine, and owns the objects that belong to the
//! machine's file descriptor.
//!
//! This module owns the file descriptors of `/dev/kvm` and of the VM. It must not know which
//! devices exist, how a guest boots, or who runs the vCPUs.
//!
//! ```text
//! Hypervisor::open ──> Vm ──┬─> MemorySlots         guest RAM        (KVM_SET_USER_MEMORY_REGION)
//!   /dev/kvm, checked       ├─> KvmMsiVectors       MSI-X vectors    (GSI routes + irqfds)
//!                           ├─> KvmDeviceMappings   kicks, BARs      (ioeventfds, memory slots)
//!                           ├─> vfio                pass-through     (KVM_CREATE_DEVICE)
//!                           ├─> InterruptLine       ISA interrupts   (irqfds)
//!                           └─> vcpu::Vcpus         processors       (KVM_CREATE_VCPU)
//! ```
//!
//! The interrupt controllers (two PICs, the IOAPIC, a local APIC per vCPU) are KVM's own, so no
//! interrupt passes through our threads. There is no PIT: the FADT sets hardware-reduced and CPUID
//! shows the TSC-deadline timer, so Linux neither calibrates against a PIT nor uses its ticks.

pub mod cpuid;
pub mod device_mappings;
pub mod dirty_log;
pub mod line;
pub mod memory_slots;
pub mod msi;
pub mod pre_fault;
pub mod routing;
pub mod saved;
pub mod statistics;
pub(crate) mod uapi_bytes;
pub mod vfio;

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{
    KVM_API_VERSION, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_irqchip, kvm_msi,
};
use kvm_ioctls::{Cap, Kvm, VmFd};

use crate::Error;

/// Where processors receive message-signalled interrupts; bits 12 to 19 hold the APIC id.
const MSI_ADDRESS: u32 = 0xfee0_0000;
/// Delivery mode NMI in the message's data.
const MSI_DELIVERY_NMI: u32 = 4 << 8;

/// Required capabilities, with their names in the uapi. All are older than vhost-vdpa itself (Linux
/// 5.7), so every supported kernel has them.
const REQUIRED: [(Cap, &str); 15] = [
    (Cap::Irqchip, "IRQCHIP"),
    (Cap::UserMemory, "USER_MEMORY"),
    (Cap::SetTssAddr, "SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "SET_IDENTITY_MAP_ADDR"),
    (Cap::ExtCpuid, "EXT_CPUID"),
    (Cap::MpState, "MP_STATE"),
    (Cap::VcpuEvents, "VCPU_EVENTS"),
    (Cap::Xsave, "XSAVE"),
    (Cap::Xcrs, "XCRS"),
    (Cap::Irqfd, "IRQFD"),
    (Cap::IrqRouting, "IRQ_ROUTING"),
    (Cap::Ioeventfd, "IOEVENTFD"),
    (Cap::IoeventfdNoLength, "IOEVENTFD_NO_LENGTH"),
    (Cap::TscDeadlineTimer, "TSC_DEADLINE_TIMER"),
    (Cap::ImmediateExit, "IMMEDIATE_EXIT"),
];

/// An open `/dev/kvm` with all required capabilities.
#[derive(Debug)]
pub struct Hypervisor {
    kvm: Kvm,
}

impl Hypervisor {
    /// Opens `/dev/kvm` and checks the API version and capabilities.
    ///
    /// # Errors
    /// The file cannot be opened, or this KVM lacks capabilities. The text names all of them.
    pub fn open() -> Result<Self, Error> {
        let kvm = Kvm::new().map_err(|error| open_error(error.into()))?;
        let found = kvm.get_api_version();
        if u32::try_from(found) != Ok(KVM_API_VERSION) {
            return Err(Error::host(format!(
                "the host's KVM has API version {found}, not {KVM_API_VERSION}"
            )));
        }
        let missing = missing_capabilities(|capability| kvm.check_extension(capability));
        if !missing.is_empty() {
            return Err(lacks(&missing));
        }
        Ok(Self { kvm })
    }

    /// The CPUID leaves that this host supports for a guest (`KVM_GET_SUPPORTED_CPUID`), unsorted,
    /// as KVM returns them.
    ///
    /// # Errors
    /// The ioctl failed.
    pub fn supported_cpuid(&self) -> Result<Vec<kvm_cpuid_entry2>, Error> {
        self.kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map(|cpuid| cpuid.as_slice().to_vec())
            .map_err(Error::failed("KVM_GET_SUPPORTED_CPUID"))
    }

    /// The MSRs that make up a vCPU's state (`KVM_GET_MSR_INDEX_LIST`).
    ///
    /// # Errors
    /// The ioctl failed.
    pub fn msr_indices(&self) -> Result<Vec<u32>, Error> {
        self.kvm
            .get_msr_index_list()
            .map(|list| list.as_slice().to_vec())
            .map_err(Error::failed("KVM_GET_MSR_INDEX_LIST"))
    }

    /// Creates a VM with in-kernel interrupt controllers and no memory.
    ///
    /// `platform` has the guest-physical pages that KVM uses itself, and `vcpus` is the number of
    /// processors that will be created.
    ///
    /// # Errors
    /// Too many vCPUs, or an ioctl failed.
    pub fn create_vm(&self, platform: PlatformAddresses, vcpus: u8) -> Result<Vm, Error> {
        let allowed = self.kvm.get_max_vcpus();
        if usize::from(vcpus) > allowed {
            return Err(Error::host(format!(
                "{vcpus} vCPUs are more than the {allowed} that the host's KVM allows in one VM"
            )));
        }
        let fd = loop {
            // A signal may interrupt the creation, which waits for other CPUs.
            match self.kvm.create_vm() {
                Err(error) if error.errno() == libc::EINTR => {}
                other => break other.map_err(Error::failed("KVM_CREATE_VM"))?,
            }
        };
        let tss = usize::try_from(platform.tss)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
            .map_err(Error::failed("KVM_SET_TSS_ADDR"))?;
        fd.set_identity_map_address(platform.identity_map)
            .map_err(Error::failed("KVM_SET_IDENTITY_MAP_ADDR"))?;
        fd.set_tss_address(tss)
            .map_err(Error::failed("KVM_SET_TSS_ADDR"))?;
        fd.create_irq_chip()
            .map_err(Error::failed("KVM_CREATE_IRQCHIP"))?;
        let initial_irqchips = [
            irqchip(&fd, KVM_IRQCHIP_PIC_MASTER)?,
            irqchip(&fd, KVM_IRQCHIP_PIC_SLAVE)?,
            irqchip(&fd, KVM_IRQCHIP_IOAPIC)?,
        ];
        Ok(Vm {
            fd: Arc::new(fd),
            initial_irqchips: Box::new(initial_irqchips),
        })
    }
}

/// Guest-physical pages that KVM uses on Intel hosts which cannot run real
/// mode natively. They lie below 4 GiB and outside RAM and devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlatformAddresses {
    /// One page with an identity-mapping page table.
    pub identity_map: u64,
    /// Three pages for a task state segment.
    pub tss: u64,
}

/// A virtual machine of KVM.
pub struct Vm {
    fd: Arc<VmFd>,
    /// PIC master, PIC slave and IOAPIC in the state that KVM created.
    initial_irqchips: Box<[kvm_irqchip; 3]>,
}

vdpa::opaque_debug!(Vm, this => fd: this.fd);

impl Vm {
    /// The VM's file descriptor, shared by all objects that use it.
    #[must_use]
    pub fn fd(&self) -> &Arc<VmFd> {
        &self.fd
    }

    /// Duplicates the VM's descriptor: KVM destroys the VM when the last one is closed, which takes
    /// long.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn keep(&self) -> io::Result<OwnedFd> {
        // SAFETY: needed because `VmFd` lends no `BorrowedFd`. It owns the descriptor, and lives
        // longer than this call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(self.fd.as_raw_fd()) };
        borrowed.try_clone_to_owned()
    }

    /// Sends a non-maskable interrupt to the vCPU with this APIC id, running or parked.
    ///
    /// # Errors
    /// The ioctl failed.
    pub fn send_nmi(&self, apic_id: u8) -> Result<(), Error> {
        // As a message-signalled interrupt (Intel SDM 3A, 11.11): unlike KVM_NMI it
        // does not wait for the vCPU to leave the guest.
        let message = kvm_msi {
            address_lo: MSI_ADDRESS | u32::from(apic_id) << 12,
            data: MSI_DELIVERY_NMI,
            ..Default::default()
        };
        self.fd
            .signal_msi(message)
            .map(drop)
            .map_err(Error::failed("KVM_SIGNAL_MSI"))
    }

    /// Resets PICs and IOAPIC to their state after the creation of the VM. For a reboot in place;
    /// no vCPU may be running.
    ///
    /// # Errors
    /// The ioctl failed.
    pub fn reset_irqchips(&self) -> Result<(), Error> {
        for chip in self.initial_irqchips.iter() {
            self.fd
                .set_irqchip(chip)
                .map_err(Error::failed("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }
}

fn irqchip(fd: &VmFd, chip_id: u32) -> Result<kvm_irqchip, Error> {
    let mut chip = kvm_irqchip {
        chip_id,
        ..Default::default()
    };
    fd.get_irqchip(&mut chip)
        .map_err(Error::failed("KVM_GET_IRQCHIP"))?;
    Ok(chip)
}

fn open_error(error: io::Error) -> Error {
    let message = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            "/dev/kvm does not exist: load the module kvm_intel or kvm_amd. Enable virtualization \
             in the firmware or, inside a virtual machine, nested virtualization in its host"
        }
        Some(libc::EACCES | libc::EPERM) => {
            "no permission to open /dev/kvm: add the user to the group kvm, or run as root"
        }
        _ => "cannot open /dev/kvm",
    };
    Error::host(message).because(error)
}

fn lacks(missing: &[&str]) -> Error {
    Error::host(format!(
        "the host's KVM lacks {}: use Linux 5.10 or later with in-kernel interrupt controllers",
        missing.join(", ")
    ))
}

fn missing_capabilities(has: impl Fn(Cap) -> bool) -> Vec<&'static str> {
    REQUIRED
        .iter()
        .filter(|(capability, _)| !has(*capability))
        .map(|(_, name)| *name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_errors_name_the_remedy() {
        let text = |errno| open_error(io::Error::from_raw_os_error(errno)).to_string();
        assert!(text(libc::ENOENT).contains("load the module"));
        assert!(text(libc::EACCES).contains("group kvm"));
        assert_eq!(text(libc::EMFILE), "cannot open /dev/kvm");
    }

    #[test]
    fn all_missing_capabilities_are_named_at_once() {
        assert!(missing_capabilities(|_| true).is_empty());
        let missing = missing_capabilities(|cap| cap != Cap::Irqfd && cap != Cap::ImmediateExit);
        assert_eq!(missing, ["IRQFD", "IMMEDIATE_EXIT"]);
        let text = lacks(&missing).to_string();
        assert!(text.contains("lacks IRQFD, IMMEDIATE_EXIT"), "{text}");
        assert_eq!(missing_capabilities(|_| false).len(), REQUIRED.len());
    }
}
