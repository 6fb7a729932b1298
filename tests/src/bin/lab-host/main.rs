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
//! `lab-host link vf0 down` (or `up`) requests the outside to pull or plug in the cable of one of
//! the rig's links. `lab-host igb plug` (or `unplug`) requests it to plug or unplug the rig's igb
//! NIC.
//!
//! This program owns the lab host's file system and its power. The agent owns the processes in it.

mod agent;
mod link;
mod root;

use lab::agent::protocol::BOOTED;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("agent") => return agent::main(),
        Some("link" | "igb") => return link::main(&arguments),
        _ => {}
    }
    if std::process::id() != 1 {
        eprintln!(
            "lab-host is the init of the lab host; there also: {}",
            link::USAGE
        );
        return ExitCode::FAILURE;
    }
    eprintln!("{BOOTED}");
    if let Err(error) = root::init() {
        eprintln!("lab-host: {}", lab::error::report(&error));
    }
    root::power_off();
    ExitCode::FAILURE
}
