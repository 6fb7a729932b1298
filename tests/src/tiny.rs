//! PVH kernels of a few bytes. One does nothing, for tests of many machines: it boots at once,
//! drives no device and takes no processor time.
//!
//! Layout: an ELF header, two program headers (the code at 1 MiB, the note), the note with the
//! entry point (`XEN_ELFNOTE_PHYS32_ENTRY`, Xen's elfnote.h), the code.

use crate::error::Result;
use crate::files;
use std::path::{Path, PathBuf};

/// The code's address in guest memory.
pub const BASE: u32 = 0x10_0000;
/// The note's offset in the file: after the headers.
const NOTE: u64 = 64 + 2 * 56;
/// The code's offset in the file.
const CODE: u64 = 0x100;
/// `cli`, `hlt`, and `hlt` again after any wake-up (a non-maskable interrupt).
const HALT: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfc];

/// The ELF file of the kernel that does nothing.
#[must_use]
pub fn kernel() -> Vec<u8> {
    kernel_of(&HALT)
}

/// The ELF file of a kernel of this 32-bit code, which may contain data.
#[must_use]
pub fn kernel_of(code: &[u8]) -> Vec<u8> {
    let len = u64::try_from(code.len()).unwrap_or(u64::MAX);
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    let half = |elf: &mut Vec<u8>, value: u16| elf.extend(value.to_le_bytes());
    let word = |elf: &mut Vec<u8>, value: u32| elf.extend(value.to_le_bytes());
    let long = |elf: &mut Vec<u8>, value: u64| elf.extend(value.to_le_bytes());
    // ET_EXEC for EM_X86_64.
    half(&mut elf, 2);
    half(&mut elf, 62);
    word(&mut elf, 1);
    // Entry, program headers, no section headers.
    for value in [BASE.into(), 64, 0] {
        long(&mut elf, value);
    }
    word(&mut elf, 0);
    for value in [64, 56, 2, 64, 0, 0] {
        half(&mut elf, value);
    }
    // PT_LOAD and PT_NOTE.
    for (kind, offset, address, size) in [(1, CODE, BASE.into(), len), (4, NOTE, 0, 20)] {
        word(&mut elf, kind);
        word(&mut elf, 7);
        for value in [offset, address, address, size, size, 4] {
            long(&mut elf, value);
        }
    }
    // Length of the name and of the value, and the type.
    for value in [4, 4, 18] {
        word(&mut elf, value);
    }
    elf.extend(b"Xen\0");
    word(&mut elf, BASE);
    elf.resize(0x100, 0);
    elf.extend(code);
    elf
}

/// Writes the kernel to a directory and returns its path.
///
/// # Errors
/// [`Error::File`](crate::Error::File).
pub fn write_kernel(directory: &Path) -> Result<PathBuf> {
    let path = directory.join("tiny-kernel");
    files::write(&path, kernel())?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_where_the_headers_say() {
        let kernel = kernel();
        assert_eq!(kernel.len(), 0x104);
        assert_eq!(kernel[0x100..], HALT);
        assert_eq!(&kernel[64 + 112 + 12..64 + 112 + 16], b"Xen\0");
    }
}
