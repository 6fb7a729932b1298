//! Whether a guest that knows one processor can resume on another one.
//!
//! A pure comparison of CPUID leaves: those that the guest sees, and those it would see here. It
//! owns the table of the registers that hold features and those that hold amounts. It must not call
//! the kernel.
//!
//! This host may have more than the guest has seen, but not less. Registers that do not affect
//! which instructions are usable (brand, caches, topology) are not compared.
//!
//! Sources: Intel SDM volume 2A, CPUID; AMD APM volume 3, appendix E;
//! `Documentation/virt/kvm/x86/cpuid.rst` for 0x4000_0001.

use std::fmt;

use kvm_bindings::kvm_cpuid_entry2;

use super::leaf;
use crate::Error;

/// A register that CPUID fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

impl Register {
    pub(super) fn of(self, entry: &kvm_cpuid_entry2) -> u32 {
        match self {
            Self::Eax => entry.eax,
            Self::Ebx => entry.ebx,
            Self::Ecx => entry.ecx,
            Self::Edx => entry.edx,
        }
    }
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Eax => "EAX",
            Self::Ebx => "EBX",
            Self::Ecx => "ECX",
            Self::Edx => "EDX",
        })
    }
}

/// Feature bits that the guest has seen and that are missing here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingFeatures {
    /// CPUID leaf (EAX).
    pub leaf: u32,
    /// Sub-leaf (ECX).
    pub index: u32,
    /// The register that holds the bits.
    pub register: Register,
    /// The bits.
    pub bits: u32,
}

impl fmt::Display for MissingFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            leaf,
            index,
            register,
            bits,
        } = self;
        write!(f, "leaf {leaf:#x}.{index:#x} {register}")?;
        let set = (0..u32::BITS).filter(|bit| bits & (1 << bit) != 0);
        for (number, bit) in set.enumerate() {
            write!(f, "{}{bit}", if number == 0 { " bit " } else { ", " })?;
        }
        Ok(())
    }
}

fn list(missing: &[MissingFeatures]) -> String {
    let shown: Vec<String> = missing.iter().map(ToString::to_string).collect();
    shown.join("; ")
}

/// Registers whose bits are features: leaf, sub-leaf, register, and a mask of those bits.
const FEATURES: [(u32, u32, Register, u32); 27] = {
    use Register::{Eax, Ebx, Ecx, Edx};
    /// Enabled by the operating system, so no feature of the processor.
    const OSXSAVE: u32 = 1 << 27;
    const OSPKE: u32 = 1 << 4;
    /// The local APIC's timer always runs; the rest of leaf 6 describes power management.
    const ARAT: u32 = 1 << 2;
    [
        (leaf::FEATURES, 0, Ecx, !OSXSAVE),
        (leaf::FEATURES, 0, Edx, !0),
        (6, 0, Eax, ARAT),
        (7, 0, Ebx, !0),
        (7, 0, Ecx, !OSPKE),
        (7, 0, Edx, !0),
        (7, 1, Eax, !0),
        (7, 1, Ebx, !0),
        (7, 1, Ecx, !0),
        (7, 1, Edx, !0),
        (7, 2, Edx, !0),
        // XCR0, the instructions of the XSAVE family, IA32_XSS.
        (leaf::XSAVE, 0, Eax, !0),
        (leaf::XSAVE, 0, Edx, !0),
        (leaf::XSAVE, 1, Eax, !0),
        (leaf::XSAVE, 1, Ecx, !0),
        (leaf::XSAVE, 1, Edx, !0),
        (0x14, 0, Ebx, !0),
        (0x14, 0, Ecx, !0),
        (leaf::KVM_FEATURES, 0, Eax, !0),
        (leaf::EXTENDED_FEATURES, 0, Ecx, !0),
        (leaf::EXTENDED_FEATURES, 0, Edx, !0),
        (0x8000_0007, 0, Ebx, !0),
        (0x8000_0007, 0, Edx, !0),
        (leaf::ADDRESS_SIZES, 0, Ebx, !0),
        (0x8000_0021, 0, Eax, !0),
        (0x8000_0021, 0, Ecx, !0),
        (0x8000_0022, 0, Eax, !0),
    ]
};

/// Registers of sub-leaf 0 that hold amounts: leaf, register, first bit, number of bits, name.
const AMOUNTS: [(u32, Register, u32, u32, &str); 6] = [
    (
        leaf::ADDRESS_SIZES,
        Register::Eax,
        0,
        8,
        "bits of a physical address",
    ),
    (
        leaf::ADDRESS_SIZES,
        Register::Eax,
        8,
        8,
        "bits of a linear address",
    ),
    (
        leaf::PERFORMANCE,
        Register::Eax,
        0,
        8,
        "versions of performance monitoring",
    ),
    (
        leaf::PERFORMANCE,
        Register::Eax,
        8,
        8,
        "performance counters",
    ),
    (
        leaf::PERFORMANCE,
        Register::Eax,
        16,
        8,
        "bits of a performance counter",
    ),
    (
        leaf::PERFORMANCE,
        Register::Edx,
        0,
        5,
        "fixed performance counters",
    ),
];

