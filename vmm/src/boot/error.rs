//! Why a kernel can't be booted, for people who chose the wrong file.

use std::path::PathBuf;

use vm_memory::GuestMemoryError;

use super::file::FileError;
use super::image::Magic;
use crate::byte_count::ByteCount;

/// Why nothing was booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel is at fault.
    #[error("cannot boot the kernel {}", path.display())]
    Kernel {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: KernelError,
    },
    /// The initramfs is at fault.
    #[error("cannot use the initramfs {}", path.display())]
    Initramfs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: InitramfsError,
    },
    /// The command line is longer than this kernel takes.
    #[error("the kernel command line has {len} bytes, this kernel takes {max}")]
    CmdlineTooLong {
        /// Bytes in the command line.
        len: usize,
        /// Bytes that the kernel takes.
        max: usize,
    },
    /// The command line has a NUL inside, where the kernel would stop reading.
    #[error("the kernel command line has a NUL byte at position {at}")]
    CmdlineNul {
        /// Offset of the first NUL.
        at: usize,
    },
    /// Guest memory refused a write inside its own layout.
    #[error("cannot write to guest memory")]
    Memory(#[source] GuestMemoryError),
}

/// What is wrong with a kernel file.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Wrong whatever is in it.
    #[error(transparent)]
    File(#[from] FileError),
    /// Neither ELF nor bzImage.
    #[error("it is not a kernel that can be booted (vmlinux or bzImage) but {found}")]
    NotAKernel {
        /// What it is instead.
        found: Magic,
    },
    /// An ELF of another machine or word size.
    #[error("it is an ELF file, but not for x86-64")]
    WrongMachine,
    /// An ELF without the PVH entry point.
    #[error(
        "it is an ELF file without a PVH note: build the kernel with CONFIG_PVH=y or use its bzImage"
    )]
    NoPvhNote,
    /// A bzImage that only starts in 16-bit or 32-bit mode.
    #[error(
        "it is a bzImage without a 64-bit entry point (boot protocol {major}.{minor:02}): \
         a 64-bit kernel of version 3.8 or later is needed"
    )]
    No64BitEntry {
        /// Boot protocol, major version.
        major: u8,
        /// Boot protocol, minor version.
        minor: u8,
    },
    /// Headers that contradict each other or the file.
    #[error("it is damaged: {0}")]
    Malformed(&'static str),
    /// A segment wants to lie where the boot structures are.
    #[error("it wants to be loaded at {at:#x}, below {start:#x} where kernels may begin")]
    TooLow {
        /// Address asked for.
        at: u64,
        /// First address allowed.
        start: u64,
    },
    /// More than the guest's memory holds.
    #[error(
        "it does not fit: it needs {} at {at:#x}, the guest's memory has {} there; \
         give the guest more memory",
        ByteCount(*needed),
        ByteCount(*available)
    )]
    NoRoom {
        /// Bytes needed.
        needed: u64,
        /// From this address on.
        at: u64,
        /// Bytes that there are.
        available: u64,
    },
}

/// What is wrong with an initramfs.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// Wrong whatever is in it.
    #[error(transparent)]
    File(#[from] FileError),
    /// More than what the kernel leaves of memory.
    #[error(
        "it does not fit: it has {}, and of the guest's {} of memory {} are free for it; \
         give the guest more memory",
        ByteCount(*len),
        ByteCount(*ram),
        ByteCount(*available)
    )]
    NoRoom {
        /// Bytes in the file.
        len: u64,
        /// Bytes of guest RAM.
        ram: u64,
        /// Bytes in one piece that kernel and boot protocol leave.
        available: u64,
    },
}
