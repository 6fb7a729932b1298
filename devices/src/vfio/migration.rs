//! Moves a function's state to another function (VFIO migration v2, `linux/vfio.h`).
//!
//! ```text
//!   source:       Running ── save: STOP_COPY, data read, STOP ──> Stopped ── resume ──> Running
//!                    │ log_writes                      ^
//!                    └── PRE_COPY: early data read ────┘  (if the driver offers it)
//!   destination:  Running ── load: RESUMING, data written, STOP ──> Stopped ── start ──> Running
//!                    ^  └─ load_early: RESUMING, early data ─┘         │
//!                    +─────────────────── reset ───────────────────────+
//! ```
//! Early data is the beginning of the data: the function hands it out while it works. A reset of
//! the function at the source ends PRE_COPY, and the early data is void: the state says so.
//!
//! Owns this order, the limit of the data and the log of what the function writes. The data is the
//! driver's: only the driver at the destination can judge it, and it comes from another host. It
//! must not know how the data gets there.
//!
//! A function that does not log its writes cannot move: while it runs, each page may be one that it
//! has written. A snapshot needs no log: it has the same steps, and memory is read after STOP. No
//! function reaches another one's BARs, so the state RUNNING_P2P is not needed.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vfio_bindings::bindings::vfio::{
    VFIO_MIGRATION_PRE_COPY, VFIO_MIGRATION_STOP_COPY,
    vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY as PRE_COPY,
    vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING as RESUMING,
    vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING as RUNNING,
    vfio_device_mig_state_VFIO_DEVICE_STATE_STOP as STOP,
    vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY as STOP_COPY,
};
use vfio_ioctls::{DmaLoggingRange, VfioError};

use super::host::CONFIG;
use super::open::HostDevice;
use super::{COMMAND, State, VfioPciDevice, reset, uapi};
use crate::Error;
use crate::pci::{ConfigSpace, ConfigSpaceState, MsixState};

/// Bytes that are read or written at once.
const CHUNK: usize = 1 << 20;
/// The unit of the log.
const PAGE: u64 = 4096;
/// Bytes of guest memory that one report covers: a bitmap of 32 KiB.
const REPORT: u64 = 1 << 30;

/// The abilities of a function's driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// It hands out the function's state, and takes it.
    pub(super) moves: bool,
    /// It reports the pages that the function writes.
    pub(super) logs: bool,
    /// It hands out a part of the state while the function works.
    pub(super) early: bool,
}

/// The progress of a move.
#[derive(Debug, Default)]
pub(super) struct Transfer {
    /// At the source: the function is in PRE_COPY, and has handed out so many bytes.
    given: Option<u64>,
    /// At the destination: the early data. It is kept for a second attempt.
    taken: Vec<u8>,
    /// At the destination: the function is in RESUMING, and has all of `taken`.
    resuming: bool,
}

impl Transfer {
    /// A reset ends all states of a migration.
    pub(super) fn reset(&mut self) {
        (self.given, self.resuming) = (None, false);
    }
}

/// The part of [`Host`](super::host::Host) that a migration needs.
pub(super) trait MigrationHost {
    /// Returns what the driver can do.
    fn abilities(&self) -> io::Result<Abilities>;

    /// Returns the function's own file, if it was opened by that one (iommufd).
    fn own_file(&self) -> Option<PathBuf>;

    /// Enters a state of `enum vfio_device_mig_state`.
    fn set_state(&self, state: u32) -> io::Result<()>;

    /// Returns how many bytes of early data are left for now.
    fn early_left(&self) -> io::Result<u64>;

    /// Reads the next bytes of the function's data; none at its end.
    fn read_data(&self, data: &mut [u8]) -> io::Result<usize>;

    /// Writes the next bytes of the function's data.
    fn write_data(&self, data: &[u8]) -> io::Result<()>;

    /// From now on, the driver logs the pages of guest RAM that the function writes.
    fn start_log(&self) -> io::Result<()>;

    /// Ends the log.
    fn stop_log(&self) -> io::Result<()>;

    /// Returns the pages that the function has written since the last call: address and length.
    fn take_log(&self) -> io::Result<Vec<(u64, u64)>>;
}

