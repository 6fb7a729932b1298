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
//! **Errors** that the device reports (AER) are counted and shown until the next reset. The guest
//! does not see them: an integrated endpoint has no port above it that would report them.
//!
//! A function whose driver can do so moves to another one: see `migration.rs`.
//!
//! Not supported: INTx, MSI, I/O BARs, option ROMs, extended capabilities, a reset together with
//! other functions, peer-to-peer DMA between devices.

mod config;
mod dma;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod fuzz;
mod host;
mod interrupts;
mod migration;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod model;
mod open;
mod region;
mod translated;
mod uapi;

use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

pub use dma::{Dma, has_iommufd};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::vfio_anything;
pub use migration::{FunctionView, VfioState};
pub use open::{VfioOptions, check_cdev};
pub use translated::TranslatedDma;

use self::config::{DeviceConfig, EXPRESS_CONTROL_FLR, GuestConfig, MsixPlaces};
use self::host::{BARS, CONFIG, Description, Host};
use self::interrupts::Interrupts;
use self::migration::{Abilities, Transfer};
use self::region::MappedBars;
use crate::Error;
use crate::hypervisor::{DeviceMappings, MsiVectors};
use crate::pci::{Bar, CONFIG_SPACE_SIZE, Msix, PciFunction};
use crate::virtio::backend::Event;

/// The command register, and the bits that the device gets: memory and bus master.
const COMMAND: u16 = 0x04;
const COMMAND_MASK: u16 = 0x06;
const BUS_MASTER: u16 = 0x04;

/// The kernel refuses a reset while another task holds the device's lock.
const RESET_ATTEMPTS: u32 = 6;
const RESET_PAUSE: Duration = if cfg!(any(test, feature = "fuzz")) {
    Duration::ZERO
} else {
    Duration::from_millis(20)
};

/// An open function of the host, before a guest has it. It reaches guest RAM, but its DMA is
/// disabled. To open it takes long.
#[derive(Debug)]
pub struct HostFunction {
    id: String,
    host: Box<dyn Host>,
    description: Description,
    abilities: Abilities,
    bytes: [u8; CONFIG_SPACE_SIZE],
    /// What it reaches behind the guest's IOMMU.
    translation: Option<Arc<Mutex<TranslatedDma>>>,
}

impl HostFunction {
    /// Opens a function, maps guest RAM for it and resets it.
    ///
    /// # Errors
    /// The function cannot be given to a guest; the text has the remedy.
    pub fn open(options: VfioOptions, dma: &Arc<Dma>) -> Result<Self, Error> {
        let id = options.id.clone();
        let (host, description) = open::open(options, dma)?;
        let mut function = Self::new(&id, Box::new(host), description)?;
        function.translation = dma.translation()?.map(|own| Arc::new(Mutex::new(own)));
        Ok(function)
    }

    fn new(id: &str, host: Box<dyn Host>, description: Description) -> Result<Self, Error> {
        let failed = |what: &'static str| Error::context(what);
        host.write(CONFIG, COMMAND.into(), &[0, 0])
            .map_err(failed("cannot write the device's configuration space"))?;
        reset(&*host, || false).map_err(failed(
            "cannot reset the device: reboot the host, or try another function",
        ))?;
        let mut bytes = [0; CONFIG_SPACE_SIZE];
        host.read(CONFIG, 0, &mut bytes)
            .map_err(failed("cannot read the device's configuration space"))?;
        let abilities = host.abilities().map_err(failed(
            "cannot ask the driver whether the function can move",
        ))?;
        Ok(Self {
            id: id.to_owned(),
            host,
            description,
            abilities,
            bytes,
            translation: None,
        })
    }

    /// What it reaches, if it is behind the guest's IOMMU.
    #[must_use]
    pub fn translation(&self) -> Option<Arc<Mutex<TranslatedDma>>> {
        self.translation.clone()
    }

    /// Its name in messages.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }
}

/// Signals of the kernel, each with an eventfd.
#[derive(Debug)]
struct Signals {
    /// The host wants the device back.
    request: EventFd,
    /// The device has reported an uncorrectable error (PCI Express AER).
    error: EventFd,
}

/// Events since the function was opened.
#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    failures: AtomicU64,
    faults: AtomicU64,
    resets: AtomicU64,
    requests: AtomicU64,
    errors: AtomicU64,
}

/// Resets a device, again if the host refuses it for now and does not want the device back.
fn reset(host: &dyn Host, wanted_back: impl Fn() -> bool) -> std::io::Result<()> {
    for _ in 1..RESET_ATTEMPTS {
        match host.reset() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && !wanted_back() => {
                thread::sleep(RESET_PAUSE);
            }
            result => return result,
        }
    }
    host.reset()
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A part of a BAR that the guest can reach without an exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedArea {
    /// The BAR.
    pub bar: u8,
    /// Offset in the BAR.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
    /// The guest-physical address, while it is mapped.
    pub address: Option<u64>,
}

