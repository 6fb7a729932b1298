//! The test areas: what `cargo lab test AREA` selects.
//!
//! This module owns the table. A test target belongs to exactly one area. A test that needs no
//! kernel belongs to the area of its subject.

use crate::error::{Error, Result};
use crate::files;
use std::path::Path;

/// A test area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Area {
    /// A microVM: the machine, the lab itself.
    Boot,
    /// vDPA devices of the simulator, behind a guest and by hand.
    Vdpa,
    /// SR-IOV, doorbells, IOMMU, VFIO.
    Hardware,
    /// Shadow rings, ring switching, used-ring shadowing.
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
    pub const ALL: [Self; 7] = [
        Self::Boot,
        Self::Vdpa,
        Self::Hardware,
        Self::Rings,
        Self::Mgmt,
        Self::Api,
        Self::Migration,
    ];

    /// The area's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Vdpa => "vdpa",
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

    /// The area of a file of integration tests.
    pub fn of_test(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|area| {
            name.strip_prefix(area.name())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        })
    }
}

/// Folders of the crates whose integration tests need the lab's kernel.
const LAB_TESTED: [&str; 3] = ["tests", "vmm", "cli"];

/// Names of all integration tests that run in the lab host.
///
/// # Errors
/// [`Error::File`]; [`Error::Invalid`] for a file that belongs to no area, because no filter would
/// select it.
pub fn test_names(repository: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for folder in LAB_TESTED {
        for path in files::list(&repository.join(folder).join("tests"))? {
            let name = path.file_stem().and_then(|name| name.to_str());
            let (Some(name), true) = (name, path.extension().is_some_and(|kind| kind == "rs"))
            else {
                continue;
            };
            if Area::of_test(name).is_none() {
                return Err(Error::invalid(
                    format!("{folder}/tests/{name}.rs"),
                    "its name starts with no area's",
                ));
            }
            all.push(name.to_owned());
        }
    }
    Ok(all)
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
        assert!(!test_names(&repository).unwrap().is_empty());
    }
}
