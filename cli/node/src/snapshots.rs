//! The snapshots that the daemon keeps, a directory for each.
//!
//! ```text
//!   STATE/snapshots/NAME/        0700
//!                     vm.json    0600   the VM and its spec; written first
//!                     new/       0700   all that the VM's process sees; none once complete
//!                     machine/          `vmm::snapshot`, from `new/`, when it is complete
//! ```
//! A daemon that starts deletes snapshots without `machine/`, unless a VM's process still writes
//! one, or has completed it meanwhile. A name is no path, and symbolic links are not followed. So
//! no request reaches another directory.
//!
//! Owns names and files.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind as IoErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use axum::http::StatusCode;
use bellhop_api::node::{BadSnapshotName, Snapshot, SnapshotName};
use serde::{Deserialize, Serialize};
use vmm::machine::Snapshot as SavedMachine;
use vmm::sandbox::namespaces::Access;
use vmm::snapshot::directory::{Snapshot as Files, is_being_written};
use vmm::snapshot::format::version_of;

use crate::error::{Error, ErrorKind, UNUSABLE};
use crate::machines::spec::VmSpec;
use crate::paths::Paths;
use crate::remove::remove_any;

/// The file that describes the VM.
const ABOUT: &str = "vm.json";
/// The saved machine.
const MACHINE: &str = "machine";
/// The directory in which the VM's process creates it.
const NEW: &str = "new";
/// The longest description, in bytes.
const ABOUT_MAX: u64 = 1 << 20;
/// How many snapshots the daemon keeps.
const SNAPSHOTS_MAX: usize = 1000;

impl From<BadSnapshotName> for Error {
    fn from(error: BadSnapshotName) -> Self {
        let kind = ErrorKind::Answer(StatusCode::BAD_REQUEST, "bad_name");
        Self::transparent(kind, error)
    }
}

/// The VM of a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct About {
    pub(crate) vm: String,
    pub(crate) created_ms: u64,
    /// With the settings that the devices of its NICs had.
    pub(crate) spec: VmSpec,
    /// The boot files of its process, which the spec may have replaced for the next start.
    #[serde(default)]
    pub(crate) files: Vec<PathBuf>,
}

/// A place where a snapshot is being written. Dropping it deletes the snapshot, unless it is
/// complete or at a path of the client.
#[derive(Debug)]
pub(crate) struct NewSnapshot {
    path: PathBuf,
    /// The directory to delete.
    unfinished: Option<PathBuf>,
    /// The path to which the complete snapshot moves.
    destination: Option<PathBuf>,
    /// The locked description: a locked snapshot cannot be deleted.
    lock: Option<File>,
}

impl NewSnapshot {
    /// A place outside of the daemon's directory.
    pub(crate) fn at(path: PathBuf) -> Self {
        Self {
            path,
            unfinished: None,
            destination: None,
            lock: None,
        }
    }

    /// The same for a VM's process that sees only its own files. It writes into a new directory
    /// beside `path`, so that it sees no other file there.
    ///
    /// # Errors
    /// `path` is in use, as the VM's process checks for its own path, or the directory cannot be
    /// created.
    pub(crate) fn beside(path: &Path) -> Result<Self, Error> {
        // The working directory of a VM's process.
        let path = Path::new("/").join(path);
        let free = vmm::snapshot::directory::NewSnapshot::create(&path);
        free.map_err(|error| Error::transparent(UNUSABLE, error))?;
        let name = path.file_name().unwrap_or_default();
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(".bellhop");
        let directory = path.with_file_name(hidden);
        let made = DirBuilder::new().mode(0o700).create(&directory);
        made.map_err(|error| {
            let directory = directory.display();
            let message = match error.kind() {
                IoErrorKind::AlreadyExists => format!(
                    "{directory} exists: another snapshot is being written there, or a killed \
                     daemon left it; in the second case delete it"
                ),
                _ => format!("cannot create the directory {directory}"),
            };
            Error::new(UNUSABLE, message).because(error)
        })?;
        Ok(Self {
            path: directory.join(name),
            unfinished: Some(directory),
            destination: Some(path),
            lock: None,
        })
    }

    /// The directory that the VM's process creates.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The files that the VM's process must see: the directory in which it creates the snapshot,
    /// and which has no other file.
    pub(crate) fn files(&self) -> Vec<(PathBuf, Access)> {
        let directory = self.path.parent();
        directory
            .map(|path| (path.to_owned(), Access::Write))
            .into_iter()
            .collect()
    }

