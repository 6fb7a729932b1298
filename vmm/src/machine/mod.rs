//! The machine.
mod console;
pub use console::{Console, ConsoleInput, ConsoleRead};
