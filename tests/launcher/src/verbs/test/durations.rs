//! Records how long each lab test took the last time, so that the longest files start first.
//!
//! This module owns the files `test-durations.json` (gate) and `soak-durations.json` in the lab's
//! cache: objects that map names (`file::test`) to milliseconds. They are only a hint: without a
//! valid file, files of tests run in the order of their names. A soak has its own file, because the
//! same test takes several times longer there.

use crate::cache::Cache;
use crate::files;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// The name of a run's file in the cache.
fn file_name(soak: bool) -> &'static str {
    if soak {
        "soak-durations.json"
    } else {
        "test-durations.json"
    }
}

/// The assumed time of an unmeasured test: the mean of complete runs.
fn unknown(soak: bool) -> Duration {
    Duration::from_secs(if soak { 20 } else { 7 })
}

/// Time to load a file of tests into the lab host.
const LOAD: Duration = Duration::from_secs(1);

/// Measurements of earlier runs.
#[derive(Debug)]
pub(super) struct Durations {
    file: PathBuf,
    unknown: Duration,
    milliseconds: BTreeMap<String, u64>,
}

impl Durations {
    /// Reads the measurements of earlier runs of the same kind.
    pub(super) fn open(cache: &Cache, soak: bool) -> Self {
        let file = cache.directory().join(file_name(soak));
        let milliseconds = files::read(&file)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        Self {
            file,
            unknown: unknown(soak),
            milliseconds,
        }
    }

    /// The expected time of these tests of a file.
    pub(super) fn of_file(&self, file: &str, tests: &[String]) -> Duration {
        let of_test = |test| {
            let time = self.milliseconds.get(&format!("{file}::{test}"));
            time.map_or(self.unknown, |time| Duration::from_millis(*time))
        };
        tests
            .iter()
            .map(of_test)
            .fold(LOAD, Duration::saturating_add)
    }

    /// Stores new measurements beside those of other tests. A file that cannot be written only
    /// degrades the order of the next run.
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
        let mut durations = Durations::open(&cache, false);
        let unmeasured = LOAD + 2 * unknown(false);
        assert_eq!(expected(&durations), unmeasured);
        durations.remember(&[("one::a".to_owned(), Duration::from_millis(1500))]);
        durations.remember(&[("one::b".to_owned(), Duration::from_millis(500))]);
        let again = Durations::open(&cache, false);
        assert_eq!(expected(&again), LOAD + Duration::from_secs(2));
        let soak = Durations::open(&cache, true);
        assert_eq!(expected(&soak), LOAD + 2 * unknown(true));
        files::write(&directory.join(file_name(false)), "{\"one::a\": -1}").unwrap();
        assert_eq!(expected(&Durations::open(&cache, false)), unmeasured);
        crate::cache::remove_tree(&directory).unwrap();
    }
}
