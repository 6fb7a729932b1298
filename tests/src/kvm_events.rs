//! Counts guest exits by the lab host's own kernel: KVM's tracepoints, filtered by guest-physical
//! address.
//!
//! This module creates its own trace instance (`tracefs`, `instances/`) and removes it when
//! dropped, so that it does not disturb other tracing.
//!
//! **Create it before the guest starts and drop it after the guest's end.** Switching a tracepoint
//! changes the kernel's code while it runs. Emulated processors with several threads sometimes get
//! that wrong: an int3 is no longer there, and the lab host panics. Without a guest no processor
//! runs that code. For the same reason process names are not recorded: that would switch
//! tracepoints in the scheduler.
//!
//! Accesses to the range are, by host:
//!
//! * AMD: `kvm_exit`, nested page fault. The event has the address of every such exit.
//! * Intel: `kvm_fast_mmio`, `kvm_mmio`, `kvm_page_fault`. Intel's `kvm_exit` has no address. Each
//!   exit makes one of these events; the first one that the host must look up makes two.

use crate::error::{Error, Result};
use crate::files;
use crate::notice;
use std::ops::Range;
use std::path::{Path, PathBuf};

const INSTANCES: &str = "/sys/kernel/tracing/instances";

/// The option that records process names with events.
const RECORD_NAMES: &str = "/sys/kernel/tracing/options/record-cmd";

/// The instance's buffer for each processor, KiB: some 100 bytes per event.
const BUFFER_KIB: u32 = 8192;

/// `isa` of `kvm_exit` for AMD, and the exit code of a nested page fault
/// (`arch/x86/include/uapi/asm/svm.h`).
const ISA_SVM: u32 = 2;
const EXIT_NPF: u32 = 0x400;

/// Exits of guests to a range of addresses.
#[derive(Debug)]
pub struct AddressExits {
    directory: PathBuf,
    amd: bool,
}

/// Event and filter, with the range as `{start}` and `{end}`.
fn events(amd: bool, range: &Range<u64>) -> Vec<(&'static str, String)> {
    let (start, end) = (range.start, range.end);
    let inside = |field| format!("{field} >= {start:#x} && {field} < {end:#x}");
    if amd {
        let exit = format!("isa == {ISA_SVM} && exit_reason == {EXIT_NPF:#x}");
        return vec![("kvm_exit", format!("{exit} && {}", inside("info2")))];
    }
    vec![
        ("kvm_fast_mmio", inside("gpa")),
        ("kvm_mmio", inside("gpa")),
        ("kvm_page_fault", inside("fault_address")),
    ]
}

impl AddressExits {
    /// Switches the tracepoints on, for no address yet.
    ///
    /// # Errors
    /// [`Error::File`] without rights, tracefs or KVM's tracepoints.
    pub fn prepare() -> Result<Self> {
        let processor = files::read_text(Path::new("/proc/cpuinfo"))?;
        let amd = processor
            .lines()
            .any(|line| line.starts_with("flags") && line.split(' ').any(|flag| flag == "svm"));
        let name = format!("lab-{}", std::process::id());
        let directory = Path::new(INSTANCES).join(name);
        // A new instance inherits this option from the top and has no switch of its own for it.
        let recorded = files::read_text(Path::new(RECORD_NAMES))?;
        files::write(Path::new(RECORD_NAMES), "0")?;
        let made = std::fs::create_dir(&directory).map_err(Error::file("create", &directory));
        // From here on a failure must not leave the instance behind.
        let exits = made.map(|()| Self { directory, amd });
        files::write(Path::new(RECORD_NAMES), recorded.trim())?;
        let exits = exits?;
        exits.set("buffer_size_kb", &BUFFER_KIB.to_string())?;
        exits.watch(&(0..0))?;
        for (event, _) in events(amd, &(0..0)) {
            exits.set(&format!("events/kvm/{event}/enable"), "1")?;
        }
        Ok(exits)
    }

    /// Counts the exits of all guests to these addresses from now on, in addition to earlier
    /// counts.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn watch(&self, range: &Range<u64>) -> Result<()> {
        for (event, filter) in events(self.amd, range) {
            self.set(&format!("events/kvm/{event}/filter"), &filter)?;
        }
        Ok(())
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        files::write(&self.directory.join(file), value)
    }

    /// The number of exits.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Invalid`] if events were lost.
    pub fn count(&self) -> Result<u64> {
        let mut sum = 0;
        for processor in files::list(&self.directory.join("per_cpu"))? {
            let statistics = files::read_text(&processor.join("stats"))?;
            sum += entries(&statistics).ok_or_else(|| {
                Error::invalid("the trace buffer", "it was too small: events were lost")
            })?;
        }
        Ok(sum)
    }
}

impl Drop for AddressExits {
    fn drop(&mut self) {
        let removed = std::fs::remove_dir(&self.directory);
        notice::left_behind(removed.map_err(Error::file("remove", &self.directory)));
    }
}

/// Events in one processor's buffer; `None` if some were lost.
fn entries(statistics: &str) -> Option<u64> {
    let field = |name: &str| {
        statistics.lines().find_map(|line| {
            let value = line.strip_prefix(name)?.strip_prefix(':')?;
            value.trim().parse::<u64>().ok()
        })
    };
    let lost = field("overrun")? + field("commit overrun")? + field("dropped events")?;
    (lost == 0).then(|| field("entries")).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_events_are_noticed() {
        let text = |overrun| {
            format!(
                "entries: 12\noverrun: {overrun}\ncommit overrun: 0\nbytes: 52\n\
                 oldest event ts: 1.1\nnow ts: 2.2\ndropped events: 0\nread events: 0\n"
            )
        };
        assert_eq!(entries(&text(0)), Some(12));
        assert_eq!(entries(&text(3)), None);
        assert_eq!(entries("nothing"), None);
    }

    #[test]
    fn filters_name_the_range() {
        let range = 0x1000..0x3000;
        let amd = events(true, &range);
        assert_eq!(amd.len(), 1);
        assert!(amd[0].1.ends_with("info2 >= 0x1000 && info2 < 0x3000"));
        assert_eq!(events(false, &range).len(), 3);
    }
}
