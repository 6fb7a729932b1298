//! A NIC without hardware at a queue of a physical NIC (AF_XDP). The driver, igb, runs the XDP
//! program itself. The peer is a guest on a vDPA device of the same switch.

use lab::guest::{BellhopArguments, Guest};
use lab::igb::IgbNic;
use lab::sriov::{SriovNic, VfDevice};
use lab::swnic::Swnic;
use lab::traffic::{Frames, exchange_between, exchange_both_ways};
use rustix::process::{Signal, kill_process};
use serde_json::json;

const MAC: &str = "52:54:00:5e:58:01";

#[test]
fn a_guest_at_a_port_of_igb_reaches_a_guest_on_a_function() {
    let nic = SriovNic::enable(1).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let igb = IgbNic::plug(1).unwrap();
    let words = ["--port", igb.port(), "--queue", "0", "--mac", MAC];
    let software = Swnic::start("lab-sw0", &words).unwrap();
    let small = BellhopArguments::small().unwrap().memory("128M");
    let [mut guest, mut peer] = [software.path(), device.path()]
        .map(|path| Guest::start(&small.clone().vdpa(path)).unwrap());
    assert_eq!(guest.ready()["problems"], json!([]));
    let other = device.function().mac();
    for (count, size, window) in [(300, 60, 32), (300, 1514, 16)] {
        let frames = Frames {
            count,
            size,
            window,
        };
        exchange_between(&mut guest, &mut peer, &other, frames).unwrap();
    }
    exchange_both_ways(&mut guest, &mut peer, [MAC, &other]).unwrap();

    let [_, worker] = software.processes().unwrap();
    kill_process(worker, Signal::KILL).unwrap();
    software.await_other_worker(worker).unwrap();
    exchange_both_ways(&mut guest, &mut peer, [MAC, &other]).unwrap();
    for guest in [guest, peer] {
        assert!(guest.power_off().unwrap().success());
    }
}
