//! Init of a lab guest: makes the guest's own view of its devices testable over its serial console.
//!
//! ```text
//!   kernel ─▶ /init ─▶ mounts, modules, NICs up ─┬─ "lab" on the kernel command line:
//!                                                │    "@lab ready {…}", then one command
//!                                                │    per line, one "@lab {…}" per answer
//!                                                └─ else: a shell for a human
//! ```
//!
//! It owns the guest. No part of it sends a frame without a command: NICs are up without any
//! address, IPv6 is off.

mod background;
mod button;
mod command;
mod control;
mod disk;
mod echo;
mod filter;
mod frames;
mod info;
mod kept;
mod memory;
mod network;
mod notify;
mod paced;
mod processors;
mod random;
mod system;
mod tcp;
mod vfio;
mod writer;

use lab::error::report;
use serde_json::Value;
use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("lab-guest is the init of a lab guest; it does nothing elsewhere");
        return ExitCode::FAILURE;
    }
    let problems = system::start();
    if !system::is_commanded() {
        for problem in &problems {
            eprintln!("lab-guest: {problem}");
        }
        if let Err(error) = system::shell() {
            eprintln!("lab-guest: {}", report(&error));
        }
        system::power_off();
        return ExitCode::FAILURE;
    }
    if let Err(error) = system::quiet_console() {
        eprintln!("lab-guest: {}", report(&error));
    }
    say("ready ", &info::all(&problems));
    for line in std::io::stdin().lock().lines() {
        match line {
            Ok(line) if line.trim().is_empty() => {}
            Ok(line) => {
                let answer = command::obey(line.trim());
                let value = answer
                    .value
                    .unwrap_or_else(|error| serde_json::json!({ "error": report(&error) }));
                say("", &value);
                answer.afterwards.act();
            }
            Err(error) => eprintln!("lab-guest: the console: {error}"),
        }
    }
    // The console has closed.
    system::power_off();
    ExitCode::FAILURE
}

/// Prints one line that the outside recognizes. The leading line break separates it from a kernel
/// message that may have just begun.
fn say(word: &str, value: &Value) {
    let line = format!("\n@lab {word}{value}\n");
    let mut console = std::io::stdout().lock();
    let _ = console
        .write_all(line.as_bytes())
        .and_then(|()| console.flush());
}
