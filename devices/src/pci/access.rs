//! The two access paths to configuration space: ECAM in memory and the ports 0xCF8/0xCFC.
//!
//! They convert an access into slot, register and data. They must not know the meaning of a
//! register.

mod saved;

use std::sync::Arc;

use parking_lot::Mutex;

use super::{PciBus, Slot};
use crate::bus::BusDevice;

pub use saved::ConfigPortsState;

/// Length of the ECAM of one bus in bytes: 32 devices, 8 functions, 4 KiB each.
pub const ECAM_SIZE: u64 = 1 << 20;
/// First port of [`ConfigPorts`] (PCI 3.0, section 3.2.2.3.2).
pub const PORTS_BASE: u64 = 0xcf8;
/// Ports of [`ConfigPorts`]: CONFIG_ADDRESS and CONFIG_DATA.
pub const PORTS_SIZE: u64 = 8;

const CONFIG_DATA: u64 = 4;
const ENABLE: u32 = 1 << 31;
/// Bits of CONFIG_ADDRESS that hold a value; the others read zero.
const ADDRESS_MASK: u32 = 0x80ff_fffc;

/// The target of an address: slot, function and register.
struct Target {
    slot: u8,
    function: u8,
    register: u16,
}

impl Target {
    fn slot(&self) -> Option<Slot> {
        Slot::new(self.slot).filter(|_| self.function == 0)
    }
}

/// Memory-mapped configuration space (PCI Express 3.0, section 7.2.2; MCFG in
/// ACPI) of bus 0, [`ECAM_SIZE`] bytes.
#[derive(Debug)]
pub struct Ecam(Arc<PciBus>);

impl Ecam {
    /// Creates an ECAM for `bus`.
    #[must_use]
    pub fn new(bus: Arc<PciBus>) -> Self {
        Self(bus)
    }

    fn target(offset: u64) -> Option<Target> {
        let offset = u32::try_from(offset).ok()?;
        let [low, middle, high, rest] = offset.to_le_bytes();
        // Bits 11:0 register, 14:12 function, 19:15 device.
        (rest == 0 && high < 0x10).then(|| Target {
            slot: (high << 1) | (middle >> 7),
            function: (middle >> 4) & 7,
            register: u16::from_le_bytes([low, middle & 0x0f]),
        })
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match Self::target(offset).and_then(|target| Some((target.slot()?, target.register))) {
            Some((slot, register)) => self.0.read_config(slot, register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(target) = Self::target(offset)
            && let Some(slot) = target.slot()
        {
            self.0.write_config(slot, target.register, data);
        }
    }
}

/// Configuration mechanism #1: CONFIG_ADDRESS at port 0xCF8, CONFIG_DATA at 0xCFC.
///
/// CONFIG_ADDRESS accepts only 4-byte accesses, as the specification requires. CONFIG_DATA accepts
/// 1, 2 and 4 bytes that stay inside it.
#[derive(Debug)]
pub struct ConfigPorts {
    bus: Arc<PciBus>,
    address: Mutex<u32>,
}

impl ConfigPorts {
    /// Creates configuration ports for `bus`.
    #[must_use]
    pub fn new(bus: Arc<PciBus>) -> Self {
        Self {
            bus,
            address: Mutex::new(0),
        }
    }

    fn address(&self) -> u32 {
        *self.address.lock()
    }

    /// Returns the target of an access of `len` bytes at `offset` in the data port.
    fn target(&self, offset: u64, len: usize) -> Option<(Slot, u16)> {
        let lane = offset.checked_sub(CONFIG_DATA)?;
        let end = lane.checked_add(u64::try_from(len).ok()?)?;
        let address = self.address();
        if end > 4 || address & ENABLE == 0 {
            return None;
        }
        let [register, devfn, bus, _] = address.to_le_bytes();
        let target = Target {
            slot: devfn >> 3,
            function: devfn & 7,
            register: u16::from(register) + u16::try_from(lane).ok()?,
        };
        let slot = target.slot().filter(|_| bus == 0)?;
        Some((slot, target.register))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address().to_le_bytes());
            return;
        }
        match self.target(offset, data.len()) {
            Some((slot, register)) => self.bus.read_config(slot, register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0
            && let Ok(value) = data.try_into()
        {
            let mut address = self.address.lock();
            *address = u32::from_le_bytes(value) & ADDRESS_MASK;
            return;
        }
        if let Some((slot, register)) = self.target(offset, data.len()) {
            self.bus.write_config(slot, register, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::Bus;
    use crate::pci::MmioWindow;
    use crate::saved::through_a_file;

    #[test]
    fn an_access_in_two_steps_continues_on_another_host() {
        let memory = Arc::new(Bus::new());
        let ports = || {
            let window = MmioWindow::new(0x4000_0000, 0x1000_0000).unwrap();
            ConfigPorts::new(Arc::new(PciBus::new(&memory, window, None)))
        };
        let source = ports();
        source.write(0, &0x8000_0000u32.to_le_bytes());
        let state = through_a_file(&source.save());
        let destination = ports();
        destination.restore(&state).unwrap();
        let mut identity = [0; 4];
        destination.read(CONFIG_DATA, &mut identity);
        assert_eq!(u32::from_le_bytes(identity), 0x0008_1b36);
        for address in [1, 0x0100_0000, u32::MAX] {
            destination
                .restore(&ConfigPortsState { address })
                .unwrap_err();
        }
        assert_eq!(destination.save(), state);
    }
}
