//! An application in the guest drives its NIC by VFIO, at addresses of its own choice behind a
//! virtio-iommu. Its VM migrates to another process and back while it exchanges frames.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod guest_nics;
mod moving;

use std::time::Duration;

use guest_nics::wait_nics;
use lab::guest::BellhopArguments;
use lab::messages::messages;
use lab::sim::{SimDevice, require_lab};
use lab::traffic::{Frames, check_traffic, exchange_counted, flood_off, flood_on};
use moving::{DOWNTIME, Host, MAPPINGS, SHADOW_QUEUES, move_guest_verified};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:04";

const SOME: Frames = Frames {
    count: 100,
    size: 1514,
    window: 16,
};

/// The application maps so many pieces of 2 MiB. The simulator suspends, so no frame may be lost.
fn there_and_back(pieces: u64, memory: &str, tracking: &str, downtime: Duration) {
    require_lab().unwrap();
    let devices = ["app1", "app2"].map(|name| SimDevice::net(name, MAC, 1500).unwrap());
    let [first, second] = &devices;
    let host = |device: &SimDevice| Host::new(device.name(), device.path());
    let [here, there] = [host(first), host(second)].map(|host| host.nic_options("iommu=on"));
    let arguments = BellhopArguments::stock().unwrap().memory(memory);
    let mut guest = here.boot(arguments.cmdline("iommu.passthrough=0"));
    wait_nics(&mut guest, &[MAC]);

    let started = guest.command(&format!("vfio-on {pieces}")).unwrap();
    let messages_before = messages(&mut guest).unwrap();
    let mapped = |host: &Host| {
        let iommu = host.client().get("/v1/vm/iommu").unwrap();
        iommu["mappings"].as_u64()
    };
    let mappings = mapped(&here);
    assert!(mappings >= started["mapped"].as_u64(), "{mappings:?}");
    for (from, to, device) in [(&here, &there, second), (&there, &here, first)] {
        flood_on(&mut guest, "vfio", MAC);
        let (moved, status) = move_guest_verified(guest, from, to, tracking, downtime);
        println!("{status}");
        guest = moved;
        flood_off(&mut guest);
        assert_eq!(mapped(to), mappings);
        exchange_counted(&mut guest, "vfio", device, &[SOME]).unwrap();
    }
    assert_eq!(messages(&mut guest).unwrap(), messages_before);

    guest.command("vfio-off").unwrap();
    guest.command("up eth0").unwrap();
    check_traffic(&mut guest, first);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn an_application_with_128_mib_mapped_moves_with_shadow_queues() {
    there_and_back(64, "384M", SHADOW_QUEUES, DOWNTIME);
}

#[test]
fn an_application_with_16_mib_mapped_moves_with_direct_queues() {
    // An emulated host takes longer than the default limit to send the mapped pages once more.
    there_and_back(8, "192M", MAPPINGS, Duration::from_secs(60));
}
