//! The node's memory: records by name, in one file that survives a crash at any moment.
//!
//! ```text
//!   /var/lib/bellhop/node.redb   0600, in a directory 0700
//!     meta   "schema" ──> the version below
//!     vms    NAME     ──> JSON of a record
//!     operations  ID  ──> the same
//! ```
//! A record is written as a whole, and is on the disk when [`Store::put`] returns. What is read in
//! it is its owner's business, but for one rule: **fields may come with a new schema
//! version only**. A file of a newer schema is refused with the remedy and not touched, so a record
//! is only ever read by a program that knows all of its fields; a file of an older one is read as it
//! is, because what came later has defaults, and is marked with the new version by the first start.
//!
//! Owns the file and its schema version. It must not know what a record means.

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

/// The version of what this program writes. 2: a machine's record tells that it was sent elsewhere; a program that does not
/// know it would start it again. 3: it tells of the machine that had its place before. 4: it no longer tells of devices that were
/// made for its NICs, which have records of their own. 5: it has a generation, and tells of the
/// machine that it replaces. 6: there are operations.
const SCHEMA: u64 = 6;
/// Memory for pages of the file, in bytes: all of a large node's records.
const CACHE: usize = 4 << 20;

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const SCHEMA_KEY: &str = "schema";

/// Records of one kind, by name.
pub(crate) type Table = TableDefinition<'static, &'static str, &'static [u8]>;
/// Virtual machines, by name.
pub(crate) const VMS: Table = TableDefinition::new("vms");
/// Operations, by ID.
pub(crate) const OPERATIONS: Table = TableDefinition::new("operations");

/// The node's memory cannot be used.
fn failed(message: impl Into<String>) -> Error {
    Error::answered(StatusCode::INTERNAL_SERVER_ERROR, "store_failed", message)
}

/// The file, open.
#[derive(Debug)]
pub(crate) struct Store {
    path: PathBuf,
    /// None after an I/O error: what redb has in memory is of no use then, the file is.
    database: Mutex<Option<Database>>,
}

impl Store {
    /// Opens the file, or makes it; its directory, too.
    ///
    /// # Errors
    /// The file cannot be used, or is of a newer schema.
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

    /// All records of a table, by name.
    ///
    /// # Errors
    /// A record cannot be decoded; those of reading.
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
                    "the record of {name} in {} cannot be read: use the program that wrote it, or \
                     put a copy of the file back (running machines go on meanwhile)",
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
    /// The record has no JSON; those of writing. The former record is still there then.
    pub(crate) fn put(&self, to: Table, name: &str, record: &impl Serialize) -> Result<(), Error> {
        let json = serde_json::to_vec(record).map_err(|source| {
            failed(format!("the record of {name} cannot be written")).because(source)
        })?;
        self.with(|database| {
            let transaction = database.begin_write()?;
            transaction.open_table(to)?.insert(name, json.as_slice())?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// Takes a record away. One that is not there is no error.
    ///
    /// # Errors
    /// Those of writing.
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
        // Whatever the umask was.
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
                "{} has schema {found}, and this program knows up to {SCHEMA}: use the program \
                 that wrote it (running machines go on meanwhile)",
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
                "{} is damaged: put a copy back, or move it away to begin with an empty one \
                 (running machines go on; those that no record tells of are ended by a daemon \
                 that begins empty)",
                self.path.display()
            ))
            .because(other),
        }
    }

    fn in_use(&self) -> Error {
        failed(format!(
            "another `bellhop serve` uses {}: end it, or give this one another --state-dir",
            self.path.display()
        ))
    }
}

/// Whether the file or its directory failed. A file that is no database at all is damaged instead.
fn is_io(error: &redb::Error) -> bool {
    match error {
        redb::Error::PreviousIo => true,
        redb::Error::Io(source) => source.kind() != io::ErrorKind::InvalidData,
        _ => false,
    }
}

/// Makes the tables and marks the file with this program's schema, unless it is a newer one: that
/// is the answer then.
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
        // Somebody else's database, or one whose first transaction did not come.
        None if !fresh => {
            let transaction = database.begin_read()?;
            if transaction.list_tables()?.next().is_some() {
                return Err(redb::Error::Corrupted(
                    "it has tables, but not ours".to_owned(),
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
        "cannot use {shown}; is there room, and may this user write there?"
    ))
    .because(source)
}

#[cfg(test)]
mod tests;
