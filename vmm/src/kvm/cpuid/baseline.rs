//! Cuts the host's processor down to a baseline, so that guests can move between different hosts.
//!
//! Pure functions from the leaves that the host supports to those that a guest of a baseline may
//! see; [`super::guest_cpuid`] turns them into a vCPU's. Owns the table of the bits of each level.
//! It must not call the kernel.
//!
//! A level is exact. A host that lacks one of its bits is rejected with the bit's name, and a guest
//! gets no bit beyond it. So two hosts of one vendor that reach a level show the same features,
//! sizes and XCR0, and [`super::compatible::check`] passes in both directions. Leaves that do not
//! affect which instructions are usable come from the host that created the guest. They stay the
//! same when it moves: vendor, family, model, stepping, brand, caches.
//!
//! | included | reason |
//! |---|---|
//! | the psABI's level | compilers target it |
//! | XSAVE components of these registers, XSAVEOPT (v3), XSAVEC, XGETBV1 (v4) | to save them |
//! | AES, PCLMULQDQ (v3) | every such processor has them, and TLS is slow without them |
//! | LM, SYSCALL, NX, RDTSCP; SMEP, FSGSBASE, 1 GiB pages (v3); SMAP (v4) | for 64-bit kernels |
//! | x2APIC, TSC_ADJUST, ARAT, KVM's clock, IPIs, TLB flushes | KVM emulates them on every host |
//!
//! | excluded | reason |
//! |---|---|
//! | invariant TSC | hosts' TSCs differ; the guest uses kvmclock |
//! | performance counters | their number and kinds differ |
//! | SPEC_CTRL, IBPB, SSBD, MD_CLEAR, ARCH_CAPABILITIES and similar | they differ by microcode |
//! | steal time | its presence depends on the build of the host's kernel |
//! | AMD topology extensions, duplicates of leaf 1 | not on all hosts; leaf 0xB has the topology |
//!
//! The guest's kernel then mitigates speculation without those bits (retpolines). Guests whose
//! programs distrust each other are better served by `host`.
//!
//! Sources: System V ABI, AMD64 supplement 1.0, table 3.1 (levels); Intel SDM volume 2A, CPUID, and
//! volume 1, 13.2 (XSAVE). AMD APM volume 3, appendix E; `Documentation/virt/kvm/x86/cpuid.rst`.

use std::fmt;

use kvm_bindings::kvm_cpuid_entry2;

use super::compatible::Register;
use super::{leaf, physical_address_bits};
use crate::Error;
use crate::config::CpuBaseline;

/// Bits that belong to a level and to those above it.
struct Bits {
    from: CpuBaseline,
    leaf: u32,
    index: u32,
    register: Register,
    /// Bit numbers, and names as in the host's `/proc/cpuinfo` where it lists them.
    bits: &'static [(u32, &'static str)],
}

const fn bits(
    from: CpuBaseline,
    (leaf, index): (u32, u32),
    register: Register,
    bits: &'static [(u32, &'static str)],
) -> Bits {
    Bits {
        from,
        leaf,
        index,
        register,
        bits,
    }
}

