//! The lab itself: the guarantees of its host to every other test.

use lab::sim::{self, Mapping, SimDevice, require_lab, vdpa};
use std::path::Path;

#[test]
fn the_host_has_kvm_and_the_simulators_management_devices() {
    require_lab().unwrap();
    assert!(Path::new("/dev/kvm").exists());
    let shown = String::from_utf8(vdpa(&["mgmtdev", "show"]).unwrap()).unwrap();
    for name in ["vdpasim_net", "vdpasim_blk", "vduse"] {
        assert!(shown.contains(name), "{shown}");
    }
}

#[test]
fn pinned_memory_is_not_limited() {
    require_lab().unwrap();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    assert_eq!(limit.current, None);
}

#[test]
fn devices_come_with_every_mapping_and_go_when_dropped() {
    require_lab().unwrap();
    for mapping in Mapping::ALL {
        sim::reload(mapping).unwrap();
        let net = SimDevice::net("net", "02:00:5e:00:53:01", 1400).unwrap();
        let block = SimDevice::block("blk").unwrap();
        assert!(net.path().exists() && block.path().exists());
        assert_ne!(net.path(), block.path());
        let config = net.config().unwrap();
        assert_eq!(config["mac"], "02:00:5e:00:53:01");
        assert_eq!(config["mtu"], 1400);
        let name = net.name().to_owned();
        drop(net);
        assert!(!Path::new("/sys/bus/vdpa/devices").join(name).exists());
    }
    sim::reload(Mapping::DEFAULT).unwrap();
}

#[test]
fn a_name_that_is_taken_is_an_error() {
    require_lab().unwrap();
    let _first = SimDevice::net("twice", "02:00:5e:00:53:01", 1500).unwrap();
    let error = SimDevice::net("twice", "02:00:5e:00:53:02", 1500).unwrap_err();
    assert!(error.to_string().contains("File exists"), "{error}");
}
