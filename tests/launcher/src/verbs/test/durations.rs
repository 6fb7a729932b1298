//! How long each lab test took the last time, so that the longest files begin first.
//!
//! Owns the file `test-durations.json` in the lab's cache: an object of names (`file::test`) with
//! milliseconds. It is only a hint: where it is missing or damaged, files of tests run in the order
//! of their names.

use crate::cache::Cache;
use crate::files;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// The file's name in the cache.
const NAME: &str = "test-durations.json";

/// What is expected of a test that has not been measured.
const UNKNOWN: Duration = Duration::from_secs(20);

/// Loading a file of tests into the lab host.
const LOAD: Duration = Duration::from_secs(1);

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

    /// How long these tests of a file will take, as far as is known.
    pub(super) fn of_file(&self, file: &str, tests: &[String]) -> Duration {
        let of_test = |test| {
            let time = self.milliseconds.get(&format!("{file}::{test}"));
            time.map_or(UNKNOWN, |time| Duration::from_millis(*time))
        };
        tests
            .iter()
            .map(of_test)
            .fold(LOAD, Duration::saturating_add)
    }

    /// Keeps new measurements beside those of other tests. A file that cannot be written only
    /// makes the next run's order a worse one.
    pub(super) fn remember(&mut self, measured: &[(String, Duration)]) {
        for (name, took) in measured {
            let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            self.milliseconds.insert(name.clone(), took);
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
        let tests = ["a".to_owned(), "b".to_owned()];
        let expected = |durations: &Durations| durations.of_file("one", &tests);
        let mut durations = Durations::open(&cache);
        assert_eq!(expected(&durations), LOAD + 2 * UNKNOWN);
        durations.remember(&[("one::a".to_owned(), Duration::from_millis(1500))]);
        durations.remember(&[("one::b".to_owned(), Duration::from_millis(500))]);
        let again = Durations::open(&cache);
        assert_eq!(expected(&again), LOAD + Duration::from_secs(2));
        files::write(&directory.join(NAME), "{\"one::a\": -1}").unwrap();
        assert_eq!(expected(&Durations::open(&cache)), LOAD + 2 * UNKNOWN);
        crate::cache::remove_tree(&directory).unwrap();
    }
}
