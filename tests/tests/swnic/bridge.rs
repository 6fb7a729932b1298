//! A bridge for NICs without hardware.

use std::process::Command;

use lab::sim::require_lab;

pub(crate) fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status().unwrap();
    assert!(status.success(), "ip {words}");
}

/// A bridge that is deleted when dropped.
pub(crate) struct Bridge(pub(crate) &'static str);

impl Bridge {
    pub(crate) fn add(name: &'static str) -> Self {
        require_lab().unwrap();
        let loaded = Command::new("modprobe").arg("tun").status().unwrap();
        assert!(loaded.success());
        ip(&format!("link add {name} type bridge"));
        ip(&format!("link set {name} up mtu 9000"));
        Self(name)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        ip(&format!("link del {}", self.0));
    }
}
