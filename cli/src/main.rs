//! The `bellhop` command.
fn main() {}
