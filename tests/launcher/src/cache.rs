//! The lab's cache: builds each slow step once per recipe.
//!
//! Each step owns a directory `<step>-<hash>` under the user's cache directory. The hash covers
//! everything that the result depends on, including the hashes of the steps before it. The lab
//! builds a step in `<step>-<hash>.partial` and renames it at the end, so a directory without that
//! suffix is complete:
//!
//! ```text
//!            build                 rename
//!   absent ────────▶ .partial ──────────────▶ complete
//!      ▲                │ interrupted: removed at the next start
//!      └────────────────┘
//! ```
//!
//! This module owns the naming, the lock between processes, and the removal of leftovers. It does
//! not know what the steps build.

use crate::error::{Error, Result};
use crate::files;
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The cache's directory under the user's cache directory.
const NAME: &str = "bellhop-lab";

/// The cache directory.
#[derive(Debug, Clone)]
pub struct Cache {
    directory: PathBuf,
}

/// Held while steps are built: two labs never build at once.
#[derive(Debug)]
pub struct CacheLock {
    _file: File,
}

/// A hash over a step's dependencies. Inputs are separated, so that moving a byte from one input to
/// its neighbour changes the result.
#[derive(Debug, Clone)]
pub struct RecipeHash {
    digest: Sha256,
}

impl RecipeHash {
    /// Starts with the step's name and the version of the code that builds it. Raise the version
    /// when a change of that code changes the result.
    pub fn new(step: &str, version: u32) -> Self {
        let mut hash = Self {
            digest: Sha256::new(),
        };
        hash.add(step.as_bytes());
        hash.add(&version.to_le_bytes());
        hash
    }

    /// Adds one input.
    pub fn add(&mut self, input: &[u8]) {
        // The length in front of each input keeps neighbours apart.
        let length = u64::try_from(input.len()).unwrap_or(u64::MAX);
        self.digest.update(length.to_le_bytes());
        self.digest.update(input);
    }

    /// Adds a file's content.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read.
    pub fn add_file(&mut self, path: &Path) -> Result<()> {
        self.add(&files::read(path)?);
        Ok(())
    }

    /// Adds the names and contents of all files below a directory.
    ///
    /// # Errors
    /// [`Error::File`] when something cannot be read.
    pub fn add_directory(&mut self, directory: &Path) -> Result<()> {
        for file in files::walk(directory)? {
            let name = file.strip_prefix(directory).unwrap_or(&file);
            self.add(name.as_os_str().as_encoded_bytes());
            self.add_file(&file)?;
        }
        Ok(())
    }

    /// The first 64 bits in hexadecimal: enough to tell recipes apart.
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(16);
        for byte in self.digest.clone().finalize().iter().take(8) {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }
}

/// Where a step's result is or will be.
#[derive(Debug, Clone)]
pub struct Entry {
    directory: PathBuf,
}

impl Entry {
    /// The finished result's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// True when the result is complete.
    pub fn is_complete(&self) -> bool {
        self.directory.is_dir()
    }

    /// The directory in which the step is built.
    pub fn partial(&self) -> PathBuf {
        let mut name = self.directory.clone().into_os_string();
        name.push(".partial");
        PathBuf::from(name)
    }
}

impl Cache {
    /// Opens the cache: `$XDG_CACHE_HOME/bellhop-lab`, else
    /// `$HOME/.cache/bellhop-lab`.
    ///
    /// # Errors
    /// [`Error::Missing`] when neither variable is set; [`Error::File`].
    pub fn open() -> Result<Self> {
        let absolute = |name| {
            std::env::var_os(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        let base = absolute("XDG_CACHE_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
            .ok_or_else(|| {
                Error::missing(
                    "no directory for the lab's cache: neither XDG_CACHE_HOME nor HOME is set",
                    "set HOME",
                )
            })?;
        Self::at(base.join(NAME))
    }

    /// Opens the cache in a given directory.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn at(directory: PathBuf) -> Result<Self> {
        files::create_directory(&directory)?;
        Ok(Self { directory })
    }

    /// The cache's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The directory of the steps' logs.
    pub fn log(&self, step: &str) -> PathBuf {
        self.directory.join("log").join(step)
    }

    /// The entry of a step with a given hash.
    pub fn entry(&self, step: &str, hash: &RecipeHash) -> Entry {
        Entry {
            directory: self.directory.join(format!("{step}-{}", hash.text())),
        }
    }

    /// Waits until no other lab builds, then locks the cache.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn lock(&self) -> Result<CacheLock> {
        let path = self.directory.join("lock");
        let file = File::create(&path).map_err(Error::file("create", &path))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("lab: another lab is preparing; waiting for it");
            flock(&file, FlockOperation::LockExclusive)
                .map_err(|error| Error::file("lock", &path)(error.into()))?;
        }
        Ok(CacheLock { _file: file })
    }

