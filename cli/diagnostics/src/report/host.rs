//! The host: versions, kernel, processors, memory, and the checks of `doctor`.

use std::fmt::Write as _;

use super::bundle::Bundle;
use super::context::Context;
use crate::doctor;

/// Files of the kernel and the distribution that are copied unchanged.
const FILES: [&str; 9] = [
    "/etc/os-release",
    "/proc/version",
    "/proc/cmdline",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/iomem",
    "/proc/self/limits",
    "/proc/self/status",
];
/// Maximum size of each of them, in bytes.
const FILE_MAX: u64 = 1 << 20;

/// Adds the host.
pub(super) fn add(context: &Context, bundle: &mut Bundle) {
    let host = &context.host;
    bundle.add(&["versions.txt"], versions().as_bytes());
    for path in FILES {
        let name = path.trim_start_matches('/').replace('/', "_");
        bundle.put(&["host", &name], host.bytes(path, FILE_MAX));
    }
    let report = doctor::report(host);
    let text = doctor::text(&report, false, doctor::COLUMNS);
    bundle.add(&["doctor.txt"], text.as_bytes());
    bundle.put(&["doctor.json"], serde_json::to_vec_pretty(&report));
}

fn versions() -> String {
    let kernel = rustix::system::uname();
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(text, "bellhop {}", env!("CARGO_PKG_VERSION"));
    for (name, value) in [
        ("system", kernel.sysname()),
        ("host", kernel.nodename()),
        ("kernel", kernel.release()),
        ("build", kernel.version()),
        ("machine", kernel.machine()),
    ] {
        let _ = writeln!(text, "{name} {}", value.to_string_lossy());
    }
    let user = rustix::process::geteuid().as_raw();
    let _ = writeln!(text, "collected by user {user}");
    text
}
