//! Steps on the real host: directories, vDPA devices, processes, and VMs through their API.
//!
//! Owns all access of a step to the host.

pub(in crate::machines) mod functions;
mod nics;
pub(in crate::machines) mod repairs;

use std::fmt;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use axum::http::{Method, StatusCode};
use bellhop_api::machine::{
    MigrationRequest, NicChange, ReceiveConfig, RestoreRequest, SNAPSHOT_TIME, VmState, VmStatus,
    WantedState,
};
use devices::virtio::block::disk::Disk;
use vdpa_mgmt::pci::FormerDriver;
use vmm::boot::{self, BootSource};
use vmm::config::{DeviceSource, DiskConfig, VfioConfig, VmConfig};
use vmm::migration::connector;
use vmm::sandbox::cgroup::Limits;
use vmm::sandbox::namespaces::Access;

pub(in crate::machines) use self::nics::by_name;
use self::nics::is_gone;
use super::Machines;
use super::incoming::IncomingReport;
use super::outgoing::MigrationReport;
use super::process::{self, Identity, Process, Start};
use super::record::Record;
use super::sandbox::{self, files_of, files_to_send, paths_of};
use super::spec::{DeviceId, NicId, NicSpec, VmName, VmSpec};
use super::steps::{Host, NOT_ENDED, ProcessState, ProxiedResponse, SendRequest};
use super::supervisor::from_status;
use super::vmm::{MIGRATION, SOON, START, Vmm};
use crate::error::{Error, UNUSABLE};
use crate::logs;
use crate::peers::Peer;
use crate::remove::remove_any;
use crate::store::VMS;

/// The time limit for a process to listen.
const LISTEN: Duration = Duration::from_secs(20);
/// How long a starting daemon retries a process that does not listen.
const FIND: Duration = Duration::from_secs(2);
/// The time limit for a process to exit on request.
const GRACE: Duration = Duration::from_secs(10);
/// The interval of checks of a process.
const LOOK: Duration = Duration::from_millis(50);
/// The time limit for a guest to release a NIC or a disk.
const GIVE_UP: Duration = Duration::from_secs(5);
/// How many lines of a log an error has at most.
const SHOWN: usize = 20;
/// The maximum size of these lines in bytes.
const SHOWN_BYTES: usize = 2048;

impl Machines {
    /// The API of a VM.
    pub(super) fn api_of(&self, vm: &VmName) -> Vmm {
        Vmm::new(&self.paths.api_socket(vm))
    }

    /// The error for a process that exited before it ran the VM. The text has the end of its log.
    fn ended_early(&self, vm: &VmName, process: Option<&Process>) -> Error {
        let said = self.end_of_log(vm);
        let status = process.and_then(Process::reap).map(from_status);
        let end = status.map_or_else(|| "its process ended".to_owned(), |end| end.detail);
        Error::failed(format!(
            "cannot start the VM: {end}; the end of its log: {said}"
        ))
    }

    /// The error of a request to a process, or that of its end if that is the cause.
    fn explain_end(&self, vm: &VmName, identity: Identity, error: Error) -> Error {
        if error.answer().0 != StatusCode::BAD_GATEWAY {
            return error;
        }
        match Process::open(identity) {
            Ok(Some(process)) if matches!(process.wait(LOOK), Ok(true)) => {
                self.ended_early(vm, Some(&process))
            }
            _ => error,
        }
    }

    fn end_of_log(&self, vm: &VmName) -> String {
        let tail = logs::tail(&self.paths.log(vm), SHOWN);
        let tail = tail.map(|part| part.bytes).unwrap_or_default();
        let begin = tail.len().saturating_sub(SHOWN_BYTES);
        let text = String::from_utf8_lossy(tail.get(begin..).unwrap_or_default());
        match text.trim() {
            "" => "it wrote no log".to_owned(),
            text => text.to_owned(),
        }
    }

    /// Waits until the process answers.
    fn await_listening(&self, vm: &VmName, process: &Process) -> Result<VmStatus, Error> {
        let start = Instant::now();
        loop {
            match self.runtime.block_on(self.api_of(vm).status()) {
                Ok(status) => return Ok(status),
                Err(error) if error.is_not_listening() && start.elapsed() < LISTEN => {}
                Err(error) => return Err(error),
            }
            if process.wait(Duration::from_millis(5)).map_err(unended)? {
                return Err(self.ended_early(vm, Some(process)));
            }
        }
    }

