//! `lab-host link NAME up|down` and `lab-host igb plug|unplug`: what is plugged into the lab host,
//! changed from inside it.

use lab::error::{Error, Result, report};
use lab::igb;
use lab::sriov;
use std::process::ExitCode;

pub(crate) const USAGE: &str =
    "lab-host link NAME up|down (such as vf0 down), lab-host igb plug|unplug";

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    match set(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-host: {}", report(&error));
            ExitCode::FAILURE
        }
    }
}

fn set(arguments: &[String]) -> Result<()> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["link", link, "up"] => sriov::set_link(link, true),
        ["link", link, "down"] => sriov::set_link(link, false),
        ["igb", "plug"] => igb::set_present(true),
        ["igb", "unplug"] => igb::set_present(false),
        _ => Err(Error::Usage(format!("usage: {USAGE}"))),
    }
}