    /// Returns a step's entry and builds it first if it is not complete. `build` receives the empty
    /// partial directory.
    ///
    /// # Errors
    /// The error of `build`; [`Error::File`].
    pub fn ensure(
        &self,
        _lock: &CacheLock,
        entry: Entry,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Entry> {
        if entry.is_complete() {
            return Ok(entry);
        }
        let partial = entry.partial();
        remove_tree(&partial)?;
        files::create_directory(&partial)?;
        build(&partial)?;
        files::rename(&partial, entry.directory())?;
        Ok(entry)
    }
}

impl Cache {
    /// Marks an entry as used now and removes other entries of the same step. An entry unused for a
    /// week is removed. Of those unused for two hours, only the newest four stay. Other worktrees
    /// and running labs may still need a recent one.
    pub fn retire_others(&self, _lock: &CacheLock, step: &str, used: &Entry) {
        let now = SystemTime::now();
        // If the time cannot be set, the entry only looks older.
        let _ = File::open(used.directory()).and_then(|file| file.set_modified(now));
        let mut others: Vec<(Duration, PathBuf)> = files::list(&self.directory)
            .unwrap_or_default()
            .into_iter()
            .filter(|path| path != used.directory() && is_of_step(path, step))
            .filter_map(|path| Some((age(&path, now)?, path)))
            .collect();
        others.sort();
        for (position, (age, path)) in others.into_iter().enumerate() {
            if age > UNUSED || (age > RECENT && position + 1 >= KEPT) {
                // A leftover is harmless; the next start tries again.
                let _ = remove_tree(&path);
            }
        }
    }

    /// Removes the leftovers of interrupted steps and ended labs: partial entries and old logs.
    pub fn prune(&self, _lock: &CacheLock) {
        let now = SystemTime::now();
        let partial = files::list(&self.directory).unwrap_or_default();
        let partial = partial
            .into_iter()
            .filter(|path| path.extension().is_some_and(|kind| kind == "partial"));
        let logs = files::list(&self.directory.join("log")).unwrap_or_default();
        let logs = logs
            .into_iter()
            .filter(|path| age(path, now).is_some_and(|age| age > UNUSED));
        for path in partial.chain(logs) {
            let _ = remove_tree(&path)
                .or_else(|_| std::fs::remove_file(&path).map_err(Error::file("remove", &path)));
        }
    }

    /// Removes the whole cache. The caller must not hold the lock.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(self) -> Result<()> {
        let lock = self.lock()?;
        remove_tree(&self.directory)?;
        drop(lock);
        Ok(())
    }
}

/// The cache removes an entry that no lab has used for this long.
const UNUSED: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// An entry used within this time may be in use now.
const RECENT: Duration = Duration::from_secs(2 * 60 * 60);

/// How many entries of one step the cache keeps, including the one in use.
const KEPT: usize = 4;

fn is_of_step(path: &Path, step: &str) -> bool {
    path.file_name()
        .and_then(|name| name.to_str()?.strip_prefix(step)?.strip_prefix('-'))
        .is_some_and(|hash| hash.len() == 16 && hash.chars().all(|c| c.is_ascii_hexdigit()))
}

/// Time since the last change.
fn age(path: &Path, now: SystemTime) -> Option<Duration> {
    let modified = std::fs::metadata(path).and_then(|data| data.modified());
    now.duration_since(modified.ok()?).ok()
}