    /// Waits until the started process listens.
    fn await_started(&self, vm: &VmName, identity: Identity) -> Result<(), Error> {
        let process = Process::open(identity).map_err(unended)?;
        let process = process.ok_or_else(|| self.ended_early(vm, None))?;
        let status = self.await_listening(vm, &process)?;
        if status.pid == identity.pid {
            Ok(())
        } else {
            Err(Error::failed(format!(
                "another process (pid {}) answers instead of the VM's (pid {})",
                status.pid, identity.pid
            )))
        }
    }

    /// The answer of a VM's process, if this very process answers; otherwise `silent`.
    fn asked<T>(
        &self,
        vm: &VmName,
        identity: Identity,
        silent: T,
        ask: impl AsyncFnOnce(&Vmm) -> T,
    ) -> T {
        let vmm = self.api_of(vm);
        self.runtime.block_on(async {
            match vmm.handshake().await {
                Ok(who) if who.pid == identity.pid => ask(&vmm).await,
                Ok(_) | Err(_) => silent,
            }
        })
    }

    /// Requests the running VM to release the device at `path`. Returns whether it is gone;
    /// `is_gone` decides that from the VM's status.
    fn give_up(
        &self,
        vm: &VmName,
        path: &str,
        is_gone: impl Fn(&VmStatus) -> bool,
    ) -> Result<bool, Error> {
        let vmm = self.api_of(vm);
        self.runtime.block_on(async {
            match vmm.ask(Method::DELETE, path, None::<&()>, SOON).await {
                Err(error) if error.is_refused(StatusCode::NOT_FOUND) => return Ok(true),
                asked => asked?,
            };
            let start = Instant::now();
            let mut status = vmm.status().await?;
            loop {
                if is_gone(&status) {
                    return Ok(true);
                }
                let left = GIVE_UP.saturating_sub(start.elapsed());
                if left.is_zero() {
                    return Ok(false);
                }
                match tokio::time::timeout(left, vmm.watch(status.generation)).await {
                    Ok(changed) => status = changed?,
                    Err(_) => return Ok(false),
                }
            }
        })
    }

    /// The files that a VM's process opens by path.
    fn files_to_run(&self, vm: &VmName, record: &Record) -> Result<sandbox::Files, Error> {
        // Disks and functions are those of the spec. A file that is shown twice is mounted and
        // unmounted again.
        let mut files = files_of(record.spec.machine());
        for file in files_of(record.running()) {
            if !files.contains(&file) {
                files.push(file);
            }
        }
        for nic in record.nics_now(vm) {
            files.extend(self.devices_to_open(vm, &nic)?);
        }
        files.extend(functions::files(&record.spec.machine().vfio)?);
        Ok(files)
    }

    /// The VM's configuration, and its opened devices in the order in which the configuration names
    /// them.
    fn configuration(
        &self,
        vm: &VmName,
        record: &Record,
    ) -> Result<(VmConfig, Vec<OwnedFd>), Error> {
        let mut config = record.spec.machine().clone();
        let mut devices = Vec::new();
        for (number, nic) in (0..).zip(record.nics_now(vm)) {
            let (vdpa, device) = self.vdpa(vm, &nic, number)?;
            config.vdpa.push(vdpa);
            devices.push(device);
        }
        Ok((config, devices))
    }
}

/// Opens a disk's image as the VM's process does, and closes it.
pub(super) fn check_disk(disk: &DiskConfig) -> Result<(), Error> {
    match Disk::open(&disk.path, disk.readonly) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::transparent(UNUSABLE, error)),
    }
}

/// Checks whether a VM can be created with these files.
pub(super) fn check_files(machine: &VmConfig) -> Result<(), Error> {
    let source = BootSource {
        kernel: &machine.kernel,
        initramfs: machine.initramfs.as_deref(),
        cmdline: &machine.cmdline,
    };
    boot::check(machine.memory.size.bytes(), &source)
        .map_err(|error| Error::transparent(UNUSABLE, error))?;
    for disk in &machine.disks {
        disk.path.metadata().map_err(|source| {
            let message = format!("cannot use the disk {}", disk.path.display());
            Error::new(UNUSABLE, message).because(source)
        })?;
    }
    Ok(())
}

