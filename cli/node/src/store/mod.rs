//! The node's persistent store: records by name, in one file that survives a crash at any moment.
//!
//! ```text
//!   /var/lib/bellhop/node.redb   0600, in a directory 0700
//!     meta   "schema" ──> the version below
//!     identity  "id"  ──> the random ID of this file
//!     vms    NAME     ──> JSON of a record
//!     operations  ID  ──> the same
//! ```
//! A record is written as a whole, and is on the disk when [`Store::put`] returns. The owner
//! defines the contents, with one rule: **fields may be added with a new schema version only**. A
//! file of a newer schema is rejected with a remedy and stays unchanged. So only a program that
//! knows all fields of a record reads it. A file of an older schema is read unchanged, because
//! later fields have defaults; the first start marks it with the new version.
//!
//! Owns the file and its schema version.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use axum::http::StatusCode;
use parking_lot::Mutex;
use redb::backends::FileBackend;
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition, TableError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::Error;

/// The schema version of this program. 2: a VM's record has a mark that it was sent elsewhere; a
/// program that does not know the mark would restart the VM. 3: it contains the former VM. 4: it no
/// longer contains devices that were created for its NICs, which have records of their own. 5: it
/// has a generation, and contains the VM that it replaces. 6: there are operations. 7: members of
/// its NICs and disks are `backup` and `stall_kick`. 8: its disks may have limits. 9: it may have
/// functions by VFIO, and their former drivers.
const SCHEMA: u64 = 9;
/// The cache for pages of the file, in bytes: all records of a large node.
const CACHE: usize = 4 << 20;

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const SCHEMA_KEY: &str = "schema";

const IDENTITY: TableDefinition<'_, &str, &str> = TableDefinition::new("identity");
const ID_KEY: &str = "id";
/// The kernel returns another random UUID at each read.
const UUID: &str = "/proc/sys/kernel/random/uuid";

/// Records of one kind, by name.
pub(crate) type Table = TableDefinition<'static, &'static str, &'static [u8]>;
/// VMs, by name.
pub(crate) const VMS: Table = TableDefinition::new("vms");
/// Operations, by ID.
pub(crate) const OPERATIONS: Table = TableDefinition::new("operations");

/// The error for a store that cannot be used.
fn failed(message: impl Into<String>) -> Error {
    Error::answered(StatusCode::INTERNAL_SERVER_ERROR, "store_failed", message)
}

/// The file, open.
#[derive(Debug)]
pub(crate) struct Store {
    path: PathBuf,
    /// None after an I/O error: redb's state in memory is invalid then, but the file is intact.
    database: Mutex<Option<Database>>,
}

