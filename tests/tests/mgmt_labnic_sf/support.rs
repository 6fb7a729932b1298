//! Shared by both parts: the state of the lab host to compare, the text of a refusal, a bridge.

use std::process::Command;
use std::time::{Duration, Instant};

use lab::labnic;
use lab::labnic::sf::devlink_json;
use lab::process::output;
use serde_json::Value;

pub(crate) fn kernel_is_well() {
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

pub(crate) fn ip(arguments: &str) {
    run("ip", arguments);
}

pub(crate) fn run(program: &str, arguments: &str) -> Vec<u8> {
    output(Command::new(program).args(arguments.split_whitespace())).unwrap()
}

/// Runs a command that must fail; returns its error text.
#[track_caller]
pub(crate) fn refusal(program: &str, arguments: &str) -> String {
    let done = Command::new(program)
        .args(arguments.split_whitespace())
        .output()
        .unwrap();
    let words = String::from_utf8(done.stderr).unwrap();
    assert!(!done.status.success(), "{program} {arguments} succeeded");
    words
}

/// A bridge without ports; deleted when dropped.
#[derive(Debug)]
pub(crate) struct Bridge(());

impl Bridge {
    pub(crate) const NAME: &str = "brsf";

    pub(crate) fn add() -> Self {
        ip(&format!("link add {} type bridge", Self::NAME));
        ip(&format!("link set {} up", Self::NAME));
        Self(())
    }

    /// Connects a representor, brings it up and waits until the bridge forwards from and to it.
    pub(crate) fn connect(&self, representor: &str) {
        ip(&format!("link set {representor} up master {}", Self::NAME));
        Self::forwards(representor);
    }

    /// Waits for a port to forward: the bridge learns of the carrier up to a second after the link
    /// is up.
    pub(crate) fn forwards(port: &str) {
        const FORWARDING: &str = "3\n";
        let path = format!("/sys/class/net/{port}/brport/state");
        let begin = Instant::now();
        while std::fs::read_to_string(&path).unwrap() != FORWARDING {
            assert!(begin.elapsed().as_secs() < 20, "{port} does not forward");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        ip(&format!("link del {}", Self::NAME));
    }
}

/// Everything that a subfunction's life may change, without running counters.
pub(crate) fn everything() -> Value {
    let links: Value = serde_json::from_slice(&run("ip", "-j link show")).unwrap();
    let links: Vec<&Value> = links
        .as_array()
        .unwrap()
        .iter()
        .map(|link| link.get("ifname").unwrap())
        .collect();
    let list = |path: &str| {
        let mut names: Vec<String> = std::fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    serde_json::json!({
        "instances": devlink_json(&["dev", "show"]).unwrap(),
        "ports": devlink_json(&["port", "show"]).unwrap(),
        "rates": devlink_json(&["port", "function", "rate", "show"]).unwrap(),
        "mode": devlink_json(&["dev", "eswitch", "show", labnic::sf::NIC]).unwrap(),
        "managers": serde_json::from_slice::<Value>(&run("vdpa", "-j mgmtdev show")).unwrap(),
        "devices": serde_json::from_slice::<Value>(&run("vdpa", "-j dev show")).unwrap(),
        "links": links,
        "auxiliary": list("/sys/bus/auxiliary/devices"),
        "platform": list("/sys/devices/platform/labnic.0"),
    })
}
