//! The host bridge at 00.0: identity and nothing else.
//!
//! Linux looks for it before it trusts the configuration ports (`arch/x86/pci/direct.c`,
//! `pci_sanity_check`). It has no BAR and no capability. It must not know the bus behind it.

use parking_lot::Mutex;

use super::{Bar, ConfigSpace, ConfigSpaceState, Identity, PciFunction};
use crate::Error;

/// The generic PCI Express host bridge that other VMMs present to guests.
const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0008,
    revision: 0,
    class: [0x06, 0x00, 0x00],
    subsystem_vendor: 0,
    subsystem: 0,
};

/// The host bridge; see the module.
#[derive(Debug)]
pub(super) struct HostBridge(Mutex<ConfigSpace>);

impl HostBridge {
    pub(super) fn new() -> Self {
        Self(Mutex::new(ConfigSpace::new(IDENTITY)))
    }

    pub(super) fn save(&self) -> ConfigSpaceState {
        self.0.lock().save()
    }

    pub(super) fn restore(&self, state: &ConfigSpaceState) -> Result<(), Error> {
        let mut space = self.0.lock();
        *space = space.restored(state)?;
        Ok(())
    }
}

impl PciFunction for HostBridge {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        let space = self.0.lock();
        space.read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        let mut space = self.0.lock();
        space.write(offset, data);
    }

    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }

    fn read_bar(&self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_bar(&self, _bar: u8, _offset: u64, _data: &[u8]) {}

    fn bar_moved(&self, _bar: u8, _address: Option<u64>) {}

    fn reset(&self) {
        let mut space = self.0.lock();
        space.reset();
    }
}
