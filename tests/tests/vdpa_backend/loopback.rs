//! Frames through a device with only the `vdpa` library.

use lab::sim::Mapping;
use vdpa::control_queue::queue::ANSWER_TIMEOUT;
use vdpa::control_queue::{Answer, Command, Placement};
use vdpa::uapi::BackendFeatures;

use super::support::frames::{exchange, is_not_delivered};
use super::support::nic::{Rig, reduced};
use super::support::{BROADCAST, FOREIGN, MAC, net, text};

const FRAMES: u32 = 1000;

fn loops_back(mapping: Mapping) {
    for wanted in [BackendFeatures::all(), reduced()] {
        let net = net(mapping);
        let mut rig = Rig::start(&net, wanted);
        assert_eq!(
            rig.device.backend_features() & !wanted,
            BackendFeatures::empty()
        );
        exchange(&mut rig.nic, FRAMES, &[MAC, BROADCAST]);
        is_not_delivered(&mut rig.nic, FOREIGN, MAC);
        // The simulator's own counts: all frames to us, none to the other station.
        let received = net.vstats(0).unwrap();
        assert_eq!(received["rx packets"], FRAMES + 2, "{received}");
        assert_eq!(received["rx drops"], 2, "{received}");
        drop(rig);
    }
}

#[test]
fn frames_loop_back_with_pinned_pages_one_by_one() {
    loops_back(Mapping::PINNED_ONE_BY_ONE);
}

#[test]
fn frames_loop_back_with_pinned_pages_in_batches() {
    loops_back(Mapping::PINNED);
}

#[test]
fn frames_loop_back_with_shared_addresses_one_by_one() {
    loops_back(Mapping {
        use_va: true,
        batch_mapping: false,
    });
}

#[test]
fn frames_loop_back_with_shared_addresses_in_batches() {
    loops_back(Mapping::DEFAULT);
}

/// A MAC address is set and used, and commands that the device lacks are refused.
fn commands_are_answered(rig: &mut Rig) {
    let mut execute = |command: &Command| rig.control.execute(command, ANSWER_TIMEOUT).unwrap();
    // First, because of the simulator. If two commands come in one turn of its worker, it gives an
    // unknown command the previous answer (`vdpasim_handle_cvq` sets its `status` once).
    assert_eq!(execute(&Command::VlanAdd(5)), Answer::Err);
    assert_eq!(execute(&Command::VlanDel(5)), Answer::Err);
    assert_eq!(execute(&Command::MacAddrSet(FOREIGN)), Answer::Ok);
    let mut shown = [0; 6];
    rig.device.read_config(0, &mut shown).unwrap();
    assert_eq!(shown, FOREIGN);
    exchange(&mut rig.nic, 20, &[FOREIGN]);
    is_not_delivered(&mut rig.nic, MAC, FOREIGN);
}

#[test]
fn the_control_queue_works_in_its_own_address_space() {
    for mapping in Mapping::ALL {
        let net = net(mapping);
        let mut rig = Rig::start(&net, BackendFeatures::all());
        assert!(
            matches!(rig.placement, Placement::OwnAddressSpace { asid: 1, .. }),
            "{:?}",
            rig.placement
        );
        commands_are_answered(&mut rig);
        assert_eq!(net.config().unwrap()["mac"], text(FOREIGN));
        drop(rig);
    }
}

#[test]
fn the_control_queue_works_beside_guest_memory() {
    for mapping in Mapping::ALL {
        let net = net(mapping);
        let mut rig = Rig::start(&net, reduced());
        assert_eq!(rig.placement, Placement::Shared);
        commands_are_answered(&mut rig);
        assert_eq!(net.config().unwrap()["mac"], text(FOREIGN));
        drop(rig);
    }
}
