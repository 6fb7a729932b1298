use super::*;

/// A leaf with its four registers.
pub(super) fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = registers;
    kvm_cpuid_entry2 {
        function,
        index,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    }
}

fn text(bytes: &[u8; 4]) -> u32 {
    u32::from_le_bytes(*bytes)
}

/// A fake Intel processor with garbage in the topology leaves.
fn intel() -> Vec<kvm_cpuid_entry2> {
    vec![
        entry(0, 0, [0x1f, text(b"Genu"), text(b"ntel"), text(b"ineI")]),
        entry(1, 0, [0x806f8, 0x5540_0800, 0x0020_0020, 0x0f8b_fbff]),
        entry(4, 0, [0xfc00_4121, 1, 2, 3]),
        entry(4, 2, [0xfc00_4143, 1, 2, 3]),
        entry(4, 3, [0xfc0f_c163, 1, 2, 3]),
        entry(4, 4, [0, 0, 0, 0]),
        entry(0xb, 0, [7, 7, 7, 7]),
        entry(0x1f, 0, [7, 7, 7, 7]),
        entry(0x8000_0000, 0, [0x8000_0008, 0, 0, 0]),
        entry(0x8000_0001, 0, [0, 0, 0x121, 0]),
        entry(0x8000_0008, 0, [0x0030_302e, 0, 0, 0]),
    ]
}

/// A fake AMD processor with topology extensions.
fn amd() -> Vec<kvm_cpuid_entry2> {
    vec![
        entry(0, 0, [0x10, text(b"Auth"), text(b"cAMD"), text(b"enti")]),
        entry(1, 0, [0x00a2_0f12, 0x0310_0800, 0x0020_0000, 0x178b_fbff]),
        entry(0xb, 0, [7, 7, 7, 7]),
        entry(0x8000_0000, 0, [0x8000_0026, 0, 0, 0]),
        entry(0x8000_0001, 0, [0, 0, TOPOLOGY_EXTENSIONS | SVM, 0]),
        entry(0x8000_0008, 0, [0x0030_3030, 0, 0x500f, 0]),
        entry(0x8000_000a, 0, [1, 8, 0, 0xff]),
        entry(0x8000_001d, 0, [0x0000_4121, 0, 0, 0]),
        entry(0x8000_001d, 3, [0x003f_c163, 0, 0, 0]),
        entry(0x8000_001e, 0, [9, 9, 9, 9]),
        entry(0x8000_0026, 0, [9, 9, 9, 9]),
    ]
}

pub(super) fn get(leaves: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
    let mut found = leaves
        .iter()
        .filter(|entry| entry.function == function && entry.index == index);
    let entry = *found.next().unwrap();
    assert!(found.next().is_none(), "leaf {function:#x}.{index} twice");
    entry
}

#[test]
fn every_processor_of_every_size_has_a_consistent_topology() {
    for supported in [intel(), amd()] {
        for count in 1..=32u8 {
            for apic_id in 0..count {
                let leaves = guest_cpuid(&supported, Processor { apic_id, count });
                let id = u32::from(apic_id);
                let one = get(&leaves, 1, 0);
                assert_eq!(one.ebx >> 24, id);
                assert!((one.ebx >> 16) & 0xff >= u32::from(count));
                assert_eq!((one.ebx >> 8) & 0xff, 8, "CLFLUSH size must pass");
                assert_ne!(one.ecx & TSC_DEADLINE, 0);
                assert_ne!(one.ecx & HYPERVISOR, 0);
                assert_eq!(one.edx & MULTIPLE_PROCESSORS != 0, count > 1);

                let (threads, cores, end) = (
                    get(&leaves, 0xb, 0),
                    get(&leaves, 0xb, 1),
                    get(&leaves, 0xb, 2),
                );
                assert_eq!((threads.eax, threads.ebx, threads.ecx), (0, 1, 0x100));
                assert_eq!((cores.ebx, cores.ecx), (count.into(), 0x201));
                assert_eq!((end.eax, end.ebx, end.ecx), (0, 0, 2));
                // The shift must put all ids of the package into one package and be no wider than
                // needed.
                assert_eq!(id >> cores.eax, 0);
                assert!(1u32 << cores.eax >= u32::from(count));
                assert!(cores.eax == 0 || 1u32 << (cores.eax - 1) < u32::from(count));
                assert!([threads, cores, end].iter().all(|level| level.edx == id));
            }
        }
    }
}

