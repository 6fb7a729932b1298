//! Compiles from the root's own linux-source: the kernel modules that the distribution leaves out,
//! and the small guest kernel.
//!
//! Recipes: `images/host/modules/` and `images/guest/{kernel.config,build-kernel}`. Both run inside
//! the root, in a work directory that is removed afterwards. The project's own module, the lab NIC
//! (`tests/kmod`), is built with the modules.

use super::root::Root;
use crate::cache::{Cache, CacheLock, Entry, RecipeHash, remove_tree};
use crate::error::{Error, Result};
use crate::files;
use crate::process::run_logged;
use crate::progress::Progress;
use std::path::{Path, PathBuf};

/// Raise this when the code here changes the steps' results.
const VERSION: u32 = 1;

/// Work directory inside the root.
const WORK: &str = "lab-build";

/// The finished steps.
#[derive(Debug, Clone)]
pub struct Kernels {
    modules: Entry,
    modules_hash: RecipeHash,
    guest: Entry,
}

impl Kernels {
    /// Builds the steps that are not in the cache yet, and the guest kernel only on request.
    /// `labnic` is the directory of the lab NIC's source.
    ///
    /// # Errors
    /// [`Error::Program`] with the compiler's last lines; [`Error::File`].
    pub fn ensure(
        cache: &Cache,
        lock: &CacheLock,
        root: &Root,
        images: &Path,
        labnic: &Path,
        with_guest: bool,
    ) -> Result<Self> {
        let modules_hash = modules_hash(root.hash(), images, labnic)?;
        let modules = cache.entry("modules", &modules_hash);
        let guest = cache.entry("guest-kernel", &guest_hash(root.hash(), images)?);
        let build_guest = with_guest && !guest.is_complete();
        if !modules.is_complete() || build_guest {
            let workshop = Workshop::open(cache, root)?;
            cache.ensure(lock, modules.clone(), |partial| {
                let progress = Progress::start("kernel modules");
                workshop.modules(images, labnic, partial, &progress)
            })?;
            if build_guest {
                cache.ensure(lock, guest.clone(), |partial| {
                    let progress = Progress::start("guest kernel");
                    workshop.guest_kernel(images, partial, &progress)
                })?;
            }
        }
        cache.retire_others(lock, "modules", &modules);
        if with_guest {
            cache.retire_others(lock, "guest-kernel", &guest);
        }
        Ok(Self {
            modules,
            modules_hash,
            guest,
        })
    }

    /// Directory of the finished `*.ko` files.
    pub fn modules(&self) -> &Path {
        self.modules.directory()
    }

    /// The hash that later steps with the modules in them start from.
    pub fn modules_hash(&self) -> &RecipeHash {
        &self.modules_hash
    }

    /// The small guest kernel, a PVH ELF without debug information; `None` where it is not built.
    pub fn guest_kernel(&self) -> Option<PathBuf> {
        let complete = self.guest.is_complete();
        complete.then(|| self.guest.directory().join("vmlinux"))
    }
}

/// The hash of the modules' recipe. `labnic` is the directory of the lab NIC's source.
///
/// # Errors
/// [`Error::File`].
pub(super) fn modules_hash(root: &RecipeHash, images: &Path, labnic: &Path) -> Result<RecipeHash> {
    let mut hash = root.clone();
    hash.add(b"modules");
    hash.add(&VERSION.to_le_bytes());
    hash.add_directory(&images.join("host/modules"))?;
    hash.add_directory(labnic)?;
    Ok(hash)
}

/// The hash of the guest kernel's recipe.
///
/// # Errors
/// [`Error::File`].
pub(super) fn guest_hash(root: &RecipeHash, images: &Path) -> Result<RecipeHash> {
    let mut hash = root.clone();
    hash.add(b"guest-kernel");
    hash.add(&VERSION.to_le_bytes());
    for name in ["kernel.config", "build-kernel"] {
        hash.add_file(&images.join("guest").join(name))?;
    }
    Ok(hash)
}

