//! A network namespace for one test, and iproute2's view of it.

use std::process::Command;

use lab::process::output;
use lab::sim::require_lab;
use serde_json::Value;
use vdpa_mgmt::link::{Links, Namespace};

/// A namespace of `ip netns`. Dropping it deletes it.
pub(crate) struct Netns(String);

impl Netns {
    pub(crate) fn new(name: &str) -> Self {
        require_lab().unwrap();
        let name = format!("lab-{name}");
        output(Command::new("ip").args(["netns", "add", &name])).unwrap();
        Self(name)
    }

    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    pub(crate) fn open(&self) -> Namespace {
        Namespace::find(&self.0).unwrap()
    }

    pub(crate) fn links(&self) -> Links {
        Links::in_namespace(&self.open()).unwrap()
    }

    /// Runs `ip` there.
    pub(crate) fn ip(&self, words: &str) -> Vec<u8> {
        let mut command = Command::new("ip");
        output(command.args(["-n", &self.0]).args(words.split_whitespace())).unwrap()
    }

    fn json(&self, tool: &str, words: &[&str]) -> Value {
        let mut command = Command::new(tool);
        let text = output(command.args(["-n", &self.0, "-j"]).args(words)).unwrap();
        if text.is_empty() {
            Value::Array(Vec::new())
        } else {
            serde_json::from_slice(&text).unwrap()
        }
    }

    /// All interfaces, as `ip -d` shows them.
    pub(crate) fn shown(&self) -> Value {
        self.json("ip", &["-d", "link", "show"])
    }

    /// VLANs of all ports, as `bridge` shows them.
    pub(crate) fn vlans(&self) -> Value {
        self.json("bridge", &["vlan", "show"])
    }

    /// The whole state for a later comparison. It leaves out what changes by itself: timers, and
    /// the state of the carrier, which follows after up to a second.
    pub(crate) fn state(&self) -> (Value, Value) {
        let mut shown = self.shown();
        for link in shown.as_array_mut().unwrap() {
            for data in ["info_data", "info_slave_data"] {
                if let Some(data) = link["linkinfo"][data].as_object_mut() {
                    data.retain(|key, _| !key.ends_with("_timer"));
                }
            }
            link.as_object_mut().unwrap().remove("operstate");
            if let Some(flags) = link["flags"].as_array_mut() {
                flags.retain(|flag| flag != "NO-CARRIER" && flag != "LOWER_UP");
            }
        }
        (shown, self.vlans())
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = output(Command::new("ip").args(["netns", "del", &self.0]));
    }
}
