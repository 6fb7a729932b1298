//! Guests that crash: the smallest PVH kernel, with a few instructions and no exception handler.

use std::path::{Path, PathBuf};

use lab::tiny::{BASE, kernel_of};

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
        std::fs::write(&path, kernel_of(&code)).unwrap();
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
    let table = BASE + u32::try_from(before).unwrap() + INSTRUCTIONS;
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
