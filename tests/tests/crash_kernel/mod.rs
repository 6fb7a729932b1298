//! Guests that crash: the smallest PVH kernel, with a few instructions and no exception handler.

use std::path::{Path, PathBuf};

/// A kernel's file in the host's /tmp; removed when dropped.
pub(crate) struct CrashKernel(PathBuf);

impl CrashKernel {
    /// A kernel that triple-faults at once.
    #[allow(dead_code, reason = "not all tests crash at once")]
    pub(crate) fn at_once() -> Self {
        Self::write("at-once", &[])
    }

    /// A kernel that triple-faults after input on its serial console.
    #[allow(dead_code, reason = "not all tests type")]
    pub(crate) fn when_typed() -> Self {
        Self::write("when-typed", &AWAIT_INPUT)
    }

    fn write(name: &str, first: &[u8]) -> Self {
        let name = format!("lab-{}-crash-{name}.elf", std::process::id());
        let path = std::env::temp_dir().join(name);
        let code = [first, &triple_fault(first.len())].concat();
        std::fs::write(&path, pvh_kernel(&code)).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for CrashKernel {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The address of [`pvh_kernel`]'s code.
const CODE: u32 = 0x10_0000;

/// 32-bit code: polls the line status register of COM1 until a byte is available (bit 0).
const AWAIT_INPUT: [u8; 9] = [
    // mov dx, 0x3fd
    0x66, 0xba, 0xfd, 0x03, //
    // in al, dx
    0xec, //
    // test al, 1
    0xa8, 0x01, //
    // jz to the `in`
    0x74, 0xfb,
];

/// 32-bit code after `before` bytes: an empty interrupt table, then an undefined instruction. The
/// processor can deliver neither the exception nor the double fault, so it triple-faults.
fn triple_fault(before: usize) -> Vec<u8> {
    /// Length of the two instructions; the table's limit and base follow them.
    const INSTRUCTIONS: u32 = 9;
    let table = CODE + u32::try_from(before).unwrap() + INSTRUCTIONS;
    let mut code = Vec::new();
    // lidt [table]
    code.extend([0x0f, 0x01, 0x1d]);
    code.extend(table.to_le_bytes());
    // ud2
    code.extend([0x0f, 0x0b]);
    // Limit 0, base 0.
    code.extend([0; 6]);
    code
}

/// The smallest PVH kernel: an ELF file (ELF-64, one segment, one note with
/// the 32-bit entry point) around some code.
fn pvh_kernel(code: &[u8]) -> Vec<u8> {
    const HEADER: u64 = 64;
    const PROGRAM_HEADER: u64 = 56;
    const NOTE: u64 = HEADER + 2 * PROGRAM_HEADER;
    const NOTE_LEN: u64 = 20;
    let code_len = u64::try_from(code.len()).unwrap();
    let mut file = Vec::new();
    // e_ident: class 64, little-endian, version 1.
    file.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    // ET_EXEC, x86-64, version 1.
    file.extend_from_slice(&[2, 0, 62, 0, 1, 0, 0, 0]);
    for number in [u64::from(CODE), HEADER, 0] {
        file.extend_from_slice(&number.to_le_bytes());
    }
    // Flags; sizes of the headers; two program headers; no sections.
    file.extend_from_slice(&[0, 0, 0, 0, 64, 0, 56, 0, 2, 0, 64, 0, 0, 0, 0, 0]);
    // PT_LOAD and PT_NOTE: offset, virtual and physical address, sizes, alignment.
    for (kind, offset, address, len, alignment) in [
        (1_u32, NOTE + NOTE_LEN, u64::from(CODE), code_len, 1_u64),
        (4, NOTE, 0, NOTE_LEN, 4),
    ] {
        file.extend_from_slice(&kind.to_le_bytes());
        // Readable, writable, executable.
        file.extend_from_slice(&7_u32.to_le_bytes());
        for number in [offset, address, address, len, len, alignment] {
            file.extend_from_slice(&number.to_le_bytes());
        }
    }
    // The note: lengths of name and value, XEN_ELFNOTE_PHYS32_ENTRY, both.
    for number in [4_u32, 4, 18] {
        file.extend_from_slice(&number.to_le_bytes());
    }
    file.extend_from_slice(b"Xen\0");
    file.extend_from_slice(&CODE.to_le_bytes());
    file.extend_from_slice(code);
    file
}
