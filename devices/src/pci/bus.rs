//! Bus 0: the functions in its slots, and the addresses of their BARs.
//!
//! Owns the slots, the first BAR addresses and the mapping of BARs into the memory [`Bus`]. It must
//! not know the type of a function.
//!
//! A BAR has these states; only the second answers accesses:
//!
//! ```text
//!              decoding on, address free and inside the window
//!   unmapped ------------------------------------------------> mapped(address)
//!      ^                                                            |
//!      +------------------------------------------------------------+
//!              decoding off, address changed, function removed
//! ```
//!
//! After each write to a command or BAR register of any function, all BARs are updated. First those
//! that left their address are unmapped, then waiting ones are mapped. So two functions may swap
//! addresses in any order of writes.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use super::config_space::{bar_register, touches_decoding};
use super::host_bridge::HostBridge;
use super::{ConfigSpaceState, EXTENDED_CONFIG_SPACE_SIZE, MmioWindow, PciFunction, SLOTS, Slot};
use crate::Error;
use crate::bus::{Bus, BusDevice};

/// Forwards accesses in a mapped BAR to its function.
struct BarRange {
    function: Arc<dyn PciFunction>,
    bar: u8,
}

impl BusDevice for BarRange {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.function.read_bar(self.bar, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(self.bar, offset, data);
    }
}

#[derive(Debug)]
struct Placement {
    /// The address that the allocator chose.
    first: u64,
    /// Whether it is from the window for 64-bit BARs.
    wide: bool,
    /// The address at which the BAR is mapped now.
    mapped: Option<u64>,
    /// The last address in use by another device, which was logged.
    collision: Option<u64>,
}

#[derive(Debug)]
struct Occupant {
    function: Arc<dyn PciFunction>,
    /// By BAR index.
    placements: BTreeMap<u8, Placement>,
}

#[derive(Debug)]
struct Slots {
    /// For 64-bit BARs.
    window: MmioWindow,
    /// For 32-bit BARs; the guest may move 64-bit ones there.
    window32: Option<MmioWindow>,
    occupants: BTreeMap<Slot, Occupant>,
}

impl Slots {
    fn window(&mut self, wide: bool) -> Option<&mut MmioWindow> {
        if wide {
            Some(&mut self.window)
        } else {
            self.window32.as_mut()
        }
    }

    fn free(&mut self, placement: &Placement) {
        if let Some(window) = self.window(placement.wide) {
            window.free(placement.first);
        }
    }
}

/// PCI bus 0; see the module. Shared by [`Ecam`](super::Ecam), [`ConfigPorts`](super::ConfigPorts)
/// and the machine.
#[derive(Debug)]
pub struct PciBus {
    /// Weak, because the memory bus owns the ECAM, which owns this bus.
    memory: Weak<Bus>,
    bridge: Arc<HostBridge>,
    slots: Mutex<Slots>,
}

/// The guest's changes to the bus itself. Each function saves itself. The BARs are mapped at the
/// addresses in configuration space once [`PciBus::remap`] was called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciBusState {
    /// The host bridge's configuration space.
    pub host_bridge: ConfigSpaceState,
}

impl PciBus {
    /// Creates a bus with its host bridge in slot 0. 64-bit BARs get their first address from
    /// `window`, 32-bit ones from `window32`, without which there can be none. BARs are mapped on
    /// `memory` only inside a window.
    #[must_use]
    pub fn new(memory: &Arc<Bus>, window: MmioWindow, window32: Option<MmioWindow>) -> Self {
        let host_bridge = Arc::new(HostBridge::new());
        let bridge = Occupant {
            function: host_bridge.clone(),
            placements: BTreeMap::new(),
        };
        Self {
            memory: Arc::downgrade(memory),
            bridge: host_bridge,
            slots: Mutex::new(Slots {
                window,
                window32,
                occupants: BTreeMap::from([(Slot::HOST_BRIDGE, bridge)]),
            }),
        }
    }

