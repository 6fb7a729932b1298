//! Recognises known faults of the emulation in the evidence about a guest.
//!
//! QEMU's emulation of nested virtualization sometimes runs a guest's processor with the lab host's
//! registers (tests/README.md). Two signatures are known:
//! * The vCPU makes no progress. KVM counts exits without end, one emulated instruction or one
//!   injected exception for each, and no interrupt reaches the guest ([`crate::kvm_trace`]). Other
//!   vCPUs of the guest wait for this one, and exit, too. So half of all exits are enough. Or the
//!   processor reports an interrupt of the host at each entry, so the vCPU stays at one address.
//! * The vCPU triple-faults. Bellhop logs the registers. Either CR3 is outside any guest's memory,
//!   or KVM has reset the registers, as it does when the VMCB is lost.
//!
//! This module must not look at a test's name or result.

use crate::files;
use crate::notice::{self, Kind};
use std::collections::BTreeMap;
use std::path::Path;

/// Fewer exits during a glimpse are no endless loop.
const MANY: u64 = 500;

/// Fewer exits of the trace that a report shows are no proof.
const SHOWN: usize = 20;

/// More memory than any guest of the lab has.
const BEYOND_MEMORY: u64 = 1 << 40;

/// The signature of a known fault in the text, in one line; `None` on a host that is not emulated.
pub fn fault(text: &str) -> Option<String> {
    is_emulated().then(|| signature(text)).flatten()
}

/// The line that reports a known fault in the text to the test runner; empty without one.
pub fn marked(text: &str) -> String {
    let line = |fault: String| format!("\n{}", notice::line(Kind::EmulatorFault, fault));
    fault(text).map(line).unwrap_or_default()
}

/// True if the lab host's processor is QEMU's emulation.
fn is_emulated() -> bool {
    files::read_text(Path::new("/proc/cpuinfo")).is_ok_and(|text| text.contains("QEMU TCG CPU"))
}

fn signature(text: &str) -> Option<String> {
    endless_exits(text).or_else(|| text.lines().find_map(lost_registers))
}

/// True if a vCPU may be in an endless loop, by the two lines of [`crate::kvm_trace::counters`].
/// Only a trace shows each kind of loop.
pub fn may_loop(text: &str) -> bool {
    machines_without_interrupts(text).next().is_some()
}

/// Looks for endless exits in a [`crate::kvm_trace::sample`].
fn endless_exits(text: &str) -> Option<String> {
    // Events of the glimpse: `{"kvm_exit": 12, "kvm_inj_exception": 12}`.
    let event = |name: &str| {
        let (_, rest) = text.split_once(&format!("\"{name}\": "))?;
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<u64>().ok()
    };
    let injected = event("kvm_inj_exception").unwrap_or(0);
    let is_held = is_held(text);
    machines_without_interrupts(text).find_map(|(name, exits, emulated)| {
        let stuck = emulated >= exits / 2 || injected >= exits / 2 || is_held;
        stuck.then(|| {
            format!(
                "vCPU in an endless loop: {exits} exits, {emulated} emulated instructions, \
                 {injected} injected exceptions, no interrupt ({name})"
            )
        })
    })
}

/// The machines with many exits and no interrupt between the two lines of counters: name, exits,
/// emulated instructions.
fn machines_without_interrupts(text: &str) -> impl Iterator<Item = (&str, u64, u64)> {
    let counters = |prefix: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(prefix));
        line.unwrap_or_default()
            .split(';')
            .filter_map(|machine| machine.split_once(':'))
            .map(|(name, counters)| (name.trim(), counters))
    };
    let after: BTreeMap<_, _> = counters("and then ").collect();
    counters("KVM counted ").filter_map(move |(name, before)| {
        let after = after.get(name)?;
        let grown = |counter| Some(value(after, counter)?.saturating_sub(value(before, counter)?));
        let exits = grown("exits")?;
        let looping = exits >= MANY && grown("irq_injections")? == 0;
        looping.then_some((name, exits, grown("insn_emulation")?))
    })
}

/// True if the host's interrupts end each entry of a vCPU at the same address. The lines of the
/// trace are `vcpu0-415 … kvm_exit: vcpu 0 reason interrupt rip 0x… …`.
fn is_held(text: &str) -> bool {
    let mut exits = BTreeMap::<&str, Vec<&str>>::new();
    for line in text.lines() {
        if let Some((thread, (_, exit))) = line
            .split_whitespace()
            .next()
            .zip(line.split_once(" kvm_exit: "))
        {
            let (why, _) = exit.split_once(" info1 ").unwrap_or((exit, ""));
            exits.entry(thread).or_default().push(why);
        }
    }
    exits.values().any(|all| {
        all.len() >= SHOWN
            && all.iter().all(|why| *why == all[0])
            && all[0].contains(" reason interrupt rip ")
    })
}