    /// Keeps the snapshot, which is complete, and returns its path.
    ///
    /// # Errors
    /// Another file is at the path of the client by now.
    pub(crate) fn complete(mut self) -> Result<PathBuf, Error> {
        let Some(destination) = self.destination.take() else {
            return Ok(self.path.clone());
        };
        let moved = fs::rename(&self.path, &destination);
        let synced = moved.and_then(|()| destination.parent().map_or(Ok(()), sync));
        synced.map_err(file(&destination))?;
        // All that the VM's process has left there.
        self.unfinished = self.path.parent().map(Path::to_owned);
        Ok(destination)
    }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        if let Some(directory) = &self.unfinished
            && let Err(error) = remove_any(directory)
        {
            let directory = directory.display();
            tracing::warn!(%directory, %error, "cannot delete the rest of a failed snapshot");
        }
    }
}

/// The daemon's directory of snapshots.
#[derive(Debug)]
pub(crate) struct Snapshots(PathBuf);

impl Snapshots {
    pub(crate) fn of(paths: &Paths) -> Self {
        Self(paths.snapshots())
    }

    fn directory(&self, name: &SnapshotName) -> PathBuf {
        self.0.join(name.as_str())
    }

    /// The directory with the saved machine.
    pub(crate) fn machine(&self, name: &SnapshotName) -> PathBuf {
        self.directory(name).join(MACHINE)
    }

