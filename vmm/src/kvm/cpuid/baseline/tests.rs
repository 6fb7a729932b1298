use proptest::prelude::*;

use super::super::compatible::check;
use super::super::tests::{entry, get};
use super::super::{Processor, guest_cpuid};
use super::*;

const LEVELS_ONLY: [CpuBaseline; 3] = [CpuBaseline::V2, CpuBaseline::V3, CpuBaseline::V4];
const BITS: u8 = 39;
/// Leaves that a host may have, including some outside every level.
const HOST_LEAVES: [(u32, u32); 32] = [
    (0, 0),
    (1, 0),
    (2, 0),
    (4, 0),
    (4, 1),
    (5, 0),
    (6, 0),
    (7, 0),
    (7, 1),
    (7, 2),
    (0xa, 0),
    (0xd, 0),
    (0xd, 1),
    (0x12, 0),
    (0x14, 0),
    (0x14, 1),
    (0x1d, 1),
    (0x24, 0),
    (0x4000_0000, 0),
    (0x4000_0001, 0),
    (0x8000_0000, 0),
    (0x8000_0001, 0),
    (0x8000_0002, 0),
    (0x8000_0006, 0),
    (0x8000_0007, 0),
    (0x8000_0008, 0),
    (0x8000_000a, 0),
    (0x8000_001d, 0),
    (0x8000_001e, 0),
    (0x8000_0021, 0),
    (0x8000_0022, 0),
    (0xc000_0001, 0),
];
/// Positions of the XSAVE components on Intel's processors: number, length, offset.
const XSAVE_PARTS: [(u32, u32, u32); 10] = [
    (2, 256, 576),
    (3, 64, 960),
    (4, 64, 1024),
    (5, 64, 1088),
    (6, 512, 1152),
    (7, 1024, 1664),
    (9, 8, 2688),
    (11, 16, 0),
    (17, 64, 2752),
    (18, 8192, 2816),
];

/// A host with all features of a level, and those of `more`.
fn host(baseline: CpuBaseline, more: &[[u32; 4]]) -> Vec<kvm_cpuid_entry2> {
    let mut leaves: Vec<kvm_cpuid_entry2> = HOST_LEAVES
        .iter()
        .zip(more)
        .map(|(&(function, index), &[eax, ebx, ecx, edx])| {
            let all = |register| level(baseline, function, index, register);
            entry(
                function,
                index,
                [
                    eax | all(Register::Eax),
                    ebx | all(Register::Ebx),
                    ecx | all(Register::Ecx),
                    edx | all(Register::Edx),
                ],
            )
        })
        .collect();
    for leaf in &mut leaves {
        match leaf.function {
            0 => {
                (leaf.ebx, leaf.edx, leaf.ecx) = (0x756e_6547, 0x4965_6e69, 0x6c65_746e);
                leaf.eax = 0xd + leaf.eax % 0x20;
            }
            0x8000_0000 => leaf.eax = 0x8000_0008 + leaf.eax % 0x20,
            // At least this many address bits, and no limit of KVM's mapping.
            0x8000_0008 => {
                leaf.eax = (u32::from(BITS) + leaf.eax % 13) | 0x3000 | (leaf.eax & 0x900)
            }
            _ => {}
        }
    }
    leaves.extend(XSAVE_PARTS.map(|(part, len, offset)| entry(0xd, part, [len, offset, 0, 0])));
    leaves
}

/// Registers with feature bits, of the present leaves.
fn features(leaves: &[kvm_cpuid_entry2]) -> Vec<(u32, u32, [u32; 4])> {
    let registers = |leaf: &kvm_cpuid_entry2| match (leaf.function, leaf.index) {
        (1 | 0x8000_0001, _) => Some([0, 0, leaf.ecx, leaf.edx]),
        (6 | 7 | 0x4000_0001, _) | (0xd, 2..) => Some([leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]),
        // The sizes in the other registers are amounts.
        (0xd, 0) => Some([leaf.eax, 0, 0, leaf.edx]),
        (0xd, 1) => Some([leaf.eax, 0, leaf.ecx, leaf.edx]),
        (0x8000_0008, _) => Some([0, leaf.ebx, leaf.ecx, leaf.edx]),
        _ => None,
    };
    let found = leaves.iter().filter_map(|leaf| {
        let registers = registers(leaf)?;
        Some((leaf.function, leaf.index, registers))
    });
    found.collect()
}

