//! `cargo lab demo` inside the lab host.

use std::process::ExitCode;

fn main() -> ExitCode {
    lab::demo::main()
}
