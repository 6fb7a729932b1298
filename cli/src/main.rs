//! The program `bellhop`; the library contains all of its code.

use std::process::ExitCode;

fn main() -> ExitCode {
    bellhop::main()
}
