//! `lab-host link NAME up|down`: plugs in or pulls the cable of a link, from inside the lab host.

use lab::error::{Error, Result, report};
use lab::sriov;
use std::process::ExitCode;

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
    let usage = || Error::Usage("usage: lab-host link NAME up|down (such as vf0 down)".into());
    let [link, state] = arguments else {
        return Err(usage());
    };
    match state.as_str() {
        "up" => sriov::set_link(link, true),
        "down" => sriov::set_link(link, false),
        _ => Err(usage()),
    }
}
