//! A cable of the host, for NICs at queues of ports.

use std::process::Command;

use lab::sim::require_lab;

use super::bridge::ip;

/// The ports at both ends.
pub(crate) const ENDS: [&str; 2] = ["lab-xa", "lab-xb"];

/// A pair of ports with two queues each, deleted when dropped.
pub(crate) struct Cable;

impl Cable {
    pub(crate) fn add() -> Self {
        require_lab().unwrap();
        let loaded = Command::new("modprobe")
            .args(["-a", "tun", "veth"])
            .status();
        assert!(loaded.unwrap().success());
        let queues = "numrxqueues 2 numtxqueues 2";
        let [first, second] = ENDS;
        ip(&format!(
            "link add {first} {queues} type veth peer name {second} {queues}"
        ));
        for end in ENDS {
            ip(&format!("link set {end} up"));
        }
        Self
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        ip(&format!("link del {}", ENDS[0]));
    }
}
