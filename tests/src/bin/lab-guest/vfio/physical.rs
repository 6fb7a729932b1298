//! A PCI function without an IOMMU: its files in sysfs, and the physical addresses of this
//! process's memory.
//!
//! Drivers in user space use the same way where VFIO cannot protect the machine. The function can
//! write anywhere, so only a lab guest may do this.

use crate::notify::PAGE;
use lab::error::{Error, Result};
use lab::files;
use rustix::mm::mlock;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const PAGEMAP: &str = "/proc/self/pagemap";

/// Bits of an entry of [`PAGEMAP`]: the page's number, and whether there is a page.
const FRAME: u64 = (1 << 55) - 1;
const PRESENT: u64 = 1 << 63;

/// With 0, the kernel moves no locked page.
const COMPACTION: &str = "/proc/sys/vm/compact_unevictable_allowed";

/// With "always", shared memory of this process consists of large pages.
const SHARED_LARGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// A function that no driver has.
pub(super) struct Physical(PathBuf);

impl Physical {
    pub(super) fn open(function: &Path) -> Result<Self> {
        for (path, value) in [(COMPACTION, "0"), (SHARED_LARGE_PAGES, "always")] {
            let path = Path::new(path);
            // The small kernel does neither.
            if path.exists() {
                files::write(path, value)?;
            }
        }
        Ok(Self(function.to_path_buf()))
    }

    pub(super) fn function(&self) -> &Path {
        &self.0
    }

    pub(super) fn config(&self) -> Result<(File, u64)> {
        self.file("config")
    }

    pub(super) fn bar(&self, index: u8) -> Result<(File, u64)> {
        self.file(&format!("resource{index}"))
    }

    fn file(&self, name: &str) -> Result<(File, u64)> {
        let path = self.0.join(name);
        let file = File::options().read(true).write(true).open(&path);
        Ok((file.map_err(Error::file("open", &path))?, 0))
    }
}

/// The physical address of `len` mapped bytes of this process. They are whole pages.
///
/// # Errors
/// The pages are not adjacent.
pub(super) fn address(host: u64, len: u64) -> Result<u64> {
    let start = std::ptr::with_exposed_provenance_mut(usize::try_from(host).unwrap_or_default());
    // SAFETY: needed because the pages must be there, and must stay. The call changes no byte, and
    // the kernel refuses what is not mapped.
    unsafe { mlock(start, usize::try_from(len).unwrap_or_default()) }
        .map_err(Error::system("lock memory"))?;
    let path = Path::new(PAGEMAP);
    let pagemap = File::open(path).map_err(Error::file("open", path))?;
    let mut entries = vec![0; usize::try_from(len / PAGE * 8).unwrap_or_default()];
    pagemap
        .read_exact_at(&mut entries, host / PAGE * 8)
        .map_err(Error::file("read", path))?;
    let (entries, _) = entries.as_chunks();
    first_frame(entries.iter().map(|entry| u64::from_le_bytes(*entry)))
        .map(|frame| frame * PAGE)
        .ok_or_else(|| Error::invalid("memory for the function", "its pages are not adjacent"))
}

/// The number of the first page, if all are there and adjacent.
fn first_frame(entries: impl Iterator<Item = u64>) -> Option<u64> {
    let mut entries = entries.map(|entry| (entry & PRESENT != 0).then_some(entry & FRAME));
    let first = entries.next()??;
    let adjacent = (first + 1..)
        .zip(entries)
        .all(|(wanted, frame)| frame == Some(wanted));
    adjacent.then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_adjacent_pages_have_an_address() {
        let frames = |frames: &[u64]| first_frame(frames.iter().map(|frame| frame | PRESENT));
        assert_eq!(frames(&[7]), Some(7));
        assert_eq!(frames(&[7, 8, 9]), Some(7));
        assert_eq!(frames(&[7, 9]), None);
        assert_eq!(frames(&[]), None);
        assert_eq!(first_frame([7 | PRESENT, 8].into_iter()), None);
        assert_eq!(first_frame([7].into_iter()), None);
    }
}
