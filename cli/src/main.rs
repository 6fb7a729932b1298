//! The program `bellhop`; all of it is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    bellhop::main()
}
