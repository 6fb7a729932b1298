//! Recognises known faults of the emulated lab host by the last lines of its kernel's console.
//!
//! QEMU's emulation of nested virtualization sometimes loses an interrupt between processors, or
//! runs a processor with the state of another (tests/README.md). A crash with one of Bellhop's
//! drivers on the stack never counts as such a fault: Bellhop may have caused it.

/// How many lines of a console are searched.
const SEARCHED: usize = 200;

/// A processor waits forever for another one to answer an interrupt.
const LOST_INTERRUPT: [&str; 2] = ["soft lockup", "smp_call_function"];

/// A stack or processor state that no kernel code wrote.
const FOREIGN_STATE: [&str; 3] = [
    "corrupted stack end",
    "kernel stack overflow",
    "double fault",
];

/// Kernel drivers that Bellhop uses.
const OWN_DRIVERS: [&str; 7] = [
    "vhost",
    "vdpa",
    "vringh",
    "labnic",
    "vduse",
    "iommu",
    "netdevsim",
];

/// Evidence that the emulation lost a host during tests, by the host's console: a known fault, or
/// an end without any report. A driver that hangs a processor is reported by the kernel's watchdog
/// before. An empty console is no evidence.
pub(crate) fn loss(console: &str) -> Option<String> {
    match crash(console) {
        Some(_) => fault(console),
        None if console.is_empty() => None,
        None => Some("its kernel reported no crash".to_owned()),
    }
}

/// The console's last lines, from the report of a crash on.
fn crash(console: &str) -> Option<Vec<&str>> {
    let lines: Vec<&str> = console.lines().collect();
    let lines = &lines[lines.len().saturating_sub(SEARCHED)..];
    let begin = lines
        .iter()
        .position(|line| line.contains("BUG:") || line.contains("Kernel panic"))?;
    Some(lines[begin..].to_vec())
}

/// Evidence of a known fault in the console of a lost host.
pub(crate) fn fault(console: &str) -> Option<String> {
    let crash = crash(console)?;
    let has = |word: &str| crash.iter().find(|line| line.contains(word));
    // Stack frames have an offset. The list of loaded modules also names drivers, without one.
    let own = crash
        .iter()
        .any(|line| line.contains("+0x") && OWN_DRIVERS.iter().any(|driver| line.contains(driver)));
    if own {
        return None;
    }
    let lost = LOST_INTERRUPT.iter().all(|word| has(word).is_some());
    let line = if lost {
        has(LOST_INTERRUPT[0])
    } else {
        FOREIGN_STATE.iter().find_map(|word| has(word))
    };
    line.map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_faults_count() {
        let lost = "watchdog: BUG: soft lockup - CPU#0 stuck for 60s!\n\
                    RIP: 0010:smp_call_function_many_cond+0x123/0x500";
        assert!(fault(lost).is_some());
        let stack =
            "[  9.1] BUG: unable to handle page fault\nKernel panic: corrupted stack end detected";
        assert!(fault(stack).unwrap().contains("corrupted stack end"));
        let own = format!("{stack}\n vhost_vdpa_release+0x20/0x40");
        assert!(fault(&own).is_none());
        let listed = format!("{stack}\nModules linked in: vhost_vdpa vdpa_sim");
        assert!(fault(&listed).is_some());
        assert!(fault("BUG: kernel NULL pointer dereference").is_none());
        assert!(fault("all is well").is_none());
        assert!(loss("all is well").is_some());
        assert!(loss("").is_none());
        assert!(loss("BUG: kernel NULL pointer dereference").is_none());
    }
}