impl MigrationHost for HostDevice {
    fn abilities(&self) -> io::Result<Abilities> {
        let flags = self.device().query_migration_support().map_err(plain)?;
        let has = |flag: u32| flags.is_some_and(|flags| flags & u64::from(flag) != 0);
        Ok(Abilities {
            moves: has(VFIO_MIGRATION_STOP_COPY),
            logs: uapi::has_log(self.device())?,
            early: has(VFIO_MIGRATION_PRE_COPY),
        })
    }

    fn own_file(&self) -> Option<PathBuf> {
        self.find_own_file()
    }

    fn early_left(&self) -> io::Result<u64> {
        let left = self.device().mig_get_precopy_info().map_err(plain)?;
        Ok(left.initial_bytes.saturating_add(left.dirty_bytes))
    }

    fn set_state(&self, state: u32) -> io::Result<()> {
        self.device().set_migration_state(state).map_err(plain)
    }

    fn read_data(&self, data: &mut [u8]) -> io::Result<usize> {
        self.device().read_migration_data(data).map_err(plain)
    }

    fn write_data(&self, data: &[u8]) -> io::Result<()> {
        self.device().write_migration_data(data).map_err(plain)
    }

    fn start_log(&self) -> io::Result<()> {
        let ranges = self
            .ram()
            .map(|(iova, length)| DmaLoggingRange { iova, length });
        let ranges: Vec<DmaLoggingRange> = ranges.collect();
        let unit = self
            .device()
            .start_dma_logging(PAGE, &ranges)
            .map_err(plain)?;
        tracing::debug!(unit, "the driver logs the function's writes");
        Ok(())
    }

    fn stop_log(&self) -> io::Result<()> {
        self.device().stop_dma_logging().map_err(plain)
    }

    fn take_log(&self) -> io::Result<Vec<(u64, u64)>> {
        let mut written = Vec::new();
        for (start, len) in self.ram() {
            let (mut iova, mut left) = (start, len);
            while left > 0 {
                let length = left.min(REPORT);
                let range = DmaLoggingRange { iova, length };
                let bitmap = self.device().report_dma_logging(range, PAGE);
                append_pages(iova, &bitmap.map_err(plain)?, &mut written);
                (iova, left) = (iova.saturating_add(length), left - length);
            }
        }
        Ok(written)
    }
}

/// Returns the cause of an error of the crate, if it is a system call's.
fn plain(error: VfioError) -> io::Error {
    match error {
        VfioError::VfioDeviceFeature(error) | VfioError::VfioMigGetPrecopyInfo(error) => {
            io::Error::from_raw_os_error(error.errno())
        }
        VfioError::VfioMigrationDataIo(error) => error,
        other => io::Error::other(other),
    }
}

/// Appends the pages of a bitmap that begins at `start`; adjacent ones become one range.
fn append_pages(start: u64, bitmap: &[u64], to: &mut Vec<(u64, u64)>) {
    let words = (0_u64..).zip(bitmap).filter(|(_, word)| **word != 0);
    for (index, word) in words {
        for bit in (0..64).filter(|bit| word >> bit & 1 != 0) {
            let page = start.saturating_add((index * 64 + bit) * PAGE);
            match to.last_mut() {
                Some((first, len)) if first.saturating_add(*len) == page => *len += PAGE,
                _ => to.push((page, PAGE)),
            }
        }
    }
}

/// The properties of a function on which its driver in the guest can rely.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionView {
    /// Configuration space after a reset.
    pub config: Vec<u8>,
    /// Sizes of the BARs, by index.
    pub sizes: Vec<u64>,
}

impl FunctionView {
    /// The bytes of a property, and its name.
    fn properties(&self) -> [(&'static str, &[u8]); 4] {
        let bytes = |range| self.config.get(range).unwrap_or_default();
        [
            ("vendor and device", bytes(0x00..0x04)),
            ("class and revision", bytes(0x08..0x0c)),
            ("subsystem", bytes(0x2c..0x30)),
            ("BARs or capabilities", self.config.as_slice()),
        ]
    }

    /// Returns the first difference from another function.
    fn difference(&self, other: &Self) -> Option<&'static str> {
        let pairs = self.properties().into_iter().zip(other.properties());
        let mut pairs = pairs.map(|((name, ours), (_, theirs))| (name, ours == theirs));
        let different = pairs.find(|(_, same)| !same).map(|(name, _)| name);
        different.or((self.sizes != other.sizes).then_some("sizes of BARs"))
    }
}

