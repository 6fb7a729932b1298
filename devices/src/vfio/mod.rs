//! A PCI function of the host, passed through to the guest by VFIO.
//!
//! ```text
//!   vCPU ── configuration space ──> GuestConfig: own registers; COMMAND and FLR ──> Host
//!        ── BAR, mapped part ─────> the device, without an exit
//!        ── BAR, other part ──────> VfioPciDevice::{read,write}_bar ──────────────> Host
//!        ── MSI-X table ──────────> Msix ──> KVM routes
//!   device ── interrupt ──> eventfd of the guest's vector ──> irqfd ──> guest
//!          ── DMA ────────> guest RAM at its guest-physical address (see `dma.rs`)
//! ```
//! [`VfioPciDevice`] owns the guest's registers, the mapped parts and the vectors. The device and
//! the guest are both hostile. It must not know system calls (`open.rs` and `uapi.rs` do), nor
//! the type of the device.
//!
//! The device's memory is enabled only while the guest enables it. Its pages are mapped after that
//! and unmapped before the opposite: an access to a disabled BAR is a fault.
//!
//! **Reset** (the machine's, the guest's FLR, the end): unmap pages, disable memory and DMA,
//! disconnect vectors, reset the device, then the guest's registers.
//!
//! Not supported: INTx, MSI, I/O BARs, option ROMs, extended capabilities, a reset together with
//! other functions, peer-to-peer DMA between devices.

mod config;
mod dma;
mod host;
mod interrupts;
mod open;
mod region;
mod uapi;

use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

pub use dma::Dma;
pub use open::VfioOptions;

use self::config::{DeviceConfig, EXPRESS_CONTROL_FLR, GuestConfig, MsixPlaces};
use self::host::{BARS, CONFIG, Description, Host};
use self::interrupts::Interrupts;
use self::region::MappedBars;
use crate::Error;
use crate::hypervisor::{Doorbells, MsiVectors};
use crate::pci::{Bar, CONFIG_SPACE_SIZE, Msix, PciFunction};

/// The command register, and the bits that the device gets: memory and bus master.
const COMMAND: u16 = 0x04;
const COMMAND_MASK: u16 = 0x06;

/// A function of the host in the guest; see the module.
#[derive(Debug)]
pub struct VfioPciDevice {
    id: String,
    host: Box<dyn Host>,
    /// Sizes of the BARs, by index.
    sizes: [u64; BARS],
    msix_places: MsixPlaces,
    /// The kernel signals it when the host wants the device back.
    request: EventFd,
    /// Whether a failed access was logged.
    failed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The guest has enabled memory or DMA since the last reset, which may take 100 ms.
    touched: bool,
    config: GuestConfig,
    msix: Msix,
    interrupts: Interrupts,
    bars: MappedBars,
}

impl VfioPciDevice {
    /// Opens a function, maps guest RAM for it and resets it.
    ///
    /// # Errors
    /// The function cannot be given to a guest; the text has the remedy.
    pub fn open(
        options: &VfioOptions,
        dma: &Arc<Dma>,
        vectors: &dyn MsiVectors,
        doorbells: Arc<dyn Doorbells>,
    ) -> Result<Self, Error> {
        let (host, description) = open::open(options, dma)?;
        Self::new(
            &options.id,
            Box::new(host),
            &description,
            vectors,
            doorbells,
        )
    }

    fn new(
        id: &str,
        host: Box<dyn Host>,
        description: &Description,
        vectors: &dyn MsiVectors,
        doorbells: Arc<dyn Doorbells>,
    ) -> Result<Self, Error> {
        let failed = |what: &'static str| Error::context(what);
        host.write(CONFIG, COMMAND.into(), &[0, 0])
            .map_err(failed("cannot write the device's configuration space"))?;
        host.reset().map_err(failed(
            "cannot reset the device: reboot the host, or try another function",
        ))?;
        let mut bytes = [0; CONFIG_SPACE_SIZE];
        host.read(CONFIG, 0, &mut bytes)
            .map_err(failed("cannot read the device's configuration space"))?;
        let device = DeviceConfig::new(&bytes)?;
        let msix_places = device.msix(description)?;
        let vectors = (0..msix_places.vectors)
            .map(|_| vectors.allocate())
            .collect::<Result<Vec<_>, _>>()
            .map_err(failed("cannot allocate an interrupt vector"))?;
        let msix = Msix::new(vectors)?;
        let config = device.for_guest(description, &msix_places, &msix)?;
        let request = vdpa::eventfd::new().map_err(failed("cannot create an eventfd"))?;
        if let Err(error) = host.set_request(request.as_raw_fd()) {
            // Kernels before 4.0. The host then waits until the VM ends.
            tracing::warn!(device = %id, %error, "cannot see when the host wants the device back");
        }
        let holes = [msix_places.table, msix_places.pending];
        let bars = MappedBars::new(&*host, &description.regions, &holes, doorbells);
        Ok(Self {
            id: id.to_owned(),
            host,
            sizes: description.regions.each_ref().map(|region| region.size),
            msix_places,
            request,
            failed: AtomicBool::new(false),
            state: Mutex::new(State {
                touched: false,
                config,
                msix,
                interrupts: Interrupts::new(description.resizable),
                bars,
            }),
        })
    }

