//! The gate: the lab tests that `cargo lab test` runs, at least one for each mechanism.
//!
//! This module owns the format of `tests/gate`: a line for each file of tests (`boot_guest`) or
//! test (`boot_guest::reboot`), and comments after `#`. A name that does not exist is an error,
//! so a renamed test does not silently leave the gate.

use crate::error::{Error, Result};
use crate::files;
use crate::setup::binaries::Built;
use std::collections::BTreeMap;
use std::path::Path;

/// The list's path in the repository.
const PLACE: &str = "tests/gate";

/// Tests by file; an empty list means all tests of the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Gate(BTreeMap<String, Vec<String>>);

impl Gate {
    /// Reads the list.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Invalid`] for a line that occurs twice.
    pub(super) fn read(repository: &Path) -> Result<Self> {
        Self::parse(&files::read_text(&repository.join(PLACE))?)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut gate = BTreeMap::<String, Vec<String>>::new();
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let twice = || Error::invalid(PLACE, format!("{line} stands there twice"));
            let (file, test) = line.split_once("::").unzip();
            let file = file.unwrap_or(line);
            match (gate.get_mut(file), test) {
                (None, test) => {
                    gate.insert(file.into(), test.into_iter().map(str::to_owned).collect());
                }
                (Some(tests), Some(test))
                    if !tests.is_empty() && !tests.iter().any(|one| one == test) =>
                {
                    tests.push(test.to_owned());
                }
                (Some(_), _) => return Err(twice()),
            }
        }
        Ok(Self(gate))
    }

    /// True if the gate has tests of this file.
    pub(super) fn has_file(&self, file: &str) -> bool {
        self.0.contains_key(file)
    }

    /// True if the gate has this test.
    pub(super) fn has(&self, file: &str, test: &str) -> bool {
        self.0
            .get(file)
            .is_some_and(|tests| tests.is_empty() || tests.iter().any(|one| one == test))
    }

    /// Fails for a name that no test has.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the name.
    pub(super) fn check(&self, listed: &[(&Built, Vec<String>)]) -> Result<()> {
        for (file, tests) in &self.0 {
            let found = listed.iter().find(|(built, _)| built.name == *file);
            let (_, all) = found.ok_or_else(|| {
                Error::invalid(PLACE, format!("there is no file of tests {file}"))
            })?;
            if let Some(test) = tests.iter().find(|test| !all.contains(test)) {
                return Err(Error::invalid(PLACE, format!("{file} has no test {test}")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::binaries::Kind;

    #[test]
    fn a_file_or_some_of_its_tests_belong_to_the_gate() {
        let gate = Gate::parse("# all\none\n\ntwo::a # why\ntwo::b::c\n").unwrap();
        assert!(gate.has("one", "x") && gate.has("two", "a") && gate.has("two", "b::c"));
        assert!(!gate.has("two", "c") && !gate.has("three", "x"));
        for wrong in ["one\none", "one\none::a", "two::a\ntwo::a", "two::a\ntwo"] {
            Gate::parse(wrong).unwrap_err();
        }
    }

    #[test]
    fn a_name_that_no_test_has_is_an_error() {
        let built = Built {
            name: "one".into(),
            kind: Kind::IntegrationTests,
            path: "/x".into(),
            package: "/".into(),
        };
        let listed = [(&built, vec!["a".to_owned()])];
        let check = |text| Gate::parse(text).unwrap().check(&listed);
        check("one").unwrap();
        check("one::a").unwrap();
        check("one::b").unwrap_err();
        check("two").unwrap_err();
    }
}
