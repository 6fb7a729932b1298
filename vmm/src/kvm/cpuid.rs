//! The guest's results of the CPUID instruction.
//!
//! Pure functions from the leaves that the host supports to the leaves of one vCPU. They own the
//! topology that the guest sees. It has one package with one core per vCPU, one thread per core,
//! one last-level cache, and APIC ids from 0. Everything else passes as KVM or a baseline
//! (`baseline.rs`) offers it, except nested virtualization, which is hidden. Its state would have
//! to be reset and migrated too. This module must not call the kernel.
//!
//! Sources: Intel SDM volume 2A, CPUID (leaves 1, 4, 0xB, 0x1F); AMD APM
//! volume 3, appendix E (0x8000_0001, 0x8000_0008, 0x8000_001D, 0x8000_001E).

pub mod baseline;
pub mod compatible;

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Physical address bits if CPUID does not report them (AMD APM, 0x8000_0008).
const DEFAULT_PHYSICAL_BITS: u8 = 36;

/// Leaf numbers used here.
mod leaf {
    pub(super) const VENDOR: u32 = 0;
    pub(super) const FEATURES: u32 = 1;
    pub(super) const TLB: u32 = 2;
    pub(super) const CACHE: u32 = 4;
    pub(super) const POWER: u32 = 6;
    pub(super) const EXTENDED: u32 = 7;
    pub(super) const PERFORMANCE: u32 = 0xa;
    pub(super) const TOPOLOGY: u32 = 0xb;
    pub(super) const XSAVE: u32 = 0xd;
    pub(super) const TOPOLOGY_V2: u32 = 0x1f;
    pub(super) const KVM_SIGNATURE: u32 = 0x4000_0000;
    pub(super) const KVM_FEATURES: u32 = 0x4000_0001;
    pub(super) const EXTENDED_MAX: u32 = 0x8000_0000;
    pub(super) const EXTENDED_FEATURES: u32 = 0x8000_0001;
    pub(super) const BRAND_FIRST: u32 = 0x8000_0002;
    pub(super) const AMD_L2: u32 = 0x8000_0006;
    pub(super) const ADDRESS_SIZES: u32 = 0x8000_0008;
    pub(super) const AMD_NESTED: u32 = 0x8000_000a;
    pub(super) const AMD_CACHE: u32 = 0x8000_001d;
    pub(super) const AMD_TOPOLOGY: u32 = 0x8000_001e;
    pub(super) const AMD_TOPOLOGY_V2: u32 = 0x8000_0026;
}

/// Leaf 1, ECX: Intel's virtualization extensions.
const VMX: u32 = 1 << 5;
/// Leaf 1, ECX: the local APIC's timer supports TSC deadlines.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1, ECX: this is a virtual machine.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: EBX bits 23:16 are valid, there is more than one logical processor.
const MULTIPLE_PROCESSORS: u32 = 1 << 28;
/// 0x8000_0001, ECX: the logical processors are cores, not threads.
const CORES_NOT_THREADS: u32 = 1 << 1;
/// 0x8000_0001, ECX: AMD's virtualization extensions.
const SVM: u32 = 1 << 2;
/// 0x8000_0001, ECX: the leaves 0x8000_001D and 0x8000_001E exist.
const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;

/// The vCPU of the leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor {
    /// Its APIC id, counted from 0; the same as its index.
    pub apic_id: u8,
    /// Number of vCPUs of the VM.
    pub count: u8,
}

impl Processor {
    /// vCPUs as a field value; 0 counts as 1.
    fn cores(self) -> u32 {
        u32::from(self.count.max(1))
    }

    /// Bits of an APIC id that distinguish the cores of the package.
    fn core_bits(self) -> u32 {
        self.cores().next_power_of_two().trailing_zeros()
    }
}

/// Creates the CPUID leaves of one vCPU from `supported`, the result of `KVM_GET_SUPPORTED_CPUID`
/// or of [`baseline::show`].
#[must_use]
pub fn guest_cpuid(supported: &[kvm_cpuid_entry2], processor: Processor) -> Vec<kvm_cpuid_entry2> {
    let amd = is_amd(supported);
    let mut leaves: Vec<kvm_cpuid_entry2> = supported
        .iter()
        .filter(|entry| {
            // Leaves that are replaced below, that contradict the topology (0x8000_0026), or that
            // describe a hidden feature (0x8000_000A).
            !matches!(
                entry.function,
                leaf::TOPOLOGY
                    | leaf::TOPOLOGY_V2
                    | leaf::AMD_NESTED
                    | leaf::AMD_TOPOLOGY
                    | leaf::AMD_TOPOLOGY_V2
            )
        })
        .copied()
        .collect();

    for entry in &mut leaves {
        match entry.function {
            leaf::FEATURES => features(entry, processor, amd),
            leaf::CACHE => intel_cache(entry, processor),
            leaf::EXTENDED_FEATURES => {
                entry.ecx &= !SVM;
                if amd {
                    set_bit(&mut entry.ecx, CORES_NOT_THREADS, processor.cores() > 1);
                }
            }
            leaf::ADDRESS_SIZES if amd => {
                // NC: cores minus one; ApicIdCoreIdSize.
                set_field(&mut entry.ecx, 0, 8, processor.cores() - 1);
                set_field(&mut entry.ecx, 12, 4, processor.core_bits());
            }
            leaf::AMD_CACHE => amd_cache(entry, processor),
            _ => {}
        }
    }

    for function in [leaf::TOPOLOGY, leaf::TOPOLOGY_V2] {
        if highest(supported, leaf::VENDOR) >= function {
            leaves.extend(topology(function, processor));
        }
    }
    let extensions = find(supported, leaf::EXTENDED_FEATURES)
        .is_some_and(|entry| entry.ecx & TOPOLOGY_EXTENSIONS != 0);
    if amd && extensions && highest(supported, leaf::EXTENDED_MAX) >= leaf::AMD_TOPOLOGY {
        leaves.push(kvm_cpuid_entry2 {
            function: leaf::AMD_TOPOLOGY,
            eax: processor.apic_id.into(),
            // Core id; one thread per core; node 0 of 1 (ECX 0).
            ebx: processor.apic_id.into(),
            ..Default::default()
        });
    }
    leaves
}

