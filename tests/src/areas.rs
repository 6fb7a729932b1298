//! The test areas: what `cargo lab test AREA` selects.
//!
//! Owns the table. A test target belongs to exactly one area; tests that need
//! no kernel belong to the area of what they test.

use crate::error::{Error, Result};
use crate::files;
use std::path::Path;

/// A test area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Area {
    /// A microVM with a vDPA NIC: the machine, the lab itself.
    Skeleton,
    /// SR-IOV, doorbells, IOMMU, VFIO.
    Hardware,
    /// Shadow rings, ring switching, mediation.
    Rings,
    /// vDPA and devlink management.
    Mgmt,
    /// The REST API and the node daemon.
    Api,
    /// Live migration, hot swap, live upgrade, snapshots.
    Migration,
}

impl Area {
    /// All areas.
    pub const ALL: [Self; 6] = [
        Self::Skeleton,
        Self::Hardware,
        Self::Rings,
        Self::Mgmt,
        Self::Api,
        Self::Migration,
    ];

    /// The area's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Skeleton => "skeleton",
            Self::Hardware => "hardware",
            Self::Rings => "rings",
            Self::Mgmt => "mgmt",
            Self::Api => "api",
            Self::Migration => "migration",
        }
    }

    /// The area of the given name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|area| area.name() == name)
    }

    /// Packages whose unit, property and documentation tests run on this machine. All
    /// belong to the first area until a crate is an area's own.
    pub fn host_packages(self) -> &'static [&'static str] {
        match self {
            Self::Skeleton => &PACKAGES,
            Self::Hardware | Self::Rings | Self::Mgmt | Self::Api | Self::Migration => &[],
        }
    }

    /// Names of the integration tests that run in the lab host: those in
    /// the `tests` folders of crates that need the lab's kernel, whose names start with the area's.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Invalid`] for a file that belongs to no area,
    /// which would never be run.
    pub fn lab_tests(self, repository: &Path) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for (directory, name) in test_targets(repository)? {
            let area = Self::ALL.into_iter().find(|area| {
                name.strip_prefix(area.name())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
            });
            match area {
                Some(area) if area == self => names.push(name),
                Some(_) => {}
                None => {
                    return Err(Error::invalid(
                        format!("{directory}/tests/{name}.rs"),
                        "its name starts with no area's, so nobody would run it",
                    ));
                }
            }
        }
        Ok(names)
    }
}

/// All packages. Whoever builds tests names all of them: what they share is built once more for any other choice, with just the
/// features that it needs.
pub const PACKAGES: [&str; 5] = ["vdpa", "devices", "vmm", "bellhop", "lab"];

/// Folders of the crates whose integration tests need the lab's kernel.
const LAB_TESTED: [&str; 3] = ["tests", "vmm", "cli"];

/// Folder and name of each integration test target, sorted by name in each folder.
fn test_targets(repository: &Path) -> Result<Vec<(&'static str, String)>> {
    let mut targets = Vec::new();
    for folder in LAB_TESTED {
        let names = files::list(&repository.join(folder).join("tests"))?;
        targets.extend(
            names
                .iter()
                .filter(|path| path.extension().is_some_and(|kind| kind == "rs"))
                .filter_map(|path| Some((folder, path.file_stem()?.to_str()?.to_owned()))),
        );
    }
    Ok(targets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_again() {
        for area in Area::ALL {
            assert_eq!(Area::named(area.name()), Some(area));
        }
        assert_eq!(Area::named("other"), None);
    }

    #[test]
    fn every_integration_test_has_an_area() {
        let repository = crate::setup::repository().unwrap();
        let mut found = 0;
        for area in Area::ALL {
            found += area.lab_tests(&repository).unwrap().len();
        }
        assert_eq!(found, test_targets(&repository).unwrap().len());
    }
}
