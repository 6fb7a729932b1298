//! Saved vCPUs and VMs against a real `/dev/kvm`: guests of a few bytes that resume in a new VM.
//! Also states that no guest could have. The tests of the clocks need a KVM on hardware
//! virtualization: one that exposes the host's TSC to guests unchanged cannot set it.

mod support;

use std::time::{Duration, Instant};

use kvm_bindings::{kvm_vcpu_events, kvm_xcrs};
use support::asm::{self, CLI, HALT_FOR_EVER, IRET, STI, join};
use support::{CODE, MMIO, PATIENCE, PORT, RAM_SIZE, Rig};
use vm_memory::{Bytes, GuestAddress};
use vmm::kvm::saved::{ClockPolicy, VmState};
use vmm::vcpu::{MsrState, VcpuState};

const COUNTER: u64 = 0x500;
const COMMAND: u64 = 0x510;
const XMM_SOURCE: u64 = 0x540;
const XMM: u64 = 0x550;
const MSR_LOW: u64 = 0x524;
const MSR_HIGH: u64 = 0x528;
const DONE: u64 = 0x530;

/// IA32_KERNEL_GS_BASE.
const KERNEL_GS_BASE: u32 = 0xc000_0102;
/// IA32_MTRR_PHYSBASE3, which KVM_GET_MSR_INDEX_LIST omits.
const MTRR_PHYSBASE3: u32 = 0x206;

/// A whole saved machine.
struct Saved {
    memory: Vec<u8>,
    vm: VmState,
    vcpus: Vec<VcpuState>,
}

fn save(rig: &Rig) -> Saved {
    rig.vcpus.pause();
    let mut memory = vec![0; RAM_SIZE];
    rig.memory.read_slice(&mut memory, GuestAddress(0)).unwrap();
    Saved {
        memory,
        vm: rig.vm.save().unwrap(),
        vcpus: rig.vcpus.save().unwrap(),
    }
}

/// A new VM with the saved state, parked. The state passes through its encoded form.
fn restore(saved: &Saved, policy: ClockPolicy) -> Rig {
    let rig = Rig::new(u8::try_from(saved.vcpus.len()).unwrap(), &[]);
    rig.load(0, &saved.memory);
    let vm: VmState = postcard::from_bytes(&postcard::to_stdvec(&saved.vm).unwrap()).unwrap();
    let vcpus: Vec<VcpuState> =
        postcard::from_bytes(&postcard::to_stdvec(&saved.vcpus).unwrap()).unwrap();
    assert_eq!((&vm, &vcpus), (&saved.vm, &saved.vcpus));
    rig.vm.restore(&vm, policy).unwrap();
    rig.vcpus.check(&vcpus).unwrap();
    rig.vcpus.restore(&vcpus).unwrap();
    rig
}

/// Sets EBX, XMM0 and two MSRs, counts, and on a command stores their values.
fn teller() -> Vec<u8> {
    let count = [
        0x66, 0x43, // inc ebx
        0x66, 0x89, 0x1e, 0x00, 0x05, // mov [COUNTER], ebx
        0x80, 0x3e, 0x10, 0x05, 0x00, // cmp byte [COMMAND], 0
        0x74, 0xf2, // je to the start
    ];
    let mut read_msr = vec![0x66, 0xb9];
    read_msr.extend(KERNEL_GS_BASE.to_le_bytes());
    read_msr.extend([0x0f, 0x32]);
    join(&[
        CLI,
        &[0x0f, 0x20, 0xe1],                         // mov ecx, cr4
        &[0x66, 0x81, 0xc9, 0x00, 0x02, 0x00, 0x00], // or ecx, OSFXSR
        &[0x0f, 0x22, 0xe1],                         // mov cr4, ecx
        &[0x0f, 0x10, 0x06, 0x40, 0x05],             // movups xmm0, [XMM_SOURCE]
        &asm::wrmsr(KERNEL_GS_BASE, 0x1234, 0x5678_9000),
        &asm::wrmsr(MTRR_PHYSBASE3, 0, 0x0040_0006),
        &count,
        &[0x0f, 0x11, 0x06, 0x50, 0x05], // movups [XMM], xmm0
        &read_msr,                       // rdmsr
        &[0x66, 0xa3, 0x24, 0x05],       // mov [MSR_LOW], eax
        &[0x66, 0x89, 0x16, 0x28, 0x05], // mov [MSR_HIGH], edx
        &[0xc6, 0x06, 0x30, 0x05, 0x01], // mov byte [DONE], 1
        HALT_FOR_EVER,
    ])
}