    /// Whether the host has wanted the device back since the last call. The kernel asks again every
    /// few seconds, and waits until the device is dropped.
    #[must_use]
    pub fn is_wanted_back(&self) -> bool {
        // Non-blocking: an error means that the counter is zero.
        self.request.read().is_ok()
    }

    /// Whether the device has `len` bytes at `offset` of a BAR.
    fn has(&self, bar: u8, offset: u64, len: u64) -> bool {
        let size = self.sizes.get(usize::from(bar)).copied().unwrap_or(0);
        offset.checked_add(len).is_some_and(|end| end <= size)
    }

    /// Logs the first failure of an access or a reset.
    fn check(&self, action: &str, result: std::io::Result<()>) -> bool {
        let Err(error) = result else { return true };
        if !self.failed.swap(true, Ordering::Relaxed) {
            tracing::error!(
                device = %self.id,
                %error,
                "cannot {action}: the guest reads all ones, and further failures are not logged"
            );
        }
        false
    }

    fn set_command(&self, command: u16) {
        let value = (command & COMMAND_MASK).to_le_bytes();
        let written = self.host.write(CONFIG, COMMAND.into(), &value);
        self.check("write the device's command register", written);
    }

    fn reset_locked(&self, state: &mut State) {
        state.bars.unmap_all();
        // From here on it neither answers nor reaches guest memory.
        self.set_command(0);
        state.interrupts.disable(&*self.host);
        if state.touched {
            state.touched = !self.check("reset the device", self.host.reset());
        }
        state.config.space.reset();
        state.msix.reset();
    }
}

impl PciFunction for VfioPciDevice {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.state.lock().config.space.read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let GuestConfig {
            space,
            msix_control,
            express_control,
        } = &mut state.config;
        let (before, control) = (space.read_u16(COMMAND), space.read_u16(*msix_control));
        space.write(offset, data);
        let command = space.read_u16(COMMAND);
        if (command ^ before) & COMMAND_MASK != 0 {
            if !space.memory_decoding() {
                state.bars.unmap_all();
            }
            state.touched |= command & COMMAND_MASK != 0;
            self.set_command(command);
        }
        let new_control = space.read_u16(*msix_control);
        if new_control != control {
            state.msix.set_control(new_control);
            state.interrupts.update(&*self.host, &state.msix);
        }
        if express_control
            .is_some_and(|register| space.read_u16(register) & EXPRESS_CONTROL_FLR != 0)
        {
            tracing::debug!(device = %self.id, "function-level reset");
            self.reset_locked(state);
        }
    }

    fn bars(&self) -> Vec<Bar> {
        self.state.lock().config.space.bars()
    }

    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let MsixPlaces { table, pending, .. } = &self.msix_places;
        if let Some(offset) = table.locate(bar, offset, len) {
            self.state.lock().msix.read_table(offset, data);
        } else if let Some(offset) = pending.locate(bar, offset, len) {
            self.state.lock().msix.read_pending(offset, data);
        } else if !table.touches(bar, offset, len)
            && !pending.touches(bar, offset, len)
            && self.has(bar, offset, len)
        {
            let read = self.host.read(bar, offset, data);
            if !self.check("read a BAR", read) {
                data.fill(0xff);
            }
        }
    }

    fn write_bar(&self, bar: u8, offset: u64, data: &[u8]) {
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let MsixPlaces { table, pending, .. } = &self.msix_places;
        if let Some(offset) = table.locate(bar, offset, len) {
            let mut state = self.state.lock();
            let state = &mut *state;
            state.msix.write_table(offset, data);
            state.interrupts.update(&*self.host, &state.msix);
        } else if !table.touches(bar, offset, len)
            && !pending.touches(bar, offset, len)
            && self.has(bar, offset, len)
        {
            let written = self.host.write(bar, offset, data);
            self.check("write a BAR", written);
        }
    }

    fn bar_moved(&self, bar: u8, address: Option<u64>) {
        self.state.lock().bars.moved(bar, address);
    }

    fn memory_fault(&self, address: Option<u64>) -> bool {
        let hit = self.state.lock().bars.fault(address);
        if hit {
            tracing::warn!(
                device = %self.id,
                ?address,
                "the device does not answer in a mapped BAR: accesses there exit from now on"
            );
        }
        hit
    }

    fn reset(&self) {
        self.reset_locked(&mut self.state.lock());
    }
}

impl Drop for VfioPciDevice {
    fn drop(&mut self) {
        self.reset();
    }
}

#[cfg(test)]
mod tests;