    /// Puts `function` into `slot`, or into the first free one, and programs its BARs with free
    /// addresses. Decoding stays off until the guest enables it.
    ///
    /// # Errors
    /// The slot is in use, no slot is free, or a BAR has no address; nothing has changed then.
    pub fn add(&self, slot: Option<Slot>, function: Arc<dyn PciFunction>) -> Result<Slot, Error> {
        let mut slots = self.slots.lock();
        let slot = match slot {
            Some(slot) if slots.occupants.contains_key(&slot) => {
                return Err(Error::other(format!("PCI slot {slot} is taken")));
            }
            Some(slot) => slot,
            None => (0..SLOTS)
                .filter_map(Slot::new)
                .find(|slot| !slots.occupants.contains_key(slot))
                .ok_or_else(|| {
                    let message = "no free PCI slot: at most 31 devices fit; unplug one first";
                    Error::other(message)
                })?,
        };
        let mut placements: BTreeMap<u8, Placement> = BTreeMap::new();
        for bar in function.bars() {
            let allocated = match slots.window(bar.wide) {
                Some(window) => window.allocate(bar.size),
                None => Err(Error::other("there is no window for 32-bit BARs")),
            };
            match allocated {
                Ok(first) => {
                    let placement = Placement {
                        first,
                        wide: bar.wide,
                        mapped: None,
                        collision: None,
                    };
                    placements.insert(bar.index, placement);
                }
                Err(error) => {
                    for placement in placements.values() {
                        slots.free(placement);
                    }
                    return Err(Error::other("cannot place a BAR").because(error));
                }
            }
        }
        let occupant = Occupant {
            function,
            placements,
        };
        occupant.program_first_addresses();
        slots.occupants.insert(slot, occupant);
        self.map_all(&mut slots);
        Ok(slot)
    }

    /// Removes the function from `slot`; its BARs are unmapped when this returns. The host bridge
    /// stays.
    pub fn remove(&self, slot: Slot) -> Option<Arc<dyn PciFunction>> {
        self.remove_if(slot, |_| true)
    }

    /// As [`PciBus::remove`], but only if `function` is in the slot, which may have got another one
    /// meanwhile. Returns `true` if it was removed.
    pub fn remove_function(&self, slot: Slot, function: &Arc<dyn PciFunction>) -> bool {
        self.remove_if(slot, |occupant| Arc::ptr_eq(occupant, function))
            .is_some()
    }

    fn remove_if(
        &self,
        slot: Slot,
        wanted: impl FnOnce(&Arc<dyn PciFunction>) -> bool,
    ) -> Option<Arc<dyn PciFunction>> {
        if slot == Slot::HOST_BRIDGE {
            return None;
        }
        let mut slots = self.slots.lock();
        if !wanted(&slots.occupants.get(&slot)?.function) {
            return None;
        }
        let mut occupant = slots.occupants.remove(&slot)?;
        for (&index, placement) in &mut occupant.placements {
            self.unmap(&occupant.function, index, placement);
            slots.free(placement);
        }
        // Another function may have waited for the address.
        self.map_all(&mut slots);
        Some(occupant.function)
    }

    /// Returns the functions on the bus by slot, including the host bridge.
    #[must_use]
    pub fn functions(&self) -> Vec<(Slot, Arc<dyn PciFunction>)> {
        let slots = self.slots.lock();
        let occupants = slots.occupants.iter();
        occupants
            .map(|(slot, occupant)| (*slot, Arc::clone(&occupant.function)))
            .collect()
    }

    /// Resets every function and programs its BARs with their first addresses again, as firmware
    /// would after the machine's reset. The last slot is first: an IOMMU has a lower slot than the
    /// devices behind it, which must stop before it gives them other memory.
    pub fn reset(&self) {
        let mut slots = self.slots.lock();
        for occupant in slots.occupants.values().rev() {
            occupant.function.reset();
            occupant.program_first_addresses();
        }
        self.map_all(&mut slots);
    }

    /// Updates the mapping to the current BARs. The machine calls it after functions were restored
    /// from a saved state; writes through this bus do so themselves.
    pub fn remap(&self) {
        self.map_all(&mut self.slots.lock());
    }

    /// Returns the state of the bus; see [`PciBusState`].
    #[must_use]
    pub fn save(&self) -> PciBusState {
        PciBusState {
            host_bridge: self.bridge.save(),
        }
    }

    /// Restores a saved bus.
    ///
    /// # Errors
    /// As [`ConfigSpace::restored`](super::ConfigSpace::restored); nothing has changed then.
    pub fn restore(&self, state: &PciBusState) -> Result<(), Error> {
        self.bridge.restore(&state.host_bridge)
    }

    /// Passes a memory fault of the guest to every function: see [`PciFunction::memory_fault`].
    /// Returns `true` if one of them removed a mapping.
    pub fn memory_fault(&self, address: Option<u64>) -> bool {
        let mut changed = false;
        for (_, function) in self.functions() {
            changed |= function.memory_fault(address);
        }
        changed
    }

