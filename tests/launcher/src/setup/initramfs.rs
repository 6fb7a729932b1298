//! The initial ramdisks: the lab host's, and the guest's for the small and the stock kernel.
//!
//! All are small archives written by [`crate::cpio`]. `/init` is one of this crate's programs;
//! `/modules` lists the modules that it loads, in order.

use super::kernel::Kernels;
use super::root::Root;
use crate::cache::{Cache, CacheLock, RecipeHash};
use crate::cpio::Archive;
use crate::error::Result;
use crate::files;
use crate::module_tree::ModuleTree;
use crate::process::output;
use std::path::{Path, PathBuf};

/// Raise this when the code here changes the archives' content.
const VERSION: u32 = 2;

/// Modules of the stock kernel that the lab host needs to reach its root.
const HOST_MODULES: [&str; 3] = ["9pnet_virtio", "9p", "overlay"];

/// Modules that a guest with the stock kernel needs for its devices.
const GUEST_MODULES: [&str; 12] = [
    // First: drivers of devices behind it wait for it.
    "virtio-iommu",
    "virtio_net",
    // For an interface in a VLAN.
    "8021q",
    "virtio_blk",
    "virtio-rng",
    "vmw_vsock_virtio_transport",
    "ext4",
    "button",
    // For functions of the igb NIC.
    "igb",
    "igbvf",
    // For a driver in the guest's user space.
    "vfio_iommu_type1",
    "vfio-pci",
];

/// The finished archives.
#[derive(Debug, Clone)]
pub struct Initramfs {
    /// The lab host's.
    pub host: PathBuf,
    /// The guest's, for the small kernel.
    pub guest: PathBuf,
    /// The guest's, for the stock kernel.
    pub guest_stock: PathBuf,
}

impl Initramfs {
    /// Writes the archives that are not in the cache yet. `host_init` and `guest_init` are the
    /// programs that become `/init`.
    ///
    /// # Errors
    /// [`crate::Error::File`], [`crate::Error::Program`] and [`crate::Error::Invalid`].
    pub fn ensure(
        cache: &Cache,
        lock: &CacheLock,
        root: &Root,
        kernels: &Kernels,
        host_init: &Path,
        guest_init: &Path,
    ) -> Result<Self> {
        let writer = Writer { cache, lock, root };
        let host = writer.archive(
            "host-initramfs",
            kernels.modules_hash(),
            host_init,
            &HOST_MODULES,
            &[],
        )?;
        let busybox = [("bin/busybox", "usr/bin/busybox")];
        let guest = writer.archive("guest-initramfs", root.hash(), guest_init, &[], &busybox)?;
        let guest_stock = writer.archive(
            "guest-initramfs-stock",
            root.hash(),
            guest_init,
            &GUEST_MODULES,
            &busybox,
        )?;
        Ok(Self {
            host,
            guest,
            guest_stock,
        })
    }
}

struct Writer<'a> {
    cache: &'a Cache,
    lock: &'a CacheLock,
    root: &'a Root,
}

impl Writer<'_> {
    /// `programs` are pairs of a path in the archive and a path in the root.
    fn archive(
        &self,
        step: &str,
        base: &RecipeHash,
        init: &Path,
        modules: &[&str],
        programs: &[(&str, &str)],
    ) -> Result<PathBuf> {
        let mut hash = base.clone();
        hash.add(step.as_bytes());
        hash.add(&VERSION.to_le_bytes());
        hash.add_file(init)?;
        for module in modules {
            hash.add(module.as_bytes());
        }
        let entry = self.cache.entry(step, &hash);
        let entry = self.cache.ensure(self.lock, entry, |partial| {
            let bytes = self.write(init, modules, programs, partial)?;
            files::write(&partial.join("initramfs"), bytes)
        })?;
        self.cache.retire_others(self.lock, step, &entry);
        Ok(entry.directory().join("initramfs"))
    }

    fn write(
        &self,
        init: &Path,
        modules: &[&str],
        programs: &[(&str, &str)],
        partial: &Path,
    ) -> Result<Vec<u8>> {
        let mut archive = Archive::new();
        for directory in [
            "bin", "dev", "lib", "newroot", "proc", "root", "run", "sys", "tmp",
        ] {
            archive.directory(directory)?;
        }
        // The kernel opens it for init's standard streams before anything is
        // mounted.
        archive.character_device("dev/console", 5, 1)?;
        archive.file("init", 0o755, &self.stripped(init, partial)?)?;
        for (name, source) in programs {
            archive.file(name, 0o755, &files::read(&self.root.tree().join(source))?)?;
        }
        let tree = self.root.tree().join("usr/lib/modules");
        let order =
            ModuleTree::read(&tree.join(self.root.kernel_release()?))?.load_order(modules)?;
        let mut names = String::new();
        for file in order {
            let file_name = file.file_name().unwrap_or_default().to_string_lossy();
            let name = file_name.trim_end_matches(".xz");
            let bytes = if name == file_name {
                files::read(&file)?
            } else {
                self.root.decompress(&file)?
            };
            archive.file(&format!("lib/{name}"), 0o644, &bytes)?;
            names.push_str(name);
            names.push('\n');
        }
        archive.file("modules", 0o644, names.as_bytes())?;
        archive.finish()
    }

    /// Removes a program's symbols, which leaves a third of the size. The kernel unpacks it at
    /// every boot, on an emulated processor.
    fn stripped(&self, program: &Path, partial: &Path) -> Result<Vec<u8>> {
        let target = partial.join("stripped");
        output(
            self.root
                .program("usr/bin/strip")
                .arg("-o")
                .arg(&target)
                .arg(program),
        )?;
        let bytes = files::read(&target)?;
        std::fs::remove_file(&target).map_err(crate::Error::file("remove", &target))?;
        Ok(bytes)
    }
}
