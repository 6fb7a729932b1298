//! A guest's vDPA NIC: traffic with every way of mapping memory, the control
//! queue, the options of `--vdpa`.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::guest::{BellhopArguments, Guest};
use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::traffic::{Frames, exchange, exchange_counted};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:01";
const OTHER_MAC: &str = "52:54:5e:11:53:0a";

/// A few frames, to check that the NIC works.
const FEW: Frames = Frames {
    count: 100,
    size: 256,
    window: 8,
};

/// 1,000 frames, from the shortest to one that fills the MTU.
fn frames_of_all_sizes(mtu: u64) -> [Frames; 4] {
    [(300, 60), (300, 61), (200, 590), (200, mtu + 14)].map(|(count, size)| Frames {
        count,
        size,
        window: 32,
    })
}

fn traffic_with(mapping: Mapping) {
    require_lab().unwrap();
    let _mapping = OtherMapping::load(mapping).unwrap();
    let net = SimDevice::net("net", MAC, 1400).unwrap();
    let mut guest = Guest::start(&small().vdpa(net.path())).unwrap();
    traffic(&mut guest, &net);
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

fn small() -> BellhopArguments {
    BellhopArguments::small().unwrap().memory("128M")
}

fn traffic(guest: &mut Guest, net: &SimDevice) {
    exchange_counted(guest, "eth0", net, &frames_of_all_sizes(1400)).unwrap();
    // A driver that restarts gets the same memory.
    let rebound = guest.command("rebind 3").unwrap();
    assert_eq!(rebound["rx"], 30, "{rebound}");
}

#[test]
fn traffic_with_pinned_memory() {
    traffic_with(Mapping {
        use_va: false,
        batch_mapping: false,
    });
}

#[test]
fn traffic_with_pinned_memory_in_batches() {
    traffic_with(Mapping {
        use_va: false,
        batch_mapping: true,
    });
}

#[test]
fn traffic_with_shared_virtual_addresses() {
    traffic_with(Mapping {
        use_va: true,
        batch_mapping: false,
    });
}

/// The simulator with its defaults. The device is already open: the VMM inherits it.
#[test]
fn traffic_with_shared_virtual_addresses_in_batches_on_an_inherited_device() {
    require_lab().unwrap();
    let net = SimDevice::net("net", MAC, 1400).unwrap();
    let open = || {
        let mut options = File::options();
        options.read(true).write(true).open(net.path())
    };
    let file = open().unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    let arguments = small().argument("--vdpa", &format!("fd={},id=nic", file.as_raw_fd()));
    let mut guest = Guest::start(&arguments).unwrap();
    // Now only the VMM has it open.
    drop(file);
    open().unwrap_err();
    traffic(&mut guest, &net);
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
    open().unwrap();
}

#[test]
fn an_address_set_by_the_guest_holds_until_its_driver_starts_anew() {
    let net = SimDevice::net("mac", MAC, 1500).unwrap();
    let arguments = small().processors(2);
    let mut guest = Guest::start(&arguments.vdpa(net.path())).unwrap();
    check_features(&guest.ready()["nics"][0]);
    guest.command(&format!("mac {OTHER_MAC}")).unwrap();
    // The device has the address: it filters by it and reports it.
    assert_eq!(net.config().unwrap()["mac"], OTHER_MAC);
    exchange_counted(&mut guest, "eth0", &net, &[FEW]).unwrap();

    let rebound = guest.command("rebind 20").unwrap();
    assert_eq!(rebound["rx"], 200, "{rebound}");
    assert_eq!(rebound["corrupt"], 0, "{rebound}");
    assert_eq!(guest.command("link").unwrap()["nics"][0]["mac"], MAC);
    assert_eq!(net.config().unwrap()["mac"], MAC);
    exchange_counted(&mut guest, "eth0", &net, &[FEW]).unwrap();

    // A reboot does not leave it behind either.
    guest.command(&format!("mac {OTHER_MAC}")).unwrap();
    guest.command("reboot").unwrap();
    let ready = guest.wait_ready(Duration::from_secs(60)).unwrap();
    assert_eq!(ready["nics"][0]["mac"], MAC);
    assert_eq!(net.config().unwrap()["mac"], MAC);
    exchange_counted(&mut guest, "eth0", &net, &[FEW]).unwrap();
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

#[test]
fn two_nics_each_have_their_own_device_and_options() {
    let first = SimDevice::net("first", MAC, 1500).unwrap();
    let second = SimDevice::net("second", "52:54:5e:11:53:02", 1400).unwrap();
    let arguments = small()
        .processors(4)
        .argument(
            "--vdpa",
            &format!("path={},id=one,num_queues=3", first.path().display()),
        )
        .argument(
            "--vdpa",
            &format!("path={},id=two,mac={OTHER_MAC}", second.path().display()),
        );
    let mut guest = Guest::start(&arguments).unwrap();
    let nics = guest.ready()["nics"].clone();
    assert_eq!(
        (&nics[0]["mac"], &nics[0]["mtu"]),
        (&MAC.into(), &1500.into())
    );
    assert_eq!(
        (&nics[1]["mac"], &nics[1]["mtu"]),
        (&OTHER_MAC.into(), &1400.into())
    );
    // The device received the address of the option.
    assert_eq!(second.config().unwrap()["mac"], OTHER_MAC);
    assert_eq!(first.config().unwrap()["mac"], MAC);

    let before = lab::traffic::packets(&second).unwrap();
    exchange_counted(&mut guest, "eth0", &first, &[FEW]).unwrap();
    assert_eq!(lab::traffic::packets(&second).unwrap(), before);
    exchange_counted(&mut guest, "eth1", &second, &[FEW]).unwrap();
    // A reset of one device does not affect the other.
    assert_eq!(guest.command("rebind 1 eth1").unwrap()["rx"], 10);
    exchange(&mut guest, "eth0", FEW).unwrap();
    exchange(&mut guest, "eth1", FEW).unwrap();
    assert_eq!(guest.command("link").unwrap()["nics"][1]["mac"], OTHER_MAC);
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

/// The guest gets the features that the device offers and the VMM supports, and no others.
fn check_features(nic: &serde_json::Value) {
    // Character N of sysfs' attribute is feature bit N.
    let negotiated: Vec<usize> = nic["features"]
        .as_str()
        .unwrap()
        .bytes()
        .enumerate()
        .filter(|(_, bit)| *bit == b'1')
        .map(|(number, _)| number)
        .collect();
    // MTU, MAC, STATUS, CTRL_VQ, CTRL_MAC_ADDR, VERSION_1. Neither ANY_LAYOUT, which VERSION_1
    // implies, nor ACCESS_PLATFORM, which is for the VMM. The VMM's own: GUEST_ANNOUNCE,
    // RING_RESET.
    assert_eq!(negotiated, [3, 5, 16, 17, 21, 23, 32, 40]);
}

#[test]
fn a_wrong_number_of_queues_is_refused() {
    let net = SimDevice::net("queues", MAC, 1500).unwrap();
    let arguments = BellhopArguments::small().unwrap().argument(
        "--vdpa",
        &format!("path={},num_queues=2", net.path().display()),
    );
    let (status, said) = Guest::run_to_end(&arguments, Duration::from_secs(60)).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains("the device has 3 queues and num_queues is 2"),
        "{said}"
    );
}