const LEVELS: [Bits; 16] = {
    use CpuBaseline::{V2, V3, V4};
    use Register::{Eax, Ebx, Ecx, Edx};
    [
        bits(
            V2,
            (leaf::FEATURES, 0),
            Edx,
            &[
                (0, "fpu"),
                (2, "de"),
                (3, "pse"),
                (4, "tsc"),
                (5, "msr"),
                (6, "pae"),
                (7, "mce"),
                (8, "cx8"),
                (9, "apic"),
                (11, "sep"),
                (12, "mtrr"),
                (13, "pge"),
                (14, "mca"),
                (15, "cmov"),
                (16, "pat"),
                (17, "pse36"),
                (19, "clflush"),
                (23, "mmx"),
                (24, "fxsr"),
                (25, "sse"),
                (26, "sse2"),
            ],
        ),
        bits(
            V2,
            (leaf::FEATURES, 0),
            Ecx,
            &[
                (0, "pni"),
                (9, "ssse3"),
                (13, "cx16"),
                (19, "sse4_1"),
                (20, "sse4_2"),
                (21, "x2apic"),
                (23, "popcnt"),
            ],
        ),
        bits(
            V3,
            (leaf::FEATURES, 0),
            Ecx,
            &[
                (1, "pclmulqdq"),
                (12, "fma"),
                (22, "movbe"),
                (25, "aes"),
                (26, "xsave"),
                (28, "avx"),
                (29, "f16c"),
            ],
        ),
        bits(V2, (leaf::POWER, 0), Eax, &[(2, "arat")]),
        bits(V2, (leaf::EXTENDED, 0), Ebx, &[(1, "tsc_adjust")]),
        bits(
            V3,
            (leaf::EXTENDED, 0),
            Ebx,
            &[
                (0, "fsgsbase"),
                (3, "bmi1"),
                (5, "avx2"),
                (7, "smep"),
                (8, "bmi2"),
            ],
        ),
        bits(
            V4,
            (leaf::EXTENDED, 0),
            Ebx,
            &[
                (16, "avx512f"),
                (17, "avx512dq"),
                (20, "smap"),
                (28, "avx512cd"),
                (30, "avx512bw"),
                (31, "avx512vl"),
            ],
        ),
        bits(
            V3,
            (leaf::XSAVE, 0),
            Eax,
            &[(0, "xcr0:x87"), (1, "xcr0:sse"), (2, "xcr0:avx")],
        ),
        bits(
            V4,
            (leaf::XSAVE, 0),
            Eax,
            &[
                (5, "xcr0:opmask"),
                (6, "xcr0:zmm_hi256"),
                (7, "xcr0:hi16_zmm"),
            ],
        ),
        bits(V3, (leaf::XSAVE, 1), Eax, &[(0, "xsaveopt")]),
        bits(V4, (leaf::XSAVE, 1), Eax, &[(1, "xsavec"), (2, "xgetbv1")]),
        bits(
            V2,
            (leaf::KVM_FEATURES, 0),
            Eax,
            &[
                (0, "kvm:clocksource"),
                (1, "kvm:nop_io_delay"),
                (3, "kvm:clocksource2"),
                (4, "kvm:async_pf"),
                (6, "kvm:pv_eoi"),
                (7, "kvm:pv_unhalt"),
                (9, "kvm:pv_tlb_flush"),
                (11, "kvm:pv_send_ipi"),
                (13, "kvm:pv_sched_yield"),
                (14, "kvm:async_pf_int"),
                (24, "kvm:clocksource_stable"),
            ],
        ),
        bits(V2, (leaf::EXTENDED_FEATURES, 0), Ecx, &[(0, "lahf_lm")]),
        bits(V3, (leaf::EXTENDED_FEATURES, 0), Ecx, &[(5, "abm")]),
        bits(
            V2,
            (leaf::EXTENDED_FEATURES, 0),
            Edx,
            &[(11, "syscall"), (20, "nx"), (27, "rdtscp"), (29, "lm")],
        ),
        bits(V3, (leaf::EXTENDED_FEATURES, 0), Edx, &[(26, "pdpe1gb")]),
    ]
};

/// The highest leaves that a guest of a baseline sees.
const HIGHEST: u32 = leaf::XSAVE;
const HIGHEST_WITHOUT_XSAVE: u32 = leaf::TOPOLOGY;
/// Bits of a linear address. More are useless without five-level page tables, which no level has.
const LINEAR_BITS: u32 = 48;
/// Bytes of an XSAVE area before its components: x87, SSE and the header (Intel SDM volume 1,
/// 13.4).
const XSAVE_HEAD: u32 = 576;
/// Leaf 0xD.1, EAX: XSAVEC.
const XSAVEC: u32 = 1 << 1;
/// Components of an XSAVE area whose position has no leaf: x87 and SSE.
const XSAVE_FIXED_PARTS: u32 = 2;

/// A feature that a host lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// Its name as in `/proc/cpuinfo`, where that lists it.
    pub name: &'static str,
    /// CPUID leaf (EAX).
    pub leaf: u32,
    /// Sub-leaf (ECX).
    pub index: u32,
    /// The register that holds the bit.
    pub register: Register,
    /// The bit's number.
    pub bit: u32,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            leaf,
            index,
            register,
            bit,
        } = self;
        write!(
            f,
            "{name} (CPUID leaf {leaf:#x}.{index:#x} {register} bit {bit})"
        )
    }
}

fn list(missing: &[Missing]) -> String {
    let shown: Vec<String> = missing.iter().map(ToString::to_string).collect();
    shown.join(", ")
}

/// Filters `supported`, the result of `KVM_GET_SUPPORTED_CPUID`, for a guest of `baseline` with
/// physical addresses of `physical_bits` bits. [`CpuBaseline::Host`] leaves all leaves as they are.
///
/// # Errors
/// The host does not reach the baseline.
pub fn show(
    supported: &[kvm_cpuid_entry2],
    baseline: CpuBaseline,
    physical_bits: u8,
) -> Result<Vec<kvm_cpuid_entry2>, Error> {
    if baseline.is_host() {
        return Ok(supported.to_vec());
    }
    let missing = missing(supported, baseline);
    if !missing.is_empty() {
        return Err(Error::unusable(format!(
            "cpu {baseline}: this host's processor or KVM lacks {}",
            list(&missing)
        )));
    }
    let here = physical_address_bits(supported);
    if here < physical_bits {
        return Err(Error::unusable(format!(
            "cpu {baseline}: a guest with so much memory needs physical addresses of \
             {physical_bits} bits, but this host has {here}"
        )));
    }
    Ok(mask(supported, baseline, physical_bits))
}

/// The bits of a level that `supported` lacks.
fn missing(supported: &[kvm_cpuid_entry2], baseline: CpuBaseline) -> Vec<Missing> {
    let of_level = LEVELS.iter().filter(|group| group.from <= baseline);
    let all = of_level.flat_map(|group| {
        let &Bits {
            leaf,
            index,
            register,
            bits,
            ..
        } = group;
        bits.iter().map(move |&(bit, name)| Missing {
            name,
            leaf,
            index,
            register,
            bit,
        })
    });
    all.filter(|one| {
        let entry = supported
            .iter()
            .find(|entry| entry.function == one.leaf && entry.index == one.index);
        entry.is_none_or(|entry| one.register.of(entry) & (1 << one.bit) == 0)
    })
    .collect()
}

