//! The vDPA devices of VMs' NICs: created, found by name, deleted.
//!
//! Owns the lock on the records of created NICs, and the order of its use.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use vdpa::causes::in_one_line;
use vdpa_mgmt::Connection;
use vdpa_mgmt::bus::Bus;
use vdpa_mgmt::nic::{self, Activity, LockedStore, MadeNic, NicRequest, Nics, State};
use vdpa_mgmt::{ClassConfig, DeviceConfig, ErrorKind, NetConfig};
use vmm::config::{DeviceSource, VdpaConfig};

use super::repairs::Failure;
use crate::error::{Error, HOST_FAILED, UNUSABLE};
use crate::machines::Machines;
use crate::machines::spec::{ExistingDevice, NicSource, NicSpec, OWNER, VmName, owned_by};
use crate::machines::steps::Host as _;

/// Keeps the record of a NIC, and reports its steps.
struct NicSteps<'a> {
    store: LockedStore,
    machines: &'a Machines,
    /// None: the NIC belongs to no VM.
    vm: Option<&'a VmName>,
}

impl NicSteps<'_> {
    fn at(&self, place: &dyn fmt::Display) {
        if let Some(vm) = self.vm {
            self.machines.at(vm, place);
        }
    }
}

impl nic::Observer for NicSteps<'_> {
    fn keep(&mut self, nic: &MadeNic) -> io::Result<()> {
        self.store.keep(nic)
    }

    fn progress(&mut self, progress: &nic::Progress<'_>) {
        match progress.activity {
            Activity::Begin(phase, what) => {
                tracing::debug!(nic = progress.name, "{phase} ({what})");
                self.at(&format_args!("{} begin {phase:?}", progress.name));
            }
            Activity::Undo(what) => {
                tracing::debug!(nic = progress.name, "undoing {what}");
                self.at(&format_args!("{} undo {what}", progress.name));
            }
            Activity::Leave(why) => tracing::warn!(nic = progress.name, "leaving {why}"),
            Activity::Wait(what) => tracing::debug!(nic = progress.name, "waiting for {what}"),
            Activity::End(_) => {}
        }
    }
}

impl Machines {
    /// The owner of a NIC's character device, to compare whether two NICs use the same device.
    pub(crate) fn device_of(&self, vm: &VmName, nic: &NicSpec) -> PathBuf {
        let path = self.character_device_of(vm, nic);
        let path = path.unwrap_or_else(|_| match nic.device(vm) {
            ExistingDevice::Name(name) => name.into(),
            ExistingDevice::Path(path) => path,
        });
        fs::canonicalize(&path).unwrap_or(path)
    }

    /// The records of NICs, locked against changes by others.
    fn nic_store(&self) -> Result<LockedStore, Error> {
        let store = nic::Store::open(&self.paths.nics()).and_then(nic::Store::lock);
        store.map_err(unread)
    }

