//! The `lab` command; `cargo lab` runs it.

use std::process::ExitCode;

fn main() -> ExitCode {
    launcher::verbs::main()
}
