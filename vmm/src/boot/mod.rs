//! From a kernel file to a guest that is ready to start.
//!
//! Owns the boot protocols. [`check`] reads the headers of the files. [`load`] copies kernel,
//! initramfs, command line and boot structures into guest memory. [`BootRegisters`] has the initial
//! state of the first processor. It must not know KVM's file descriptors, vCPUs or devices;
//! [`crate::acpi`] writes the ACPI tables to the address named here.
//!
//! ```text
//!   kernel file ── Magic ──┬── ELF ────── elf.rs ──── PVH: pvh.rs (start info)
//!                          ├── bzImage ── bzimage.rs ─ Linux64: linux64.rs (zero page)
//!                          └── else ───── "it is not a kernel"
//! ```
//!
//! A reboot calls [`load`] again on the same memory: it rewrites everything that the kernel relies
//! on, and rereads the files.

mod bzimage;
mod elf;
mod error;
mod file;
mod image;
mod initramfs;
mod linux64;
mod pvh;
mod registers;
mod reset_vector;

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use vdpa::memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

use self::bzimage::BzImageKernel;
use self::elf::ElfKernel;
use self::error::unreadable;
pub use self::image::Magic;
pub use self::registers::{BootRegisters, EntryPoint};
use crate::Error;
use crate::layout::{
    AddressRange, BOOT_CMDLINE, BOOT_CMDLINE_LEN, BOOT_GDT, BOOT_PVH_START_INFO, BOOT_ZERO_PAGE,
    Layout,
};

/// The longest command line (without NUL) that a PVH kernel keeps: Linux has `COMMAND_LINE_SIZE`
/// 2048 on x86, and PVH has no field for it.
const PVH_CMDLINE_MAX: usize = 2047;

/// The files and the command line to boot from.
#[derive(Debug, Clone, Copy)]
pub struct BootSource<'a> {
    /// A `vmlinux` with a PVH note, or a bzImage.
    pub kernel: &'a Path,
    /// The initial root file system.
    pub initramfs: Option<&'a Path>,
    /// The kernel command line, without NUL.
    pub cmdline: &'a str,
}

/// Result of [`load`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootedKernel {
    /// The entry point.
    pub entry: EntryPoint,
    /// From the first to the last byte that the kernel needs at entry.
    pub kernel: AddressRange,
    /// The initramfs, without padding.
    pub initramfs: Option<AddressRange>,
}

impl BootedKernel {
    /// The registers of the boot processor.
    #[must_use]
    pub fn registers(&self) -> BootRegisters {
        BootRegisters::new(self.entry)
    }
}

/// A kernel whose headers were checked.
enum KernelImage {
    Elf(ElfKernel),
    BzImage(BzImageKernel),
}

impl KernelImage {
    /// Identifies the file and checks its headers.
    fn parse<R: Read + Seek>(reader: &mut R, len: u64, layout: &Layout) -> Result<Self, Error> {
        let mut start = Vec::with_capacity(image::PROBE_LEN);
        reader.rewind().map_err(unreadable)?;
        reader
            .by_ref()
            .take(image::PROBE_LEN as u64)
            .read_to_end(&mut start)
            .map_err(unreadable)?;
        let loadable = layout.loadable();
        match Magic::of(&start) {
            Magic::Elf => Ok(Self::Elf(ElfKernel::parse(reader, len, loadable)?)),
            Magic::BzImage => Ok(Self::BzImage(BzImageKernel::parse(reader, len, loadable)?)),
            found @ (Magic::Known(_) | Magic::Unknown(_)) => Err(Error::unusable(format!(
                "it is not a kernel that can be booted (vmlinux or bzImage) but {found}"
            ))),
        }
    }

    fn load<R: ReadVolatile + Seek>(
        &self,
        reader: &mut R,
        memory: &GuestMemory,
    ) -> Result<(), file::CopyError> {
        match self {
            Self::Elf(kernel) => kernel.load(reader, memory),
            Self::BzImage(kernel) => kernel.load(reader, memory),
        }
    }

    fn extent(&self) -> AddressRange {
        match self {
            Self::Elf(kernel) => kernel.extent,
            Self::BzImage(kernel) => kernel.extent,
        }
    }

    fn entry(&self) -> EntryPoint {
        match self {
            Self::Elf(kernel) => EntryPoint::Pvh {
                entry: kernel.entry,
                start_info: BOOT_PVH_START_INFO,
            },
            Self::BzImage(kernel) => EntryPoint::Linux64 {
                entry: kernel.entry(),
                zero_page: BOOT_ZERO_PAGE,
            },
        }
    }

    /// The highest address for a byte of the initramfs.
    fn initramfs_max(&self) -> u64 {
        match self {
            Self::Elf(_) => u64::MAX,
            Self::BzImage(kernel) => kernel.initramfs_max(),
        }
    }

    /// The longest command line without its NUL.
    fn cmdline_max(&self) -> usize {
        match self {
            Self::Elf(_) => PVH_CMDLINE_MAX,
            Self::BzImage(kernel) => kernel.cmdline_max(),
        }
    }
}

/// The widest guest-physical addresses, in bits: no processor has more room for RAM.
const PHYSICAL_BITS_MAX: u8 = 52;