/// The number after a counter's name: `exits 12`.
fn value(counters: &str, name: &str) -> Option<u64> {
    let mut words = counters.split_whitespace();
    words.find(|word| *word == name)?;
    words.next()?.parse().ok()
}

/// Looks for lost registers in Bellhop's line `vcpu0 registers: rip=0x… … cr3=0x…`.
fn lost_registers(line: &str) -> Option<String> {
    let (_, registers) = line.split_once(" registers: rip=")?;
    let cr3 = registers
        .split_whitespace()
        .find_map(|word| word.strip_prefix("cr3=0x"))
        .and_then(|digits| u64::from_str_radix(digits, 16).ok())?;
    let reset = registers.contains("after the reset that KVM does at a triple fault");
    (reset || cr3 >= BEYOND_MEMORY).then(|| format!("registers lost: rip={}", registers.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(emulated: u64, interrupts: u64, injected: u64) -> String {
        format!(
            "KVM counted 7-9: exits 100 halt_exits 1 insn_emulation 5 irq_injections 3 \
             irq_window_exits 0; 8-1: exits 5 halt_exits 2 insn_emulation 1 irq_injections 1 ; \n\
             and then    7-9: exits 2100 halt_exits 1 insn_emulation {} irq_injections {} \
             irq_window_exits 0; 8-1: exits 9 halt_exits 4 insn_emulation 1 irq_injections 2 ; \n\
             {{\"kvm_exit\": 2000, \"kvm_inj_exception\": {injected}}}\n",
            5 + emulated,
            3 + interrupts
        )
    }

    #[test]
    fn an_endless_loop_is_known_by_its_counters() {
        assert!(signature(&sample(1990, 0, 0)).unwrap().contains("7-9"));
        assert!(signature(&sample(0, 0, 1990)).is_some());
        // Another vCPU waits meanwhile.
        assert!(signature(&sample(1460, 0, 0)).is_some());
        assert!(may_loop(&sample(0, 0, 0)) && !may_loop(&sample(1990, 1, 0)));
        // A guest that works, and one that waits.
        assert_eq!(signature(&sample(1990, 1, 0)), None);
        assert_eq!(signature(&sample(100, 0, 100)), None);
        assert_eq!(signature("KVM counted \nand then \n{}"), None);
    }

    #[test]
    fn a_vcpu_that_no_entry_moves_is_known_by_its_address() {
        let exits = |interrupts, reason: &str, address: fn(usize) -> usize| {
            let line = |number| {
                let rip = address(number);
                format!(
                    "vcpu0-415  [001] d..1.   391.179262: kvm_entry: vcpu 0, rip {rip:#x}\n\
                     vcpu0-415  [001] d..1.   391.179315: kvm_exit: vcpu 0 reason {reason} rip \
                     {rip:#x} info1 0x0 info2 0x0 intr_info 0x0 error_code 0x0\n"
                )
            };
            let lines: String = (0..30).map(line).collect();
            sample(0, interrupts, 0) + &lines
        };
        let held = exits(0, "interrupt", |_| 0x10);
        assert!(signature(&held).unwrap().contains("7-9"));
        assert_eq!(signature(&exits(0, "interrupt", |number| number)), None);
        assert_eq!(signature(&exits(0, "npf", |_| 0x10)), None);
        // It gets interrupts of its own, or a few exits are by chance the same.
        assert_eq!(signature(&exits(1, "interrupt", |_| 0x10)), None);
        let few: Vec<_> = held.lines().take(3 + 2 * 19).collect();
        assert_eq!(signature(&few.join("\n")), None);
    }

    #[test]
    fn lost_registers_are_known_by_their_values() {
        let line =
            |cr3: &str, note: &str| format!("ERROR vcpu0 registers: rip=0x10 cr3={cr3}{note}");
        assert!(signature(&line("0x7f0000001000", "")).is_some());
        let reset = " (after the reset that KVM does at a triple fault on AMD processors; lost)";
        assert!(signature(&line("0x0", reset)).is_some());
        assert_eq!(signature(&line("0x2600000", "")), None);
        assert_eq!(signature("a guest that prints registers: rip=x"), None);
    }
}