#[test]
fn intel_caches_and_second_topology_leaf() {
    let leaves = guest_cpuid(
        &intel(),
        Processor {
            apic_id: 2,
            count: 3,
        },
    );
    for (index, sharing) in [(0, 0), (2, 0), (3, 3)] {
        let cache = get(&leaves, 4, index);
        assert_eq!((cache.eax >> 14) & 0xfff, sharing, "cache {index}");
        assert_eq!(cache.eax >> 26, 3);
        assert_eq!((cache.ebx, cache.ecx, cache.edx), (1, 2, 3));
    }
    assert_eq!(get(&leaves, 4, 4).eax, 0);
    assert_eq!(get(&leaves, 0x1f, 1).ebx, 3);
    // Leaves of the other vendor stay unchanged.
    assert_eq!(get(&leaves, 0x8000_0008, 0).ecx, 0);
    assert!(leaves.iter().all(|entry| entry.function != 0x8000_001e));
}

#[test]
fn amd_cores_and_nodes() {
    for (count, bits) in [(1, 0), (2, 1), (3, 2), (32, 5)] {
        let apic_id = count - 1;
        let leaves = guest_cpuid(&amd(), Processor { apic_id, count });
        let sizes = get(&leaves, 0x8000_0008, 0);
        assert_eq!(sizes.ecx & 0xff, u32::from(count - 1));
        assert_eq!((sizes.ecx >> 12) & 0xf, bits);
        assert_eq!(sizes.eax, 0x0030_3030);
        let features = get(&leaves, 0x8000_0001, 0);
        assert_eq!(features.ecx & CORES_NOT_THREADS != 0, count > 1);
        assert_ne!(features.ecx & TOPOLOGY_EXTENSIONS, 0);
        let node = get(&leaves, 0x8000_001e, 0);
        assert_eq!(
            (node.eax, node.ebx, node.ecx, node.edx),
            (apic_id.into(), apic_id.into(), 0, 0)
        );
        assert_eq!((get(&leaves, 0x8000_001d, 0).eax >> 14) & 0xfff, 0);
        assert_eq!(
            (get(&leaves, 0x8000_001d, 3).eax >> 14) & 0xfff,
            u32::from(count - 1)
        );
        assert!(leaves.iter().all(|entry| entry.function != 0x8000_0026));
        // Leaf 0x1F is beyond the highest basic leaf of this processor.
        assert!(leaves.iter().all(|entry| entry.function != 0x1f));
    }
}

#[test]
fn amd_without_topology_extensions_gets_no_node_leaf() {
    let mut supported = amd();
    for entry in &mut supported {
        if entry.function == 0x8000_0001 {
            entry.ecx = 0;
        }
    }
    let one = Processor {
        apic_id: 0,
        count: 1,
    };
    let leaves = guest_cpuid(&supported, one);
    assert!(leaves.iter().all(|entry| entry.function != 0x8000_001e));
}

#[test]
fn strange_input_does_no_harm() {
    let zero = Processor {
        apic_id: 255,
        count: 0,
    };
    assert!(guest_cpuid(&[], zero).is_empty());
    let all = Processor {
        apic_id: 255,
        count: 255,
    };
    let leaves = guest_cpuid(&intel(), all);
    // Six bits hold no more than 63.
    assert_eq!(get(&leaves, 4, 3).eax >> 26, 63);
}

#[test]
fn address_bits() {
    assert_eq!(physical_address_bits(&intel()), 46);
    assert_eq!(physical_address_bits(&amd()), 48);
    assert_eq!(physical_address_bits(&[]), 36);
    let limited = [entry(0x8000_0008, 0, [0x0030_3034, 0, 0, 0])];
    assert_eq!(physical_address_bits(&limited), 48);
}

#[test]
fn nested_virtualization_is_hidden() {
    let processor = Processor {
        apic_id: 0,
        count: 2,
    };
    for supported in [intel(), amd()] {
        let leaves = guest_cpuid(&supported, processor);
        assert_eq!(get(&leaves, 1, 0).ecx & VMX, 0);
        assert_eq!(get(&leaves, 0x8000_0001, 0).ecx & SVM, 0);
        assert!(leaves.iter().all(|entry| entry.function != 0x8000_000a));
    }
}
