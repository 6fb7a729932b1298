//! How long each file of tests took the last time, so that the longest begin first.
//!
//! Owns the file `test-durations.json` in the lab's cache: an object of names with
//! milliseconds. It is only a hint: where it is missing or damaged, files of tests run in
//! the order of their names.

use crate::cache::Cache;
use crate::files;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// The file's name in the cache.
const NAME: &str = "test-durations.json";

/// What is expected of a file of tests that has not been measured.
const UNKNOWN: Duration = Duration::from_secs(60);

/// What was measured in earlier runs.
#[derive(Debug)]
pub(super) struct Durations {
    file: PathBuf,
    milliseconds: BTreeMap<String, u64>,
}

impl Durations {
    /// Reads what earlier runs have left.
    pub(super) fn open(cache: &Cache) -> Self {
        let file = cache.directory().join(NAME);
        let milliseconds = files::read(&file)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        Self { file, milliseconds }
    }

    /// How long a file of tests will take, as far as is known.
    pub(super) fn expected(&self, name: &str) -> Duration {
        self.milliseconds
            .get(name)
            .map_or(UNKNOWN, |time| Duration::from_millis(*time))
    }

    /// Keeps new measurements beside those of other files of tests. That this cannot be
    /// written only makes the next run's order a worse one.
    pub(super) fn remember(&mut self, measured: Vec<(String, Duration)>) {
        for (name, took) in measured {
            let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            self.milliseconds.insert(name, took);
        }
        let Ok(text) = serde_json::to_vec_pretty(&self.milliseconds) else {
            return;
        };
        // Another lab that reads at this moment finds the old file or the new one.
        let partial = self
            .file
            .with_extension(format!("partial-{}", std::process::id()));
        let _ = files::write(&partial, text).and_then(|()| files::rename(&partial, &self.file));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_are_found_again_and_damage_is_no_obstacle() {
        let directory = std::env::temp_dir().join(format!("lab-durations-{}", std::process::id()));
        let cache = Cache::at(directory.clone()).unwrap();
        let mut durations = Durations::open(&cache);
        assert_eq!(durations.expected("one"), UNKNOWN);
        durations.remember(vec![("one".to_owned(), Duration::from_millis(1500))]);
        durations.remember(vec![("two".to_owned(), Duration::MAX)]);
        let again = Durations::open(&cache);
        assert_eq!(again.expected("one"), Duration::from_millis(1500));
        assert_eq!(again.expected("two"), Duration::from_millis(u64::MAX));
        files::write(&directory.join(NAME), "{\"one\": -1}").unwrap();
        assert_eq!(Durations::open(&cache).expected("one"), UNKNOWN);
        crate::cache::remove_tree(&directory).unwrap();
    }
}
