//! PCI as the guest sees it: one segment, one bus, 32 slots, no bridges.
//!
//! Owns configuration space, BAR decoding, the two access paths to configuration space ([`Ecam`]
//! and [`ConfigPorts`]), MSI-X and hot-plug. It must not know the type of a function (virtio is
//! only a client), nor how the hypervisor delivers an interrupt.
//!
//! ```text
//!   vCPU exit --> Bus (ports) --> ConfigPorts --+
//!                                               +--> PciBus --> PciFunction (config)
//!   vCPU exit --> Bus (memory) --> Ecam --------+       |
//!                     ^                                 | a BAR or the memory
//!                     +---- BAR ranges follow ----------+ decode bit changed
//!                     |
//!                     +--> PciFunction (BAR)
//! ```
//!
//! Lock order: [`PciHotplug`], then [`PciBus`], then the lock inside a function, then the memory
//! [`Bus`](crate::bus::Bus). A function never calls up.

mod access;
mod bus;
mod config_space;
mod host_bridge;
mod hotplug;
mod msix;
mod window;

use std::fmt;

pub use access::{ConfigPorts, ConfigPortsState, ECAM_SIZE, Ecam, PORTS_BASE, PORTS_SIZE};
pub use bus::{PciBus, PciBusState};
pub use config_space::{
    CONFIG_SPACE_SIZE, ConfigSpace, ConfigSpaceState, EXTENDED_CONFIG_SPACE_SIZE, Identity,
};
pub use hotplug::{
    HOTPLUG_EJECT, HOTPLUG_INSERTED, HOTPLUG_LEN, HOTPLUG_REMOVAL, PciHotplug, PciHotplugState,
};
pub use msix::{
    MAX_VECTORS, MSIX_CAPABILITY_ID, MSIX_CONTROL_OFFSET, Msix, MsixEntryState, MsixState,
    PBA_WORD_SIZE, TABLE_ENTRY_SIZE,
};
pub use window::MmioWindow;

/// Device numbers on a bus (PCI 3.0, section 3.2.2.3.2: five bits).
pub const SLOTS: u8 = 32;

/// A device number on bus 0: 0 to 31.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u8);

impl Slot {
    /// The host bridge's slot.
    pub const HOST_BRIDGE: Self = Self(0);

    /// `None` if `number` is 32 or more.
    #[must_use]
    pub fn new(number: u8) -> Option<Self> {
        (number < SLOTS).then_some(Self(number))
    }

    /// Returns the device number.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0000:00:{:02x}.0", self.0)
    }
}

/// The type of a memory BAR (PCI 3.0, section 6.2.5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BarType {
    /// Its address has 64 bits, in two registers; otherwise 32 bits in one.
    pub wide: bool,
    /// Reads have no side effects.
    pub prefetchable: bool,
}

impl BarType {
    /// 64 bits, not prefetchable.
    pub const WIDE: Self = Self {
        wide: true,
        prefetchable: false,
    };
}

/// A memory BAR as currently programmed in its function's configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// Number of its first BAR register, 0 to 5.
    pub index: u8,
    /// Size in bytes; a power of two of at least 4096.
    pub size: u64,
    /// Guest-physical address as programmed; a multiple of the size.
    pub address: u64,
    /// Whether the address has 64 bits, in two registers.
    pub wide: bool,
    /// Whether the command register enables decoding of the BAR.
    pub decoded: bool,
}

/// One PCI function in a slot.
///
/// All methods take `&self`: any vCPU thread may call them at any time. An
/// implementation keeps one lock of its own and never calls back into
/// [`PciBus`]. Offsets and widths come from the guest and are not trusted.
pub trait PciFunction: Send + Sync + fmt::Debug {
    /// Reads configuration space; `offset + data.len()` is at most 4096.
    fn read_config(&self, offset: u16, data: &mut [u8]);

    /// Writes configuration space; bounds as in [`PciFunction::read_config`].
    fn write_config(&self, offset: u16, data: &[u8]);

    /// Returns the function's BARs as currently programmed, ascending by index. Number, index and
    /// size never change.
    fn bars(&self) -> Vec<Bar>;

    /// Reads at `offset` from the start of BAR `bar`. The whole access lies inside the BAR.
    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes at `offset` from the start of BAR `bar`; bounds as in [`PciFunction::read_bar`].
    fn write_bar(&self, bar: u8, offset: u64, data: &[u8]);

    /// BAR `bar` is decoded at `address` from now on, or nowhere if `None`. There is always a call
    /// with `None` between two addresses.
    fn bar_moved(&self, bar: u8, address: Option<u64>);

    /// Handles a guest access that memory of this function cannot serve, such as a read of a
    /// write-only page that is mapped in a BAR. `address` is guest-physical; `None` if the
    /// hypervisor does not report it. The function removes the mapping, so that the same access
    /// then comes to [`PciFunction::read_bar`].
    ///
    /// Returns `true` if it removed a mapping. Functions without mappings have nothing to do.
    fn memory_fault(&self, _address: Option<u64>) -> bool {
        false
    }

    /// Restores the state after power-on: BARs zero, decoding off.
    fn reset(&self);
}
