//! Replays a seed corpus: the unit tests of the crates include this file by `#[path]`.
//!
//! With `BELLHOP_WRITE_CORPUS` in the environment a test first writes its valid sequences.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The longest file, in bytes.
const LEN_MAX: usize = 4096;

fn directory(target: &str) -> PathBuf {
    let roots = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut fuzz = roots.map(|root| root.join("tests/fuzz"));
    let fuzz = fuzz.find(|fuzz| fuzz.is_dir()).expect("tests/fuzz");
    fuzz.join("corpus").join(target)
}

/// Passes each file of `tests/fuzz/corpus/TARGET` to `check`, and returns those that fail.
pub(crate) fn failing(target: &str, check: impl Fn(&[u8])) -> Vec<String> {
    let files = fs::read_dir(directory(target)).unwrap();
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 8, "the corpus of {target} is almost empty");
    files.retain(|file| {
        let input = fs::read(file).unwrap();
        assert!(input.len() <= LEN_MAX, "{} is too long", file.display());
        catch_unwind(AssertUnwindSafe(|| check(&input))).is_err()
    });
    files
        .iter()
        .map(|file| file.display().to_string())
        .collect()
}

/// Checks that no file of the corpus fails. `seeds` creates the valid sequences to write.
pub(crate) fn replay(target: &str, seeds: impl FnOnce() -> Vec<Vec<u8>>, check: impl Fn(&[u8])) {
    if std::env::var_os("BELLHOP_WRITE_CORPUS").is_some() {
        let directory = directory(target);
        fs::create_dir_all(&directory).unwrap();
        for (number, seed) in seeds().into_iter().enumerate() {
            fs::write(directory.join(format!("seed-{number:02}")), seed).unwrap();
        }
    }
    assert_eq!(failing(target, check), Vec::<String>::new());
}
