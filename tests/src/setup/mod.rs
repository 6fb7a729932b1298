//! Preparation of the lab: everything that must exist before a lab host boots.
//!
//! ```text
//!   packages ─▶ root ─▶ modules ────────┐
//!                 └───▶ guest kernel    ├─▶ initramfs (host, guest, stock guest)
//!   cargo ────▶ lab-host, lab-guest ────┘
//! ```
//!
//! Owns the order of the steps. Each is cached by the hash of its recipe (see
//! [`crate::cache`]) and an interrupted preparation goes on where it was.

pub mod apt;
pub mod binaries;
pub mod initramfs;
pub mod kernel;
pub mod packages;
pub mod root;

use crate::cache::Cache;
use crate::error::{Error, Result};
use initramfs::Initramfs;
use kernel::Kernels;
use root::Root;
use std::path::{Path, PathBuf};

/// The repository: the workspace that this crate is a member of.
///
/// # Errors
/// [`Error::Missing`] when it was moved after this program was built.
pub fn repository() -> Result<PathBuf> {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .filter(|path| path.join("images").is_dir())
        .map(Path::to_path_buf)
        .ok_or_else(|| {
            Error::missing(
                "the repository is not where this program was built from",
                "run `cargo lab` in the repository, which builds it again",
            )
        })
}

/// How `bellhop` is built (Cargo.toml).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// For tests and for work in the lab: optimized, but each crate by itself, so that a change is
    /// built soon.
    Lab,
    /// As users build it: for everything whose figures are looked at.
    Release,
}

impl Profile {
    /// Cargo's argument.
    fn argument(self) -> &'static str {
        match self {
            Self::Lab => "--profile=lab",
            Self::Release => "--profile=release",
        }
    }
}

/// Everything that the lab host and its guests are made of.
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
    /// The `bellhop` command.
    pub bellhop: PathBuf,
}

impl Lab {
    /// Prepares the lab, with `bellhop` built so. Where all is in the cache and built, this takes less
    /// than two seconds.
    ///
    /// # Errors
    /// Those of the steps; each names its log or its remedy.
    pub fn prepare(profile: Profile) -> Result<Self> {
        let repository = repository()?;
        let cache = Cache::open()?;
        packages::ensure(&cache)?;
        let built = binaries::cargo(
            &repository,
            &[
                "build",
                "--package=lab",
                "--bin=lab-host",
                "--bin=lab-guest",
            ],
            "building lab-host and lab-guest",
        )?;
        let images = repository.join("images");
        let lock = cache.lock()?;
        let root = Root::ensure(&cache, &lock, &images)?;
        let labnic = repository.join("tests/kmod");
        let kernels = Kernels::ensure(&cache, &lock, &root, &images, &labnic)?;
        let initramfs = Initramfs::ensure(
            &cache,
            &lock,
            &root,
            &kernels,
            &binaries::find(&built, "lab-host")?,
            &binaries::find(&built, "lab-guest")?,
        )?;
        drop(lock);
        let built = binaries::cargo(
            &repository,
            &[
                "build",
                profile.argument(),
                "--package=bellhop",
                "--bin=bellhop",
            ],
            "building bellhop",
        )?;
        let bellhop = binaries::find(&built, "bellhop")?;
        Ok(Self {
            repository,
            cache,
            root,
            kernels,
            initramfs,
            bellhop,
        })
    }

    /// This crate's own program, optimized as Bellhop is: for measurements of code
    /// that it runs itself.
    ///
    /// # Errors
    /// [`crate::Error::Program`] when it does not compile.
    pub fn optimized_lab(&self) -> Result<PathBuf> {
        let built = binaries::cargo(
            &self.repository,
            &["build", "--release", "--package=lab", "--bin=lab"],
            "building an optimized lab",
        )?;
        binaries::find(&built, "lab")
    }

    /// The environment of every command in the lab.
    ///
    /// # Errors
    /// As [`Root::kernel_release`].
    pub fn environment(&self) -> Result<Vec<(String, String)>> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        Ok(vec![
            ("BELLHOP".into(), text(&self.bellhop)),
            ("GUEST_KERNEL".into(), text(&self.kernels.guest_kernel())),
            ("GUEST_INITRAMFS".into(), text(&self.initramfs.guest)),
            (
                "GUEST_KERNEL_STOCK".into(),
                text(&self.root.kernel_image()?),
            ),
            (
                "GUEST_INITRAMFS_STOCK".into(),
                text(&self.initramfs.guest_stock),
            ),
            ("LAB_MODULES".into(), text(self.kernels.modules())),
        ])
    }
}
