use super::*;
use vdpa_mgmt::topology::{BellhopRun, Class, PostedInterrupt, Queue};

fn empty() -> Topology {
    Topology {
        management: ManagementState::Known,
        all_processes_seen: true,
        physical_functions: vec![],
        mgmtdevs: vec![],
        vdpa_devices: vec![],
    }
}

fn device() -> Device {
    let queue = |index, doorbell| Queue {
        index,
        doorbell,
        posted_interrupt: PostedInterrupt::No,
    };
    Device {
        name: "nic\x1b0".to_owned(),
        class: Some(Class::Network),
        max_vqs: Some(5),
        max_vq_size: Some(256),
        mac: Some([2, 0, 0, 0, 0, 0xab]),
        mtu: Some(1500),
        driver: Some("vhost_vdpa".to_owned()),
        path: Some("/dev/vhost-vdpa-7".into()),
        netdevs: vec![],
        tap: None,
        holders: vec![DeviceHolder {
            pid: 42,
            command: "bellhop".to_owned(),
            executable: Some("/usr/bin/bellhop".into()),
            bellhop: Some(BellhopRun {
                config: Some("web.toml".to_owned()),
                ..BellhopRun::default()
            }),
        }],
        posting_obstacle: Some(PostingObstacle::Software),
        queues: vec![
            queue(0, Doorbell::Mapped),
            queue(1, Doorbell::Mapped),
            queue(2, Doorbell::NotMapped),
            queue(3, Doorbell::Mapped),
            queue(4, Doorbell::NotMapped),
        ],
    }
}

#[test]
fn a_device_is_drawn_with_its_holder() {
    let topology = Topology {
        vdpa_devices: vec![device()],
        ..empty()
    };
    let expected = "\
nic?0: network mac 02:00:00:00:00:ab mtu 1500 max_vqs 5 driver vhost_vdpa
`-- /dev/vhost-vdpa-7
    |-- held by bellhop (PID 42) /usr/bin/bellhop, a virtual machine: config web.toml
    |-- doorbells: mapped of 0-1,3, not mapped of 2,4
    `-- posted interrupts: impossible, the device has no interrupts of its own
";
    assert_eq!(text(&topology, Lines::Ascii), expected);
}

#[test]
fn a_software_nic_is_drawn_with_its_tap() {
    let topology = Topology {
        vdpa_devices: vec![Device {
            tap: Some(Tap {
                netdev: "sw0".to_owned(),
                state: Some("up".to_owned()),
                master: Some("br0".to_owned()),
            }),
            holders: vec![],
            ..device()
        }],
        ..empty()
    };
    let drawn = text(&topology, Lines::Ascii);
    let wanted = "|-- tap sw0: state up master br0\n`-- /dev/vhost-vdpa-7: free\n";
    assert!(drawn.ends_with(wanted), "{drawn}");
}

#[test]
fn a_free_device_is_called_free_only_if_that_is_known() {
    let mut topology = Topology {
        vdpa_devices: vec![Device {
            holders: vec![],
            ..device()
        }],
        ..empty()
    };
    assert!(text(&topology, Lines::Boxes).ends_with("└── /dev/vhost-vdpa-7: free\n"));
    topology.all_processes_seen = false;
    let drawn = text(&topology, Lines::Boxes);
    assert!(
        drawn.contains("└── /dev/vhost-vdpa-7\n") && drawn.contains("as root"),
        "{drawn}"
    );
}

#[test]
fn nothing_points_at_the_doctor() {
    let topology = Topology {
        management: ManagementState::Absent,
        ..empty()
    };
    let drawn = text(&topology, Lines::Ascii);
    assert!(
        drawn.contains("bellhop doctor") && drawn.contains("modprobe vdpa"),
        "{drawn}"
    );
}

#[test]
fn numbers_in_a_row_are_put_together() {
    assert_eq!(show_list([0_u32; 0]), "");
    assert_eq!(show_list([0, 1, 2, 5, u32::MAX]), "0-2,5,4294967295");
}
