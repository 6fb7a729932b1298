//! Runs iproute2's `devlink` as a user does, and compares both tools.

use std::process::{Command, Output, Stdio};

use lab::netdevsim::Netdevsim;
use serde_json::Value;
use vdpa_mgmt::devlink::Handle;

use super::support::{bellhop, printed};

/// Runs `devlink` with the words of this line.
pub(crate) fn devlink(line: &str) -> Output {
    let mut command = Command::new("devlink");
    let command = command.args(line.split(' ')).stdin(Stdio::null());
    command.output().unwrap()
}

/// The value that `devlink -j` prints under this key.
#[track_caller]
pub(crate) fn printed_json(line: &str, key: &str) -> Value {
    let text = printed(&devlink(&format!("-j {line}")));
    let mut answer: Value = serde_json::from_str(&text).unwrap();
    answer[key].take()
}

/// Runs `bellhop` with the words of this line.
pub(crate) fn ours(line: &str) -> Output {
    let arguments: Vec<&str> = line.split(' ').collect();
    bellhop(&arguments)
}

/// Both tools print the same, as text, as JSON and as JSON on many lines.
#[track_caller]
pub(crate) fn same(line: &str) -> String {
    for format in ["", "-j ", "-jp ", "-p "] {
        let theirs = printed(&devlink(&format!("{format}{line}")));
        // Bellhop takes the options anywhere after the object.
        let ours = match format.trim() {
            "" => printed(&ours(line)),
            format => printed(&ours(&format!("{line} {format}"))),
        };
        assert_eq!(ours, theirs, "{format}{line}");
    }
    printed(&ours(line))
}

/// The instance's name, checked.
pub(crate) fn handle(nic: &Netdevsim) -> Handle {
    nic.handle().parse().unwrap()
}

/// A NIC in switchdev mode with two virtual functions.
pub(crate) fn switchdev(number: u32) -> Netdevsim {
    let nic = Netdevsim::add(number, 2).unwrap();
    nic.set_eswitch_mode("switchdev").unwrap();
    nic.set_virtual_functions(2).unwrap();
    nic
}
