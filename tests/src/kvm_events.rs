//! Guest exits counted by the lab host's own kernel: KVM's tracepoints, filtered
//! by guest-physical address.
//!
//! Owns a trace instance of its own (`tracefs`, `instances/`), removed when dropped, so
//! that nobody else's tracing is disturbed. What counts as an access to
//! the range:
//!
//! | host | event | why |
//! |---|---|---|
//! | AMD | `kvm_exit`, nested page fault | has the address of every such exit |
//! | Intel | `kvm_fast_mmio`, `kvm_mmio`, `kvm_page_fault` | its `kvm_exit` has no address; each exit makes one of these (the first one that the host must look up makes two) |

use crate::error::{Error, Result};
use crate::files;
use std::ops::Range;
use std::path::{Path, PathBuf};

const INSTANCES: &str = "/sys/kernel/tracing/instances";

/// The instance's buffer of each processor, KiB: some 100 bytes per event.
const BUFFER_KIB: u32 = 8192;

/// `isa` of `kvm_exit` for AMD, and the exit code of a nested page fault
/// (`arch/x86/include/uapi/asm/svm.h`).
const ISA_SVM: u32 = 2;
const EXIT_NPF: u32 = 0x400;

/// Exits of guests to a range of addresses, counted from its creation on.
#[derive(Debug)]
pub struct AddressExits {
    directory: PathBuf,
}

/// Event and filter, `{start}` and `{end}` being the range.
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
    /// Starts to count, all guests of this host together.
    ///
    /// # Errors
    /// [`Error::File`] without rights, tracefs or KVM's tracepoints.
    pub fn start(range: &Range<u64>) -> Result<Self> {
        let name = format!("lab-{}", std::process::id());
        let directory = Path::new(INSTANCES).join(name);
        std::fs::create_dir(&directory).map_err(Error::file("create", &directory))?;
        // From here on a failure must not leave it behind.
        let exits = Self { directory };
        exits.set("buffer_size_kb", &BUFFER_KIB.to_string())?;
        let processor = files::read_text(Path::new("/proc/cpuinfo"))?;
        let amd = processor
            .lines()
            .any(|line| line.starts_with("flags") && line.split(' ').any(|flag| flag == "svm"));
        for (event, filter) in events(amd, range) {
            exits.set(&format!("events/kvm/{event}/filter"), &filter)?;
            exits.set(&format!("events/kvm/{event}/enable"), "1")?;
        }
        Ok(exits)
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        files::write(&self.directory.join(file), value)
    }

    /// How many there were.
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
        if let Err(error) = std::fs::remove_dir(&self.directory) {
            eprintln!("lab: cannot remove {}: {error}", self.directory.display());
        }
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