/// The saved state of a function, from a file or another host and not trusted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfioState {
    /// The guest's configuration space.
    pub config_space: ConfigSpaceState,
    /// The guest's MSI-X table.
    pub msix: MsixState,
    /// Bytes of early data that precede the data.
    pub early: u64,
    /// The data of the function's driver.
    #[serde(with = "as_bytes")]
    pub data: Vec<u8>,
}

/// Bytes at once: serde takes one after the other, while the guest is stopped.
mod as_bytes {
    use std::fmt;

    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(data: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(data)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u8>, D::Error> {
        struct Bytes;

        impl Visitor<'_> for Bytes {
            type Value = Vec<u8>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }
        }

        deserializer.deserialize_bytes(Bytes)
    }
}

impl VfioPciDevice {
    /// Checks that the function can be saved, and can take a saved state.
    ///
    /// # Errors
    /// Its driver cannot move its state, or it is behind the guest's IOMMU.
    pub fn ensure_savable(&self) -> Result<(), Error> {
        if self.translation.is_some() {
            // The log of a migration has addresses of the guest's IOMMU.
            return Err(Error::other(
                "it is behind the guest's IOMMU: leave out iommu=on",
            ));
        }
        if self.state.lock().unreset {
            return Err(Error::other("its last reset has failed: reset it"));
        }
        self.ensure(self.abilities.moves, "cannot move the state of a function")
    }

    /// Checks that the function can move while its guest runs.
    ///
    /// # Errors
    /// As [`VfioPciDevice::ensure_savable`], or its driver does not log what it writes.
    pub fn ensure_movable(&self) -> Result<(), Error> {
        self.ensure_savable()?;
        let missing = "does not log the pages that a function writes";
        self.ensure(self.abilities.logs, missing)
    }

    /// Checks that another program in this process can open the function by its path. It may have
    /// come as a descriptor.
    ///
    /// # Errors
    /// The process has no access.
    pub fn ensure_reopens(&self) -> Result<(), Error> {
        let Some(path) = self.host.own_file() else {
            return Ok(());
        };
        // The file can be open twice. VFIO refuses only a second one that is bound to iommufd.
        let opened = File::options().read(true).write(true).open(&path);
        opened.map(drop).map_err(|error| {
            Error::other(format!(
                "this process cannot open {} again ({error}): give it access",
                path.display()
            ))
        })
    }

    fn ensure(&self, able: bool, missing: &str) -> Result<(), Error> {
        if able {
            return Ok(());
        }
        let driver = &self.driver;
        Err(Error::other(format!("its driver {driver} {missing}")))
    }

    /// Returns the properties on which the guest relies.
    #[must_use]
    pub fn view(&self) -> FunctionView {
        let mut space = self.state.lock().config.space.clone();
        space.reset();
        FunctionView {
            config: space.save().bytes,
            sizes: self.sizes.to_vec(),
        }
    }

    /// Checks that the guest can take this function for the one of this description.
    ///
    /// # Errors
    /// Names the difference.
    pub fn compare(&self, view: &FunctionView) -> Result<(), Error> {
        match self.view().difference(view) {
            Some(difference) => Err(Error::other(format!("its {difference} differ"))),
            None => Ok(()),
        }
    }

    /// Has the function's writes logged, or ends that. From then on, [`VfioPciDevice::read_early`]
    /// has data if the driver offers some.
    ///
    /// # Errors
    /// The driver refuses it.
    pub fn log_writes(&self, on: bool) -> Result<(), Error> {
        let mut state = self.state.lock();
        if on {
            // It may not have left PRE_COPY before.
            self.run(&mut state);
            if state.stopped {
                return Err(Error::other("the function does not run: reset it"));
            }
        } else if state.transfer.given.take().is_some() {
            // If it stays in PRE_COPY, an alarm lasts until its reset. The next move tries again.
            state.stopped = true;
            self.run(&mut state);
        }
        // A log that could not be ended covers more than the new one.
        if state.logging != on {
            let done = if on {
                self.host.start_log()
            } else {
                self.host.stop_log()
            };
            done.map_err(Error::context(
                "the driver cannot log what the function writes",
            ))?;
            state.logging = on;
        }
        if on && self.abilities.early && state.transfer.given.is_none() {
            let entered = self.host.set_state(PRE_COPY);
            entered.map_err(Error::context("the driver does not begin the transfer"))?;
            state.transfer.given = Some(0);
        }
        Ok(())
    }

