//! Keeps a NIC that this process has created. The process that serves a software NIC is started
//! again if it was killed, and continued if it was stopped.

use std::thread;
use std::time::Duration;

use bellhop_common::error::Error;
use vdpa::causes::in_one_line;
use vdpa_mgmt::nic::{LockedStore, MadeNic, Nics, RemoveError, State, Store, StoreError};

/// The interval of checks for signals, and for users of the device.
const PAUSE: Duration = Duration::from_millis(100);
/// The interval of attempts to start the process of the NIC after one that failed.
const RETRY: Duration = Duration::from_secs(1);

/// Keeps a NIC running until it is deleted.
pub(crate) struct Keeper<'a> {
    nics: &'a Nics,
    /// Its record when this process last read it.
    nic: MadeNic,
    /// The last failure. Each attempt may fail for the same reason.
    failure: String,
}

impl<'a> Keeper<'a> {
    pub(crate) fn new(nics: &'a Nics, nic: MadeNic) -> Self {
        Self {
            nics,
            nic,
            failure: String::new(),
        }
    }

    /// Repairs the NIC if necessary. Returns the pause before the next look. `None`: another
    /// process has deleted the NIC.
    pub(crate) fn look(&mut self) -> Result<Option<Duration>, Error> {
        if !self.nic.needs_repair() && self.exists() {
            self.failure.clear();
            return Ok(Some(PAUSE));
        }
        match self.locked() {
            Ok(None) => return Ok(None),
            Ok(Some(mut store)) => {
                check_complete(&self.nic)?;
                self.repair(&mut store);
            }
            Err(error) => self.report(&error),
        }
        Ok(Some(RETRY))
    }

    /// Whether the NIC has its record, read without the lock.
    fn exists(&self) -> bool {
        let store = Store::open_default();
        let nic = store.and_then(|store| store.nic(self.nic.name()));
        nic.is_ok_and(|nic| nic.is_same(&self.nic))
    }

    /// Locks the records, and reads that of the NIC. `None`: another process has deleted the NIC.
    fn locked(&mut self) -> Result<Option<LockedStore>, Error> {
        let store = Store::open_default()?.lock()?;
        match store.nic(self.nic.name()) {
            Err(StoreError::NoNic(_)) => return Ok(None),
            // Another NIC of the same name.
            Ok(nic) if !nic.is_same(&self.nic) => return Ok(None),
            nic => self.nic = nic?,
        }
        Ok(Some(store))
    }

    fn repair(&mut self, store: &mut LockedStore) {
        match self.nics.repair(&mut self.nic, store) {
            Ok(is_repaired) => {
                if is_repaired {
                    tracing::warn!(nic = self.nic.name(), "repaired the NIC");
                }
                self.failure.clear();
            }
            Err(error) => self.report(&error),
        }
    }

    fn report(&mut self, error: &(dyn std::error::Error + 'static)) {
        let text = in_one_line(error);
        if self.failure != text {
            tracing::error!(nic = self.nic.name(), error, "cannot repair the NIC");
            self.failure = text;
        }
    }

    /// Deletes the NIC once no process has it open. The command keeps the NIC running until its
    /// user ends.
    pub(crate) fn delete(&mut self) -> Result<(), Error> {
        let mut is_reported = false;
        while let Some(mut store) = self.locked()? {
            match self.nics.remove(&self.nic, &mut store) {
                Err(RemoveError::InUse(error)) => {
                    if !is_reported {
                        tracing::warn!(%error, "the NIC waits for the end of its use");
                    }
                    is_reported = true;
                    self.repair(&mut store);
                }
                removed => return Ok(removed?),
            }
            drop(store);
            thread::sleep(PAUSE);
        }
        tracing::warn!("another process has deleted the NIC");
        Ok(())
    }
}

/// Fails if another process has begun to delete the NIC, and has not finished. This process has the
/// lock, so the other one has ended or failed.
fn check_complete(nic: &MadeNic) -> Result<(), Error> {
    if nic.state() != State::Removing {
        return Ok(());
    }
    let name = nic.name();
    Err(Error::failed(format!(
        "another process has deleted a part of the NIC {name}; `bellhop nic delete {name}` deletes \
         the rest"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_that_is_deleted_in_part_ends_the_command() {
        let nic = |state| {
            let record = serde_json::json!({
                "version": 1, "name": "sw0", "from": "software", "state": state, "steps": [],
            });
            serde_json::from_value::<MadeNic>(record).unwrap()
        };
        check_complete(&nic("made")).unwrap();
        let error = check_complete(&nic("removing")).unwrap_err().to_string();
        assert!(error.contains("`bellhop nic delete sw0`"), "{error}");
    }
}
