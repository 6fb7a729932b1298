//! The registers of a vCPU that cannot continue, as one line for the log.
//!
//! Owns the format, which bug reports and the lab's tests read, with all values in hexadecimal:
//! `vcpu0 registers: rip=0x… rsp=0x… …`. It must not know why the vCPU failed, except for a triple
//! fault.

use std::fmt;

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::failure::VcpuFailure;
use crate::Error;

/// Where a processor starts after a reset (Intel SDM volume 3, 11.1.4; AMD APM volume 2, 14.1.3).
const RESET_RIP: u64 = 0xfff0;
const RESET_CS_BASE: u64 = 0xffff_0000;

/// Logs the registers of a vCPU after `failure`.
pub(super) fn log(index: u8, fd: &VcpuFd, failure: &VcpuFailure) {
    match Registers::read(fd) {
        Ok(registers) => {
            let note = registers.note(failure);
            tracing::error!("vcpu{index} registers: {registers}{note}");
        }
        Err(error) => tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot read the registers of vcpu{index}"
        ),
    }
}

struct Registers {
    general: kvm_regs,
    special: kvm_sregs,
}

impl Registers {
    fn read(fd: &VcpuFd) -> Result<Self, Error> {
        Ok(Self {
            general: fd.get_regs().map_err(Error::failed("KVM_GET_REGS"))?,
            special: fd.get_sregs().map_err(Error::failed("KVM_GET_SREGS"))?,
        })
    }

    /// A note on the values for the reader. On AMD processors the VMCB is undefined after a triple
    /// fault, and KVM resets the vCPU before it returns (`shutdown_interception` in
    /// arch/x86/kvm/svm/svm.c).
    fn note(&self, failure: &VcpuFailure) -> &'static str {
        let reset = self.general.rip == RESET_RIP && self.special.cs.base == RESET_CS_BASE;
        if *failure == VcpuFailure::TripleFault && reset {
            " (after the reset that KVM does at a triple fault on AMD processors; the guest's own \
             are lost)"
        } else {
            ""
        }
    }
}

impl fmt::Display for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { general, special } = self;
        let all = [
            ("rip", general.rip),
            ("rsp", general.rsp),
            ("rflags", general.rflags),
            ("rax", general.rax),
            ("cr0", special.cr0),
            ("cr2", special.cr2),
            ("cr3", special.cr3),
            ("cr4", special.cr4),
            ("efer", special.efer),
            ("cs", special.cs.selector.into()),
            ("cs_base", special.cs.base),
            ("ss", special.ss.selector.into()),
            ("gdt", special.gdt.base),
            ("gdt_limit", special.gdt.limit.into()),
            ("idt", special.idt.base),
            ("idt_limit", special.idt.limit.into()),
        ];
        for (index, (name, value)) in all.into_iter().enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(f, "{space}{name}={value:#x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers() -> Registers {
        let mut special = kvm_sregs {
            cr0: 0x8005_0033,
            cr3: 0x7f00_0000_1000,
            ..kvm_sregs::default()
        };
        special.cs.selector = 0x10;
        special.idt.limit = 0xfff;
        Registers {
            general: kvm_regs {
                rip: 0xffff_ffff_8100_0000,
                ..kvm_regs::default()
            },
            special,
        }
    }

    #[test]
    fn all_are_on_one_line() {
        let shown = registers().to_string();
        assert!(
            shown.starts_with("rip=0xffffffff81000000 rsp=0x0 "),
            "{shown}"
        );
        for part in [
            " cr0=0x80050033 ",
            " cr3=0x7f0000001000 ",
            " cs=0x10 ",
            " idt_limit=0xfff",
        ] {
            assert!(shown.contains(part), "{shown}");
        }
        assert!(!shown.contains('\n'));
    }

    #[test]
    fn values_after_a_reset_are_called_so() {
        let mut registers = registers();
        assert_eq!(registers.note(&VcpuFailure::TripleFault), "");
        registers.general.rip = RESET_RIP;
        registers.special.cs.base = RESET_CS_BASE;
        assert!(
            registers
                .note(&VcpuFailure::TripleFault)
                .contains("AMD processors")
        );
        assert_eq!(registers.note(&VcpuFailure::Run { errno: 1 }), "");
    }
}
