//! A hostile guest without an operating system. It programs its devices in every wrong way that its
//! VMM logs, as fast as it can. The VMM's log stays small.
//!
//! [`bare_metal`] has the form of the guest's program.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "another test uses the rest")]
mod bare_metal;

use bare_metal::{
    BAR, COMMAND, CTRL_VQ, DISK, Files, MSIX_TABLE, NIC, Program, RNG, Ring, SCRATCH, VERSION_1,
    WINDOW_COUNT, config,
};
use lab::sim::SimDevice;
use lab::tiny::BASE;
use rustix::process::{Pid, Signal, kill_process};
use std::thread::sleep;
use std::time::Duration;

const MAC: &str = "02:00:5e:00:53:31";
const ATTACK: Duration = Duration::from_secs(10);
const LOG_MAX: usize = 1 << 20;

/// Everything at once, for ever.
fn attack() -> Vec<u8> {
    let mut program = Program::default();
    let slots = [NIC, DISK, RNG];
    for slot in slots {
        program.copy(SCRATCH + 4 * slot, config(slot, BAR));
        program.set(config(slot, COMMAND), 6);
    }
    let again = program.address();
    // BARs over each other, at one address after the other. One exit of the guest causes a line.
    for _ in 0..200 {
        for over in [DISK, RNG] {
            program.copy(config(NIC, BAR), SCRATCH + 4 * over);
        }
    }
    for over in [DISK, NIC] {
        program.copy(config(RNG, BAR), SCRATCH + 4 * over);
    }
    for slot in slots {
        program.copy(config(slot, BAR), SCRATCH + 4 * slot);
    }
    // Features that were not offered; no VERSION_1.
    for slot in slots {
        program.negotiate(slot, u64::MAX);
        program.negotiate(slot, 0);
    }
    // Rings outside guest memory.
    let outside = Ring {
        descriptors: 0x7000_0000_0000,
        avail: 0x7000_0000_1000,
        used: 0x7000_0000_2000,
    };
    for slot in slots {
        program.negotiate(slot, VERSION_1);
        program.queue(slot, 0, outside);
        program.run(slot, 0);
    }
    // An avail index that is too far ahead; a chain that loops.
    let [ahead, looping, empty] = [0, 1, 2].map(Ring::number);
    for (slot, ring) in [(RNG, ahead), (DISK, looping), (DISK, ahead), (RNG, looping)] {
        program.negotiate(slot, VERSION_1);
        program.queue(slot, 0, ring);
        program.run(slot, 0);
    }
    // The control queue, which the VMM serves.
    program.negotiate(NIC, VERSION_1 | CTRL_VQ);
    for (index, ring) in [(0, empty), (1, empty), (2, ahead)] {
        program.queue(NIC, index, ring);
    }
    program.run(NIC, 2);
    // Interrupts to anywhere.
    for slot in slots {
        for (word, value) in [(0, u32::MAX), (1, u32::MAX), (2, u32::MAX), (3, 0), (3, 1)] {
            program.write(slot, MSIX_TABLE + 4 * word, 4, value);
        }
    }
    program.continue_at(again);
    // `flags` and `idx`, then the head of the chain; a descriptor of 16 bytes that continues at
    // itself.
    let rings = [
        (ahead.avail, vec![0x4000_0000]),
        (looping.descriptors, vec![BASE, 0, 16, 1]),
        (looping.avail, vec![1 << 16, 0]),
    ];
    program.kernel(&rings, 1, &[[SCRATCH, 0]; WINDOW_COUNT])
}

#[test]
fn a_guest_does_not_fill_the_log() {
    let net = SimDevice::net("hostile", MAC, 1500).unwrap();
    let files = Files::new("hostile", &attack());
    let mut child = files.spawn(&format!("path={}", net.path().display()));
    sleep(ATTACK);
    assert_eq!(child.try_wait().unwrap(), None, "the VMM has ended");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    let text = files.said();
    let end = text.get(text.len().saturating_sub(4096)..).unwrap_or(&text);
    let expected = Some(128 + Signal::TERM.as_raw());
    assert_eq!(status.code(), expected, "{status}: {end}");

    let lines = |what: &str| text.lines().filter(|line| line.contains(what)).count();
    let size = text.len();
    println!("{size} bytes, {} lines", text.lines().count());
    for what in [
        "the guest put a BAR over another device",
        "the device cannot start",
        "device needs reset",
        "the driver of virtio-rng broke its queue",
        "the driver of virtio-blk broke its queue",
        "the control queue is broken",
    ] {
        println!("{}: {what}", lines(what));
        assert!(lines(what) > 0, "no {what:?} in: {text}");
    }
    assert!(lines("lines suppressed") > 0, "{text}");
    assert!(size < LOG_MAX, "{size}");
}