/// All bits of a level in one register.
fn level(baseline: CpuBaseline, leaf: u32, index: u32, register: Register) -> u32 {
    LEVELS
        .iter()
        .filter(|group| {
            group.from <= baseline
                && (group.leaf, group.index) == (leaf, index)
                && group.register == register
        })
        .flat_map(|group| group.bits)
        .fold(0, |all, (bit, _)| all | 1 << bit)
}

/// Clears all bits outside a level; sets none. `baseline` is not [`CpuBaseline::Host`].
fn mask(
    supported: &[kvm_cpuid_entry2],
    baseline: CpuBaseline,
    physical_bits: u8,
) -> Vec<kvm_cpuid_entry2> {
    let mut shown: Vec<kvm_cpuid_entry2> = supported
        .iter()
        .filter_map(|entry| mask_leaf(*entry, baseline, physical_bits))
        .collect();
    resize_xsave(&mut shown);
    shown
}

/// Filters one leaf; `None` hides it, so the guest reads zeros.
fn mask_leaf(
    mut entry: kvm_cpuid_entry2,
    baseline: CpuBaseline,
    physical_bits: u8,
) -> Option<kvm_cpuid_entry2> {
    let features = |register| level(baseline, entry.function, entry.index, register);
    let [eax, ebx, ecx, edx] =
        [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx].map(features);
    match (entry.function, entry.index) {
        (leaf::VENDOR, _) => {
            let xsave = level(baseline, leaf::XSAVE, 0, Register::Eax) != 0;
            let highest = if xsave {
                HIGHEST
            } else {
                HIGHEST_WITHOUT_XSAVE
            };
            entry.eax = entry.eax.min(highest);
        }
        // Family, sizes and identification come from the host.
        (leaf::FEATURES | leaf::EXTENDED_FEATURES, _) => {
            entry.ecx &= ecx;
            entry.edx &= edx;
        }
        (leaf::TLB | leaf::CACHE | leaf::KVM_SIGNATURE, _)
        | (leaf::BRAND_FIRST..=leaf::AMD_L2, _) => {}
        (leaf::POWER | leaf::EXTENDED | leaf::KVM_FEATURES, 0) => {
            entry.eax &= eax;
            entry.ebx &= ebx;
            entry.ecx &= ecx;
            entry.edx &= edx;
        }
        (leaf::XSAVE, 0) if eax != 0 => {
            entry.eax &= eax;
            entry.edx = 0;
        }
        (leaf::XSAVE, 1) if eax != 0 => {
            entry.eax &= eax;
            // IA32_XSS exists only with XSAVES.
            entry.ecx = 0;
            entry.edx = 0;
        }
        (leaf::XSAVE, part) if part >= XSAVE_FIXED_PARTS => {
            let parts = level(baseline, leaf::XSAVE, 0, Register::Eax);
            let shown = part < u32::BITS && parts & (1 << part) != 0;
            return shown.then_some(entry);
        }
        (leaf::EXTENDED_MAX, _) => entry.eax = entry.eax.min(leaf::ADDRESS_SIZES),
        (leaf::ADDRESS_SIZES, _) => {
            let [here, linear, ..] = entry.eax.to_le_bytes();
            entry.eax =
                u32::from(physical_bits.min(here)) | u32::from(linear).min(LINEAR_BITS) << 8;
            (entry.ebx, entry.ecx, entry.edx) = (0, 0, 0);
        }
        _ => return None,
    }
    Some(entry)
}

/// Sets the sizes of XSAVE areas to those of the remaining components. KVM updates the sizes that
/// follow the components the guest has enabled; those begin with x87 and SSE.
fn resize_xsave(shown: &mut [kvm_cpuid_entry2]) {
    let parts = shown
        .iter()
        .filter(|entry| entry.function == leaf::XSAVE && entry.index >= XSAVE_FIXED_PARTS);
    let largest = parts
        .map(|part| part.eax.saturating_add(part.ebx))
        .fold(XSAVE_HEAD, u32::max);
    for entry in shown {
        match (entry.function, entry.index) {
            (leaf::XSAVE, 0) => (entry.ebx, entry.ecx) = (XSAVE_HEAD, largest),
            (leaf::XSAVE, 1) if entry.eax & XSAVEC != 0 => entry.ebx = XSAVE_HEAD,
            (leaf::XSAVE, 1) => entry.ebx = 0,
            _ => {}
        }
    }
}

/// XCR0 that a guest with these leaves can set: the components of its XSAVE area.
#[must_use]
pub fn xcr0(shown: &[kvm_cpuid_entry2]) -> u64 {
    let mut leaves = shown.iter();
    leaves
        .find(|entry| (entry.function, entry.index) == (leaf::XSAVE, 0))
        .map_or(0, |entry| u64::from(entry.edx) << 32 | u64::from(entry.eax))
}

#[cfg(test)]
mod tests;
