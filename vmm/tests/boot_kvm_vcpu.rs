//! vCPU threads against a real `/dev/kvm`, with real-mode guests of a few bytes. Fails with a
//! message without KVM.

mod support;

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_regs, kvm_sregs};
use support::asm::{self, CLI, HALT_FOR_EVER, join};
use support::{MMIO, PATIENCE, PORT, Rig};
use vmm::vcpu::VcpuFailure;

/// Word that guests count in.
const COUNTER: u64 = 0x500;

/// inc dword [COUNTER]; jmp back: never leaves the guest by itself.
const SPIN: &[u8] = &[0x66, 0xff, 0x06, 0x00, 0x05, 0xeb, 0xf9];
/// The same with a port access in between.
const SPIN_WITH_EXITS: &[u8] = &[
    0x66, 0xff, 0x06, 0x00, 0x05, 0xe4, 0x99, 0xeb, 0xf7, // in al, 0x99
];

fn wait_report(rig: &Rig) -> vmm::vcpu::VcpuReport {
    let start = Instant::now();
    loop {
        if let Some(report) = rig.vcpus.take_report() {
            return report;
        }
        assert!(start.elapsed() < PATIENCE, "no vCPU failed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn port_and_memory_accesses_reach_the_buses() {
    let [low, high] = MMIO.to_le_bytes();
    let rig = Rig::new(
        1,
        &join(&[
            &asm::out(PORT, b'A'),
            &[0xe4, PORT, 0xe6, PORT], // in al, PORT; out PORT, al
            &asm::store(MMIO + 2, 0x1234),
            &[0xa0, low, high, 0xa2, low + 8, high], // mov al, [MMIO]; mov [MMIO + 8], al
            &[0xe4, 0x77, 0xe6, PORT],               // nothing is at port 0x77
            HALT_FOR_EVER,
        ]),
    );
    rig.vcpus.resume();
    assert_eq!(rig.port.take_bytes(3), [b'A', 0x5a, 0xff]);
    assert_eq!(rig.mmio.take(2), [(2, vec![0x34, 0x12]), (8, vec![0x5a])]);
}

#[test]
fn string_instructions_are_taken_apart() {
    let text = b"four score and seven";
    let count = u8::try_from(text.len()).unwrap();
    let rig = Rig::new(
        1,
        &join(&[
            &[0xbe, 0x00, 0x06, 0xb9, count, 0, 0xba, PORT, 0], // mov si, 0x600; mov cx; mov dx
            &[0xf3, 0x6e],                                      // rep outsb
            HALT_FOR_EVER,
        ]),
    );
    rig.load(0x600, text);
    rig.vcpus.resume();
    let writes = rig.port.take(text.len());
    assert!(
        writes
            .iter()
            .all(|(offset, data)| (*offset, data.len()) == (0, 1))
    );
    let bytes: Vec<u8> = writes.into_iter().flat_map(|(_, data)| data).collect();
    assert_eq!(bytes, text);
}

fn protected_mode(sregs: &mut kvm_sregs) {
    sregs.cr0 |= 1;
    sregs.idt.limit = 0;
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        segment.base = 0;
        segment.selector = 0x10;
        segment.limit = u32::MAX;
        (segment.g, segment.db, segment.type_) = (1, 1, 3);
    }
    (sregs.cs.selector, sregs.cs.type_) = (0x08, 0xb);
}

#[test]
fn a_triple_fault_is_reported_and_reset_recovers() {
    let rig = Rig::new(1, &[0x0f, 0x0b]); // ud2
    for _ in 0..3 {
        // Protected mode without a table of handlers: neither an exception nor the following double
        // fault can be delivered.
        let regs = kvm_regs {
            rip: support::CODE,
            rflags: 2,
            ..Default::default()
        };
        rig.vcpus.set_entry(&regs, protected_mode).unwrap();
        rig.vcpus.resume();
        let report = wait_report(&rig);
        assert_eq!(
            (report.index, report.failure),
            (0, VcpuFailure::TripleFault)
        );
        rig.vcpus.pause();
        rig.restart();
        assert_eq!(rig.vcpus.take_report(), None);
    }
    rig.load(
        support::CODE,
        &join(&[&asm::out(PORT, b'Z'), HALT_FOR_EVER]),
    );
    rig.vcpus.resume();
    assert_eq!(rig.port.take_bytes(1), b"Z");
}

/// Saving a machine parks its vCPUs and then checks for a failure: no vCPU may report one later.
#[test]
fn a_vcpu_reports_its_failure_before_it_parks() {
    let rig = Rig::new(1, &[0x0f, 0x0b]); // ud2
    for _ in 0..50 {
        let regs = kvm_regs {
            rip: support::CODE,
            rflags: 2,
            ..Default::default()
        };
        rig.vcpus.set_entry(&regs, protected_mode).unwrap();
        rig.vcpus.resume();
        rig.vcpus.pause();
        // It may have been parked before its first instruction.
        let seen = rig.vcpus.failure();
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(rig.vcpus.failure(), seen, "looking takes nothing");
        assert_eq!(rig.vcpus.take_report(), seen);
        assert_eq!(rig.vcpus.failure(), None);
        rig.restart();
    }
}

#[test]
fn memory_that_is_not_there_is_an_exit_not_a_loop() {
    // jmp far 0x0000:0x8800: instructions from an address without memory.
    let rig = Rig::new(1, &[0xea, 0x00, 0x88, 0x00, 0x00]);
    rig.vcpus.resume();
    let report = wait_report(&rig);
    assert!(
        matches!(
            report.failure,
            VcpuFailure::InternalError { suberror: 1, .. } | VcpuFailure::TripleFault
        ),
        "{report}"
    );
}

#[test]
fn pause_holds_and_resume_continues_under_load() {
    for code in [SPIN, SPIN_WITH_EXITS] {
        // The application processors wait for a start-up IPI throughout.
        let rig = Rig::new(4, &join(&[CLI, code]));
        rig.vcpus.resume();
        let mut seen = rig.wait_change(COUNTER, 0);
        for round in 0..200 {
            rig.vcpus.pause();
            let held = rig.word(COUNTER);
            if round % 20 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(rig.word(COUNTER), held, "the guest ran while it was paused");
            rig.vcpus.resume();
            if round % 10 == 0 {
                seen = rig.wait_change(COUNTER, held.max(seen));
            }
        }
        assert_eq!(rig.vcpus.take_report(), None);
    }
}

#[test]
fn pause_right_after_resume_loses_no_wakeup() {
    let rig = Rig::new(2, SPIN);
    for _ in 0..2000 {
        rig.vcpus.resume();
        rig.vcpus.pause();
    }
    // A repeated call has no further effect.
    rig.vcpus.pause();
    rig.vcpus.resume();
    rig.vcpus.resume();
    rig.wait_change(COUNTER, rig.word(COUNTER));
}

/// How long a device delays a vCPU in this test.
const HELD: Duration = Duration::from_millis(200);

#[test]
fn a_pause_waits_for_each_vcpu() {
    // out PORT, al; jmp
    let application = [0xe6, PORT, 0xeb, 0xfc];
    let rig = Rig::new(2, &start_all());
    rig.load(0x2000, &application);
    for _ in 0..3 {
        rig.vcpus.resume();
        rig.port.take(1);
        let port = Arc::clone(&rig.port);
        std::thread::scope(|scope| {
            let (begun, has_begun) = mpsc::channel();
            scope.spawn(move || port.hold(HELD, || begun.send(()).unwrap()));
            has_begun.recv().unwrap();
            // The application processor waits in its next access.
            std::thread::sleep(HELD / 4);
            rig.vcpus.pause();
            // A vCPU that is not paused cannot be saved.
            rig.vcpus.save().unwrap();
        });
        rig.port.take(0);
    }
}

#[test]
fn a_running_vcpu_is_not_touched() {
    let rig = Rig::new(1, SPIN);
    rig.vcpus.resume();
    rig.wait_change(COUNTER, 0);
    let error = rig.vcpus.reset().unwrap_err();
    assert_eq!(error.to_string(), "vCPU 0 is not paused");
}

#[test]
fn dropping_ends_the_threads_in_every_state() {
    for cpus in [1, 8] {
        let parked = Rig::new(cpus, SPIN);
        drop(parked);
        let running = Rig::new(cpus, SPIN);
        running.vcpus.resume();
        running.wait_change(COUNTER, 0);
        let start = Instant::now();
        drop(running);
        assert!(start.elapsed() < PATIENCE);
        let halted = Rig::new(cpus, &join(&[CLI, HALT_FOR_EVER]));
        halted.vcpus.resume();
        drop(halted);
    }
}

/// Wakes all application processors, which each count once and halt.
fn start_all() -> Vec<u8> {
    join(&[
        CLI,
        &asm::x2apic(),
        &asm::wrmsr(0x830, 0, 0x000c_4500), // INIT, all but self
        &asm::wrmsr(0x830, 0, 0x000c_4602), // start-up at 0x2000, all but self
        HALT_FOR_EVER,
    ])
}

#[test]
fn application_processors_start_and_reset_in_place() {
    // lock inc dword [COUNTER]; out PORT, al; cli; hlt
    let application = [
        0xf0, 0x66, 0xff, 0x06, 0x00, 0x05, 0xe6, PORT, 0xfa, 0xf4, 0xeb, 0xfd,
    ];
    for cpus in [2u8, 5] {
        let rig = Rig::new(cpus, &start_all());
        rig.load(0x2000, &application);
        for round in 1..=5 {
            rig.vcpus.resume();
            rig.port.take(usize::from(cpus) - 1);
            assert_eq!(rig.word(COUNTER), round * u32::from(cpus - 1));
            rig.vcpus.pause();
            rig.vm.reset_irqchips().unwrap();
            rig.restart();
        }
        assert_eq!(rig.vcpus.take_report(), None);
    }
}