fn value(state: &VcpuState, index: u32) -> Option<u64> {
    let found = state.msrs.iter().find(|msr| msr.index == index);
    found.map(|msr| msr.value)
}

#[test]
fn a_guest_resumes_in_another_vm() {
    let rig = Rig::new(1, &teller());
    rig.load(XMM_SOURCE, b"sixteen bytes...");
    rig.vcpus.resume();
    rig.wait_change(COUNTER, 0);
    let mut saved = save(&rig);
    drop(rig);
    assert_eq!(
        value(&saved.vcpus[0], KERNEL_GS_BASE),
        Some(0x1234_5678_9000)
    );
    assert_eq!(value(&saved.vcpus[0], MTRR_PHYSBASE3), Some(0x0040_0006));
    for _ in 0..3 {
        let rig = restore(&saved, ClockPolicy::StandStill);
        let count = rig.word(COUNTER);
        // A restored vCPU holds the saved values, except for the TSC.
        let mut again = rig.vcpus.save().unwrap();
        again[0].tsc = saved.vcpus[0].tsc;
        assert_eq!(again, saved.vcpus);
        rig.vcpus.resume();
        let now = rig.wait_change(COUNTER, count);
        assert!(now > count && now - count < 1 << 30, "{count} then {now}");
        saved = save(&rig);
    }
    let rig = restore(&saved, ClockPolicy::StandStill);
    rig.load(COMMAND, &[1]);
    rig.vcpus.resume();
    rig.wait_change(DONE, 0);
    let told = [MSR_LOW, MSR_HIGH].map(|address| rig.word(address));
    assert_eq!(told, [0x5678_9000, 0x1234]);
    let mut xmm = [0; 16];
    rig.memory.read_slice(&mut xmm, GuestAddress(XMM)).unwrap();
    assert_eq!(&xmm, b"sixteen bytes...");
}

#[test]
fn no_device_access_is_lost_or_done_twice() {
    // inc ebx; mov [MMIO], ebx; mov al, bl; out PORT, al; in al, PORT; jmp
    let [low, high] = MMIO.to_le_bytes();
    let code = [
        0x66, 0x43, 0x66, 0x89, 0x1e, low, high, 0x88, 0xd8, 0xe6, PORT, 0xe4, PORT, 0xeb, 0xf1,
    ];
    let mut rig = Rig::new(1, &join(&[CLI, &code]));
    let (mut at_address, mut at_port) = (Vec::new(), Vec::new());
    for round in 0..40u64 {
        rig.vcpus.resume();
        // At any speed: somewhere after its first access.
        at_address.extend(rig.mmio.take(1));
        std::thread::sleep(Duration::from_micros(round * 37 % 500));
        let saved = save(&rig);
        at_address.extend(rig.mmio.take(0));
        at_port.extend(rig.port.take(0));
        rig = restore(&saved, ClockPolicy::StandStill);
    }
    for (number, (offset, data)) in (1u32..).zip(&at_address) {
        assert_eq!((*offset, &data[..]), (0, &number.to_le_bytes()[..]));
    }
    for (number, (_, data)) in (1u32..).zip(&at_port) {
        assert_eq!(data[..], number.to_le_bytes()[..1]);
    }
    assert!(at_address.len() - at_port.len() <= 1);
}

/// The counter of vCPU `index`, and kvmclock when it was read.
fn tsc(state: &VcpuState) -> (i128, i128) {
    (state.tsc.value.into(), state.tsc.kvmclock_ns.into())
}

/// Nanoseconds that two clocks may differ when they are read one after the other.
const SLACK: i128 = 50_000_000;

/// Nanoseconds since `begin`.
fn since(begin: Instant) -> i128 {
    begin.elapsed().as_nanos().try_into().unwrap()
}