    /// Deletes devices of VMs that no longer exist. `wanted` tells which devices belong to a VM.
    pub(crate) fn delete_orphaned_devices(
        &self,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(), Error> {
        let _one = self.nics.lock();
        let mut store = self.nic_store()?;
        let all = store.nics().map_err(unread)?;
        let strays = all.iter().filter(|nic| {
            nic.owner().is_some_and(|owner| owner.starts_with(OWNER)) && !wanted(nic.name())
        });
        let mut nics = None;
        for stray in strays {
            tracing::warn!(
                device = stray.name(),
                owner = stray.owner(),
                "deleting an orphaned device"
            );
            let nics = match &nics {
                Some(nics) => nics,
                None => nics.insert(Nics::open()?),
            };
            if let Err(error) = nics.remove(stray, &mut store) {
                tracing::error!(
                    device = stray.name(),
                    error = &error as &dyn std::error::Error,
                    "cannot delete an orphaned device"
                );
            }
        }
        Ok(())
    }

    /// The vDPA device of a NIC; none if it does not exist now.
    pub(crate) fn vdpa_device(&self, vm: &VmName, nic: &NicSpec) -> Option<String> {
        match nic.device(vm) {
            ExistingDevice::Name(name) => Some(name),
            ExistingDevice::Path(path) => device_at(&path),
        }
    }

    /// The records of created NICs by device name, without those that cannot be read.
    pub(crate) fn created_nics(&self) -> BTreeMap<String, MadeNic> {
        readable(&self.paths.nics())
            .map(|nic| (nic.name().to_owned(), nic))
            .collect()
    }

    /// The configuration that the vDPA device of a NIC reports; none if it is unknown.
    pub(crate) fn net_config(&self, vm: &VmName, nic: &NicSpec) -> Option<NetConfig> {
        let ExistingDevice::Name(name) = nic.device(vm) else {
            return None;
        };
        self.config_of(vm, &name)
    }

    /// The same for the device of this name.
    pub(in crate::machines) fn config_of(&self, vm: &VmName, name: &str) -> Option<NetConfig> {
        let config = Connection::open().and_then(|kernel| kernel.config(name));
        match config {
            Ok(DeviceConfig {
                class: ClassConfig::Net(net),
                ..
            }) => Some(net),
            Ok(_) => None,
            Err(error) => {
                tracing::debug!(%vm, device = name, %error, "cannot read a device's configuration");
                None
            }
        }
    }

    /// The configuration of a NIC for the VM, and its open device; `number` is the device's index
    /// among the passed descriptors.
    pub(super) fn vdpa(
        &self,
        vm: &VmName,
        nic: &NicSpec,
        number: u32,
    ) -> Result<(VdpaConfig, OwnedFd), Error> {
        let path = self.character_device_of(vm, nic)?;
        let mut options = fs::File::options();
        options.read(true).write(true);
        let device = match options.open(&path) {
            Ok(device) => device.into(),
            Err(source) => {
                let message = format!(
                    "cannot open {}: another process may have it open",
                    path.display()
                );
                return Err(Error::new(UNUSABLE, message).because(source));
            }
        };
        let backup = self.backup_path(vm, nic)?;
        Ok((nic.vdpa(DeviceSource::Number(number), backup), device))
    }

    /// The character device of a NIC's backup, as it is now, if the NIC has a backup.
    pub(in crate::machines) fn backup_path(
        &self,
        vm: &VmName,
        nic: &NicSpec,
    ) -> Result<Option<PathBuf>, Error> {
        let backup = nic.on_backup(vm);
        backup
            .map(|nic| self.character_device_of(vm, &nic))
            .transpose()
    }

    /// Checks that the host has the sources or devices of a NIC and its backup.
    pub(super) fn check_nic(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        let requests = [nic.request(vm), nic.backup_request(vm, None)];
        for request in requests.iter().flatten() {
            Nics::open()?.check_source(request)?;
        }
        let sources = [Some(nic.source()), nic.backup()];
        for source in sources.into_iter().flatten() {
            match source {
                NicSource::From(_) => {}
                NicSource::There(ExistingDevice::Name(name)) => drop(by_name(name)?),
                NicSource::There(ExistingDevice::Path(path)) => {
                    device_at(path).map(drop).ok_or_else(|| {
                        let shown = path.display();
                        let message = format!(
                            "{shown} is not a vhost-vdpa device; `bellhop dev show` lists them"
                        );
                        Error::new(UNUSABLE, message)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Creates a device for a VM's NIC, unless it exists.
    pub(super) fn make(&self, vm: &VmName, request: &NicRequest) -> Result<(), Error> {
        let _one = self.nics.lock();
        let store = self.nic_store()?;
        let mut others = store.nics().map_err(unread)?;
        let mut steps = NicSteps {
            store,
            machines: self,
            vm: Some(vm),
        };
        let nics = Nics::open()?;
        let is_ours = |other: &MadeNic| {
            other.name() == request.name && other.owner() == request.owner.as_deref()
        };
        if let Some(ours) = others.iter_mut().find(|other| is_ours(other)) {
            if ours.state() == State::Made && by_name(&request.name).is_ok() {
                nics.repair(ours, &mut steps.store)?;
                return Ok(());
            }
            nics.remove(ours, &mut steps)?;
        }
        others.retain(|other| !is_ours(other));
        nics.make(request, &others, &mut steps)?;
        Ok(())
    }

    /// Deletes a device that was created for a NIC of this VM. Does nothing if there is none, or
    /// another VM owns it.
    pub(super) fn delete_device(&self, vm: &VmName, device: &str) -> Result<(), Error> {
        let _one = self.nics.lock();
        let store = self.nic_store()?;
        let nic = match store.nic(device) {
            Err(nic::StoreError::NoNic(_)) => return Ok(()),
            nic => nic.map_err(unread)?,
        };
        let owner = format!("{OWNER}{vm}/");
        if !nic.owner().is_some_and(|is| is.starts_with(&owner)) {
            return Ok(());
        }
        let mut steps = NicSteps {
            store,
            machines: self,
            vm: Some(vm),
        };
        Nics::open()?.remove(&nic, &mut steps)?;
        Ok(())
    }

    /// Repairs software NICs: see [`Nics::repair`]. Attempts that fail become rarer.
    pub(crate) fn repair_nics(&self) {
        let mut failures = self.nics.lock();
        let mut former = std::mem::take(&mut *failures);
        for record in records(&self.paths.nics()) {
            let nic = match record {
                Ok(nic) if nic.needs_repair() => nic,
                Ok(_) => continue,
                Err(error) => {
                    let text = in_one_line(&error);
                    let last = former.remove(&text);
                    if last.is_none() {
                        log_unread(&error);
                    }
                    let failure = Failure::after(last.as_ref(), text.clone(), Instant::now());
                    failures.insert(text, failure);
                    continue;
                }
            };
            let failure = match former.remove(nic.name()) {
                Some(last) if last.pauses(Instant::now()) => Some(last),
                last => self.repair_nic(nic.name(), last.as_ref()),
            };
            failures.extend(failure.map(|failure| (nic.name().to_owned(), failure)));
        }
    }

    /// Repairs one NIC. Returns the failure, and logs it if its reason is new.
    fn repair_nic(&self, name: &str, last: Option<&Failure>) -> Option<Failure> {
        let error = match self.repair_locked(name) {
            Ok(is_repaired) => {
                if is_repaired {
                    tracing::warn!(nic = name, "repaired a NIC");
                }
                return None;
            }
            Err(error) => error,
        };
        let failure = Failure::after(last, in_one_line(&error), Instant::now());
        if failure.is_new(last) {
            let error = &error as &dyn std::error::Error;
            tracing::error!(nic = name, error, "cannot repair a NIC");
        }
        Some(failure)
    }

    /// Another process may have deleted the NIC until this one has the lock.
    fn repair_locked(&self, name: &str) -> Result<bool, Error> {
        let mut store = self.nic_store()?;
        let mut nic = match store.nic(name) {
            Err(nic::StoreError::NoNic(_)) => return Ok(false),
            nic => nic.map_err(unread)?,
        };
        Ok(Nics::open()?.repair(&mut nic, &mut store)?)
    }

    /// Creates a NIC that belongs to no VM.
    ///
    /// # Errors
    /// A step failed; those before it are undone.
    pub(crate) fn make_host_nic(&self, request: &NicRequest) -> Result<MadeNic, Error> {
        let _one = self.nics.lock();
        let store = self.nic_store()?;
        let others = store.nics().map_err(unread)?;
        let mut steps = NicSteps {
            store,
            machines: self,
            vm: None,
        };
        Ok(Nics::open()?.make(request, &others, &mut steps)?)
    }

    /// Deletes a NIC that belongs to no VM.
    ///
    /// # Errors
    /// It does not exist, belongs to a VM or is in use; or a step cannot be undone.
    pub(crate) fn remove_host_nic(&self, name: &str) -> Result<(), Error> {
        let _one = self.nics.lock();
        let store = self.nic_store()?;
        let nic = store.nic(name)?;
        if let Some((vm, id)) = nic.owner().and_then(owned_by) {
            let message = format!("{name} is NIC {id} of the virtual machine {vm}");
            let error = Error::conflict("in_use", message);
            return Err(error.hint("DELETE /v1/vms/{name}/nics/{id} removes it"));
        }
        let mut steps = NicSteps {
            store,
            machines: self,
            vm: None,
        };
        Nics::open()?.remove(&nic, &mut steps)?;
        Ok(())
    }

    /// The character device of a NIC, as it is now.
    pub(crate) fn character_device_of(&self, vm: &VmName, nic: &NicSpec) -> Result<PathBuf, Error> {
        match nic.device(vm) {
            ExistingDevice::Name(name) => by_name(&name),
            ExistingDevice::Path(path) => Ok(path),
        }
    }
}

/// The records of NICs in this directory.
fn records(directory: &Path) -> Vec<Result<MadeNic, nic::StoreError>> {
    let records = nic::Store::open(directory).and_then(|store| store.each());
    records.unwrap_or_else(|error| vec![Err(error)])
}

/// The same. One that cannot be read is logged, and affects no other.
fn readable(directory: &Path) -> impl Iterator<Item = MadeNic> {
    let records = records(directory).into_iter();
    records.filter_map(|record| record.inspect_err(log_unread).ok())
}

fn log_unread(error: &nic::StoreError) {
    let error: &dyn std::error::Error = error;
    tracing::error!(error, "cannot read a record of a NIC");
}

/// The error for records of NICs that cannot be used: always a failure of the host.
fn unread(error: nic::StoreError) -> Error {
    Error::transparent(HOST_FAILED, error)
}

/// The character device of the vDPA device of this name.
pub(in crate::machines) fn by_name(device: &str) -> Result<PathBuf, Error> {
    let found = Bus::default().device(device);
    let found = found.map_err(|error| Error::transparent(UNUSABLE, error))?;
    found.path().ok_or_else(|| {
        let message = format!(
            "{device} has no character device; `bellhop bind {device} vhost_vdpa` gives it one"
        );
        Error::new(UNUSABLE, message)
    })
}

/// Whether there is no vDPA device of this name. The kernel takes a device off the bus before it
/// waits for the processes that have it open.
pub(super) fn is_gone(device: &str) -> bool {
    let found = Bus::default().device(device);
    found.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// The vDPA device that has this character device.
fn device_at(path: &Path) -> Option<String> {
    let wanted = path.metadata().ok()?;
    if !wanted.file_type().is_char_device() {
        return None;
    }
    let mut devices = Bus::default().devices().ok()?.into_iter();
    let found = devices.find(|device| {
        let there = device.path().and_then(|path| path.metadata().ok());
        there.is_some_and(|there| there.rdev() == wanted.rdev())
    });
    found.map(|device| device.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_hides_no_other() {
        let directory = std::env::temp_dir().join(format!("bellhop-read-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        nic::Store::open(&directory).unwrap();
        let put = |name: &str, version| {
            let record = serde_json::json!({
                "version": version, "name": name, "from": "software", "state": "made", "steps": [],
            });
            fs::write(directory.join(format!("{name}.json")), record.to_string()).unwrap();
        };
        put("a", 1);
        put("b", 2);
        put("c", 1);
        let names: Vec<String> = readable(&directory)
            .map(|nic| nic.name().to_owned())
            .collect();
        assert_eq!(names, ["a", "c"]);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn other_files_are_no_device() {
        assert_eq!(device_at(Path::new("/dev/null")), None);
        assert_eq!(device_at(Path::new("/nowhere")), None);
    }

    #[test]
    fn an_invalid_name_is_no_proof_of_a_removal() {
        assert!(!is_gone("../x"));
    }
}