/// The unpacked source inside the root, removed when dropped.
struct Workshop<'a> {
    cache: &'a Cache,
    root: &'a Root,
    directory: PathBuf,
}

impl<'a> Workshop<'a> {
    fn open(cache: &'a Cache, root: &'a Root) -> Result<Self> {
        let directory = root.tree().join(WORK);
        remove_tree(&directory)?;
        let workshop = Self {
            cache,
            root,
            directory,
        };
        let progress = Progress::start("kernel source");
        let mut command = root.chroot("sh");
        command.args(["-ceu", UNPACK, "unpack", &format!("/{WORK}")]);
        run_logged(&mut command, &cache.log("kernel-source"), &progress)?;
        Ok(workshop)
    }

    /// Copies a recipe file into the work directory. The root's own user writes it, because that
    /// user may not be able to read this directory.
    fn place(&self, name: &str, recipe: &Path) -> Result<()> {
        let target = format!("/{WORK}/{name}");
        let mut command = self.root.chroot("sh");
        command
            .args([
                "-ceu",
                "mkdir -p \"${1%/*}\"; cat >\"$1\"; chmod 755 \"$1\"",
                "place",
                &target,
            ])
            .stdin(std::fs::File::open(recipe).map_err(Error::file("read", recipe))?);
        let status = command.status().map_err(|source| Error::Start {
            program: "chroot".into(),
            source,
        })?;
        if status.success() {
            return Ok(());
        }
        Err(Error::Program {
            program: format!("writing {target} in the lab host's root"),
            status: status.to_string(),
            tail: String::new(),
        })
    }

    fn modules(
        &self,
        images: &Path,
        labnic: &Path,
        partial: &Path,
        progress: &Progress,
    ) -> Result<()> {
        for (recipe, target) in [
            (images.join("host/modules").as_path(), "modules"),
            (labnic, "modules/labnic"),
        ] {
            for file in files::list(recipe)? {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                self.place(&format!("{target}/{name}"), &file)?;
            }
        }
        let release = self.root.kernel_release()?;
        let mut command = self.root.chroot("sh");
        command.args([
            "-ceu",
            "cd \"$1\"; shift; exec ./build \"$@\"",
            "build",
            &format!("/{WORK}/modules"),
            &format!("/{WORK}/source"),
            &release,
        ]);
        run_logged(&mut command, &self.cache.log("modules"), progress)?;
        let mut found = 0_usize;
        for file in files::list(&self.directory.join("modules"))? {
            if let (Some(name), Some("ko")) = (
                file.file_name(),
                file.extension().and_then(|kind| kind.to_str()),
            ) {
                files::copy(&file, &partial.join(name))?;
                found += 1;
            }
        }
        if found == 0 {
            return Err(Error::invalid(
                "images/host/modules/build",
                "it left no *.ko files",
            ));
        }
        Ok(())
    }

    fn guest_kernel(&self, images: &Path, partial: &Path, progress: &Progress) -> Result<()> {
        for name in ["build-kernel", "kernel.config"] {
            self.place(&format!("guest/{name}"), &images.join("guest").join(name))?;
        }
        let mut command = self.root.chroot(format!("/{WORK}/guest/build-kernel"));
        command.args([
            format!("/{WORK}/source"),
            format!("/{WORK}/guest/kernel.config"),
            format!("/{WORK}/guest-kernel"),
        ]);
        run_logged(&mut command, &self.cache.log("guest-kernel"), progress)?;
        files::copy(
            &self.directory.join("guest-kernel/vmlinux"),
            &partial.join("vmlinux"),
        )?;
        files::copy(
            &self.directory.join("guest-kernel/.config"),
            &partial.join("config"),
        )
    }
}

impl Drop for Workshop<'_> {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.directory) {
            eprintln!("lab: {}", crate::error::report(&error));
        }
    }
}

/// Unpacks the one linux-source archive of the root into `$1/source`.
const UNPACK: &str = "mkdir -p \"$1\"; cd \"$1\"; tar xf /usr/src/linux-source-*.tar.xz; \
                      mv linux-source-* source";