/// Removes a directory and its content; a missing directory is no error. Files of a root that was
/// built without privileges belong to subordinate user IDs, which only their user namespace can
/// remove.
///
/// # Errors
/// [`Error::File`].
pub fn remove_tree(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            let removed = std::process::Command::new("unshare")
                .args(["--map-root-user", "--map-auto", "rm", "-rf", "--"])
                .arg(path)
                .status();
            if removed.is_ok_and(|status| status.success()) {
                Ok(())
            } else {
                Err(Error::file("remove", path)(error))
            }
        }
        Err(error) => Err(Error::file("remove", path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("lab-cache-{}-{name}", std::process::id()))
    }

    #[test]
    fn hash_separates_inputs() {
        let mut one = RecipeHash::new("step", 1);
        one.add(b"ab");
        one.add(b"c");
        let mut two = RecipeHash::new("step", 1);
        two.add(b"a");
        two.add(b"bc");
        assert_ne!(one.text(), two.text());
        assert_ne!(
            RecipeHash::new("step", 1).text(),
            RecipeHash::new("step", 2).text()
        );
        assert_eq!(one.text().len(), 16);
    }

    #[test]
    fn old_entries_and_all_but_the_newest_of_a_step_are_retired() {
        let cache = Cache::at(scratch("retire")).unwrap();
        let lock = cache.lock().unwrap();
        let build = |step: &str, version: u32, hours: u64| {
            let entry = cache.entry(step, &RecipeHash::new(step, version));
            let entry = cache.ensure(&lock, entry, |_| Ok(())).unwrap();
            let time = SystemTime::now() - Duration::from_secs(hours * 60 * 60);
            let file = File::open(entry.directory()).unwrap();
            file.set_modified(time).unwrap();
            entry
        };
        let used = build("a", 0, 0);
        let recent: Vec<_> = (1..=6).map(|version| build("a", version, 1)).collect();
        let newest = build("b", 0, 0);
        let kept: Vec<_> = (1..=3).map(|version| build("b", version, 3)).collect();
        let surplus = build("b", 4, 4);
        let old = build("b", 5, 8 * 24);
        let other = build("a-b", 1, 8 * 24);
        cache.retire_others(&lock, "a", &used);
        cache.retire_others(&lock, "b", &newest);
        assert!(recent.iter().chain(&kept).all(Entry::is_complete));
        assert!(used.is_complete() && newest.is_complete() && other.is_complete());
        assert!(!surplus.is_complete() && !old.is_complete());
        drop(lock);
        let directory = cache.directory().to_path_buf();
        cache.remove().unwrap();
        assert!(!directory.exists());
    }

    #[test]
    fn leftovers_of_an_interrupted_step_are_pruned() {
        let cache = Cache::at(scratch("prune")).unwrap();
        let lock = cache.lock().unwrap();
        let partial = cache.entry("a", &RecipeHash::new("a", 1)).partial();
        files::create_directory(&partial.join("half")).unwrap();
        files::create_directory(&cache.log("")).unwrap();
        files::write(&cache.log("recent"), "").unwrap();
        cache.prune(&lock);
        assert!(!partial.exists() && cache.log("recent").exists());
        remove_tree(cache.directory()).unwrap();
    }

    #[test]
    fn an_interrupted_step_is_built_again_and_a_complete_one_is_not() {
        let cache = Cache::at(scratch("steps")).unwrap();
        let lock = cache.lock().unwrap();
        let hash = RecipeHash::new("step", 1);
        let entry = cache.entry("step", &hash);
        cache
            .ensure(&lock, entry.clone(), |partial| {
                files::write(&partial.join("half"), "")?;
                Err(Error::Usage("interrupted".into()))
            })
            .unwrap_err();
        assert!(!entry.is_complete());
        let entry = cache
            .ensure(&lock, entry, |partial| {
                assert!(files::list(partial)?.is_empty());
                files::write(&partial.join("whole"), "")
            })
            .unwrap();
        assert!(entry.directory().join("whole").exists());
        cache
            .ensure(&lock, entry, |_| panic!("was complete"))
            .unwrap();
        remove_tree(cache.directory()).unwrap();
    }
}
