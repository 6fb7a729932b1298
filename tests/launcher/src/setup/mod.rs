//! Prepares the lab: everything that must exist before a lab host boots.
//!
//! ```text
//!   packages ─▶ root ─┬▶ modules ──────┐
//!                     └▶ guest kernel  ├─▶ initramfs (host, guest, stock guest)
//!   cargo ────────────▶ programs ──────┘
//! ```
//!
//! This module owns the order of the steps; the two lines run at the same time. Each step is cached
//! by the hash of its recipe (see [`crate::cache`]), and an interrupted preparation resumes at the
//! same step.

pub mod apt;
pub mod binaries;
pub mod initramfs;
pub mod kernel;
pub mod packages;
mod plan;
pub mod root;

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::progress;
use binaries::{Built, Kind};
use initramfs::Initramfs;
use kernel::Kernels;
use plan::Plan;
use root::Root;
use std::path::{Path, PathBuf};

/// The repository: the workspace that this crate is a member of.
///
/// # Errors
/// [`Error::Missing`] when it was moved after this program was built.
pub fn repository() -> Result<PathBuf> {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .filter(|path| path.join("images").is_dir())
        .map(Path::to_path_buf)
        .ok_or_else(|| {
            Error::missing(
                "the repository is not where this program was built from",
                "run `cargo lab` in the repository, which builds it again",
            )
        })
}

/// How cargo builds the project's programs (Cargo.toml).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// For tests, the demo and work in the lab.
    Dev,
    /// As [`Self::Dev`], with counters for line coverage.
    Coverage,
    /// As users build it: for all figures that are compared.
    Release,
}

/// The parts of the lab that a verb needs.
#[derive(Debug, Clone, Copy)]
pub struct Needs<'a> {
    /// How programs are built.
    pub profile: Profile,
    /// Cargo's words for test targets to build beside the programs.
    pub tests: &'a [String],
    /// Whether guests run the small kernel. The demo's run Debian's.
    pub guest_kernel: bool,
}

impl Needs<'_> {
    /// The programs and the lab host.
    pub const HOST: Self = Self {
        profile: Profile::Dev,
        tests: &[],
        guest_kernel: false,
    };

    /// [`Self::HOST`] with the small guest kernel.
    pub const HOST_AND_GUEST: Self = Self {
        guest_kernel: true,
        ..Self::HOST
    };
}

/// All parts of the lab host and its guests.
#[derive(Debug, Clone)]
pub struct Lab {
    /// The workspace.
    pub repository: PathBuf,
    /// The cache in which the rest lives.
    pub cache: Cache,
    /// The lab host's root.
    pub root: Root,
    /// Modules and the small guest kernel.
    pub kernels: Kernels,
    /// The initial ramdisks.
    pub initramfs: Initramfs,
    /// The executables that cargo built.
    pub built: Vec<Built>,
    /// The `bellhop` command.
    pub bellhop: PathBuf,
}

impl Lab {
    /// Prepares the lab. If everything is cached and built, this takes about two seconds.
    ///
    /// # Errors
    /// Those of the steps; each names its log or its remedy.
    pub fn prepare(needs: &Needs<'_>) -> Result<Self> {
        let repository = repository()?;
        let cache = Cache::open()?;
        let images = repository.join("images");
        let lock = cache.lock()?;
        let plan = Plan::of(&cache, &repository, needs)?;
        plan.check_disk(&cache)?;
        progress::expect(plan.time());
        let host = || {
            packages::ensure(&cache)?;
            let root = Root::ensure(&cache, &lock, &images)?;
            let labnic = repository.join("tests/kmod");
            let kernels =
                Kernels::ensure(&cache, &lock, &root, &images, &labnic, needs.guest_kernel)?;
            Ok((root, kernels))
        };
        let (host, built) = std::thread::scope(|scope| {
            // A thread's child processes die with it, so it must not end before they do.
            let host = scope.spawn(host);
            let built = binaries::programs(&repository, needs.profile, needs.tests);
            let host = host
                .join()
                .unwrap_or_else(|_| Err(Error::invalid("a thread of the setup", "it panicked")));
            (host, built)
        });
        let ((root, kernels), built) = (host?, built?);
        let initramfs = Initramfs::ensure(
            &cache,
            &lock,
            &root,
            &kernels,
            &binaries::find(&built, "lab-host")?,
            &binaries::find(&built, "lab-guest")?,
        )?;
        cache.prune(&lock);
        drop(lock);
        let bellhop = binaries::find(&built, "bellhop")?;
        Ok(Self {
            repository,
            cache,
            root,
            kernels,
            initramfs,
            built,
            bellhop,
        })
    }

    /// A program that cargo built.
    ///
    /// # Errors
    /// As [`binaries::find`].
    pub fn program(&self, name: &str) -> Result<String> {
        binaries::find(&self.built, name).map(|path| path.to_string_lossy().into_owned())
    }

    /// All programs that cargo built.
    pub fn programs(&self) -> Vec<String> {
        let programs = self.built.iter().filter(|one| one.kind == Kind::Program);
        programs
            .map(|one| one.path.to_string_lossy().into_owned())
            .collect()
    }

    /// The environment of every command in the lab.
    ///
    /// # Errors
    /// As [`Root::kernel_release`].
    pub fn environment(&self) -> Result<Vec<(String, String)>> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut environment = vec![
            ("BELLHOP".into(), text(&self.bellhop)),
            (
                "GUEST_KERNEL_STOCK".into(),
                text(&self.root.kernel_image()?),
            ),
            (
                "GUEST_INITRAMFS_STOCK".into(),
                text(&self.initramfs.guest_stock),
            ),
            ("GUEST_INITRAMFS".into(), text(&self.initramfs.guest)),
            ("LAB_MODULES".into(), text(self.kernels.modules())),
        ];
        if let Some(kernel) = self.kernels.guest_kernel() {
            environment.push(("GUEST_KERNEL".into(), text(&kernel)));
        }
        Ok(environment)
    }
}