fn make_directory(path: &Path) -> Result<(), Error> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(file(path))
}

fn file(path: &Path) -> impl FnOnce(io::Error) -> Error {
    Error::context(format!("cannot use {}", path.display()))
}

/// Whether a VM's process uses a device that exists, by the path that it reports. It may report any
/// path, such as one on storage that does not answer. So that one is not looked up.
fn is_path_of(reported: &Path, device: &Path) -> bool {
    fs::canonicalize(device).is_ok_and(|opened| reported == device || reported == opened)
}

/// Ends a process if it exists.
pub(super) fn end(identity: Identity) -> io::Result<()> {
    Process::open(identity)?.map_or(Ok(()), |process| process.end(GRACE))
}

/// The error for a VM's process that cannot be watched or ended.
fn unended(source: io::Error) -> Error {
    Error::failed("cannot end the VM's process").because(source)
}

impl Machines {
    /// Ends the processes of a VM, and removes their control group.
    fn end_all(&self, vm: &VmName, identity: Option<Identity>) -> io::Result<()> {
        identity.map_or(Ok(()), end)?;
        for marked in process::find(&self.paths.runtime_of(vm))? {
            end(marked)?;
        }
        // All that it has started.
        let groups = self.sandbox.groups();
        groups.map_or(Ok(()), |groups| groups.remove(vm.as_str()))
    }
}

impl Host for Machines {
    fn keep(&self, vm: &VmName, record: &Record) -> Result<(), Error> {
        let entry = self.entries().get(vm).cloned();
        let mut record = record.clone();
        if let Some(entry) = &entry {
            record.count_change(entry.view().record.as_ref());
        }
        self.store.put(VMS, vm.as_str(), &record)?;
        if let Some(entry) = entry {
            entry.shows(Some(&record));
        }
        Ok(())
    }

    fn user(&self, vm: &VmName) -> Result<Option<u32>, Error> {
        self.sandbox.user(vm)
    }

    fn forget(&self, vm: &VmName) -> Result<(), Error> {
        let forgotten = self.store.remove(VMS, vm.as_str());
        if forgotten.is_ok() {
            // The next daemon would find the record, and the user in it.
            self.sandbox.free(vm);
        }
        // Nothing is left of the VM, whatever the store contains: a record without steps does no
        // harm.
        if let Some(entry) = self.entries().get(vm) {
            entry.shows(None);
        }
        forgotten
    }

    fn at(&self, vm: &VmName, place: &dyn fmt::Display) {
        tracing::debug!(%vm, "step: {place}");
        if let Some(observer) = &self.observer {
            observer.show(vm, place);
        }
    }

    fn boot(&self) -> String {
        self.boot.clone()
    }

    fn check(&self, vm: &VmName, spec: &VmSpec) -> Result<(), Error> {
        check_files(spec.machine())?;
        spec.nics()
            .iter()
            .try_for_each(|nic| self.check_nic(vm, nic))?;
        let mut functions = spec.machine().vfio.iter();
        functions.try_for_each(|function| self.check_function(function).map(drop))
    }

    fn check_function(&self, function: &VfioConfig) -> Result<Option<FormerDriver>, Error> {
        functions::check(function)
    }

    fn bind_function(&self, former: &FormerDriver) -> Result<(), Error> {
        functions::bind(former)
    }

    fn has_function(&self, vm: &VmName, function: &VfioConfig) -> Result<bool, Error> {
        let status = self.runtime.block_on(self.api_of(vm).status())?;
        let name = function.name();
        Ok(status.vfio.iter().any(|one| one.id == name))
    }

    fn plug_function(&self, vm: &VmName, function: &VfioConfig) -> Result<(), Error> {
        let files = functions::files(std::slice::from_ref(function))?;
        let path = format!("/v1/vm/vfio/{}", function.name());
        let vmm = self.api_of(vm);
        let plug = vmm.ask(Method::PUT, &path, Some(function), START);
        self.with_files(vm, files, || self.runtime.block_on(plug).map(drop))
    }

    fn unplug_function(&self, vm: &VmName, id: &DeviceId) -> Result<bool, Error> {
        let is_gone = |status: &VmStatus| status.vfio.iter().all(|one| one.id != id.as_str());
        let gone = self.give_up(vm, &format!("/v1/vm/vfio/{id}"), is_gone)?;
        if gone {
            self.hide_devices_after(vm, |record| _ = record.mark_function_released(id));
        }
        Ok(gone)
    }

