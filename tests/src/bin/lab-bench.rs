//! `cargo lab bench` inside the lab host.

use std::process::ExitCode;

fn main() -> ExitCode {
    lab::bench::main()
}
