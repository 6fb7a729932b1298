//! Routes memory faults of the guest to the part of the machine that may handle them.
//!
//! A doorbell that the guest read is in a BAR of some PCI function. It must not know how a function
//! handles the fault.

use std::sync::Arc;

use devices::pci::PciBus;

use crate::kvm::device_mappings::KvmDeviceMappings;
use crate::vcpu::FaultHandler;

/// Hands faults to the functions on the PCI bus.
#[derive(Debug)]
pub(super) struct DoorbellFaults {
    pub(super) pci: Arc<PciBus>,
    pub(super) mappings: Arc<KvmDeviceMappings>,
}

impl FaultHandler for DoorbellFaults {
    fn generation(&self) -> u64 {
        self.mappings.unmapped_count()
    }

    fn memory_fault(&self, guest_address: Option<u64>) -> bool {
        self.pci.memory_fault(guest_address)
    }
}