    /// Reads configuration space; returns all ones if there is no function.
    pub fn read_config(&self, slot: Slot, register: u16, data: &mut [u8]) {
        let function = self.function(slot);
        match function.filter(|_| in_bounds(register, data.len())) {
            Some(function) => function.read_config(register, data),
            None => data.fill(0xff),
        }
    }

    /// Writes configuration space; dropped if there is no function. When it returns, BARs are
    /// mapped according to the write.
    pub fn write_config(&self, slot: Slot, register: u16, data: &[u8]) {
        if !in_bounds(register, data.len()) {
            return;
        }
        if !touches_decoding(register, data.len()) {
            if let Some(function) = self.function(slot) {
                function.write_config(register, data);
            }
            return;
        }
        // Held over write and mapping: if two vCPUs write at once, the first one's mapping must not
        // undo the second one's.
        let mut slots = self.slots.lock();
        if let Some(occupant) = slots.occupants.get(&slot) {
            occupant.function.write_config(register, data);
            self.map_all(&mut slots);
        }
    }

    fn function(&self, slot: Slot) -> Option<Arc<dyn PciFunction>> {
        let slots = self.slots.lock();
        let occupant = slots.occupants.get(&slot)?;
        Some(Arc::clone(&occupant.function))
    }

    fn unmap(&self, function: &Arc<dyn PciFunction>, index: u8, placement: &mut Placement) {
        if let Some(address) = placement.mapped.take() {
            function.bar_moved(index, None);
            if let Some(memory) = self.memory.upgrade() {
                memory.remove(address);
            }
        }
    }

    fn map_all(&self, slots: &mut Slots) {
        let Some(memory) = self.memory.upgrade() else {
            return;
        };
        for occupant in slots.occupants.values_mut() {
            for bar in occupant.function.bars() {
                let wanted = bar.decoded.then_some(bar.address);
                if let Some(placement) = occupant.placements.get_mut(&bar.index)
                    && placement.mapped != wanted
                {
                    self.unmap(&occupant.function, bar.index, placement);
                }
            }
        }
        let Slots {
            window,
            window32,
            occupants,
        } = slots;
        let windows: Vec<&MmioWindow> = window32.iter().chain([&*window]).collect();
        for (slot, occupant) in occupants {
            for bar in occupant.function.bars() {
                let Some(placement) = occupant.placements.get_mut(&bar.index) else {
                    continue;
                };
                if !bar.decoded || placement.mapped.is_some() {
                    continue;
                }
                let mut windows = windows.iter();
                if !windows.any(|window| window.contains(bar.address, bar.size)) {
                    // Guests that size a BAR with decoding on reach this.
                    debug!(
                        %slot,
                        bar = bar.index,
                        address = bar.address,
                        "BAR outside the PCI window: nothing answers there"
                    );
                    continue;
                }
                let range = Arc::new(BarRange {
                    function: Arc::clone(&occupant.function),
                    bar: bar.index,
                });
                match memory.insert(bar.address, bar.size, range) {
                    Ok(()) => {
                        placement.mapped = Some(bar.address);
                        occupant.function.bar_moved(bar.index, Some(bar.address));
                    }
                    Err(error) => {
                        // Each write to a command or BAR register tries again.
                        let logged = placement.collision.replace(bar.address);
                        if logged != Some(bar.address) {
                            warn!(
                                %slot,
                                bar = bar.index,
                                %error,
                                "the guest put a BAR over another device: the BAR stays unmapped"
                            );
                        }
                    }
                }
            }
        }
    }
}

impl Drop for PciBus {
    /// The memory bus may live longer and must not keep the functions alive.
    fn drop(&mut self) {
        let slots: Vec<Slot> = self.slots.lock().occupants.keys().copied().collect();
        for slot in slots {
            self.remove(slot);
        }
    }
}

impl Occupant {
    fn program_first_addresses(&self) {
        for (&index, placement) in &self.placements {
            let address = placement.first.to_le_bytes();
            let len = if placement.wide { 8 } else { 4 };
            self.function
                .write_config(bar_register(index), &address[..len]);
        }
    }
}

fn in_bounds(register: u16, len: usize) -> bool {
    let end = usize::from(register).saturating_add(len);
    end <= usize::from(EXTENDED_CONFIG_SPACE_SIZE)
}

#[cfg(test)]
mod tests;