    /// Creates the directory of a new snapshot, with the description of its VM.
    ///
    /// # Errors
    /// The name is taken, there are too many, or the directory cannot be written.
    pub(crate) fn create(&self, name: &SnapshotName, about: &About) -> Result<NewSnapshot, Error> {
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.0);
        made.map_err(file(&self.0))?;
        if self.names()?.len() >= SNAPSHOTS_MAX {
            let message = format!("this node already has {SNAPSHOTS_MAX} snapshots: delete some");
            return Err(Error::conflict("no_room", message));
        }
        let directory = self.directory(name);
        let made = DirBuilder::new().mode(0o700).create(&directory);
        made.map_err(|error| match error.kind() {
            IoErrorKind::AlreadyExists => {
                let message =
                    format!("the snapshot {name} exists already: delete it, or use another name");
                Error::conflict("name_taken", message)
            }
            _ => file(&directory)(error),
        })?;
        let new = directory.join(NEW);
        let mut snapshot = NewSnapshot {
            path: new.join(MACHINE),
            unfinished: Some(directory.clone()),
            destination: Some(self.machine(name)),
            lock: None,
        };
        let made = DirBuilder::new().mode(0o700).create(&new);
        made.map_err(file(&new))?;
        let json = serde_json::to_vec(about);
        let json = json.map_err(Error::context("cannot encode the description"))?;
        snapshot.lock = Some(write(&directory, &json).map_err(file(&directory))?);
        sync(&self.0).map_err(file(&self.0))?;
        Ok(snapshot)
    }

    fn names(&self) -> Result<Vec<SnapshotName>, Error> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == IoErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(file(&self.0))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(file(&self.0))?;
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.parse().ok());
            names.extend(name.filter(|_| is_directory));
        }
        names.sort();
        Ok(names)
    }

    /// All snapshots, by name.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(crate) fn list(&self) -> Result<Vec<Snapshot>, Error> {
        let names = self.names()?;
        names.iter().for_each(|name| self.adopt(name));
        Ok(names.iter().map(|name| self.describe(name)).collect())
    }

    /// One snapshot.
    ///
    /// # Errors
    /// It does not exist.
    pub(crate) fn show(&self, name: &SnapshotName) -> Result<Snapshot, Error> {
        self.check_exists(name)?;
        Ok(self.describe(name))
    }

    fn describe(&self, name: &SnapshotName) -> Snapshot {
        let about = self.about(name).ok();
        let path = self.machine(name);
        let files = Files::open(&path).ok();
        let sizes = files
            .iter()
            .flat_map(|files| [files.state(), files.memory()]);
        let sizes = sizes.filter_map(|file| Some(file.metadata().ok()?.blocks()));
        Snapshot {
            name: name.clone(),
            vm: about.as_ref().map(|about| about.vm.clone()),
            created_ms: about.as_ref().map(|about| about.created_ms),
            // In blocks of 512 bytes, whatever the file system's block size (stat(3type)).
            bytes: sizes.fold(0, u64::saturating_add).saturating_mul(512),
            format: files.and_then(|files| version_of(&mut files.state())),
            path,
        }
    }

    /// The VM of a snapshot.
    ///
    /// # Errors
    /// The snapshot does not exist, or its description is damaged.
    pub(crate) fn about(&self, name: &SnapshotName) -> Result<About, Error> {
        self.check_exists(name)?;
        let damaged = |why: Box<dyn std::error::Error + Send + Sync>| {
            let message = format!("cannot read the snapshot {name}: its file {ABOUT} is damaged");
            Error::new(UNUSABLE, message).because(why)
        };
        let path = self.directory(name).join(ABOUT);
        let mut json = Vec::new();
        let read = open(&path).and_then(|file| file.take(ABOUT_MAX).read_to_end(&mut json));
        read.map_err(|error| damaged(error.into()))?;
        serde_json::from_slice(&json).map_err(|error| damaged(error.into()))
    }

    /// Reads all of a snapshot but the guest's memory.
    ///
    /// # Errors
    /// It does not exist, or is damaged.
    pub(crate) fn open(&self, name: &SnapshotName) -> Result<SavedMachine, Error> {
        self.check_exists(name)?;
        let opened = SavedMachine::open(&self.machine(name));
        opened.map_err(|error| {
            let message = format!("cannot restore the snapshot {name}");
            Error::new(UNUSABLE, message).because(error)
        })
    }

    /// Deletes a snapshot, also an incomplete or damaged one.
    ///
    /// # Errors
    /// It does not exist, is being written, or cannot be deleted.
    pub(crate) fn remove(&self, name: &SnapshotName) -> Result<(), Error> {
        self.check_exists(name)?;
        let directory = self.directory(name);
        let is_written = match open(&directory.join(ABOUT)) {
            Ok(about) => matches!(about.try_lock(), Err(TryLockError::WouldBlock)),
            // The daemon ended while it created the snapshot.
            Err(_) => false,
        };
        if is_written {
            let message = format!("the snapshot {name} is being written: wait for the operation");
            return Err(Error::conflict("saving", message));
        }
        remove_any(&directory).map_err(file(&directory))
    }

    /// Deletes the incomplete snapshots of a daemon that was killed. Those that the processes of
    /// VMs still write stay, and may become complete.
    ///
    /// # Errors
    /// The directory cannot be read. A snapshot that cannot be deleted stays.
    pub(crate) fn remove_incomplete(&self) -> Result<(), Error> {
        for name in self.names()? {
            let machine = self.machine(&name);
            let new = self.directory(&name).join(NEW).join(MACHINE);
            // First: a process that completes a snapshot in between has renamed it before the look
            // at the result.
            if is_being_written(&new) {
                continue;
            }
            self.adopt(&name);
            let found = fs::symlink_metadata(&machine);
            if !found.is_err_and(|error| error.kind() == IoErrorKind::NotFound) {
                continue;
            }
            match remove_any(&self.directory(&name)) {
                Ok(()) => tracing::warn!(snapshot = %name, "deleted an incomplete snapshot"),
                Err(error) => {
                    tracing::warn!(snapshot = %name, %error, "an incomplete snapshot stays");
                }
            }
        }
        Ok(())
    }

    /// Moves a snapshot into place that a VM's process has completed after its daemon was killed,
    /// and deletes all else that the process has left.
    fn adopt(&self, name: &SnapshotName) {
        let directory = self.directory(name);
        let (new, machine) = (directory.join(NEW), self.machine(name));
        let is_unused = open(&directory.join(ABOUT)).is_ok_and(|about| about.try_lock().is_ok());
        if !is_unused {
            return;
        }
        // A daemon may have been killed after the rename.
        let placed = if fs::symlink_metadata(&machine).is_ok() {
            Ok(())
        } else if fs::rename(new.join(MACHINE), &machine).is_ok() {
            sync(&directory)
        } else {
            return;
        };
        if let Err(error) = placed.and_then(|()| remove_any(&new)) {
            tracing::warn!(snapshot = %name, %error, "cannot complete a snapshot");
        }
    }

    fn check_exists(&self, name: &SnapshotName) -> Result<(), Error> {
        let found = fs::symlink_metadata(self.directory(name));
        if found.is_ok_and(|found| found.is_dir()) {
            self.adopt(name);
            return Ok(());
        }
        let message = format!("the snapshot {name} does not exist");
        let error = Error::answered(StatusCode::NOT_FOUND, "no_such_snapshot", message);
        Err(error.hint("GET /v1/snapshots lists them"))
    }
}