/// Whether each feature of `less` is in `more`.
fn within(less: &[kvm_cpuid_entry2], more: &[kvm_cpuid_entry2]) -> bool {
    let more = features(more);
    features(less).iter().all(|(function, index, registers)| {
        let same = more.iter().find(|(f, i, _)| (f, i) == (function, index));
        let there = same.map_or([0; 4], |(_, _, there)| *there);
        registers
            .iter()
            .zip(there)
            .all(|(less, more)| less & !more == 0)
    })
}

fn more() -> impl Strategy<Value = Vec<[u32; 4]>> {
    prop::collection::vec(any::<[u32; 4]>(), HOST_LEAVES.len())
}

fn guest(leaves: &[kvm_cpuid_entry2]) -> Vec<kvm_cpuid_entry2> {
    let processor = Processor {
        apic_id: 1,
        count: 4,
    };
    guest_cpuid(leaves, processor)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn nothing_is_set_and_twice_is_once(more in more()) {
        for baseline in LEVELS_ONLY {
            let host = host(baseline, &more);
            let shown = show(&host, baseline, BITS).unwrap();
            prop_assert!(within(&shown, &host));
            // Amounts and sizes do not exceed the host's either.
            for leaf in &shown {
                let there = get(&host, leaf.function, leaf.index);
                prop_assert!(leaf.function == 0xd || leaf.eax <= there.eax);
            }
            prop_assert_eq!(&show(&shown, baseline, BITS).unwrap(), &shown);
        }
    }

    #[test]
    fn each_level_has_the_one_below(more in more()) {
        let host = host(CpuBaseline::V4, &more);
        let [v2, v3, v4] = LEVELS_ONLY.map(|baseline| show(&host, baseline, BITS).unwrap());
        prop_assert!(within(&v2, &v3) && within(&v3, &v4) && within(&v4, &host));
        prop_assert!(!within(&v3, &v2) && !within(&v4, &v3));
        prop_assert_eq!(show(&host, CpuBaseline::Host, BITS).unwrap(), host);
    }

    #[test]
    fn two_hosts_show_the_same_and_a_guest_goes_from_each_to_the_other(
        one in more(),
        other in more(),
        index in 0_usize..3,
    ) {
        let baseline = LEVELS_ONLY[index];
        let [one, other] = [one, other].map(|more| host(baseline, &more));
        let shown = [&one, &other].map(|host| show(host, baseline, BITS).unwrap());
        prop_assert_eq!(features(&shown[0]), features(&shown[1]));
        let [here, there] = shown.map(|shown| guest(&shown));
        prop_assert!(check(&here, &there).is_ok());
        prop_assert!(check(&there, &here).is_ok());
    }

    #[test]
    fn features_that_a_host_lacks_are_named(more in more(), index in any::<prop::sample::Index>()) {
        let all = missing(&[], CpuBaseline::V4);
        let gone = all[index.index(all.len())];
        // Only the features of the level, so that no other bit is missing.
        let mut host = host(CpuBaseline::V4, &more);
        let at_gone =
            |leaf: &&mut kvm_cpuid_entry2| (leaf.function, leaf.index) == (gone.leaf, gone.index);
        for leaf in host.iter_mut().filter(at_gone) {
            let register = match gone.register {
                Register::Eax => &mut leaf.eax,
                Register::Ebx => &mut leaf.ebx,
                Register::Ecx => &mut leaf.ecx,
                Register::Edx => &mut leaf.edx,
            };
            *register &= !(1 << gone.bit);
        }
        let error = show(&host, CpuBaseline::V4, BITS).unwrap_err();
        prop_assert!(error.to_string().ends_with(&format!("lacks {gone}")), "{}", error);
        prop_assert!(error.to_string().contains(gone.name));
    }
}

/// A host with every feature.
fn everything() -> Vec<kvm_cpuid_entry2> {
    host(CpuBaseline::V4, &[[u32::MAX; 4]; HOST_LEAVES.len()])
}