/// Checks that a guest that has seen `saved` can resume on a host that would show it `here`.
///
/// # Errors
/// The first obstacle; for features, all that are missing.
pub fn check(saved: &[kvm_cpuid_entry2], here: &[kvm_cpuid_entry2]) -> Result<(), Error> {
    if saved.len() > kvm_bindings::KVM_MAX_CPUID_ENTRIES {
        let message = format!("{} CPUID leaves are more than KVM takes", saved.len());
        return Err(Error::host(message));
    }
    let (theirs, ours) = (vendor(saved), vendor(here));
    if theirs != ours {
        return Err(Error::host(format!(
            "the guest has seen a processor of {theirs}, but this host's is of {ours}"
        )));
    }
    let missing: Vec<MissingFeatures> = FEATURES
        .iter()
        .filter_map(|&(leaf, index, register, mask)| {
            let bits =
                value(saved, leaf, index, register) & !value(here, leaf, index, register) & mask;
            (bits != 0).then_some(MissingFeatures {
                leaf,
                index,
                register,
                bits,
            })
        })
        .collect();
    if !missing.is_empty() {
        return Err(Error::host(format!(
            "the guest may use processor features that are missing here: CPUID {}",
            list(&missing)
        )));
    }
    for (leaf, register, shift, width, what) in AMOUNTS {
        let amount = |leaves| (value(leaves, leaf, 0, register) >> shift) & ((1 << width) - 1);
        let (theirs, ours) = (amount(saved), amount(here));
        if theirs > ours {
            return Err(Error::host(format!(
                "the guest has seen {theirs} {what}, but this host has {ours}"
            )));
        }
    }
    // The first two components (x87 and SSE) have a fixed position.
    for part in 2..u64::BITS - 1 {
        let place = |leaves, register| value(leaves, leaf::XSAVE, part, register);
        let moved = [Register::Eax, Register::Ebx]
            .iter()
            .any(|register| place(saved, *register) != place(here, *register));
        if moved && place(saved, Register::Eax) != 0 {
            return Err(Error::host(format!(
                "part {part} of the XSAVE area has another offset or size here (CPUID leaf 0xd)"
            )));
        }
    }
    Ok(())
}

/// The value of a register; 0 if the leaf is missing, as a guest reads it.
pub(crate) fn value(leaves: &[kvm_cpuid_entry2], leaf: u32, index: u32, register: Register) -> u32 {
    leaves
        .iter()
        .find(|entry| entry.function == leaf && entry.index == index)
        .map_or(0, |entry| register.of(entry))
}

fn vendor(leaves: &[kvm_cpuid_entry2]) -> String {
    let name: Vec<u8> = [Register::Ebx, Register::Edx, Register::Ecx]
        .iter()
        .flat_map(|register| value(leaves, leaf::VENDOR, 0, *register).to_le_bytes())
        .collect();
    // Untrusted bytes: they may go into a log.
    name.escape_ascii().to_string()
}

#[cfg(test)]
mod tests {
    use super::super::tests::entry;
    use super::*;

    fn processor() -> Vec<kvm_cpuid_entry2> {
        vec![
            entry(0, 0, [0xd, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
            entry(1, 0, [0x906ea, 0, 0x8120_0000, 0x1f8b_fbff]),
            entry(7, 0, [0, 0x20, 0x10, 0]),
            entry(0xd, 0, [7, 0x340, 0x340, 0]),
            entry(0xd, 2, [0x100, 0x240, 0, 0]),
            entry(0x8000_0008, 0, [0x3027, 0, 0, 0]),
        ]
    }

    #[test]
    fn the_same_and_more_are_enough() {
        check(&processor(), &processor()).unwrap();
        check(&[], &[]).unwrap();
        let mut more = processor();
        more[1].ecx |= 1;
        more[1].eax = 0;
        more[5].eax = 0x302e;
        check(&processor(), &more).unwrap();
        // Bits that the operating system sets are no features.
        let mut running = processor();
        running[1].ecx |= 1 << 27;
        check(&running, &processor()).unwrap();
    }

    #[test]
    fn missing_features_are_named() {
        let mut guest = processor();
        guest[1].ecx |= 0x3;
        guest[2].ebx |= 1 << 16;
        let error = check(&guest, &processor()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the guest may use processor features that are missing here: CPUID leaf 0x1.0x0 ECX \
             bit 0, 1; leaf 0x7.0x0 EBX bit 16"
        );
        let error = check(&processor(), &processor()[..5]).unwrap_err();
        assert!(
            error.to_string().contains("the guest has seen 39 "),
            "{error}"
        );
        assert!(error.to_string().ends_with("this host has 0"), "{error}");
        let mut moved = processor();
        moved[4].ebx = 0x400;
        let error = check(&processor(), &moved).unwrap_err();
        assert!(
            error.to_string().starts_with("part 2 of the XSAVE area"),
            "{error}"
        );
    }

    #[test]
    fn vendors_are_compared_and_shown_safely() {
        let mut other = processor();
        other[0].ebx = u32::from_le_bytes(*b"\x1b[0m");
        let error = check(&other, &processor()).unwrap_err().to_string();
        assert!(error.contains("\\x1b[0mineIntel"), "{error}");
        assert!(error.contains("of GenuineIntel"), "{error}");
        let many = vec![kvm_cpuid_entry2::default(); 257];
        let error = check(&many, &many).unwrap_err().to_string();
        assert!(error.starts_with("257 CPUID leaves"), "{error}");
    }
}
