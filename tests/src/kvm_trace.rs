//! KVM's activity for the guests of this lab host: a moment of all its tracepoints, for a report of
//! a guest that no longer answers.
//!
//! This module creates a trace instance for that moment. It is only for a guest that the test gives
//! up: switching tracepoints under a running guest can crash an emulated lab host (see
//! [`crate::kvm_events`]).

use crate::error::{Error, Result};
use crate::files;
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::time::Duration;

const INSTANCE: &str = "/sys/kernel/tracing/instances/lab-kvm-trace";
const KVM: &str = "/sys/kernel/debug/kvm";

/// How long the sample lasts.
const MOMENT: Duration = Duration::from_millis(100);

/// How many of the last events are shown.
const SHOWN: usize = 60;

/// vCPU counters that show whether a vCPU makes progress.
const COUNTERS: [&str; 5] = [
    "exits",
    "halt_exits",
    "insn_emulation",
    "irq_injections",
    "irq_window_exits",
];

/// The last events of a moment, and how the counters of each machine grew in it.
///
/// # Errors
/// [`Error::File`] without rights, tracefs or debugfs.
pub fn sample() -> Result<String> {
    let instance = Path::new(INSTANCE);
    match std::fs::create_dir(instance) {
        // Of a process that was killed while it sampled.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => created.map_err(Error::file("create", instance))?,
    }
    let seen = look(instance);
    std::fs::remove_dir(instance).map_err(Error::file("remove", instance))?;
    seen
}

/// How the counters of each machine grow in a moment. It changes nothing, so it is also for a guest
/// that the test still waits for.
///
/// # Errors
/// [`Error::File`] without rights or debugfs.
pub fn counters() -> Result<String> {
    let before = counted()?;
    std::thread::sleep(MOMENT);
    Ok(grown(&before, &counted()?))
}

fn grown(before: &str, after: &str) -> String {
    format!("KVM counted {before}\nand then    {after}\n")
}

fn look(instance: &Path) -> Result<String> {
    let switch = instance.join("events/kvm/enable");
    let before = counted()?;
    files::write(&switch, "1")?;
    std::thread::sleep(MOMENT);
    files::write(&switch, "0")?;
    let mut seen = grown(&before, &counted()?);
    let trace = files::read_text(&instance.join("trace"))?;
    let events: Vec<_> = trace
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    let mut names = std::collections::BTreeMap::new();
    for event in &events {
        let name = event.split(": ").nth(1).unwrap_or_default();
        *names.entry(name.to_owned()).or_insert(0_u32) += 1;
    }
    let _ = writeln!(seen, "{names:?}");
    // Tracepoints are disabled one after the other, and exits are among the first.
    let end = events
        .iter()
        .rposition(|event| event.contains(" kvm_exit: "));
    let events = &events[..end.map_or(events.len(), |end| end + 1)];
    for event in &events[events.len().saturating_sub(SHOWN)..] {
        let _ = writeln!(seen, "{}", event.trim());
    }
    Ok(seen)
}

/// `machine: counter value, …` of each machine.
fn counted() -> Result<String> {
    let mut all = String::new();
    for machine in files::list(Path::new(KVM))?
        .iter()
        .filter(|path| path.is_dir())
    {
        let _ = write!(
            all,
            "{}:",
            machine.file_name().unwrap_or_default().display()
        );
        for counter in COUNTERS {
            // A machine that ends removes its files.
            let value = files::read_text(&machine.join(counter)).unwrap_or_default();
            let _ = write!(all, " {counter} {}", value.trim());
        }
        all.push_str("; ");
    }
    Ok(all)
}