#[test]
fn the_psabi_levels_are_in_it() {
    // System V ABI, AMD64 supplement, table 3.1, with the names of /proc/cpuinfo.
    let v2 = "cmov cx8 fpu fxsr mmx syscall sse sse2 cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3";
    let v3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave";
    let v4 = "avx512f avx512bw avx512cd avx512dq avx512vl";
    let named = |baseline| -> Vec<&str> {
        missing(&[], baseline)
            .iter()
            .map(|missing| missing.name)
            .collect()
    };
    let mut so_far = Vec::new();
    for (baseline, names) in LEVELS_ONLY.into_iter().zip([v2, v3, v4]) {
        so_far.extend(names.split(' '));
        let has = named(baseline);
        for name in &so_far {
            assert!(has.contains(name), "{baseline} {name}");
        }
    }
    assert!(!named(CpuBaseline::V2).contains(&"avx"));
    assert!(!named(CpuBaseline::V3).contains(&"avx512f"));
    // Each bit once.
    let mut all: Vec<_> = missing(&[], CpuBaseline::V4)
        .iter()
        .map(|one| (one.leaf, one.index, one.register.to_string(), one.bit))
        .collect();
    let len = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), len);
}

#[test]
fn xsave_has_the_size_of_its_parts() {
    let host = everything();
    let v2 = show(&host, CpuBaseline::V2, BITS).unwrap();
    assert!(v2.iter().all(|leaf| leaf.function != 0xd));
    assert_eq!((get(&v2, 0, 0).eax, xcr0(&v2)), (0xb, 0));
    let v3 = show(&host, CpuBaseline::V3, BITS).unwrap();
    let sizes = |leaves: &[_], index| {
        let leaf = get(leaves, 0xd, index);
        (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx)
    };
    assert_eq!(sizes(&v3, 0), (7, 576, 576 + 256, 0));
    assert_eq!(sizes(&v3, 1), (1, 0, 0, 0));
    assert_eq!(xcr0(&v3), 7);
    let v4 = show(&host, CpuBaseline::V4, BITS).unwrap();
    assert_eq!(sizes(&v4, 0), (0xe7, 576, 2688, 0));
    assert_eq!(sizes(&v4, 1), (7, 576, 0, 0));
    let parts = |leaves: &[kvm_cpuid_entry2]| -> Vec<u32> {
        leaves
            .iter()
            .filter(|leaf| leaf.function == 0xd && leaf.index > 1)
            .map(|leaf| leaf.index)
            .collect()
    };
    assert_eq!(parts(&v3), [2]);
    assert_eq!(parts(&v4), [2, 5, 6, 7]);
}

#[test]
fn bits_that_differ_by_host_and_microcode_are_hidden() {
    let shown = show(&everything(), CpuBaseline::V4, BITS).unwrap();
    // SPEC_CTRL and ARCH_CAPABILITIES; invariant TSC; performance counters; steal time; AMX, PT,
    // SGX.
    assert_eq!(get(&shown, 7, 0).edx, 0);
    assert_eq!(get(&shown, 0x4000_0001, 0).eax & (1 << 5), 0);
    assert_eq!(get(&shown, 0x8000_0008, 0).ebx, 0);
    for gone in [
        5,
        0xa,
        0x12,
        0x14,
        0x1d,
        0x24,
        0x8000_0007,
        0x8000_001e,
        0x8000_0021,
        0xc000_0001,
    ] {
        assert!(
            shown.iter().all(|leaf| leaf.function != gone),
            "leaf {gone:#x}"
        );
    }
    assert_eq!(get(&shown, 0x8000_0000, 0).eax, 0x8000_0008);
    assert_eq!(get(&shown, 0x8000_0008, 0).eax, 0x3027);
    // The topology is created anew, and the features of every KVM guest are present again.
    let guest = guest(&shown);
    assert_eq!(get(&guest, 0xb, 1).ebx, 4);
    assert_ne!(get(&guest, 1, 0).ecx & (1 << 24 | 1 << 31), 0);
}

#[test]
fn the_error_for_old_hosts_names_the_missing_features() {
    let error = show(&everything()[..7], CpuBaseline::V3, BITS)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with(
            "cpu x86-64-v3: this host's processor or KVM lacks tsc_adjust \
             (CPUID leaf 0x7.0x0 EBX bit 1)"
        ),
        "{error}"
    );
    assert!(
        error.contains("avx2 (") && !error.contains("avx512f"),
        "{error}"
    );
    let error = show(&everything(), CpuBaseline::V2, 52).unwrap_err();
    assert!(error.to_string().contains("of 52 bits"), "{error}");
    assert_eq!(show(&[], CpuBaseline::Host, BITS).unwrap(), []);
}
