//! Init of the lab host: from the kernel's start to the agent's greeting.
//!
//! ```text
//!   kernel ─▶ /init (PID 1)
//!               load 9p ─▶ mount the root, read-only, under an overlay
//!               read Setup from the port ─▶ mount the shares
//!               switch root ─▶ start itself as the agent, reap children
//!   agent       load modules ─▶ Hello ─▶ serve commands ─▶ exit
//!   PID 1       sync ─▶ switch the machine off
//! ```
//!
//! Owns the lab host's file system and its power. What runs in it is the
//! agent's.

mod agent;
mod root;

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("agent") {
        return agent::main();
    }
    if std::process::id() != 1 {
        eprintln!("lab-host is the init of the lab host; it does nothing elsewhere");
        return ExitCode::FAILURE;
    }
    if let Err(error) = root::init() {
        eprintln!("lab-host: {}", lab::error::report(&error));
    }
    root::power_off();
    ExitCode::FAILURE
}