    fn release_function(&self, vm: &VmName, former: &FormerDriver) -> Result<(), Error> {
        functions::release(vm, former)
    }

    fn make_directories(&self, vm: &VmName) -> Result<(), Error> {
        make_directory(&self.paths.runtime_of(vm))?;
        make_directory(&self.paths.state_of(vm))
    }

    fn remove_directories(&self, vm: &VmName) -> Result<(), Error> {
        let directories = [self.paths.runtime_of(vm), self.paths.state_of(vm)];
        directories
            .iter()
            .try_for_each(|path| remove_any(path).map_err(file(path)))
    }

    fn make_nic(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        match nic.request(vm) {
            Some(request) => self.make(vm, &request),
            None => Ok(()),
        }
    }

    fn make_backup(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        let own = self.net_config(vm, nic);
        match nic.backup_request(vm, own.as_ref()) {
            Some(request) => self.make(vm, &request).map_err(Error::wrap(format!(
                "cannot create the backup device of NIC {}",
                nic.id()
            ))),
            None => Ok(()),
        }
    }

    fn remove_nic(&self, vm: &VmName, device: &str) -> Result<(), Error> {
        // Another VM's device may get the same path and number.
        match by_name(device) {
            Ok(path) => self.hide_files(vm, &[path]),
            // The host has removed it.
            Err(_) => self.hide_devices(vm),
        }
        self.delete_device(vm, device)
    }

    fn is_gone(&self, device: &str) -> bool {
        is_gone(device)
    }

    fn start_process(&self, vm: &VmName, record: &Record) -> Result<Identity, Error> {
        // After a reboot of the host one of them is missing.
        self.make_directories(vm)?;
        let log = self.paths.log(vm);
        for log in [&log, &self.paths.console_log(vm)] {
            logs::free(log).map_err(file(log))?;
        }
        let socket = self.paths.api_socket(vm);
        let mark = self.paths.runtime_of(vm);
        let mut arguments = vec![
            "--log-level".into(),
            self.log_level.clone().into(),
            "run".into(),
            "--sandbox".into(),
            "on".into(),
            "--api-socket".into(),
            socket.into(),
            "--console-socket".into(),
            self.paths.console_socket(vm).into(),
            "--console-log".into(),
            self.paths.console_log(vm).into(),
        ];
        if let Some(user) = record.user {
            for directory in [mark.clone(), self.paths.state_of(vm)] {
                sandbox::give(&directory, user).map_err(file(&directory))?;
            }
            arguments.extend(["--sandbox-user".into(), user.to_string().into()]);
        }
        let machine = record.running();
        let limits = Limits {
            memory: machine.memory.size.bytes(),
            cpus: machine.cpus.get().into(),
        };
        let groups = self.sandbox.groups();
        let group = groups.map(|groups| groups.create(vm.as_str(), limits));
        let no_group = Error::context("cannot create the control group of the VM");
        let started = process::start(Start {
            arguments,
            mark: &mark,
            log: &log,
            user: record.user,
            group: group.transpose().map_err(no_group)?,
        });
        let process = started.map_err(Error::context(format!(
            "cannot start the VM's process; its log is {}",
            log.display()
        )))?;
        Ok(process.identity())
    }