/// The state of a function, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionDescription {
    /// Its driver on the host.
    pub driver: String,
    /// Its MSI-X vectors.
    pub vectors: u16,
    /// Vectors that are connected to the guest.
    pub connected: u16,
    /// Parts of its BARs.
    pub areas: Vec<MappedArea>,
    /// Whether it has failed since its last reset: it has reported an error, or a reset or a resume
    /// has failed.
    pub failed: bool,
    /// Reads and writes of BARs that exited to this process.
    pub trapped: [u64; 2],
    /// Accesses and resets that the host rejected.
    pub failures: u64,
    /// Accesses to mapped parts that the device did not answer.
    pub faults: u64,
    /// Resets, the one at its opening not counted.
    pub resets: u64,
    /// How often the host wanted it back.
    pub requests: u64,
    /// Uncorrectable errors that it has reported, and failed resets and resumes.
    pub errors: u64,
}

/// A function of the host in the guest; see the module.
#[derive(Debug)]
pub struct VfioPciDevice {
    /// Dropped before `host`: its mapped pages keep the device open.
    state: Mutex<State>,
    id: String,
    host: Box<dyn Host>,
    driver: String,
    abilities: Abilities,
    translation: Option<Arc<Mutex<TranslatedDma>>>,
    /// Sizes of the BARs, by index.
    sizes: [u64; BARS],
    msix_places: MsixPlaces,
    signals: Signals,
    counters: Counters,
    /// Whether a failed access was logged.
    logged: AtomicBool,
    /// Whether the device has reported an error since its last reset.
    failed: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// The guest has enabled memory or DMA since the last reset, which may take 100 ms.
    touched: bool,
    /// Its last reset has failed. Until one succeeds, it gets no DMA.
    unreset: bool,
    /// Its driver has stopped it, for a migration, or keeps it in PRE_COPY after one.
    stopped: bool,
    /// Its driver logs what it writes.
    logging: bool,
    transfer: Transfer,
    config: GuestConfig,
    msix: Msix,
    interrupts: Interrupts,
    bars: MappedBars,
}

impl State {
    /// The bits of the command register that the device gets now.
    fn allowed(&self) -> u16 {
        if self.unreset {
            COMMAND_MASK & !BUS_MASTER
        } else {
            COMMAND_MASK
        }
    }
}

impl VfioPciDevice {
    /// Shows an open function to a guest.
    ///
    /// # Errors
    /// The function cannot be given to a guest; the text has the remedy.
    pub fn new(
        function: HostFunction,
        vectors: &dyn MsiVectors,
        mappings: Arc<dyn DeviceMappings>,
    ) -> Result<Self, Error> {
        let failed = |what: &'static str| Error::context(what);
        let HostFunction {
            id,
            host,
            description,
            abilities,
            bytes,
            translation,
        } = function;
        let device = DeviceConfig::new(&bytes)?;
        let msix_places = device.msix(&description)?;
        let vectors = (0..msix_places.vectors)
            .map(|_| vectors.allocate())
            .collect::<Result<Vec<_>, _>>()
            .map_err(failed("cannot allocate an interrupt vector"))?;
        let msix = Msix::new(vectors)?;
        let config = device.for_guest(&description, &msix_places, &msix)?;
        let eventfd = || vdpa::eventfd::new().map_err(failed("cannot create an eventfd"));
        let signals = Signals {
            request: eventfd()?,
            error: eventfd()?,
        };
        if let Err(error) = host.set_request(signals.request.as_raw_fd()) {
            // Kernels before 4.0. The host then waits until the VM ends.
            tracing::warn!(device = %id, %error, "cannot see when the host wants the device back");
        }
        if let Err(error) = host.set_error(signals.error.as_raw_fd()) {
            // Functions without PCI Express have no such reports.
            tracing::debug!(device = %id, %error, "the device reports no errors");
        }
        let holes = [msix_places.table, msix_places.pending];
        let bars = MappedBars::new(&*host, &description.regions, &holes, mappings);
        Ok(Self {
            id,
            host,
            driver: description.driver,
            abilities,
            translation,
            sizes: description.regions.each_ref().map(|region| region.size),
            msix_places,
            signals,
            counters: Counters::default(),
            logged: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            state: Mutex::new(State {
                touched: false,
                unreset: false,
                stopped: false,
                logging: false,
                transfer: Transfer::default(),
                config,
                msix,
                interrupts: Interrupts::new(description.resizable),
                bars,
            }),
        })
    }

    /// The descriptors that become readable when [`VfioPciDevice::is_wanted_back`] or
    /// [`VfioPciDevice::take_error`] has news. Their tokens have no meaning.
    #[must_use]
    pub fn events(&self) -> [Event; 2] {
        let Signals { request, error } = &self.signals;
        [request, error].map(|eventfd| Event {
            fd: eventfd.as_raw_fd(),
            token: 0,
        })
    }

    /// Whether the host has wanted the device back since the last call. The kernel asks again every
    /// few seconds, and waits until the device is dropped.
    #[must_use]
    pub fn is_wanted_back(&self) -> bool {
        // Non-blocking: an error means that the counter is zero.
        let wanted = self.signals.request.read().is_ok();
        if wanted {
            count(&self.counters.requests);
        }
        wanted
    }

