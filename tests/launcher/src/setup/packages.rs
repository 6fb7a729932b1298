//! Installs the few programs that the lab needs on its machine.
//!
//! This module owns their list. It installs them as root with apt-get, on a terminal after a
//! question; otherwise the error's remedy is the one command to type. All else (QEMU, the kernel,
//! compilers for it) lives in the lab host's root.

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::process::run_logged;
use crate::progress::Progress;
use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::process::Command;

/// A package and a file that proves it is installed.
struct Package {
    name: &'static str,
    file: &'static str,
}

/// Always needed.
const NEEDED: [Package; 2] = [
    Package {
        name: "mmdebstrap",
        file: "/usr/bin/mmdebstrap",
    },
    Package {
        name: "debian-archive-keyring",
        file: "/usr/share/keyrings/debian-archive-keyring.gpg",
    },
];

/// Needed where the lab does not run as root: it maps subordinate user IDs.
const NEEDED_WITHOUT_ROOT: Package = Package {
    name: "uidmap",
    file: "/usr/bin/newuidmap",
};

/// Installs the missing packages.
///
/// # Errors
/// [`Error::Missing`] with the command to type where the lab may not install packages itself;
/// [`Error::Program`] when the installation fails.
pub fn ensure(cache: &Cache) -> Result<()> {
    let root = rustix::process::geteuid().is_root();
    let missing: Vec<&str> = NEEDED
        .iter()
        .chain((!root).then_some(&NEEDED_WITHOUT_ROOT))
        .filter(|package| !Path::new(package.file).exists())
        .map(|package| package.name)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    let command = format!(
        "{}apt-get update && {0}apt-get install --option Acquire::Retries=3 --yes \
         --no-install-recommends {names}",
        if root { "" } else { "sudo " },
    );
    if !Path::new("/usr/bin/apt-get").exists() {
        return Err(Error::missing(
            format!("the lab needs {names}"),
            "install them with this system's package manager",
        ));
    }
    if !root && !agreed(&format!("The lab needs {names}. Run `{command}`?")) {
        return Err(Error::missing(format!("the lab needs {names}"), command));
    }
    let progress = Progress::start(format!("packages {names}"));
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &command])
        .env("DEBIAN_FRONTEND", "noninteractive");
    run_logged(&mut shell, &cache.log("packages"), &progress)
}

/// Asks on the terminal; false where there is none.
fn agreed(question: &str) -> bool {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return false;
    }
    eprint!("{question} [y/N] ");
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).is_ok()
        && matches!(answer.trim(), "y" | "Y" | "yes" | "Yes")
}
