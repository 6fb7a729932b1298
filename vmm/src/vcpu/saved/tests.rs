//! Tests without `/dev/kvm`; the others are in `tests/migration_kvm_state.rs`.

use super::*;

fn state() -> VcpuState {
    let mut lapic = kvm_lapic_state::default();
    lapic.regs[0x20] = -1;
    VcpuState {
        cpuid: vec![CpuidLeaf {
            function: 7,
            index: 1,
            flags: 1,
            registers: [1, 2, 3, 4],
        }],
        mp_state: 3,
        events: kvm_vcpu_events {
            exception_payload: 9,
            ..Default::default()
        },
        regs: kvm_regs {
            rip: 0xfff0,
            ..Default::default()
        },
        sregs: kvm_sregs {
            cr3: 0x1000,
            ..Default::default()
        },
        debug_regs: kvm_debugregs::default(),
        xcrs: kvm_xcrs::default(),
        xsave: vec![1; 4096],
        lapic,
        tsc: TscState {
            value: 1,
            kvmclock_ns: 2,
            offset: Some(3),
            khz: 4,
        },
        msrs: vec![MsrState { index: 5, value: 6 }],
    }
}

#[test]
fn survives_the_way_through_a_file() {
    let state = state();
    let bytes = postcard::to_stdvec(&state).unwrap();
    assert_eq!(postcard::from_bytes::<VcpuState>(&bytes).unwrap(), state);
    for length in (0..bytes.len()).step_by(37) {
        assert!(postcard::from_bytes::<VcpuState>(&bytes[..length]).is_err());
    }
}

#[test]
fn cpuid_leaves_keep_their_place() {
    let leaf = state().cpuid[0];
    let entry = kvm_cpuid_entry2::from(&leaf);
    assert_eq!((entry.eax, entry.ebx, entry.ecx, entry.edx), (1, 2, 3, 4));
    assert_eq!(CpuidLeaf::from(&entry), leaf);
    let error = state().check_cpuid(&[]).unwrap_err();
    assert!(error.to_string().contains("are missing here"), "{error}");
}
