//! Estimates the time and disk space of a preparation from the steps that are not in the cache yet.
//!
//! Times are those of two idle cores and a near mirror. They feed only the estimate of the progress
//! display.

use super::{Needs, Profile, kernel, root};
use crate::cache::{Cache, Entry};
use crate::error::{Error, Result};
use rustix::fs::statvfs;
use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

/// Time if nothing has to be built.
const WARM: Duration = Duration::from_secs(10);

/// A step that is not in the cache: how long it takes, and how much it leaves on the disk, in MiB.
#[derive(Debug, Clone, Copy)]
struct Step {
    seconds: u64,
    mebibytes: u64,
}

const ROOT: Step = Step {
    seconds: 75,
    mebibytes: 1300,
};
/// Includes the unpacked kernel source, which is removed afterwards.
const MODULES: Step = Step {
    seconds: 60,
    mebibytes: 1700,
};
const GUEST_KERNEL: Step = Step {
    seconds: 300,
    mebibytes: 2200,
};
const PROGRAMS: Step = Step {
    seconds: 270,
    mebibytes: 1500,
};
const RELEASE: Step = Step {
    seconds: 420,
    mebibytes: 1500,
};
/// One file of tests beside the programs.
const TEST: Step = Step {
    seconds: 3,
    mebibytes: 37,
};

/// The steps that will run.
#[derive(Debug)]
pub(super) struct Plan {
    /// Steps that fill the cache.
    host: Vec<Step>,
    /// Steps that fill cargo's target directory.
    cargo: Vec<Step>,
    target: std::path::PathBuf,
}

impl Plan {
    /// Finds the missing steps.
    ///
    /// # Errors
    /// [`Error::File`] for a recipe that cannot be read.
    pub(super) fn of(cache: &Cache, repository: &Path, needs: &Needs<'_>) -> Result<Self> {
        let images = repository.join("images");
        let hash = root::hash(&images)?;
        let absent = |entry: &Entry, step| (!entry.is_complete()).then_some(step);
        let modules = kernel::modules_hash(&hash, &images, &repository.join("tests/kmod"))?;
        let guest = kernel::guest_hash(&hash, &images)?;
        let mut host: Vec<Step> = [
            absent(&cache.entry("root", &hash), ROOT),
            absent(&cache.entry("modules", &modules), MODULES),
        ]
        .into_iter()
        .flatten()
        .collect();
        if needs.guest_kernel {
            host.extend(absent(&cache.entry("guest-kernel", &guest), GUEST_KERNEL));
        }
        let target = std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| repository.join("target"), Into::into);
        let profile = match needs.profile {
            Profile::Dev | Profile::Coverage => ("debug", PROGRAMS),
            Profile::Release => ("release", RELEASE),
        };
        let directory = target.join("x86_64-unknown-linux-gnu").join(profile.0);
        let mut cargo = Vec::new();
        if !directory.join("bellhop").exists() {
            cargo.push(profile.1);
        }
        let built = programs(&directory.join("deps"));
        let files = needs.tests.iter().filter(|word| !word.starts_with('-'));
        let absent = files.filter(|file| !built.contains(file.as_str()));
        cargo.extend(absent.map(|_| TEST));
        Ok(Self {
            host,
            cargo,
            target,
        })
    }

    /// How long the steps take. Both rows run at the same time and share the processors, so half of
    /// the shorter row is added to the longer one.
    pub(super) fn time(&self) -> Duration {
        let seconds = |steps: &[Step]| steps.iter().map(|step| step.seconds).sum::<u64>();
        let (host, cargo) = (seconds(&self.host), seconds(&self.cargo));
        WARM + Duration::from_secs(host.max(cargo) + host.min(cargo) / 2)
    }

    /// Fails early if the disk lacks room for the build.
    ///
    /// # Errors
    /// [`Error::Missing`] with the directory and the size it needs.
    pub(super) fn check_disk(&self, cache: &Cache) -> Result<()> {
        let needed = |steps: &[Step]| steps.iter().map(|step| step.mebibytes).sum::<u64>();
        let (host, cargo) = (needed(&self.host), needed(&self.cargo));
        let target = existing(&self.target);
        let one_disk = device(cache.directory()) == device(target);
        let (host, cargo) = if one_disk {
            (host + cargo, 0)
        } else {
            (host, cargo)
        };
        check(cache.directory(), host, "the lab's cache")?;
        check(target, cargo, "cargo's build directory")
    }
}

/// Which programs cargo has built, current or not: their files are `NAME-HASH`.
fn programs(directory: &Path) -> HashSet<String> {
    let files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = files.filter_map(|file| file.file_name().into_string().ok());
    names
        .filter_map(|name| Some(name.rsplit_once('-')?.0.to_owned()))
        .collect()
}

/// The directory itself or the nearest one above it that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors()
        .find(|path| path.is_dir())
        .unwrap_or(Path::new("/"))
}

fn device(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).ok().map(|data| data.dev())
}

fn check(directory: &Path, needed: u64, what: &str) -> Result<()> {
    let state = statvfs(directory)
        .map_err(|error| Error::file("find the free space of", directory)(error.into()))?;
    let free = state.f_bavail.saturating_mul(state.f_frsize) >> 20;
    if free >= needed {
        return Ok(());
    }
    Err(Error::missing(
        format!(
            "{what} needs {needed} MiB in {}, and {free} MiB are free",
            directory.display()
        ),
        "make room there (`cargo lab clean`, `cargo clean`), or choose another disk with \
         XDG_CACHE_HOME and CARGO_TARGET_DIR",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_an_error_with_both_figures() {
        let error = check(Path::new("/"), u64::MAX >> 20, "the cache").unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("the cache needs") && text.contains("are free"),
            "{text}"
        );
        check(Path::new("/"), 0, "nothing").unwrap();
    }

    #[test]
    fn rows_that_run_at_once_share_the_processors() {
        let plan = Plan {
            host: vec![ROOT, MODULES],
            cargo: vec![PROGRAMS],
            target: "/".into(),
        };
        let longer = PROGRAMS.seconds;
        let shorter = ROOT.seconds + MODULES.seconds;
        assert_eq!(
            plan.time(),
            WARM + Duration::from_secs(longer + shorter / 2)
        );
    }
}