/// The open files of a boot, after all checks that need no copying.
struct Checked<'a> {
    file: File,
    image: KernelImage,
    initramfs: Option<Initramfs<'a>>,
}

impl<'a> Checked<'a> {
    fn open(layout: &Layout, source: &BootSource<'a>) -> Result<Self, Error> {
        let kernel_error = |error| kernel_error(source.kernel, error);
        let (mut file, len) = file::open(source.kernel).map_err(kernel_error)?;
        let image = KernelImage::parse(&mut file, len, layout).map_err(kernel_error)?;
        check_cmdline(source.cmdline, image.cmdline_max())?;
        let initramfs = source
            .initramfs
            .map(|path| Initramfs::open(path, &image, layout))
            .transpose()?;
        Ok(Self {
            file,
            image,
            initramfs,
        })
    }
}

fn kernel_error(kernel: &Path, source: Error) -> Error {
    Error::unusable(format!("cannot boot the kernel {}", kernel.display())).because(source)
}

/// Checks whether a guest with `ram_size` bytes of RAM can boot from these files. Reads their
/// headers only.
///
/// # Errors
/// Those of [`load`].
pub fn check(ram_size: u64, source: &BootSource<'_>) -> Result<(), Error> {
    let layout = Layout::new(ram_size, PHYSICAL_BITS_MAX)?;
    Checked::open(&layout, source).map(drop)
}

/// Writes everything that the guest needs to start into `memory`, except the ACPI tables. All
/// checks that need no copying come first, so that a wrong file is reported at once.
///
/// # Errors
/// [`Error`]. The content of `memory` is then undefined, and another call with better files is
/// allowed.
pub fn load(
    memory: &GuestMemory,
    layout: &Layout,
    source: &BootSource<'_>,
) -> Result<BootedKernel, Error> {
    let Checked {
        mut file,
        image,
        initramfs,
    } = Checked::open(layout, source)?;
    image
        .load(&mut file, memory)
        .map_err(|error| error.into_error(|error| kernel_error(source.kernel, error)))?;
    let initramfs = initramfs
        .map(|initramfs| initramfs.load(memory))
        .transpose()?;
    let booted = BootedKernel {
        entry: image.entry(),
        kernel: image.extent(),
        initramfs,
    };
    write_structures(memory, layout, source.cmdline, &image, &booted).map_err(file::not_written)?;
    Ok(booted)
}

/// An initramfs and its address.
struct Initramfs<'a> {
    path: &'a Path,
    file: File,
    range: AddressRange,
}

impl<'a> Initramfs<'a> {
    fn open(path: &'a Path, image: &KernelImage, layout: &Layout) -> Result<Self, Error> {
        let (file, len) = file::open(path).map_err(|error| Self::error(path, error))?;
        let range = initramfs::place(len, image.initramfs_max(), image.extent(), layout)
            .map_err(|error| Self::error(path, error))?;
        Ok(Self { path, file, range })
    }

    fn load(mut self, memory: &GuestMemory) -> Result<AddressRange, Error> {
        let AddressRange { start, len } = self.range;
        file::copy_to_guest(&mut self.file, memory, start, len)
            .map_err(|error| error.into_error(|error| Self::error(self.path, error)))?;
        Ok(self.range)
    }

    fn error(path: &Path, source: Error) -> Error {
        Error::unusable(format!("cannot use the initramfs {}", path.display())).because(source)
    }
}

/// Checks the command line against the kernel's limit and the reserved space.
fn check_cmdline(cmdline: &str, kernel_max: usize) -> Result<(), Error> {
    let room = usize::try_from(BOOT_CMDLINE_LEN - 1).unwrap_or(usize::MAX);
    let max = kernel_max.min(room);
    if cmdline.len() > max {
        return Err(Error::unusable(format!(
            "the kernel command line has {} bytes, but this kernel takes up to {max}",
            cmdline.len()
        )));
    }
    match cmdline.bytes().position(|byte| byte == 0) {
        Some(at) => Err(Error::unusable(format!(
            "the kernel command line has a NUL byte at position {at}"
        ))),
        None => Ok(()),
    }
}

/// Writes the reset vector, the command line, the descriptor table and the protocol's structures.
fn write_structures(
    memory: &GuestMemory,
    layout: &Layout,
    cmdline: &str,
    image: &KernelImage,
    booted: &BootedKernel,
) -> Result<(), vm_memory::GuestMemoryError> {
    reset_vector::write(memory)?;
    memory.write_slice(cmdline.as_bytes(), GuestAddress(BOOT_CMDLINE))?;
    // Checked by `check_cmdline`: there is room for the NUL.
    memory.write_obj(0_u8, GuestAddress(BOOT_CMDLINE + cmdline.len() as u64))?;
    memory.write_slice(
        &booted.registers().descriptor_table(),
        GuestAddress(BOOT_GDT),
    )?;
    match image {
        KernelImage::Elf(_) => pvh::write_start_info(memory, layout, booted.initramfs),
        KernelImage::BzImage(kernel) => {
            linux64::write_page_tables(memory)?;
            linux64::write_zero_page(memory, layout, &kernel.header, booted.initramfs)
        }
    }
}

#[cfg(test)]
mod tests;
