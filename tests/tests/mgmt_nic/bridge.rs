//! The lab NIC in switchdev mode beside a VLAN-aware bridge.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use lab::labnic::Labnic;
use lab::labnic::sf::set_eswitch_mode;
use lab::process::output;

use super::host::clean_up;

pub(crate) const BRIDGE: &str = "br-nic";
const PORT: &str = "lab-port";
pub(crate) const UPLINK: &str = "uplink0";
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn run(command: &str) -> String {
    let mut words = command.split(' ');
    let mut program = Command::new(words.next().unwrap());
    String::from_utf8(output(program.args(words)).unwrap()).unwrap()
}

/// The NIC in switchdev mode, and a VLAN-aware bridge. Dropping it removes both.
pub(crate) struct Host {
    #[allow(dead_code, reason = "not all tests add devices of their own")]
    pub(crate) labnic: Labnic,
}

impl Host {
    pub(crate) fn new() -> Self {
        // The attachment takes a moment, so the code must wait for it.
        let labnic = Labnic::load(&[("sf_attach_ms", "100")]).unwrap();
        set_eswitch_mode("switchdev").unwrap();
        // With its own address: otherwise it would take that of its ports.
        run(&format!(
            "ip link add {BRIDGE} address 02:00:5e:00:53:01 type bridge vlan_filtering 1 \
             mcast_snooping 0"
        ));
        fs::write(
            format!("/proc/sys/net/ipv6/conf/{BRIDGE}/disable_ipv6"),
            "1",
        )
        .unwrap();
        run(&format!("ip link set {BRIDGE} up"));
        // A permanent port: without one, the bridge would lose its carrier a while after the last
        // port goes.
        run(&format!(
            "ip link add {PORT} address 02:00:5e:00:53:02 type dummy"
        ));
        fs::write(format!("/proc/sys/net/ipv6/conf/{PORT}/disable_ipv6"), "1").unwrap();
        run(&format!("ip link set {PORT} up master {BRIDGE}"));
        bridge_is_up();
        Self { labnic }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        clean_up();
        run(&format!("ip link del {PORT}"));
        run(&format!("ip link del {BRIDGE}"));
    }
}

/// Waits until the bridge has noticed its port's carrier.
#[allow(dead_code, reason = "not all tests lose its carrier")]
pub(crate) fn bridge_is_up() {
    let is = |file: &str, expected: &str| {
        let path = Path::new("/sys/class/net").join(file);
        fs::read_to_string(path).unwrap().trim() == expected
    };
    let begin = Instant::now();
    while !is(&format!("{BRIDGE}/operstate"), "up") || !is(&format!("{PORT}/brport/state"), "3") {
        assert!(begin.elapsed() < PATIENCE, "the bridge does not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
}