/// The width of a guest-physical address, from the supported leaves: limits the addresses of memory
/// and devices.
#[must_use]
pub fn physical_address_bits(supported: &[kvm_cpuid_entry2]) -> u8 {
    let Some(entry) = find(supported, leaf::ADDRESS_SIZES) else {
        return DEFAULT_PHYSICAL_BITS;
    };
    let [bits, _, guest_bits, _] = entry.eax.to_le_bytes();
    // Bits 23:16 are the width that KVM can map, where that is less than the processor's
    // (four-level page tables).
    match guest_bits {
        0 => bits,
        limit => bits.min(limit),
    }
}

fn features(entry: &mut kvm_cpuid_entry2, processor: Processor, amd: bool) {
    // Intel counts possible ids, AMD existing processors.
    let logical = if amd {
        processor.cores()
    } else {
        processor.cores().next_power_of_two()
    };
    set_field(&mut entry.ebx, 16, 8, logical);
    set_field(&mut entry.ebx, 24, 8, processor.apic_id.into());
    // KVM emulates the deadline timer on any processor. It does not list it, because it depends on
    // the in-kernel local APIC, which this VM has.
    entry.ecx |= TSC_DEADLINE | HYPERVISOR;
    entry.ecx &= !VMX;
    set_bit(&mut entry.edx, MULTIPLE_PROCESSORS, processor.cores() > 1);
}

/// Leaf 4: the processors that share a cache, and the number of core ids of the package.
fn intel_cache(entry: &mut kvm_cpuid_entry2, processor: Processor) {
    if entry.eax & 0x1f == 0 {
        return; // No more caches.
    }
    let ids = processor.cores().next_power_of_two();
    let sharing = if cache_level(entry) >= 3 { ids } else { 1 };
    set_field(&mut entry.eax, 14, 12, sharing - 1);
    set_field(&mut entry.eax, 26, 6, ids - 1);
}

/// 0x8000_001D: the processors that share a cache.
fn amd_cache(entry: &mut kvm_cpuid_entry2, processor: Processor) {
    if entry.eax & 0x1f == 0 {
        return;
    }
    let sharing = if cache_level(entry) >= 3 {
        processor.cores()
    } else {
        1
    };
    set_field(&mut entry.eax, 14, 12, sharing - 1);
}

fn cache_level(entry: &kvm_cpuid_entry2) -> u32 {
    (entry.eax >> 5) & 7
}

/// Leaves 0xB and 0x1F: one thread per core, then all cores of the package.
fn topology(function: u32, processor: Processor) -> [kvm_cpuid_entry2; 3] {
    const THREADS: u32 = 1;
    const CORES: u32 = 2;
    let level = |index: u32, kind: u32, shift: u32, count: u32| kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: (kind << 8) | index,
        edx: processor.apic_id.into(),
        ..Default::default()
    };
    [
        level(0, THREADS, 0, 1),
        level(1, CORES, processor.core_bits(), processor.cores()),
        level(2, 0, 0, 0),
    ]
}

fn find(leaves: &[kvm_cpuid_entry2], function: u32) -> Option<&kvm_cpuid_entry2> {
    leaves.iter().find(|entry| entry.function == function)
}

/// The highest leaf of the range that begins at `base` (EAX of that leaf).
fn highest(leaves: &[kvm_cpuid_entry2], base: u32) -> u32 {
    find(leaves, base).map_or(0, |entry| entry.eax)
}

fn is_amd(leaves: &[kvm_cpuid_entry2]) -> bool {
    let Some(entry) = find(leaves, leaf::VENDOR) else {
        return false;
    };
    let mut vendor = [0; 12];
    for (part, register) in vendor.chunks_mut(4).zip([entry.ebx, entry.edx, entry.ecx]) {
        part.copy_from_slice(&register.to_le_bytes());
    }
    matches!(&vendor, b"AuthenticAMD" | b"HygonGenuine")
}

fn set_bit(register: &mut u32, mask: u32, on: bool) {
    if on {
        *register |= mask;
    } else {
        *register &= !mask;
    }
}

/// Sets `width` bits from `shift` on. A value too large for them is limited to the maximum (core
/// ids of leaf 4 have six bits).
fn set_field(register: &mut u32, shift: u32, width: u32, value: u32) {
    let max = (1 << width) - 1;
    *register = (*register & !(max << shift)) | (value.min(max) << shift);
}

#[cfg(test)]
mod tests;