impl Store {
    /// Opens the file, or creates it and its directory.
    ///
    /// # Errors
    /// The file cannot be used, or has a newer schema.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        if let Some(directory) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(directory)
                .map_err(|source| file(directory, source))?;
        }
        let store = Self {
            path: path.to_owned(),
            database: Mutex::new(None),
        };
        store.reopen(&mut store.database.lock())?;
        Ok(store)
    }

    /// The random ID of the file, which it keeps.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn id(&self) -> Result<String, Error> {
        let new = fs::read_to_string(UUID).map_err(|source| file(Path::new(UUID), source))?;
        self.with(|database| {
            let transaction = database.begin_write()?;
            let mut table = transaction.open_table(IDENTITY)?;
            let found = table.get(ID_KEY)?.map(|id| id.value().to_owned());
            let id = match found {
                Some(id) => id,
                None => {
                    table.insert(ID_KEY, new.trim())?;
                    new.trim().to_owned()
                }
            };
            drop(table);
            transaction.commit()?;
            Ok(id)
        })
    }

    /// All records of a table, by name.
    ///
    /// # Errors
    /// A record cannot be decoded, or the file cannot be read.
    pub(crate) fn all<T: DeserializeOwned>(&self, of: Table) -> Result<Vec<(String, T)>, Error> {
        let mut records = Vec::new();
        let raw = self.with(|database| {
            let transaction = database.begin_read()?;
            let table = transaction.open_table(of)?;
            let mut raw = Vec::new();
            for entry in table.iter()? {
                let (name, record) = entry?;
                raw.push((name.value().to_owned(), record.value().to_vec()));
            }
            Ok(raw)
        })?;
        for (name, record) in raw {
            let record = serde_json::from_slice(&record).map_err(|source| {
                failed(format!(
                    "cannot read the record of {name} in {}: use the program that wrote it, or \
                     restore a copy of the file (VMs keep running meanwhile)",
                    self.path.display()
                ))
                .because(source)
            })?;
            records.push((name, record));
        }
        Ok(records)
    }

    /// Writes a record; it is on the disk when this returns.
    ///
    /// # Errors
    /// The record cannot be serialized, or the file cannot be written. The former record still
    /// exists.
    pub(crate) fn put(&self, to: Table, name: &str, record: &impl Serialize) -> Result<(), Error> {
        let json = serde_json::to_vec(record).map_err(|source| {
            failed(format!("cannot encode the record of {name}")).because(source)
        })?;
        self.with(|database| {
            let transaction = database.begin_write()?;
            transaction.open_table(to)?.insert(name, json.as_slice())?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// Removes a record. A missing one is not an error.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn remove(&self, from: Table, name: &str) -> Result<(), Error> {
        self.with(|database| {
            let transaction = database.begin_write()?;
            transaction.open_table(from)?.remove(name)?;
            transaction.commit()?;
            Ok(())
        })
    }

    fn with<T>(&self, act: impl FnOnce(&Database) -> Result<T, redb::Error>) -> Result<T, Error> {
        let mut database = self.database.lock();
        if database.is_none() {
            self.reopen(&mut database)?;
        }
        let Some(open) = database.as_ref() else {
            return Err(self.in_use());
        };
        act(open).map_err(|error| {
            if is_io(&error) {
                *database = None;
            }
            self.sort(error)
        })
    }

    fn reopen(&self, database: &mut Option<Database>) -> Result<(), Error> {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&self.path)
            .map_err(|source| file(&self.path, source))?;
        // Independent of the umask.
        opened
            .set_permissions(Permissions::from_mode(0o600))
            .map_err(|source| file(&self.path, source))?;
        let fresh = fs::metadata(&self.path)
            .map_err(|source| file(&self.path, source))?
            .len()
            == 0;
        let backend = FileBackend::new(opened).map_err(|error| self.sort(error.into()))?;
        let open = Database::builder()
            .set_cache_size(CACHE)
            .create_with_backend(backend)
            .map_err(|error| self.sort(error.into()))?;
        let found = prepare(&open, fresh).map_err(|error| self.sort(error))?;
        match found {
            Some(found) if found > SCHEMA => Err(failed(format!(
                "{} has schema {found}, but this program supports up to {SCHEMA}: use the \
                 program that wrote it (VMs keep running meanwhile)",
                self.path.display()
            ))),
            _ => {
                *database = Some(open);
                Ok(())
            }
        }
    }

    fn sort(&self, error: redb::Error) -> Error {
        match error {
            redb::Error::DatabaseAlreadyOpen => self.in_use(),
            redb::Error::PreviousIo => {
                file(&self.path, io::Error::other("an earlier write failed"))
            }
            redb::Error::Io(source) if source.kind() != io::ErrorKind::InvalidData => {
                file(&self.path, source)
            }
            other => failed(format!(
                "{} is damaged: restore a copy (VMs keep running meanwhile). To begin with an \
                 empty store, move the file away; while VMs run, the daemon then starts only with \
                 --end-orphans, which ends them",
                self.path.display()
            ))
            .because(other),
        }
    }

    fn in_use(&self) -> Error {
        failed(format!(
            "another `bellhop serve` uses {}: end it, or choose another --state-dir",
            self.path.display()
        ))
    }
}

/// Whether the file or its directory failed. A file that is not a database counts as damaged
/// instead.
fn is_io(error: &redb::Error) -> bool {
    match error {
        redb::Error::PreviousIo => true,
        redb::Error::Io(source) => source.kind() != io::ErrorKind::InvalidData,
        _ => false,
    }
}

/// Creates the tables and marks the file with this program's schema. Returns the file's schema if
/// that is newer.
fn prepare(database: &Database, fresh: bool) -> Result<Option<u64>, redb::Error> {
    let found = {
        let transaction = database.begin_read()?;
        match transaction.open_table(META) {
            Ok(table) => table.get(SCHEMA_KEY)?.map(|version| version.value()),
            Err(TableError::TableDoesNotExist(_)) => None,
            Err(error) => return Err(error.into()),
        }
    };
    match found {
        Some(found) if found >= SCHEMA => return Ok(Some(found)),
        // A foreign database, or one whose first transaction was not committed.
        None if !fresh => {
            let transaction = database.begin_read()?;
            if transaction.list_tables()?.next().is_some() {
                return Err(redb::Error::Corrupted(
                    "its tables are not those of Bellhop".to_owned(),
                ));
            }
        }
        _ => {}
    }
    let transaction = database.begin_write()?;
    transaction.open_table(META)?.insert(SCHEMA_KEY, SCHEMA)?;
    for table in [VMS, OPERATIONS] {
        transaction.open_table(table)?;
    }
    transaction.commit()?;
    Ok(Some(SCHEMA))
}

fn file(path: &Path, source: io::Error) -> Error {
    let shown = path.display();
    failed(format!(
        "cannot use {shown}: check the free space and this user's permissions"
    ))
    .because(source)
}

#[cfg(test)]
mod tests;