    /// Whether the device has reported an uncorrectable error since the last call, or a reset or a
    /// resume has failed.
    #[must_use]
    pub fn take_error(&self) -> bool {
        let reported = self.signals.error.read().is_ok();
        if reported {
            count(&self.counters.errors);
            self.failed.store(true, Ordering::Relaxed);
        }
        reported
    }

    /// Whether [`VfioPciDevice::take_error`] was true since the device's last reset.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Returns its current state.
    #[must_use]
    pub fn describe(&self) -> FunctionDescription {
        let state = self.state.lock();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters {
            reads,
            writes,
            failures,
            faults,
            resets,
            requests,
            errors,
        } = &self.counters;
        FunctionDescription {
            driver: self.driver.clone(),
            vectors: self.msix_places.vectors,
            connected: u16::try_from(state.interrupts.connected()).unwrap_or(u16::MAX),
            areas: state.bars.areas().collect(),
            failed: self.has_failed(),
            trapped: [get(reads), get(writes)],
            failures: get(failures),
            faults: get(faults),
            resets: get(resets),
            requests: get(requests),
            errors: get(errors),
        }
    }

    /// Whether the device has `len` bytes at `offset` of a BAR.
    fn has(&self, bar: u8, offset: u64, len: u64) -> bool {
        let size = self.sizes.get(usize::from(bar));
        let end = offset.checked_add(len);
        // No BAR at all has not even an empty access: its number may be that of another region.
        size.zip(end).is_some_and(|(&size, end)| end <= size)
    }

    /// Logs the first failure of an access or a reset.
    fn check(&self, action: &str, result: std::io::Result<()>) -> bool {
        let Err(error) = result else { return true };
        count(&self.counters.failures);
        if !self.logged.swap(true, Ordering::Relaxed) {
            tracing::error!(
                device = %self.id,
                %error,
                "cannot {action}: the guest reads all ones, and further failures are not logged"
            );
        }
        false
    }

    /// An alarm until its next reset, as if the device had reported an error.
    fn report_failure(&self) {
        self.failed.store(true, Ordering::Relaxed);
        let _ = self.signals.error.write(1);
    }

    fn set_command(&self, command: u16) {
        let value = command.to_le_bytes();
        let written = self.host.write(CONFIG, COMMAND.into(), &value);
        self.check("write the device's command register", written);
    }

    fn try_reset(&self) -> bool {
        count(&self.counters.resets);
        let wanted_back = || self.counters.requests.load(Ordering::Relaxed) > 0;
        match reset(&*self.host, wanted_back) {
            // The host's unbind holds the function's lock. Its memory and DMA are disabled, and its
            // next driver resets it, as vfio-pci does when it is opened.
            Err(error) if error.kind() == ErrorKind::WouldBlock && wanted_back() => {
                tracing::debug!(device = %self.id, "the host resets the device itself");
                false
            }
            result => {
                let reset = self.check("reset the device", result);
                if !reset {
                    self.report_failure();
                }
                reset
            }
        }
    }

    fn reset_locked(&self, state: &mut State) {
        state.bars.unmap_all();
        // From here on it neither answers nor reaches guest memory.
        self.set_command(0);
        state.interrupts.disable(&*self.host);
        if state.touched || state.stopped || self.has_failed() {
            let reset = self.try_reset();
            state.touched = !reset;
            state.unreset = !reset;
            state.stopped &= !reset;
            if reset {
                state.transfer.reset();
                // An error before the reset is counted, and is no alarm any more.
                let _ = self.take_error();
                self.failed.store(false, Ordering::Relaxed);
            }
        }
        if let Some(translation) = &self.translation {
            translation.lock().unblock();
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
        let allowed = state.allowed();
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
            self.set_command(command & allowed);
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
        // After an FLR the bus still decodes the BARs. A reset waits until the access ends.
        let state = self.state.lock();
        if !state.config.space.memory_decoding() {
            return;
        }
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let MsixPlaces { table, pending, .. } = &self.msix_places;
        if let Some(offset) = table.locate(bar, offset, len) {
            state.msix.read_table(offset, data);
        } else if let Some(offset) = pending.locate(bar, offset, len) {
            state.msix.read_pending(offset, data);
        } else if !table.touches(bar, offset, len)
            && !pending.touches(bar, offset, len)
            && self.has(bar, offset, len)
        {
            count(&self.counters.reads);
            let read = self.host.read(bar, offset, data);
            if !self.check("read a BAR", read) {
                data.fill(0xff);
            }
        }
    }

    fn write_bar(&self, bar: u8, offset: u64, data: &[u8]) {
        let mut state = self.state.lock();
        let state = &mut *state;
        if !state.config.space.memory_decoding() {
            return;
        }
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let MsixPlaces { table, pending, .. } = &self.msix_places;
        if let Some(offset) = table.locate(bar, offset, len) {
            state.msix.write_table(offset, data);
            state.interrupts.update(&*self.host, &state.msix);
        } else if !table.touches(bar, offset, len)
            && !pending.touches(bar, offset, len)
            && self.has(bar, offset, len)
        {
            count(&self.counters.writes);
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
            count(&self.counters.faults);
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