    /// Bytes of early data that were read so far.
    #[cfg(test)]
    fn early(&self) -> u64 {
        self.state.lock().transfer.given.unwrap_or(0)
    }

    /// Bytes of early data that it has got so far.
    #[must_use]
    pub fn early_taken(&self) -> usize {
        self.state.lock().transfer.taken.len()
    }

    /// Returns the next early data of the function, at most `max` bytes; none if it has none now.
    ///
    /// # Errors
    /// The driver does not return it.
    pub fn read_early(&self, max: usize) -> Result<Vec<u8>, Error> {
        let failed = || Error::context("the driver does not return the early state");
        let mut state = self.state.lock();
        let Some(given) = &mut state.transfer.given else {
            return Ok(Vec::new());
        };
        if self.host.early_left().map_err(failed())? == 0 {
            return Ok(Vec::new());
        }
        let mut data = vec![0; max.min(CHUNK)];
        let read = match self.host.read_data(&mut data) {
            Ok(read) => read,
            // The estimate was too high.
            Err(error) if error.raw_os_error() == Some(libc::ENOMSG) => 0,
            Err(error) => return Err(failed()(error)),
        };
        data.truncate(read);
        *given = given.saturating_add(u64::try_from(read).unwrap_or(u64::MAX));
        Ok(data)
    }

    /// Gives early data to the function's driver.
    ///
    /// # Errors
    /// The driver refuses it, or it would be more than `max` bytes. The function must be reset.
    pub fn load_early(&self, data: &[u8], max: usize) -> Result<(), Error> {
        let mut state = self.state.lock();
        let state = &mut *state;
        if data.len() > max.saturating_sub(state.transfer.taken.len()) {
            return Err(Error::other(format!(
                "the early state has more than {max} bytes"
            )));
        }
        self.resume_transfer(state)?;
        self.host.write_data(data).map_err(refused())?;
        state.transfer.taken.extend_from_slice(data);
        Ok(())
    }

    /// Enters RESUMING, unless that is done, and writes all early data.
    fn resume_transfer(&self, state: &mut State) -> Result<(), Error> {
        if state.transfer.resuming {
            return Ok(());
        }
        // From here on only a reset makes it run without a guest.
        (state.touched, state.stopped) = (true, true);
        self.host.set_state(RESUMING).map_err(refused())?;
        for chunk in state.transfer.taken.chunks(CHUNK) {
            self.host.write_data(chunk).map_err(refused())?;
        }
        state.transfer.resuming = true;
        Ok(())
    }

    /// Returns the pages that the function has written since the last call: guest-physical address
    /// and length.
    ///
    /// # Errors
    /// The driver does not report them, or there is no log.
    pub fn take_log(&self) -> Result<Vec<(u64, u64)>, Error> {
        let taken = self.host.take_log();
        taken.map_err(Error::context(
            "the driver does not report what the function has written",
        ))
    }

    /// Stops the function and returns its state, whose data has at most `max` bytes. The vCPUs are
    /// parked.
    ///
    /// # Errors
    /// The driver refuses a step, or has more data. The function runs.
    pub fn save(&self, max: usize) -> Result<VfioState, Error> {
        let mut state = self.state.lock();
        if state.stopped || state.unreset {
            return Err(Error::other(
                "the function is saved already, does not run, or was not reset: reset it",
            ));
        }
        state.stopped = true;
        let early = state.transfer.given.take().unwrap_or(0);
        match self.read_all(max) {
            Ok(data) => Ok(VfioState {
                config_space: state.config.space.save(),
                // Now that it is stopped, the last trigger is in its eventfd.
                msix: state.msix.save(),
                early,
                data,
            }),
            Err(error) => {
                self.run(&mut state);
                Err(error)
            }
        }
    }

    /// Lets a saved function run as before. If that fails, the alarm stays until its next reset.
    pub fn resume(&self) {
        self.run(&mut self.state.lock());
    }

