//! The code at the reset vector: all that this machine has of a PC's firmware.
//!
//! Linux with CONFIG_EFI, as distributions have it, resets a machine with hardware-reduced ACPI by
//! EFI, even if it has no EFI (`reboot_init` in `arch/x86/kernel/reboot.c`). Then it tries the
//! firmware: `machine_real_restart` jumps to F000:FFF0 in real mode. It never writes the ACPI reset
//! register. Without code there, the processor would execute zeros and never stop.

use vdpa::memory::GuestMemory;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryError};

use crate::layout::{I8042_COMMAND_PORT, RESET_VECTOR};

/// Resets the machine by the keyboard controller.
///
/// ```text
///         mov   al, 0xfe          ; pulse the reset line
///         out   0x64, al
///   wait: hlt
///         jmp   wait
/// ```
const CODE: [u8; 7] = [
    0xb0,
    0xfe,
    0xe6,
    I8042_COMMAND_PORT.to_le_bytes()[0],
    0xf4,
    0xeb,
    0xfd,
];

/// Writes the code. A guest may overwrite it, and harms only its own resets.
pub(super) fn write(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    memory.write_slice(&CODE, GuestAddress(RESET_VECTOR))
}
