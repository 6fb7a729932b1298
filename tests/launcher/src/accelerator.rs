//! Chooses QEMU's accelerator for the lab host: KVM where nested virtualization works, else TCG.
//!
//! A `/dev/kvm` that opens proves little: some hosts emulate too little of a processor for Linux.
//! The lab uses KVM only after a lab host has booted on it within [`PROBE_LIMIT`] *and* has a
//! `/dev/kvm` of its own. The probe runs once per boot of this machine, and only where the
//! processor announces virtualization.
//!
//! This module owns the choice and the remembered result of the probe.

use crate::cache::Cache;
use crate::files;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How long the probe's lab host may take to greet.
pub const PROBE_LIMIT: Duration = Duration::from_secs(20);

/// QEMU's accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// KVM of this machine, nested.
    Kvm,
    /// QEMU's emulation; it includes AMD's virtualization extension.
    Tcg,
}

impl std::fmt::Display for Accelerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Kvm => "on nested KVM",
            Self::Tcg => "emulated by QEMU's TCG",
        })
    }
}

impl Accelerator {
    /// The arguments for QEMU.
    pub fn qemu_arguments(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            // Five-level paging would only lengthen every nested page walk.
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max,la57=off"],
        }
    }

    /// Chooses the accelerator. `boots` boots a lab host on KVM and returns true if it greeted with
    /// a `/dev/kvm` of its own.
    pub fn choose(cache: &Cache, boots: impl FnOnce() -> bool) -> Self {
        if File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_err()
            || !announced(&files::read_text(Path::new("/proc/cpuinfo")).unwrap_or_default())
            || !nesting_enabled(Path::new("/sys/module"))
        {
            return Self::Tcg;
        }
        // One probe at a time: two would slow each other down, perhaps beyond the limit.
        static PROBE: Mutex<()> = Mutex::new(());
        let _one = PROBE.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = memory_of_probe(cache);
        match files::read_text(&memory).as_deref() {
            Ok("kvm") => return Self::Kvm,
            Ok("tcg") => return Self::Tcg,
            _ => {}
        }
        let (chosen, text) = if boots() {
            (Self::Kvm, "kvm")
        } else {
            (Self::Tcg, "tcg")
        };
        // If the result cannot be saved, the next start probes again: slower, not wrong.
        let _ = files::write(&memory, text);
        chosen
    }
}

/// The file with the probe's result. Its name contains the boot ID: after a boot, a new kernel or a
/// moved machine may behave differently.
fn memory_of_probe(cache: &Cache) -> PathBuf {
    let boot = files::read_text(Path::new("/proc/sys/kernel/random/boot_id")).unwrap_or_default();
    let boot: String = boot.chars().filter(char::is_ascii_hexdigit).collect();
    cache.directory().join(format!("kvm-probe-{boot}"))
}

/// True if the processor announces Intel's or AMD's virtualization extension. Without it, a
/// `/dev/kvm` that opens is an emulation.
fn announced(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| {
            line.split_whitespace()
                .any(|flag| flag == "vmx" || flag == "svm")
        })
}

/// False where a KVM module reports that it does not nest. A missing parameter counts as nesting.
fn nesting_enabled(modules: &Path) -> bool {
    ["kvm_intel", "kvm_amd"].iter().all(|name| {
        files::read_text(&modules.join(name).join("parameters/nested"))
            .map_or(true, |value| matches!(value.trim(), "1" | "Y"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_flag_announces_virtualization() {
        assert!(announced("model\t: x\nflags\t: fpu svm sse\n"));
        assert!(announced("flags\t: vmx\n"));
        assert!(!announced("flags\t: fpu svm_lock\nbugs\t: svm\n"));
    }

    #[test]
    fn a_module_that_does_not_nest_rules_kvm_out() {
        let modules = std::env::temp_dir().join(format!("lab-nested-{}", std::process::id()));
        let directory = modules.join("kvm_intel/parameters");
        files::create_directory(&directory).unwrap();
        assert!(nesting_enabled(&modules));
        files::write(&directory.join("nested"), "N\n").unwrap();
        assert!(!nesting_enabled(&modules));
        files::write(&directory.join("nested"), "Y\n").unwrap();
        assert!(nesting_enabled(&modules));
        crate::cache::remove_tree(&modules).unwrap();
    }
}