/// Opens a description, which is no link.
fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Writes the description, which is on the disk afterwards, and locks it.
fn write(directory: &Path, json: &[u8]) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut about = options.open(directory.join(ABOUT))?;
    about.lock()?;
    about.write_all(json)?;
    about.sync_all()?;
    sync(directory)?;
    Ok(about)
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

fn file(path: &Path) -> impl FnOnce(io::Error) -> Error {
    Error::context(format!("cannot use {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    fn about() -> About {
        let spec = json!({ "kernel": "/k", "nics": [{ "id": "net0", "from": "eth0" }] });
        About {
            vm: "web".to_owned(),
            created_ms: 7,
            spec: serde_json::from_value(spec).unwrap(),
            files: vec!["/k".into()],
        }
    }

    fn fresh(test: &str) -> Snapshots {
        let name = format!("node-snapshots-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&directory);
        Snapshots(directory)
    }

    /// A killed daemon deletes nothing. Returns the path for the VM's process.
    fn killed(mut new: NewSnapshot) -> PathBuf {
        new.unfinished = None;
        new.path.clone()
    }

    /// The status and the code.
    fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> (u16, &'static str) {
        let (status, code) = result.unwrap_err().answer();
        (status.as_u16(), code)
    }

    #[test]
    fn a_snapshot_is_listed_by_name_until_it_is_deleted() {
        let snapshots = fresh("life");
        assert!(snapshots.list().unwrap().is_empty());
        let name: SnapshotName = "before".parse().unwrap();
        assert_eq!(refusal(snapshots.show(&name)), (404, "no_such_snapshot"));
        // A failed one leaves nothing behind.
        drop(snapshots.create(&name, &about()).unwrap());
        assert!(snapshots.list().unwrap().is_empty());
        let new = snapshots.create(&name, &about()).unwrap();
        assert_eq!(
            refusal(snapshots.create(&name, &about())),
            (409, "name_taken")
        );
        assert_eq!(refusal(snapshots.remove(&name)), (409, "saving"));
        // The VM's process sees a directory that has nothing of the daemon.
        let seen = snapshots.directory(&name).join(NEW);
        assert_eq!(new.files(), [(seen.clone(), Access::Write)]);
        assert_eq!(fs::read_dir(&seen).unwrap().count(), 0);
        assert_eq!(snapshots.show(&name).unwrap().format, None);
        fs::create_dir(new.path()).unwrap();
        let state = [vmm::snapshot::format::MAGIC.as_slice(), &[9, 0, 0, 0]].concat();
        fs::write(new.path().join("state"), state).unwrap();
        let memory = File::create(new.path().join("memory")).unwrap();
        memory.set_len(64 << 20).unwrap();
        fs::write(seen.join("more"), "m").unwrap();
        assert_eq!(new.complete().unwrap(), snapshots.machine(&name));
        assert!(!seen.exists());
        let [one]: [_; 1] = snapshots.list().unwrap().try_into().unwrap();
        assert_eq!(
            (one.name.as_str(), one.vm.as_deref()),
            ("before", Some("web"))
        );
        assert_eq!((one.created_ms, one.format), (Some(7), Some(9)));
        assert!((1..64 << 20).contains(&one.bytes), "{}", one.bytes);
        let spec = snapshots.about(&name).unwrap().spec;
        assert_eq!(spec, about().spec);
        assert_eq!(refusal(snapshots.open(&name)), (422, "unusable"));
        snapshots.remove(&name).unwrap();
        assert_eq!(refusal(snapshots.remove(&name)), (404, "no_such_snapshot"));
        fs::remove_dir_all(&snapshots.0).unwrap();
    }

    #[test]
    fn incomplete_snapshots_are_deleted_unless_a_process_writes_them() {
        let snapshots = fresh("incomplete");
        snapshots.remove_incomplete().unwrap();
        let create = |name: &str| {
            let name: SnapshotName = name.parse().unwrap();
            killed(snapshots.create(&name, &about()).unwrap())
        };
        let names = || {
            let names = snapshots.names().unwrap().into_iter();
            names.map(|name| name.to_string()).collect::<Vec<_>>()
        };
        fs::create_dir(create("complete")).unwrap();
        symlink("/nonexistent", create("link")).unwrap();
        create("begun");
        fs::create_dir(create("half").with_file_name(".machine.partial")).unwrap();
        fs::create_dir(snapshots.0.join("empty")).unwrap();
        let late = create("late");
        let written = create("written");
        let writer = vmm::snapshot::directory::NewSnapshot::create(&written).unwrap();
        fs::create_dir(late).unwrap();
        snapshots.remove_incomplete().unwrap();
        assert_eq!(names(), ["complete", "late", "link", "written"]);
        let late = snapshots.directory(&"late".parse().unwrap());
        assert!(late.join(MACHINE).is_dir() && !late.join(NEW).exists());
        // A daemon was killed after the rename.
        fs::create_dir_all(late.join(NEW).join("more")).unwrap();
        snapshots.remove_incomplete().unwrap();
        assert!(late.join(MACHINE).is_dir() && !late.join(NEW).exists());
        drop(writer);
        snapshots.remove_incomplete().unwrap();
        assert_eq!(names(), ["complete", "late", "link"]);
        fs::remove_dir_all(&snapshots.0).unwrap();
    }

    #[test]
    fn a_confined_process_writes_beside_the_path_of_the_client() {
        let snapshots = fresh("beside");
        fs::create_dir(&snapshots.0).unwrap();
        let path = snapshots.0.join("mine");
        let new = NewSnapshot::beside(&path).unwrap();
        let beside = new.path().parent().unwrap().to_owned();
        assert_eq!(new.files(), [(beside.clone(), Access::Write)]);
        let error = NewSnapshot::beside(&path).unwrap_err().to_string();
        assert!(error.contains("a killed daemon left it"), "{error}");
        fs::create_dir(new.path()).unwrap();
        fs::write(new.path().join("state"), "s").unwrap();
        assert_eq!(new.complete().unwrap(), path);
        assert_eq!(fs::read(path.join("state")).unwrap(), b"s");
        assert!(!beside.exists());
        // A path that is in use, and one without a parent.
        assert_eq!(refusal(NewSnapshot::beside(&path)), (422, "unusable"));
        let nowhere = snapshots.0.join("no/such");
        assert_eq!(refusal(NewSnapshot::beside(&nowhere)), (422, "unusable"));
        let other = NewSnapshot::beside(&snapshots.0.join("other")).unwrap();
        drop(other);
        assert_eq!(fs::read_dir(&snapshots.0).unwrap().count(), 1);
        fs::remove_dir_all(&snapshots.0).unwrap();
    }

    #[test]
    fn links_and_damage_lead_nowhere() {
        let snapshots = fresh("links");
        let elsewhere = fresh("elsewhere");
        let name: SnapshotName = "a".parse().unwrap();
        killed(elsewhere.create(&name, &about()).unwrap());
        let other: SnapshotName = "b".parse().unwrap();
        killed(snapshots.create(&other, &about()).unwrap());
        symlink(elsewhere.directory(&name), snapshots.directory(&name)).unwrap();
        assert_eq!(refusal(snapshots.about(&name)), (404, "no_such_snapshot"));
        assert_eq!(refusal(snapshots.remove(&name)), (404, "no_such_snapshot"));
        assert_eq!(snapshots.list().unwrap().len(), 1);
        let target = elsewhere.directory(&name);
        let description = snapshots.directory(&other).join(ABOUT);
        for damage in 0..4 {
            fs::remove_file(&description).unwrap();
            match damage {
                0 => symlink(target.join(ABOUT), &description).unwrap(),
                1 => fs::write(&description, b"{}").unwrap(),
                2 => fs::write(&description, vec![b' '; 2 << 20]).unwrap(),
                _ => fs::write(&description, [0xff; 9]).unwrap(),
            }
            assert_eq!(refusal(snapshots.about(&other)), (422, "unusable"));
            let [one]: [_; 1] = snapshots.list().unwrap().try_into().unwrap();
            assert_eq!((one.vm, one.format), (None, None));
        }
        symlink(&target, snapshots.machine(&other)).unwrap();
        assert_eq!(refusal(snapshots.open(&other)), (422, "unusable"));
        snapshots.remove(&other).unwrap();
        assert!(target.join(ABOUT).is_file());
        fs::remove_dir_all(&snapshots.0).unwrap();
        fs::remove_dir_all(&elsewhere.0).unwrap();
    }
}
