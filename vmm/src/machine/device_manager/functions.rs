//! Saves the functions of the host, and moves their states to other functions.
//!
//! Owns which state belongs to which function, and the limit of all of them. It must not know what
//! a state contains, nor when the machine stops.

use devices::pci::Slot;
use devices::vfio::{FunctionView, VfioPciDevice};

use super::super::error::{NotMovable, RequestError, SnapshotError};
use super::super::saved::{EARLY_MAX, EarlyState, FUNCTIONS_MAX, GuestFunction, SavedFunction};
use super::DeviceManager;
use super::attached::Attached;

/// Bytes of early data in one message. With the name they fit into a frame.
const EARLY_CHUNK: usize = 512 << 10;

impl DeviceManager {
    fn vfio(&self) -> impl Iterator<Item = (&str, Slot, &VfioPciDevice)> {
        let entries = self.entries.values();
        entries.filter_map(|entry| match &entry.device {
            Attached::Virtio(_) => None,
            Attached::Vfio(device) => Some((entry.id.as_str(), entry.slot, &**device)),
        })
    }

    /// Checks that each function can move, except those that `leaves` names.
    ///
    /// # Errors
    /// [`NotMovable::PassedThrough`] names one that cannot.
    pub(in super::super) fn ensure_functions_movable(
        &self,
        leaves: impl Fn(&str) -> bool,
    ) -> Result<(), NotMovable> {
        for (id, _, device) in self.vfio().filter(|(id, ..)| !leaves(id)) {
            device
                .ensure_movable()
                .map_err(|why| NotMovable::PassedThrough {
                    id: id.to_owned(),
                    why: why.to_string(),
                })?;
        }
        Ok(())
    }

    /// Checks that each function can be saved.
    ///
    /// # Errors
    /// [`RequestError::NotSavable`] names one that cannot.
    pub(in super::super) fn ensure_functions_savable(&self) -> Result<(), RequestError> {
        self.ensure_functions(VfioPciDevice::ensure_savable)
    }

    /// Checks that each function can be saved, and that another program of this process can open
    /// it.
    ///
    /// # Errors
    /// [`RequestError::NotSavable`] names one that cannot.
    pub(in super::super) fn ensure_functions_continue(&self) -> Result<(), RequestError> {
        self.ensure_functions(|device| {
            device.ensure_savable()?;
            device.ensure_reopens()
        })
    }

    fn ensure_functions(
        &self,
        able: impl Fn(&VfioPciDevice) -> Result<(), devices::Error>,
    ) -> Result<(), RequestError> {
        for (id, _, device) in self.vfio() {
            able(device).map_err(|why| RequestError::NotSavable {
                id: id.to_owned(),
                why: why.to_string(),
            })?;
        }
        Ok(())
    }

    /// Returns the functions as the guest sees them.
    pub(in super::super) fn function_views(&self) -> Vec<GuestFunction> {
        let view = |(id, slot, device): (&str, Slot, &VfioPciDevice)| GuestFunction {
            id: id.to_owned(),
            slot: slot.number(),
            view: device.view(),
        };
        self.vfio().map(view).collect()
    }

    /// Checks that the function of this name can replace another one, and is `able`. `None`: there
    /// is none.
    pub(in super::super) fn adopt_function(
        &self,
        id: &str,
        view: &FunctionView,
        able: impl Fn(&VfioPciDevice) -> Result<(), devices::Error>,
    ) -> Option<Result<(), devices::Error>> {
        let (_, _, device) = self.vfio().find(|(other, ..)| *other == id)?;
        Some(device.compare(view).and_then(|()| able(device)))
    }

    /// Checks that the functions can replace those of a snapshot.
    ///
    /// # Errors
    /// [`SnapshotError::OtherFunction`] names one that cannot.
    pub(in super::super) fn adopt_functions(
        &self,
        saved: &[GuestFunction],
    ) -> Result<(), SnapshotError> {
        for GuestFunction { id, view, .. } in saved {
            self.adopt_function(id, view, VfioPciDevice::ensure_savable)
                .ok_or_else(|| SnapshotError::NoDevice(id.clone()))?
                .map_err(|why| SnapshotError::OtherFunction {
                    id: id.clone(),
                    why: why.to_string(),
                })?;
        }
        Ok(())
    }

    /// Returns the next early data of a function, as a message, after `sent` bytes of these.
    /// `None`: no function has some now.
    ///
    /// # Errors
    /// A driver does not return it.
    pub(in super::super) fn early_state(
        &self,
        sent: usize,
    ) -> Result<Option<Vec<u8>>, RequestError> {
        let room = EARLY_MAX.saturating_sub(sent).min(EARLY_CHUNK);
        if room == 0 {
            return Ok(None);
        }
        for (id, _, device) in self.vfio() {
            let failed = |source| RequestError::Save {
                id: id.to_owned(),
                source,
            };
            let data = device.read_early(room).map_err(failed)?;
            if !data.is_empty() {
                let state = EarlyState { id, data: &data };
                let state = postcard::to_allocvec(&state).map_err(SnapshotError::Early)?;
                return Ok(Some(state));
            }
        }
        Ok(None)
    }

