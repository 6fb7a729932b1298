//! The device's configurable abilities, and the effect of each.

use lab::labnic::{self, Labnic};
use vdpa::control_queue::Command;
use vdpa::uapi::BackendFeatures;

use super::client::{Client, Setup, frame, open};
use super::{A, B, C, add, count, exchange, kernel_is_well, two};

#[test]
fn every_ability_can_be_off_and_is_seen() {
    let labnic = Labnic::load(&[]).unwrap();
    let all = labnic.add("all", &["max_vqp", "8"]).unwrap();
    let (_file, device, _iotlb) = open(all.path());
    let info = device.info().clone();
    assert_eq!(info.backend_features, BackendFeatures::all());
    assert_eq!((info.groups, info.address_spaces), (3, 3));
    assert_eq!(info.queue_count(), 17);
    let groups = |queue: usize| {
        (
            info.queues[queue].group,
            info.queues[queue].descriptor_group,
        )
    };
    assert_eq!(groups(0), (Some(0), Some(2)));
    assert_eq!(groups(15), (Some(0), Some(2)));
    assert_eq!(groups(16), (Some(1), Some(1)));
    assert_eq!(info.iova_range.last(), (1 << 48) - 1);
    for (parameter, feature) in [
        ("suspend", BackendFeatures::SUSPEND),
        ("resume", BackendFeatures::RESUME),
        (
            "enable_after_driver_ok",
            BackendFeatures::ENABLE_AFTER_DRIVER_OK,
        ),
        ("desc_group", BackendFeatures::DESC_ASID),
        ("iotlb_persist", BackendFeatures::IOTLB_PERSIST),
    ] {
        labnic.set(parameter, "0").unwrap();
        let one = labnic.add("off", &["max_vqp", "8"]).unwrap();
        labnic.set(parameter, "1").unwrap();
        let (_file, device, _iotlb) = open(one.path());
        let expected = BackendFeatures::all() - feature;
        assert_eq!(device.info().backend_features, expected, "{parameter}");
    }
    for (parameter, bit) in [
        ("event_idx", 29),
        ("indirect", 28),
        ("in_order", 35),
        ("mrg_rxbuf", 15),
        ("notification_data", 38),
    ] {
        let other = if parameter == "notification_data" {
            "1"
        } else {
            "0"
        };
        labnic.set(parameter, other).unwrap();
        let one = labnic.add("off", &["max_vqp", "8"]).unwrap();
        labnic
            .set(parameter, if other == "0" { "1" } else { "0" })
            .unwrap();
        let (_file, device, _iotlb) = open(one.path());
        assert_eq!(
            device.info().features ^ info.features,
            1 << bit,
            "{parameter}"
        );
    }
    labnic.set("mq", "0").unwrap();
    assert!(labnic.add("off", &["max_vqp", "8"]).is_err());
    labnic.set("cvq_group", "0").unwrap();
    labnic.set("address_spaces", "1").unwrap();
    labnic.set("queue_size", "1024").unwrap();
    labnic.set("iova_bits", "40").unwrap();
    let one = labnic.add("off", &[]).unwrap();
    let (_file, device, _iotlb) = open(one.path());
    let info = device.info();
    assert_eq!((info.groups, info.address_spaces), (2, 1));
    assert_eq!(info.queues[0].max_size, 1024);
    assert_eq!(info.iova_range.last(), (1 << 40) - 1);
}

#[test]
fn wrong_parameters_are_refused() {
    let labnic = Labnic::load(&[]).unwrap();
    for (parameter, wrong, right) in [
        ("ring_state", "index", "avail"),
        ("apply", "never", "enable"),
        ("completion", "late", "immediate"),
        ("cvq", "rich", "full"),
        ("faults", "wrong_base,none_such", ""),
        ("address_spaces", "5", "3"),
        ("queue_size", "100", "256"),
        ("queue_size", "2048", "256"),
        ("rx_prefetch", "33", "0"),
        ("iova_bits", "65", "48"),
        ("completion_ms", "10001", "20"),
    ] {
        labnic.set(parameter, wrong).unwrap();
        assert!(labnic.add("bad", &[]).is_err(), "{parameter} {wrong}");
        labnic.set(parameter, right).unwrap();
    }
    for attributes in [
        ["max_vqp", "9"],
        ["mtu", "67"],
        ["mac", "01:00:00:00:00:01"],
    ] {
        assert!(labnic.add("bad", &attributes).is_err(), "{attributes:?}");
    }
    labnic.add("good", &[]).unwrap();
    kernel_is_well();
}

#[test]
fn rings_can_have_their_own_address_space() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let setup = Setup {
        rings_asid: 2,
        ..Setup::default()
    };
    let mut a = Client::with(&one, &setup);
    let mut b = Client::with(&other, &setup);
    exchange(&mut a, &mut b, 100);
    b.obey(&Command::MacAddrSet(C));
    kernel_is_well();
}

#[test]
fn mappings_survive_a_reset_or_do_not() {
    for (persist, set_map) in [("1", "1"), ("1", "0"), ("0", "1"), ("0", "0")] {
        let parameters = [("iotlb_persist", persist), ("set_map", set_map)];
        let labnic = Labnic::load(&parameters).unwrap();
        let (one, other) = two(&labnic);
        let mut a = Client::start(&one);
        let mut b = Client::start(&other);
        exchange(&mut a, &mut b, 5);
        assert_eq!(b.iotlb.survives_reset(), persist == "1");
        let mut b = b.restart_without_mapping();
        if persist == "1" {
            exchange(&mut a, &mut b, 5);
        } else {
            b.send(0, &frame(A, B, 1, 100));
            a.receives_nothing();
            assert_ne!(count(&other, 1, "tx errors"), 0);
        }
    }
    kernel_is_well();
}

#[test]
fn a_queue_enabled_late_works_only_where_that_can_be() {
    let labnic = Labnic::load(&[]).unwrap();
    let one = add(&labnic, "a", A);
    labnic.set("enable_after_driver_ok", "0").unwrap();
    let other = add(&labnic, "b", B);
    let setup = Setup {
        disabled: Some(1),
        ..Setup::default()
    };
    let mut a = Client::with(&one, &setup);
    let mut b = Client::with(&other, &setup);
    a.enable_anyway(1);
    b.enable_anyway(1);
    a.send(0, &frame(B, A, 1, 100));
    assert_eq!(b.receive(0), frame(B, A, 1, 100));
    b.send(0, &frame(A, B, 1, 100));
    a.receives_nothing();
    assert_eq!(labnic::counter(&one, "ignored_enables").unwrap(), 0);
    assert_eq!(labnic::counter(&other, "ignored_enables").unwrap(), 1);
    kernel_is_well();
}