#[test]
fn the_clocks_stop_or_continue_together() {
    let rig = Rig::new(3, &join(&[CLI, HALT_FOR_EVER]));
    rig.vcpus.resume();
    std::thread::sleep(Duration::from_millis(20));
    let begin = Instant::now();
    let saved = save(&rig);
    let after_save = Instant::now();
    std::thread::sleep(Duration::from_millis(300));

    let (tsc_then, clock_then) = tsc(&saved.vcpus[0]);
    let khz = i128::from(saved.vcpus[0].tsc.khz);
    assert!(khz > 0, "this host does not know its TSC's frequency");
    for (policy, hours_ago, away) in [
        (ClockPolicy::StandStill, 0, None),
        (ClockPolicy::Advance, 0, Some(0)),
        (ClockPolicy::Advance, 100, Some(100)),
        // As if saved in the future: the clock never goes back.
        (ClockPolicy::Advance, -1000, None),
    ] {
        let moment = saved.vm.clock.realtime_ns;
        let mut vm = saved.vm.clone();
        vm.clock.realtime_ns = moment
            .checked_add_signed(-hours_ago * 1_000_000_000)
            .unwrap();
        let saved = Saved {
            memory: saved.memory.clone(),
            vm,
            vcpus: saved.vcpus.clone(),
        };
        let least = since(after_save);
        let restoring = Instant::now();
        let rig = restore(&saved, policy);
        let now = rig.vcpus.save().unwrap();
        let passed = tsc(&now[0]).1 - clock_then;
        // The clock counts from the restore on, or from the save on plus the time away.
        let (least, most) = match away {
            None => (0, since(restoring)),
            Some(seconds) => {
                let away = seconds * 1_000_000_000;
                (away + least, away + since(begin))
            }
        };
        let expected = (least - SLACK).max(0)..=most + SLACK;
        assert!(expected.contains(&passed), "{policy:?}: {passed} ns");
        for state in &now {
            let (tsc_now, clock_now) = tsc(state);
            let expected = tsc_then + (clock_now - clock_then) * khz / 1_000_000;
            let apart = (tsc_now - expected).abs() * 1_000_000 / khz;
            assert!(apart < 2_000_000, "{policy:?}: {apart} ns apart");
            assert_eq!(state.tsc.offset, now[0].tsc.offset, "{policy:?}");
        }
    }
}

/// Limit of the guests with a timer that this test starts.
const TIMERS: u32 = 5;

#[test]
fn a_timer_that_runs_fires_at_its_time() {
    // The deadline's handler prints T.
    let handler = join(&[&asm::out(PORT, b'T'), IRET]);
    let code = join(&[
        CLI,
        &asm::x2apic(),
        &asm::wrmsr(0x832, 0, 0x0004_0020), // timer: TSC deadline, vector 0x20
        &[0x0f, 0x31],                      // rdtsc
        &[0x66, 0x05],                      // add eax, 0x60000000
        &0x6000_0000u32.to_le_bytes(),
        &[0x66, 0x83, 0xd2, 0x00],                   // adc edx, 0
        &[0x66, 0xb9, 0xe0, 0x06, 0, 0, 0x0f, 0x30], // wrmsr TSC_DEADLINE
        &[0xc6, 0x06, 0x30, 0x05, 0x01],             // mov byte [DONE], 1
        STI,
        HALT_FOR_EVER,
    ]);
    // On a busy host the timer may fire before the state is saved. Such a run proves nothing, and
    // another guest starts.
    let saved = (0..TIMERS).find_map(|_| {
        let rig = Rig::new(2, &code);
        rig.load(0x20 * 4, &[0x00, 0x20, 0x00, 0x00]); // 0000:2000
        rig.load(0x2000, &handler);
        rig.vcpus.resume();
        rig.wait_change(DONE, 0);
        std::thread::sleep(Duration::from_millis(5));
        let saved = save(&rig);
        rig.port.is_empty().then_some(saved)
    });
    let saved = saved.expect("each timer fired before the state was saved");
    let deadline = value(&saved.vcpus[0], 0x6e0).unwrap();
    let left = deadline - saved.vcpus[0].tsc.value;
    let left = Duration::from_micros(left * 1000 / u64::from(saved.vcpus[0].tsc.khz));
    std::thread::sleep(left * 2);
    let rig = restore(&saved, ClockPolicy::StandStill);
    let start = Instant::now();
    rig.vcpus.resume();
    assert_eq!(rig.port.take_bytes(1), b"T");
    let took = start.elapsed();
    assert!(took > left / 2, "{took:?} instead of {left:?}");
    // With time that passed, the deadline has expired.
    let rig = restore(&saved, ClockPolicy::Advance);
    rig.vcpus.resume();
    assert_eq!(rig.port.take_bytes(1), b"T");
}