    fn run(&self, state: &mut State) {
        if !state.stopped {
            return;
        }
        let running = self.host.set_state(RUNNING);
        state.stopped = running.is_err();
        if let Err(error) = running {
            tracing::error!(device = %self.id, %error, "the function does not resume: reset it");
            self.report_failure();
        }
    }

    fn read_all(&self, max: usize) -> Result<Vec<u8>, Error> {
        let stopped = self.host.set_state(STOP_COPY);
        stopped.map_err(Error::context("the driver does not stop the function"))?;
        let mut data = Vec::new();
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = self.host.read_data(&mut chunk);
            let read = read.map_err(Error::context("the driver does not return the state"))?;
            if read == 0 {
                break;
            }
            if read > max.saturating_sub(data.len()) {
                return Err(Error::other(format!(
                    "the function's state has more than {max} bytes"
                )));
            }
            data.extend_from_slice(chunk.get(..read).unwrap_or_default());
        }
        let ended = self.host.set_state(STOP);
        ended.map_err(Error::context("the driver does not end the transfer"))?;
        Ok(data)
    }

    /// Returns the registers of a state, if it is this function's.
    fn registers(&self, state: &State, saved: &VfioState) -> Result<ConfigSpace, Error> {
        let space = state.config.space.restored(&saved.config_space);
        let space = space.map_err(Error::context("cannot restore PCI configuration space"))?;
        let msix = state.msix.check(&saved.msix);
        msix.map_err(Error::context("cannot restore MSI-X"))?;
        Ok(space)
    }

    /// Gives a stopped state to the function's driver, which checks it. The function does not run
    /// until [`VfioPciDevice::start`].
    ///
    /// # Errors
    /// It is the state of another function, or the driver refuses it. The function must be reset.
    pub fn load(&self, saved: &VfioState) -> Result<(), Error> {
        let mut state = self.state.lock();
        let state = &mut *state;
        self.registers(state, saved)?;
        if saved.early == 0 && !state.transfer.taken.is_empty() {
            // The function was reset at the source after it had handed them out.
            state.transfer.taken.clear();
            reset(&*self.host, || false).map_err(refused())?;
            state.transfer.reset();
        }
        if u64::try_from(state.transfer.taken.len()) != Ok(saved.early) {
            return Err(Error::other("a part of the function's early state is lost"));
        }
        self.resume_transfer(state)?;
        for chunk in saved.data.chunks(CHUNK) {
            self.host.write_data(chunk).map_err(refused())?;
        }
        // The driver checks the whole state here.
        state.transfer.resuming = false;
        self.host.set_state(STOP).map_err(refused())
    }

    /// Runs the function with the state that it has loaded.
    ///
    /// # Errors
    /// It has no state, or the host refuses a step. The function must be reset.
    pub fn start(&self, saved: &VfioState) -> Result<(), Error> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let space = self.registers(state, saved)?;
        if !state.stopped {
            return Err(Error::other("the function has no state"));
        }
        state.config.space = space;
        // It is stopped, so it does not write yet.
        let command = state.config.space.read_u16(COMMAND) & state.allowed();
        let written = self
            .host
            .write(CONFIG, COMMAND.into(), &command.to_le_bytes());
        written.map_err(Error::context(
            "the host does not enable its memory and DMA",
        ))?;
        let control = state.config.space.read_u16(state.config.msix_control);
        let restored = state.msix.restore(&saved.msix, control);
        restored.map_err(Error::context("cannot restore MSI-X"))?;
        state.interrupts.update(&*self.host, &state.msix);
        let wanted = state.msix.unmasked().map_or(0, |unmasked| unmasked.max(1));
        if state.interrupts.connected() < wanted {
            return Err(Error::other("the host does not connect its vectors"));
        }
        let running = self.host.set_state(RUNNING);
        running.map_err(Error::context("the driver does not start the function"))?;
        state.stopped = false;
        state.transfer = Transfer::default();
        // A trigger may have been lost while the guest moved.
        for vector in (0..u16::MAX).take(wanted) {
            state.msix.signal(vector);
        }
        Ok(())
    }
}

/// For `map_err` of the destination's steps.
fn refused() -> impl FnOnce(io::Error) -> Error {
    Error::context("the driver refuses the function's state")
}

#[cfg(test)]
mod tests;
