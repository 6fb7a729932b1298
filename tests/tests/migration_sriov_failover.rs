//! Net failover: a guest drives a function by VFIO, and a vDPA NIC with the same MAC address stands
//! by. A migration has the guest eject the function, moves the guest with its NIC, and plugs a
//! function in at the destination. The peer is a guest on a third device of the same switch.
//!
//! Linux pairs the NIC only with a device whose driver is bound to the PCI function itself. So the
//! primary is a function of the rig's igb NIC. The guest's counters show the device that it uses.

mod moving;

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use lab::guest::{BellhopArguments, Guest};
use lab::igb::IgbNic;
use lab::process::output;
use lab::sriov::{SriovNic, VfDevice};
use lab::traffic::{Frames, exchange_between};
use moving::{Host, NOTICE};
use serde_json::{Value, json};

/// Frames in each direction.
const COUNT: u64 = 300;

/// The function as the guest's primary, with the NIC of [`Host`] as its standby.
fn vfio(address: &str) -> String {
    format!("host={address},id=vf,standby=nic")
}

/// Checked frames in both directions, which the guest sends by its primary.
#[track_caller]
fn talk_by_primary(guest: &mut Guest, peer: &mut Guest, [mac, other]: [&str; 2]) {
    let frames = Frames {
        count: COUNT,
        size: 256,
        window: 16,
    };
    let before = Counters::of(guest);
    exchange_between(guest, peer, other, frames).unwrap();
    exchange_between(peer, guest, mac, frames).unwrap();
    let after = Counters::of(guest);
    let shown = format!("{before:?} {after:?}");
    for (before, after) in [
        (before.primary, after.primary),
        (before.failover, after.failover),
    ] {
        for (before, after) in before.iter().zip(after) {
            assert!(after - before >= 2 * COUNT, "{shown}");
        }
    }
    assert_eq!(before.standby, after.standby, "{shown}");
}

/// Frames that each network device of the guest has received and sent.
#[derive(Debug)]
struct Counters {
    failover: [u64; 2],
    standby: [u64; 2],
    primary: [u64; 2],
}

impl Counters {
    #[track_caller]
    fn of(guest: &mut Guest) -> Self {
        let shown = guest.command("link").unwrap();
        let of = |driver: &str, master: &Value| {
            let mut nics = shown["nics"].as_array().unwrap().iter();
            let nic = nics.find(|nic| nic["driver"] == driver && nic["master"] == *master);
            let nic = nic.unwrap_or_else(|| panic!("{driver} below {master}: {shown}"));
            ["rx_packets", "tx_packets"].map(|name| nic[name].as_u64().unwrap())
        };
        Self {
            failover: of("virtio_net", &Value::Null),
            standby: of("virtio_net", &"eth0".into()),
            primary: of("igbvf", &"eth0".into()),
        }
    }
}

/// Waits until the guest on this host has its primary, with a link. The failover device, the
/// standby and the primary are network devices of the guest.
#[track_caller]
fn await_primary(guest: &mut Guest, host: &Host) {
    let begin = Instant::now();
    loop {
        let functions = host.client().get("/v1/vm/vfio").unwrap();
        let plugged = functions["items"][0]["state"] == "Plugged";
        let shown = guest.command("link").unwrap();
        let mut nics = shown["nics"].as_array().unwrap().iter();
        let enslaved = nics.any(|nic| {
            nic["driver"] == "igbvf" && nic["master"] == "eth0" && nic["operstate"] == "up"
        });
        if plugged && enslaved {
            assert_eq!(shown["nics"].as_array().map(Vec::len), Some(3), "{shown}");
            return;
        }
        let failed = format!("{functions}\n{shown}\n{}", guest.console());
        assert!(begin.elapsed() < NOTICE, "{failed}");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_guest_with_a_function_migrates_on_its_standby() {
    let nic = SriovNic::enable(3).unwrap();
    let igb = IgbNic::plug(1).unwrap();
    let primary = igb.vf(0).unwrap();
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    primary.bind("vfio-pci").unwrap();
    let [first, second, third] =
        [0, 1, 2].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let (mac, other) = (primary.mac(), third.function().mac());
    let options = format!("mac={mac},standby=on");
    let here = Host::new("here", first.path()).nic_options(&options);
    let there = Host::new("there", second.path()).nic_options(&options);
    let nowhere = Host::new("nowhere", second.path());
    let small = BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&small.vdpa(third.path())).unwrap();
    peer.command("echo-on").unwrap();

    let address = primary.address();
    let stock = BellhopArguments::stock().unwrap().memory("256M");
    let mut guest = here.boot(stock.argument("--vfio", &vfio(address)));
    await_primary(&mut guest, &here);
    peer.command("echo-off").unwrap();
    talk_by_primary(&mut guest, &mut peer, [&mac, &other]);

    // The guest gets its primary back if it stays.
    here.send(&nowhere, json!({}));
    let status = here.ended(&mut guest);
    assert_eq!(status["phase"], "Stayed", "{status}");
    await_primary(&mut guest, &here);
    talk_by_primary(&mut guest, &mut peer, [&mac, &other]);

    // There, under traffic, with the same function as the primary of both hosts.
    peer.command("echo-on").unwrap();
    let flood = format!("flood-on 300 16 eth0 to {other}");
    guest.command(&flood).unwrap();
    let before = Counters::of(&mut guest);
    let waiting = there.wait_as(|command| {
        command.args(["--vfio", &vfio(address)]);
    });
    let (mut guest, status) = moving::move_to_waiting(guest, waiting, &here, &there);
    assert_eq!(status["phase"], "Moved", "{status}");
    await_primary(&mut guest, &there);
    let after = Counters::of(&mut guest);
    for (before, after) in before.standby.iter().zip(after.standby) {
        assert!(after > *before, "the standby carried no frame meanwhile");
    }
    let flooded = guest.command("flood-off").unwrap();
    for wrong in ["corrupt", "duplicate"] {
        assert_eq!(flooded[wrong], 0, "{wrong}: {flooded}");
    }
    assert!(flooded["rx"].as_u64() > Some(300), "{flooded}");
    peer.command("echo-off").unwrap();
    talk_by_primary(&mut guest, &mut peer, [&mac, &other]);
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
}

#[test]
fn a_standby_that_is_none_is_refused() {
    let nic = SriovNic::enable(2).unwrap();
    let function = nic.vf(0).unwrap();
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    function.bind("vfio-pci").unwrap();
    let device = VfDevice::add(nic.vf(1).unwrap()).unwrap();
    for options in ["", ",standby=on"] {
        let named = if options.is_empty() { "nic" } else { "other" };
        let vdpa = format!("id=nic,path={}{options}", device.path().display());
        let arguments = BellhopArguments::small()
            .unwrap()
            .argument("--vdpa", &vdpa)
            .argument(
                "--vfio",
                &format!("host={},standby={named}", function.address()),
            );
        let message = arguments.refused().unwrap();
        assert!(message.contains("with standby=on"), "{message}");
    }
    function.bind("virtio-pci").unwrap();
}
