//! A guest whose NIC is behind a virtio-iommu, on vp_vdpa: virtual functions behind an IOMMU of the
//! host. Its kernel or an application with VFIO exchanges frames with another guest, while the VM
//! migrates. The kernel also rebinds its driver.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod guest_nics;
mod moving;

use std::time::Duration;

use guest_nics::wait_nics;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::rig::FIRST_PACKED_FUNCTION as PACKED;
use lab::sriov::{SriovNic, VfDevice};
use lab::traffic::all_returned;
use moving::{DOWNTIME, Host, SHADOW_QUEUES, move_guest_verified};
use serde_json::Value;

/// Frames in flight at once.
const WINDOW: u64 = 8;
/// Resets of the device by a migration: when shadow queues begin, when the guest stops, and when it
/// starts at the destination. Each may lose a window of frames.
const RESETS: u64 = 3;
/// The guest gives up the frames in flight after so many seconds, and sends as many again.
const GIVE_UP_S: u64 = 2;
/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(240);

/// The most frames that a migration may lose. The guest's clock counts its downtime.
fn lost_at_most(status: &Value) -> u64 {
    let downtime = status["downtime_ms"].as_f64().unwrap() / 1000.0;
    let given_up = Duration::from_secs_f64(downtime).as_secs() / GIVE_UP_S;
    WINDOW * (2 * RESETS + given_up)
}

#[track_caller]
fn assert_intact(answer: &Value, may_lose: u64) {
    println!("{answer}");
    assert!(answer["rx"].as_u64() > Some(0), "{answer}");
    for wrong in ["corrupt", "duplicate"] {
        assert_eq!(answer[wrong], 0, "{wrong}: {answer}");
    }
    assert!(answer["lost"].as_u64().unwrap() <= may_lose, "{answer}");
}

/// Frames to the other guest and back, with nothing else under way. `nic`: the kernel's NIC or the
/// application's.
#[track_caller]
fn exchange(guest: &mut Guest, nic: &str, peer: &str) {
    let line = format!("frames 200 590 {WINDOW} {nic} to {peer}");
    let answer = guest.command_within(&line, LIMIT).unwrap();
    all_returned(&answer, 200).unwrap();
}

/// Boots a guest on the first function and its peer on the third one. `begin` starts what exchanges
/// the frames, and returns its name. Then the guest migrates to the second function and back.
fn moves_between(functions: [usize; 3], memory: &str, begin: fn(&mut Guest, &str) -> &'static str) {
    let nic = SriovNic::enable(4).unwrap();
    let devices = functions.map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let [first, second, third] = &devices;
    let mut peer = Guest::start(&BellhopArguments::small().unwrap().vdpa(third.path())).unwrap();
    peer.command("echo-on").unwrap();
    // The switch may know its address at a port that another test has moved it to.
    peer.command("pace 1 64 0").unwrap();
    let other = third.function().mac();
    let host =
        |name: &str, device: &VfDevice<'_>| Host::new(name, device.path()).nic_options("iommu=on");
    let [here, there] = [host("here", first), host("there", second)];

    let words = "iommu.passthrough=0 iommu.strict=0";
    let stock = BellhopArguments::stock().unwrap();
    let arguments = stock.memory(memory).cmdline(words);
    let mut guest = here.boot(arguments);
    let mac = first.function().mac();
    wait_nics(&mut guest, &[&mac]);
    let info = guest.command("info").unwrap();
    assert_eq!(info["nics"][0]["iommu"], "DMA-FQ", "{info}");
    exchange(&mut guest, "eth0", &other);
    let name = begin(&mut guest, &other);
    exchange(&mut guest, name, &other);
    let messages_before = messages(&mut guest).unwrap();

    let flood = format!("flood-on 590 {WINDOW} {name} to {other}");
    for (from, to) in [(&here, &there), (&there, &here)] {
        guest.command(&flood).unwrap();
        // A function cannot suspend.
        let (moved, status) = move_guest_verified(guest, from, to, SHADOW_QUEUES, DOWNTIME);
        println!("{status}");
        guest = moved;
        let came = guest.command_within("flood-off", LIMIT).unwrap();
        assert_intact(&came, lost_at_most(&status));
        exchange(&mut guest, name, &other);
    }
    assert_eq!(messages(&mut guest).unwrap(), messages_before);
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
}

/// The kernel's driver maps its buffers again.
fn rebind(guest: &mut Guest, other: &str) -> &'static str {
    let line = format!("rebind 2 to {other}");
    let rebound = guest.command_within(&line, LIMIT).unwrap();
    assert_eq!(rebound["corrupt"], 0, "{rebound}");
    "eth0"
}

// The destination compares all memory with a digest, which takes an unoptimized build long.

#[test]
fn a_guest_with_split_rings_moves_there_and_back() {
    moves_between([0, 1, 2], "128M", rebind);
}

#[test]
fn a_guest_with_packed_rings_moves_there_and_back() {
    moves_between([PACKED, PACKED + 1, 0], "128M", rebind);
}

/// An application with addresses of its own choice.
#[test]
fn an_application_that_talks_with_another_guest_moves_there_and_back() {
    moves_between([0, 1, 2], "192M", |guest, _| {
        guest.command("vfio-on 16").unwrap();
        "vfio"
    });
}
