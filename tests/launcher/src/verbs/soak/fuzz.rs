//! Fuzzing in a soak: each target of `tests/fuzz` has an equal share of the minutes.

use crate::error::{Error, Result};
use crate::process::{die_with_parent, exit_code, output, without_cargo};
use std::path::Path;
use std::process::Command;

/// Time limit of one input, and limit of memory: a hang and an input that allocates are found.
const LIMITS: [&str; 2] = ["-timeout=30", "-rss_limit_mb=2048"];

/// Arguments of the fuzzing.
#[derive(Debug, clap::Args)]
pub struct FuzzArguments {
    /// Minutes of fuzzing after the tests, which all targets share; 0 for none
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u64).range(0..=10_000),
        default_value_t = 10
    )]
    fuzz_minutes: u64,
}

/// Checks that the targets can be built: before the tests, which take hours.
///
/// # Errors
/// [`Error::Missing`] without a C++ compiler.
pub fn check(arguments: &FuzzArguments) -> Result<()> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    if arguments.fuzz_minutes == 0 {
        return Ok(());
    }
    match output(Command::new(&compiler).arg("--version")) {
        Ok(_) => Ok(()),
        Err(_) => Err(missing(&compiler)),
    }
}

fn missing(compiler: &str) -> Error {
    Error::missing(
        format!("libFuzzer needs a C++ compiler, and {compiler} cannot be started"),
        "apt-get install g++, or soak with --fuzz-minutes 0",
    )
}

/// Fuzzes all targets; the exit code is 1 when one failed.
///
/// # Errors
/// The targets cannot be listed, or their script cannot be started.
pub fn run(arguments: &FuzzArguments, repository: &Path) -> Result<u8> {
    if arguments.fuzz_minutes == 0 {
        return Ok(0);
    }
    let targets = targets(&repository.join("tests/fuzz/targets"))?;
    let count = u64::try_from(targets.len()).unwrap_or(1).max(1);
    let seconds = (60 * arguments.fuzz_minutes).div_ceil(count);
    let mut failed = Vec::new();
    for target in targets {
        eprintln!("lab: fuzzing {target} for {seconds} s");
        let mut command = without_cargo(Command::new("tests/fuzz/run"));
        command
            .arg(&target)
            .arg(format!("-max_total_time={seconds}"))
            .args(LIMITS)
            .current_dir(repository);
        let status = die_with_parent(&mut command)
            .status()
            .map_err(|source| Error::Start {
                program: "tests/fuzz/run".into(),
                source,
            })?;
        if exit_code(status) != 0 {
            failed.push(target);
        }
    }
    if !failed.is_empty() {
        eprintln!(
            "lab: fuzzing failed: {}; the inputs are target/fuzz-corpus/TARGET-*",
            failed.join(", ")
        );
    }
    Ok(u8::from(!failed.is_empty()))
}

/// The names of the targets, sorted.
fn targets(directory: &Path) -> Result<Vec<String>> {
    let listing = Error::file("list", directory);
    let entries = std::fs::read_dir(directory).map_err(listing)?;
    let names = entries.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        Some(name.to_str()?.strip_suffix(".rs")?.to_owned())
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::repository;

    #[test]
    fn a_missing_compiler_is_an_error_with_the_remedy() {
        let error = missing("c++").to_string();
        assert!(error.contains("remedy: apt-get install g++"), "{error}");
    }

    #[test]
    fn each_target_has_a_corpus_and_is_built() {
        let fuzz = repository().unwrap().join("tests/fuzz");
        let manifest = std::fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
        let targets = targets(&fuzz.join("targets")).unwrap();
        assert!(targets.len() >= 9, "{targets:?}");
        for target in targets {
            assert!(fuzz.join("corpus").join(&target).is_dir(), "{target}");
            assert!(
                manifest.contains(&format!("name = \"{target}\"")),
                "{target}"
            );
        }
    }
}