    fn end_process(&self, vm: &VmName, identity: Option<Identity>) -> Result<(), Error> {
        self.end_all(vm, identity).map_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut
                && let Some(entry) = self.entries().get(vm)
            {
                entry.view().not_ended = Some(error.to_string());
            }
            unended(error).hint(NOT_ENDED)
        })?;
        // A killed process leaves them behind.
        for socket in [
            self.paths.api_socket(vm),
            self.paths.console_socket(vm),
            self.paths.migration_socket(vm),
        ] {
            // The process may have made it a directory.
            remove_any(&socket).map_err(file(&socket))?;
        }
        Ok(())
    }

    fn boot_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error> {
        self.await_started(vm, identity)?;
        let (config, devices) = self.configuration(vm, record)?;
        let mut files = self.files_to_run(vm, record)?;
        files.extend(record.restore_from.clone().map(|path| (path, Access::Read)));
        self.show_files(vm, files)?;
        let vmm = self.api_of(vm);
        if let Some(path) = &record.restore_from {
            let at = "/v1/vm/restore";
            let wanted = RestoreRequest {
                path: path.clone(),
                vdpa: config.vdpa,
                vfio: config.vfio,
                // Of the snapshot as it was checked, and of the client.
                allow_paths: record
                    .running()
                    .files()
                    .chain(record.spec.machine().files())
                    .map(Path::to_owned)
                    .collect(),
                paused: false,
            };
            let wanted = Some(&wanted);
            let restored = vmm.hand_over(Method::PUT, at, wanted, SNAPSHOT_TIME, &devices);
            let restored = self.runtime.block_on(restored).map(drop);
            return restored.map_err(|error| self.explain_end(vm, identity, error));
        }
        let started = self.runtime.block_on(async {
            vmm.hand_over(Method::PUT, "/v1/vm", Some(&config), SOON, &devices)
                .await?;
            // From here on only the VM has them open: they are free when it ends.
            drop(devices);
            vmm.want(WantedState::Running).await
        });
        started.map_err(|error| self.explain_end(vm, identity, error))
    }

    fn plug(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        let vmm = self.api_of(vm);
        let status = self.runtime.block_on(vmm.status())?;
        // A device opens only once: a VM that has it already cannot receive it again.
        if status.nics.iter().any(|one| one.id == nic.id().as_str()) {
            return Ok(());
        }
        let (config, device) = self.vdpa(vm, nic, 0)?;
        let files = self.devices_to_open(vm, nic)?;
        let path = format!("/v1/vm/nics/{}", nic.id());
        let devices = [device];
        let plug = vmm.hand_over(Method::PUT, &path, Some(&config), START, &devices);
        self.with_files(vm, files, || self.runtime.block_on(plug).map(drop))
    }

    fn swap(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        let vmm = self.api_of(vm);
        let backup = self.backup_path(vm, nic)?;
        let info = self.runtime.block_on(vmm.nic(nic.id()))?;
        let there = info.backup.as_ref().map(PathBuf::from);
        // A device opens only once: a VM that has it already cannot receive it again.
        let (fd, devices) = if self.is_on(vm, nic) {
            (None, Vec::new())
        } else {
            (Some(0), vec![self.vdpa(vm, nic, 0)?.1])
        };
        // A process of an earlier version refuses the member, so it is only sent for a change.
        let backup = (there != backup).then_some(backup);
        if fd.is_none() && backup.is_none() {
            return Ok(());
        }
        let files = self.devices_to_open(vm, nic)?;
        let path = format!("/v1/vm/nics/{}", nic.id());
        let change = NicChange {
            fd,
            backup,
            ..NicChange::default()
        };
        let swapped = vmm.hand_over(Method::PATCH, &path, Some(&change), START, &devices);
        self.with_files(vm, files, || self.runtime.block_on(swapped).map(drop))
    }

    fn is_on(&self, vm: &VmName, nic: &NicSpec) -> bool {
        let Ok(status) = self.runtime.block_on(self.api_of(vm).status()) else {
            return false;
        };
        let Ok(wanted) = self.character_device_of(vm, nic) else {
            return false;
        };
        let there = status.nics.iter().find(|one| one.id == nic.id().as_str());
        there.is_some_and(|one| is_path_of(Path::new(&one.path), &wanted))
    }

    fn unplug(&self, vm: &VmName, nic: &NicId) -> Result<bool, Error> {
        let is_gone = |status: &VmStatus| status.nics.iter().all(|one| one.id != nic.as_str());
        let gone = self.give_up(vm, &format!("/v1/vm/nics/{nic}"), is_gone)?;
        if gone {
            self.hide_devices_after(vm, |record| _ = record.mark_released(nic));
        }
        Ok(gone)
    }

    fn plug_disk(&self, vm: &VmName, id: &DeviceId, disk: &DiskConfig) -> Result<(), Error> {
        let path = format!("/v1/vm/disks/{id}");
        let vmm = self.api_of(vm);
        let plug = vmm.ask(Method::PUT, &path, Some(disk), START);
        let files = vec![sandbox::file_of(disk)];
        self.with_files(vm, files, || self.runtime.block_on(plug).map(drop))
    }

    fn unplug_disk(&self, vm: &VmName, id: &DeviceId, image: Option<&Path>) -> Result<bool, Error> {
        let is_gone = |status: &VmStatus| status.disks.iter().all(|one| one.id != id.as_str());
        let gone = self.give_up(vm, &format!("/v1/vm/disks/{id}"), is_gone)?;
        if gone && let Some(image) = image {
            self.hide_files(vm, &[image.to_owned()]);
        }
        Ok(gone)
    }

    fn announce(&self, vm: &VmName, nics: &[NicSpec]) {
        self.announce_mute(vm, nics);
    }

    fn press_button(&self, vm: &VmName) -> Result<(), Error> {
        self.runtime.block_on(self.api_of(vm).press_button())
    }

    fn send(&self, vm: &VmName, request: &SendRequest) -> Result<ProxiedResponse, Error> {
        let files = files_to_send(&request.body);
        self.show_files(vm, files.clone())?;
        let connector = request.endpoint.clone();
        let connector = connector.map(|endpoint| connector::serve(vm.as_str(), endpoint));
        let connector = connector.transpose();
        let connector = connector.map_err(Error::context("cannot connect for the VM"))?;
        let connector: Vec<OwnedFd> = connector.into_iter().collect();
        let left = self
            .runtime
            .block_on(self.api_of(vm).leave(request, &connector));
        // The process reads them before it answers. It may have other uses for one of them.
        let record = self.entries().get(vm).and_then(|entry| entry.record());
        let used = record.and_then(|record| self.files_to_run(vm, &record).ok());
        let used = paths_of(used.unwrap_or_default());
        let mut unused = paths_of(files);
        unused.retain(|path| !used.contains(path));
        self.hide_files(vm, &unused);
        left
    }

    fn migration(&self, vm: &VmName, identity: Identity) -> MigrationReport {
        let status = self.asked(vm, identity, Err(MigrationReport::Silent), async |vmm| {
            vmm.migration().await
        });
        match status {
            Ok(status) => {
                self.migration_reports(vm, &status);
                MigrationReport::from(&status)
            }
            Err(account) => account,
        }
    }

    fn await_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error> {
        if record.incoming.is_none() {
            return Ok(());
        }
        let entry = self.entries().get(vm).cloned();
        let reception = entry.and_then(|entry| entry.reception.lock().take());
        let reception = reception.ok_or_else(|| {
            Error::failed("the terms of the migration are gone: migrate the VM again")
        })?;
        self.await_started(vm, identity)?;
        let mut vdpa = Vec::new();
        for nic in record.nics_now(vm) {
            // By path, so that the source can make a dry run first, which opens the device and
            // closes it again.
            let path = self.character_device_of(vm, &nic)?;
            let backup = self.backup_path(vm, &nic)?;
            vdpa.push(nic.vdpa(DeviceSource::Path(path), backup));
        }
        let listener: Vec<OwnedFd> = reception.listener.map(OwnedFd::from).into_iter().collect();
        let machine = record.running();
        self.show_files(vm, self.files_to_run(vm, record)?)?;
        let wanted = MigrationRequest::Receive(ReceiveConfig {
            listen: reception.endpoint,
            vdpa,
            vfio: record.spec.machine().vfio.clone(),
            kernel: Some(machine.kernel.clone()),
            initramfs: machine.initramfs.clone(),
            max_memory: Some(machine.memory.size),
            hugepages: machine.memory.hugepages,
            host_numa_node: machine.memory.host_numa_node,
            cpu_affinity: machine.cpu_affinity.clone(),
            tls: None,
            plaintext: false,
            pairing: Some(reception.pairing),
            fd: (!listener.is_empty()).then_some(0),
        });
        let vmm = self.api_of(vm);
        let wanted = Some(&wanted);
        let waits = vmm.hand_over(Method::POST, MIGRATION, wanted, SOON, &listener);
        let waits = self.runtime.block_on(waits).map(drop);
        waits.map_err(|error| self.explain_end(vm, identity, error))
    }

    fn incoming_report(&self, vm: &VmName, identity: Identity) -> IncomingReport {
        self.asked(vm, identity, IncomingReport::Silent, async |vmm| {
            vmm.incoming_report().await
        })
    }

    fn cancel_incoming(&self, vm: &VmName, identity: Identity) -> Result<bool, Error> {
        let Some(process) = Process::open(identity).map_err(unended)? else {
            return Ok(true);
        };
        let vmm = self.api_of(vm);
        let asked = vmm.ask(Method::DELETE, MIGRATION, None::<&()>, SOON);
        match self.runtime.block_on(asked) {
            // The request may arrive too late or after the end: the report of the process counts.
            Err(error) if !error.is_not_listening() && !error.is_refused(StatusCode::CONFLICT) => {
                return Err(error);
            }
            Ok(_) | Err(_) => {}
        }
        let asked = Instant::now();
        while asked.elapsed() < GRACE {
            if process.wait(LOOK).map_err(unended)? {
                return Ok(true);
            }
            match self.incoming_report(vm, identity) {
                // The process could receive another VM now, but there is none.
                IncomingReport::Stayed => {
                    self.runtime.block_on(vmm.want(WantedState::Stopped))?;
                    return process.wait(GRACE).map_err(unended);
                }
                IncomingReport::Arrived | IncomingReport::Indeterminate => return Ok(false),
                IncomingReport::Waits(_) | IncomingReport::UnderWay | IncomingReport::Silent => {}
            }
        }
        Ok(false)
    }

    fn withdraw(&self, vm: &VmName, peer: &Peer) {
        if let Err(error) = self.peers.withdraw(peer) {
            tracing::warn!(
                %vm,
                node = peer.node,
                error = &error as &dyn std::error::Error,
                "cannot cancel the migration at the other node; it will time out"
            );
        }
    }

    fn is_at(&self, vm: &VmName, peer: &Peer) -> bool {
        self.peers.has(peer).unwrap_or_else(|error| {
            tracing::warn!(
                %vm,
                node = peer.node,
                error = &error as &dyn std::error::Error,
                "cannot confirm the VM at the other node; keeping its spec"
            );
            false
        })
    }

    fn look(&self, vm: &VmName, identity: Option<Identity>) -> ProcessState {
        let Some(identity) = identity else {
            let found = process::find(&self.paths.runtime_of(vm));
            return match found {
                Ok(found) if found.is_empty() => ProcessState::Gone,
                _ => ProcessState::Unknown,
            };
        };
        let process = match Process::open(identity) {
            Ok(Some(process)) => process,
            Ok(None) => return ProcessState::Gone,
            Err(_) => return ProcessState::Unknown,
        };
        let start = Instant::now();
        let handshake = loop {
            match self.runtime.block_on(self.api_of(vm).handshake()) {
                Ok(handshake) => break handshake,
                Err(error) if error.is_not_listening() && start.elapsed() < FIND => {}
                Err(_) => return gone_or(&process, ProcessState::Unknown),
            }
            if process.wait(Duration::from_millis(20)).unwrap_or(false) {
                return gone_or(&process, ProcessState::Gone);
            }
        };
        if handshake.pid != identity.pid || !super::supports_api(handshake.api) {
            return ProcessState::Unknown;
        }
        let status = self.runtime.block_on(self.api_of(vm).status());
        match status.map(|status| status.state) {
            Ok(VmState::Running | VmState::Paused) => ProcessState::Runs,
            Ok(VmState::NotStarted | VmState::Starting) => ProcessState::NotBooted,
            Ok(VmState::Stopped) | Err(_) => {
                let _ = process.wait(SOON);
                gone_or(&process, ProcessState::Unknown)
            }
        }
    }
}

/// `otherwise`, unless the process has exited meanwhile.
fn gone_or(process: &Process, otherwise: ProcessState) -> ProcessState {
    match process.wait(Duration::ZERO) {
        Ok(true) => ProcessState::Gone,
        _ => otherwise,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_reported_path_is_compared_and_not_looked_up() {
        let name = format!("node-reported-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        let directory = directory.canonicalize().unwrap();
        let [device, link, other] = ["device", "link", "other"].map(|name| directory.join(name));
        fs::write(&device, "").unwrap();
        for link in [&link, &other] {
            symlink(&device, link).unwrap();
        }
        // The process reports the path that it received, or the one of the descriptor.
        assert!(is_path_of(&device, &device));
        assert!(is_path_of(&device, &link));
        assert!(is_path_of(&link, &link));
        assert!(!is_path_of(&other, &device));
        assert!(!is_path_of(&other, &link));
        fs::remove_file(&device).unwrap();
        assert!(!is_path_of(&device, &device), "the device is gone");
        fs::remove_dir_all(directory).unwrap();
    }
}
