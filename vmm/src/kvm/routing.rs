//! The GSI routing table of a VM, as data.
//!
//! `KVM_SET_GSI_ROUTING` replaces the whole table. So adding one MSI means repeating all other
//! entries, KVM's own default entries for PICs and IOAPIC included: without them ISA interrupts are
//! lost. This module owns that table and the numbering of GSIs. It must not call the kernel.

use std::collections::{BTreeMap, BTreeSet};

use devices::hypervisor::MsiMessage;
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};

/// Pins of KVM's IOAPIC; GSIs from here on are free for MSIs.
pub const IOAPIC_PINS: u32 = 24;
/// ISA interrupts, which reach both a PIC and the IOAPIC.
const ISA_INTERRUPTS: u32 = 16;
/// Pins of one PIC.
const PIC_PINS: u32 = 8;
/// Entries for PICs and IOAPIC.
const FIXED_ENTRIES: usize = 40;

/// Allocated GSIs and their routes.
#[derive(Debug)]
pub struct RoutingTable {
    /// First GSI that must not be allocated.
    end: u32,
    allocated: BTreeSet<u32>,
    messages: BTreeMap<u32, MsiMessage>,
}

impl RoutingTable {
    /// A table with the default entries only. `max_entries` is the host's limit
    /// (`KVM_CAP_IRQ_ROUTING`); it limits the number of allocated GSIs.
    #[must_use]
    pub fn new(max_entries: usize) -> Self {
        let free = max_entries.saturating_sub(FIXED_ENTRIES);
        let end = u32::try_from(free)
            .unwrap_or(u32::MAX)
            .saturating_add(IOAPIC_PINS);
        Self {
            end,
            allocated: BTreeSet::new(),
            messages: BTreeMap::new(),
        }
    }

    /// Allocates the lowest free GSI above the IOAPIC's; `None` if none is free.
    pub fn allocate(&mut self) -> Option<u32> {
        let gsi = (IOAPIC_PINS..self.end).find(|gsi| !self.allocated.contains(gsi))?;
        self.allocated.insert(gsi);
        Some(gsi)
    }

    /// Frees a GSI; `true` if it had a route.
    pub fn free(&mut self, gsi: u32) -> bool {
        self.allocated.remove(&gsi);
        self.messages.remove(&gsi).is_some()
    }

    /// Sets or (`None`) removes the route of `gsi` and returns the previous one. A GSI that is not
    /// allocated gets no route.
    pub fn set(&mut self, gsi: u32, message: Option<MsiMessage>) -> Option<MsiMessage> {
        match message {
            Some(message) if self.allocated.contains(&gsi) => self.messages.insert(gsi, message),
            _ => self.messages.remove(&gsi),
        }
    }

    /// The route of `gsi`.
    #[must_use]
    pub fn get(&self, gsi: u32) -> Option<MsiMessage> {
        self.messages.get(&gsi).copied()
    }

    /// Number of allocated GSIs.
    #[must_use]
    pub fn allocated(&self) -> usize {
        self.allocated.len()
    }

    /// Number of MSI routes in the table.
    #[must_use]
    pub fn routes(&self) -> usize {
        self.messages.len()
    }

    /// The whole table for `KVM_SET_GSI_ROUTING`: KVM's defaults (`default_routing` in
    /// `arch/x86/kvm/irq_comm.c`), then the MSIs.
    #[must_use]
    pub fn entries(&self) -> Vec<kvm_irq_routing_entry> {
        let mut entries = Vec::with_capacity(FIXED_ENTRIES + self.messages.len());
        for gsi in 0..IOAPIC_PINS {
            entries.push(chip_entry(gsi, KVM_IRQCHIP_IOAPIC, gsi));
            if gsi < ISA_INTERRUPTS {
                let chip = if gsi < PIC_PINS {
                    KVM_IRQCHIP_PIC_MASTER
                } else {
                    KVM_IRQCHIP_PIC_SLAVE
                };
                entries.push(chip_entry(gsi, chip, gsi % PIC_PINS));
            }
        }
        entries.extend(
            self.messages
                .iter()
                .map(|(gsi, message)| msi_entry(*gsi, *message)),
        );
        entries
    }
}

fn chip_entry(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            irqchip: kvm_irq_routing_irqchip { irqchip, pin },
        },
        ..Default::default()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the two halves of the address are taken apart here"
)]
fn msi_entry(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            msi: kvm_irq_routing_msi {
                address_lo: message.address as u32,
                address_hi: (message.address >> 32) as u32,
                data: message.data,
                ..Default::default()
            },
        },
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: MsiMessage = MsiMessage {
        address: 0x12_fee0_1000,
        data: 0x4041,
    };

    #[test]
    fn defaults_reach_pic_and_ioapic() {
        let table = RoutingTable::new(4096);
        let entries = table.entries();
        assert_eq!(entries.len(), FIXED_ENTRIES);
        for gsi in 0..IOAPIC_PINS {
            let chips: Vec<(u32, u32)> = entries
                .iter()
                .filter(|entry| entry.gsi == gsi)
                .map(|entry| {
                    assert_eq!(entry.type_, KVM_IRQ_ROUTING_IRQCHIP);
                    // SAFETY: the type says that `irqchip` is the member in use.
                    let chip = unsafe { entry.u.irqchip };
                    (chip.irqchip, chip.pin)
                })
                .collect();
            let expected = match gsi {
                0..8 => vec![(2, gsi), (0, gsi)],
                8..16 => vec![(2, gsi), (1, gsi - 8)],
                _ => vec![(2, gsi)],
            };
            assert_eq!(chips, expected);
        }
    }

    #[test]
    fn gsis_are_above_the_ioapic_bounded_and_reused() {
        let mut table = RoutingTable::new(FIXED_ENTRIES + 2);
        assert_eq!(table.allocate(), Some(24));
        assert_eq!(table.allocate(), Some(25));
        assert_eq!(table.allocate(), None);
        assert_eq!(table.set(24, Some(MESSAGE)), None);
        assert!(table.free(24));
        assert!(!table.free(25));
        assert_eq!((table.allocated(), table.routes()), (0, 0));
        assert_eq!(table.allocate(), Some(24));
        // A host that reports no limit allows no GSI.
        assert_eq!(RoutingTable::new(0).allocate(), None);
    }

    #[test]
    fn messages_are_split_and_replaced() {
        let mut table = RoutingTable::new(4096);
        let gsi = table.allocate().unwrap();
        assert_eq!(table.set(gsi, Some(MESSAGE)), None);
        assert_eq!(table.set(gsi, Some(MESSAGE)), Some(MESSAGE));
        assert_eq!(table.get(gsi), Some(MESSAGE));
        let entries = table.entries();
        let entry = entries.last().unwrap();
        assert_eq!((entry.gsi, entry.type_), (gsi, KVM_IRQ_ROUTING_MSI));
        // SAFETY: the type says that `msi` is the member in use.
        let msi = unsafe { entry.u.msi };
        assert_eq!(
            (msi.address_lo, msi.address_hi, msi.data),
            (0xfee0_1000, 0x12, 0x4041)
        );
        // The IOAPIC's own numbers and unallocated ones can't be set.
        assert_eq!(table.set(4, Some(MESSAGE)), None);
        assert_eq!(table.set(4000, Some(MESSAGE)), None);
        assert_eq!(table.routes(), 1);
        assert_eq!(table.set(gsi, None), Some(MESSAGE));
        assert_eq!(table.entries().len(), FIXED_ENTRIES);
    }
}
