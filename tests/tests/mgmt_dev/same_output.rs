//! Output that equals iproute2's, byte for byte.

use lab::labnic::{self, Labnic};
use lab::sim::SimDevice;

use super::same::{negotiated, same};
use super::support::{MAC, bellhop, iproute2, printed};

#[test]
fn management_devices() {
    lab::sim::require_lab().unwrap();
    same(&["mgmtdev", "show"]);
    same(&["mgmtdev", "list"]);
    for name in ["vdpasim_net", "vdpasim_blk", "vduse"] {
        same(&["mgmtdev", "show", name]);
    }
}

#[test]
fn devices_and_their_configuration() {
    lab::sim::require_lab().unwrap();
    same(&["dev", "show"]);
    let net = SimDevice::net("same", MAC, 1500).unwrap();
    same(&["dev", "config", "show"]);
    let block = SimDevice::block("same-blk").unwrap();
    same(&["dev", "show"]);
    same(&["dev", "list"]);
    same(&["dev", "show", net.name()]);
    same(&["dev", "show", block.name()]);
    same(&["dev", "config", "show", net.name()]);
    let _driver = negotiated(net.path());
    same(&["dev", "config", "show", net.name()]);
}

#[test]
fn counters_of_a_queue() {
    lab::sim::require_lab().unwrap();
    let net = SimDevice::net("same", MAC, 1500).unwrap();
    let _driver = negotiated(net.path());
    same(&["dev", "vstats", "show", net.name(), "qidx", "1"]);
    // Without MQ, iproute2 takes queue 0 for the control queue.
    for (index, theirs, ours) in [
        ("0", "\"control_vq\"", "\"rx\""),
        ("2", "\"rx\"", "\"control_vq\""),
    ] {
        let arguments = ["dev", "vstats", "show", net.name(), "qidx", index];
        let expected = printed(&iproute2(&[&["-j"], &arguments[..]].concat()));
        assert!(expected.contains(theirs), "{expected}");
        let found = printed(&bellhop(&[&arguments[..], &["-j"]].concat()));
        assert_eq!(found, expected.replace(theirs, ours));
    }
}

#[test]
fn the_lab_nic_with_several_queue_pairs() {
    let labnic = Labnic::load(&[]).unwrap();
    same(&["mgmtdev", "show"]);
    let attributes = ["mac", MAC, "mtu", "9000", "max_vqp", "4"];
    let nic = labnic.add("same", &attributes).unwrap();
    same(&["dev", "show"]);
    same(&["dev", "config", "show"]);
    labnic::set_link(&nic, false).unwrap();
    same(&["dev", "config", "show", nic.name()]);
    let driver = negotiated(nic.path());
    same(&["dev", "config", "show", nic.name()]);
    for index in ["0", "1", "6", "7", "8"] {
        same(&["dev", "vstats", "show", nic.name(), "qidx", index]);
    }
    drop(driver);
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn a_disk_is_described_where_iproute2_prints_nothing() {
    lab::sim::require_lab().unwrap();
    let block = SimDevice::block("same-blk").unwrap();
    let text = printed(&bellhop(&["dev", "config", "show", block.name(), "-j"]));
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    let config = &answer["config"][block.name()];
    // Sectors of the simulator's 128 MiB.
    assert_eq!(config["capacity"], 262_144, "{config}");
    assert_eq!(config["read_only"], false);
    let text = printed(&bellhop(&["dev", "config", "show", block.name()]));
    assert!(text.contains(": capacity 262144 "), "{text}");
}
