//! A process that holds a device open.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A process that holds a device open and runs it, killed at the end.
pub(crate) struct Holder(Child);

impl Holder {
    pub(crate) fn start(device: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lab-holder"))
            .arg(device)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "running\n");
        Self(child)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}