/// MSR_KVM_SYSTEM_TIME_NEW: where KVM writes the guest's clock; bit 0 switches it on.
const KVM_SYSTEM_TIME: u32 = 0x4b56_4d01;
/// `struct pvclock_vcpu_time_info`, which begins with its version.
const CLOCK: u64 = 0x600;
/// Its flags.
const CLOCK_FLAGS: u64 = CLOCK + 29;
/// PVCLOCK_GUEST_STOPPED.
const GUEST_STOPPED: u8 = 1 << 1;

/// KVM sets the flag only if the guest's clock, an MSR, is on. So events follow the registers.
#[test]
fn a_restored_guest_sees_that_it_was_stopped() {
    let code = join(&[
        CLI,
        &asm::wrmsr(KVM_SYSTEM_TIME, 0, 0x601), // CLOCK
        // inc ebx; mov [COUNTER], ebx; jmp
        &[0x66, 0x43, 0x66, 0x89, 0x1e, 0x00, 0x05, 0xeb, 0xf7],
    ]);
    let rig = Rig::new(1, &code);
    rig.vcpus.resume();
    rig.wait_change(COUNTER, 0);
    let saved = save(&rig);
    let flags = |rig: &Rig| -> u8 { rig.memory.read_obj(GuestAddress(CLOCK_FLAGS)).unwrap() };
    assert_ne!(rig.word(CLOCK), 0, "KVM writes no clock");
    assert_eq!(flags(&rig) & GUEST_STOPPED, 0);
    drop(rig);
    let rig = restore(&saved, ClockPolicy::StandStill);
    rig.vcpus.resume();
    let begin = Instant::now();
    while flags(&rig) & GUEST_STOPPED == 0 {
        assert!(
            begin.elapsed() < PATIENCE,
            "the guest does not see that it was stopped"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn application_processors_wait_on_and_start_later() {
    // Waits for the command, then starts all others; each counts once.
    let code = join(&[
        CLI,
        &asm::x2apic(),
        &[0xc6, 0x06, 0x30, 0x05, 0x01], // mov byte [DONE], 1
        &[0x80, 0x3e, 0x10, 0x05, 0x00, 0x74, 0xf9], // wait for [COMMAND]
        &asm::wrmsr(0x830, 0, 0x000c_4500), // INIT, all but self
        &asm::wrmsr(0x830, 0, 0x000c_4602), // start-up at 0x2000, all but self
        HALT_FOR_EVER,
    ]);
    let application = [
        0xf0, 0x66, 0xff, 0x06, 0x00, 0x05, 0xe6, PORT, 0xfa, 0xf4, 0xeb, 0xfd,
    ];
    let rig = Rig::new(4, &code);
    rig.load(0x2000, &application);
    rig.vcpus.resume();
    rig.wait_change(DONE, 0);
    let saved = save(&rig);
    let rig = restore(&saved, ClockPolicy::StandStill);
    rig.load(COMMAND, &[1]);
    rig.vcpus.resume();
    rig.port.take(3);
    assert_eq!(rig.word(COUNTER), 3);
    // And once more, after they have run and halted.
    let saved = save(&rig);
    let rig = restore(&saved, ClockPolicy::StandStill);
    rig.vcpus.resume();
    assert_eq!(rig.vcpus.take_report(), None);
    // A machine from elsewhere can be reset like any other.
    rig.vcpus.pause();
    rig.vm.reset_irqchips().unwrap();
    rig.restart();
    rig.load(CODE, &join(&[&asm::out(PORT, b'R'), HALT_FOR_EVER]));
    rig.vcpus.resume();
    assert_eq!(rig.port.take_bytes(1), b"R");
}

#[test]
fn the_interrupt_controllers_come_along() {
    let rig = Rig::new(1, &join(&[CLI, HALT_FOR_EVER]));
    let mut saved = save(&rig);
    assert_eq!(
        saved.vm.ioapic.redirection[4],
        1 << 16,
        "masked at power-on"
    );
    saved.vm.ioapic.redirection[4] = 0x0001_8031;
    saved.vm.ioapic.ioregsel = 0xffff_ff12;
    saved.vm.ioapic.id = 0xffff_fff3;
    saved.vm.pic_master.0.imr = 0xfb;
    let rig = restore(&saved, ClockPolicy::StandStill);
    let vm = rig.vm.save().unwrap();
    assert_eq!(vm.ioapic.redirection, saved.vm.ioapic.redirection);
    assert_eq!((vm.ioapic.ioregsel, vm.ioapic.id), (0x12, 3));
    assert_eq!(vm.pic_master.0.imr, 0xfb);
    // Any bytes are a state.
    saved.vm.ioapic.redirection = [u64::MAX; 24];
    let all_ones = [0xff; 16];
    saved.vm.pic_slave = postcard::from_bytes(&[&[16][..], &all_ones].concat()).unwrap();
    saved.vm.clock.kvmclock_ns = u64::MAX;
    let rig = Rig::new(1, HALT_FOR_EVER);
    rig.vm.restore(&saved.vm, ClockPolicy::Advance).unwrap();
    rig.vcpus.resume();
    rig.vcpus.pause();
}

#[test]
fn states_that_cannot_be_are_refused() {
    let rig = Rig::new(1, &teller());
    rig.vcpus.resume();
    rig.wait_change(COUNTER, 0);
    let good = save(&rig).vcpus;
    drop(rig);

    let rig = Rig::new(1, HALT_FOR_EVER);
    let error = rig.vcpus.restore(&[]).unwrap_err().to_string();
    assert!(
        error.starts_with("the saved machine has 0 vCPUs, but this one has 1"),
        "{error}"
    );
    let refused_before = |name: &str, change: &dyn Fn(&mut VcpuState)| {
        let mut states = good.clone();
        change(&mut states[0]);
        for result in [rig.vcpus.check(&states), rig.vcpus.restore(&states)] {
            let error = result.unwrap_err().to_string();
            assert!(
                error.starts_with("cannot restore the saved state of vCPU"),
                "{name}: {error}"
            );
        }
    };
    refused_before("xsave empty", &|state| state.xsave.clear());
    refused_before("xsave cut", &|state| state.xsave.truncate(4000));
    refused_before("xsave huge", &|state| state.xsave.resize(1 << 20, 0));
    refused_before("xsave of another host", &|state| {
        state.xsave.resize(65536, 1)
    });
    refused_before("MSRs", &|state| {
        state.msrs = vec![
            MsrState {
                index: 0xc000_0102,
                value: 0
            };
            1025
        ];
    });
    refused_before("unknown MSR", &|state| {
        state.msrs.push(MsrState {
            index: 0xdead_0000,
            value: 1,
        });
    });
    refused_before("Hyper-V's MSR", &|state| {
        state.msrs.push(MsrState {
            index: 0x4000_0000,
            value: 1,
        });
    });
    refused_before("CPUID features", &|state| {
        for leaf in &mut state.cpuid {
            leaf.registers = [!0; 4];
        }
    });
    refused_before("CPUID leaves", &|state| {
        state.cpuid = vec![state.cpuid[0]; 300];
    });

    // KVM itself rejects these and the ones below, in the middle of a restore.
    let refused_by_kvm = |name: &str, change: &dyn Fn(&mut VcpuState)| {
        let mut states = good.clone();
        change(&mut states[0]);
        let result = rig.vcpus.restore(&states);
        assert!(result.is_err(), "{name} was taken");
    };
    refused_by_kvm("CR0", &|state| state.sregs.cr0 = u64::MAX);
    refused_by_kvm("CR4", &|state| state.sregs.cr4 = u64::MAX);
    refused_by_kvm("MP state", &|state| state.mp_state = 77);
    refused_by_kvm("XSAVE header", &|state| state.xsave[512..576].fill(0xff));
    refused_by_kvm("MSR value", &|state| {
        for msr in &mut state.msrs {
            msr.value = u64::MAX;
        }
    });
    refused_by_kvm("DR7", &|state| state.debug_regs.dr7 = u64::MAX);

    // KVM may accept the others: no guest could do worse. The vCPU fails, not the VMM: the machine
    // works again after its next reset.
    let refused = |name: &str, change: &dyn Fn(&mut VcpuState)| {
        let mut states = good.clone();
        change(&mut states[0]);
        let rig = Rig::new(1, HALT_FOR_EVER);
        let restored = rig.vcpus.restore(&states);
        rig.vcpus.resume();
        std::thread::sleep(Duration::from_millis(5));
        rig.vcpus.pause();
        let report = rig.vcpus.take_report();
        println!("{name}: {restored:?}, then {report:?}");
        rig.vm.reset_irqchips().unwrap();
        rig.restart();
        rig.load(CODE, &join(&[&asm::out(PORT, b'R'), HALT_FOR_EVER]));
        rig.vcpus.resume();
        assert_eq!(rig.port.take_bytes(1), b"R", "{name}");
        restored.is_err()
    };
    assert!(refused("events", &|state| state.events =
        any::<kvm_vcpu_events>(0xff)));
    assert!(refused("XCRs", &|state| state.xcrs = any::<kvm_xcrs>(0xff)));
    assert!(refused("special registers", &|state| state.sregs = any(0x5a)));
    refused("local APIC of ones", &|state| state.lapic.regs.fill(-1));
    refused("local APIC of zeros", &|state| state.lapic.regs.fill(0));
    refused("registers", &|state| state.regs = any(0xff));
    refused("TSC", &|state| {
        state.tsc.value = u64::MAX;
        state.tsc.kvmclock_ns = u64::MAX;
        state.tsc.offset = Some(u64::MAX / 3);
    });
    refused("a slow TSC", &|state| state.tsc.khz = 1);
    refused("a fast TSC", &|state| state.tsc.khz = u32::MAX);
    refused("MP state", &|state| state.mp_state = 1);

    // It works as before after all that.
    rig.restart();
    rig.vcpus.restore(&good).unwrap();
}

/// A structure whose bytes are all `byte`.
fn any<T: zerocopy::FromBytes>(byte: u8) -> T {
    T::read_from_bytes(&vec![byte; size_of::<T>()]).unwrap()
}

#[test]
fn vcpus_that_run_are_neither_saved_nor_restored() {
    let rig = Rig::new(2, &teller());
    let states = rig.vcpus.save().unwrap();
    rig.vcpus.resume();
    rig.wait_change(COUNTER, 0);
    for refused in [
        rig.vcpus.save().map(drop),
        rig.vcpus.check(&states),
        rig.vcpus.restore(&states),
    ] {
        assert_eq!(refused.unwrap_err().to_string(), "vCPU 0 is not paused");
    }
}

#[test]
fn a_guest_keeps_the_processor_that_it_knows() {
    let rig = Rig::new(1, HALT_FOR_EVER);
    let mut states = rig.vcpus.save().unwrap();
    // A processor without RDRAND, AVX2 and the highest leaf: an older one.
    for leaf in &mut states[0].cpuid {
        match (leaf.function, leaf.index) {
            (1, 0) => leaf.registers[2] &= !(1 << 30),
            (7, 0) => leaf.registers[1] &= !(1 << 5),
            _ => {}
        }
    }
    rig.vcpus.restore(&states).unwrap();
    assert_eq!(rig.vcpus.save().unwrap()[0].cpuid, states[0].cpuid);
    // Back to the older one, and to this one again.
    let rig = Rig::new(1, HALT_FOR_EVER);
    rig.vcpus.restore(&states).unwrap();
    let error = states[0].check_cpuid(&[]);
    let error = error.expect_err("no processor at all is enough");
    assert!(error.to_string().contains("processor"));
}