    /// Gives early data, as [`DeviceManager::early_state`] returned it, to its function.
    ///
    /// # Errors
    /// [`SnapshotError`]: it is malformed, there is no such function, or its driver refuses it.
    pub(in super::super) fn load_early(&self, state: &[u8]) -> Result<(), SnapshotError> {
        let EarlyState { id, data } = postcard::from_bytes(state).map_err(SnapshotError::Early)?;
        let found = self.vfio().find(|(other, ..)| *other == id);
        let (_, _, device) = found.ok_or_else(|| SnapshotError::NoDevice(id.to_owned()))?;
        let others = self.vfio().filter(|(other, ..)| *other != id);
        let others: usize = others.map(|(.., device)| device.early_taken()).sum();
        device
            .load_early(data, EARLY_MAX.saturating_sub(others))
            .map_err(|source| SnapshotError::Device {
                id: id.to_owned(),
                source,
            })
    }

    /// Stops all functions and returns their states. The vCPUs are parked.
    ///
    /// # Errors
    /// One cannot be saved; all run.
    pub(in super::super) fn save_functions(&self) -> Result<Vec<SavedFunction>, RequestError> {
        let mut saved = Vec::new();
        let mut left = FUNCTIONS_MAX;
        for (id, slot, device) in self.vfio() {
            match device.save(left) {
                Ok(state) => {
                    left = left.saturating_sub(state.data.len());
                    saved.push(SavedFunction {
                        id: id.to_owned(),
                        slot: slot.number(),
                        state,
                    });
                }
                Err(source) => {
                    self.resume_functions();
                    let id = id.to_owned();
                    return Err(RequestError::Save { id, source });
                }
            }
        }
        Ok(saved)
    }

    /// Lets all saved functions run as before.
    pub(in super::super) fn resume_functions(&self) {
        for (_, _, device) in self.vfio() {
            device.resume();
        }
    }

    /// Gives the states to the functions of a machine that was just built for them. They stay
    /// stopped.
    ///
    /// # Errors
    /// [`SnapshotError`]: the functions are not exactly those that were saved, or one rejects its
    /// state.
    pub(in super::super) fn load_functions(
        &self,
        saved: &[SavedFunction],
    ) -> Result<(), SnapshotError> {
        if let Some((id, ..)) = self
            .vfio()
            .find(|(id, ..)| saved.iter().all(|function| function.id != *id))
        {
            return Err(SnapshotError::DeviceNotSaved(id.to_owned()));
        }
        self.each_saved(saved, |device, function| device.load(&function.state))
    }

    /// Runs the functions with the states that they have loaded.
    ///
    /// # Errors
    /// As [`DeviceManager::load_functions`].
    pub(in super::super) fn start_functions(
        &self,
        saved: &[SavedFunction],
    ) -> Result<(), SnapshotError> {
        self.each_saved(saved, |device, function| device.start(&function.state))
    }

    fn each_saved(
        &self,
        saved: &[SavedFunction],
        work: impl Fn(&VfioPciDevice, &SavedFunction) -> Result<(), devices::Error>,
    ) -> Result<(), SnapshotError> {
        for function in saved {
            let id = function.id.clone();
            let Some((_, _, device)) = self.vfio().find(|(other, ..)| *other == id) else {
                return Err(SnapshotError::NoDevice(id));
            };
            work(device, function).map_err(|source| SnapshotError::Device { id, source })?;
        }
        Ok(())
    }

    /// Has the writes of all functions logged, or of none.
    ///
    /// # Errors
    /// Names the function whose driver refuses that.
    pub(super) fn log_functions(&self, on: bool) -> Result<(), RequestError> {
        let mut result = Ok(());
        for (id, _, device) in self.vfio() {
            let logged = device.log_writes(on);
            let id = id.to_owned();
            result = result.and(logged.map_err(|source| RequestError::DirtyLog { id, source }));
        }
        result
    }

    /// Returns what functions have written since the last call, while their writes are logged:
    /// guest-physical addresses and lengths in bytes.
    ///
    /// # Errors
    /// A driver does not report it.
    pub(in super::super) fn written_by_functions(&self) -> Result<Vec<(u64, u64)>, RequestError> {
        let mut written = Vec::new();
        for (id, _, device) in self.vfio() {
            let id = id.to_owned();
            let log = device.take_log();
            written.extend(log.map_err(|source| RequestError::DirtyLog { id, source })?);
        }
        Ok(written)
    }
}
