//! Tests of the methods of a device, in each state.

use std::fs::File;
use std::sync::Arc;

use super::*;
use crate::iotlb::{DeviceSink, Iotlb, IotlbLimits};
use crate::iova::{DeviceAddress, IovaRange};

/// A device in `state` that refuses each ioctl: its file is not a vhost-vdpa device.
fn refusing(state: State) -> Device {
    let file = Some(Arc::new(File::open("/dev/null").unwrap()));
    Device {
        handle: Handle { file },
        state,
        info: DeviceInfo {
            device_id: 1,
            features: VERSION_1,
            backend_features: BackendFeatures::all(),
            queues: vec![QueueInfo {
                max_size: 16,
                group: None,
                descriptor_group: None,
            }],
            groups: 1,
            address_spaces: 1,
            config_size: 8,
            iova_range: IovaRange::ALL,
        },
        acked: BackendFeatures::all(),
        features: VERSION_1,
    }
}

const STATES: [State; 6] = [
    State::Opened,
    State::Owned,
    State::Negotiated,
    State::Running,
    State::Suspended,
    State::Lost,
];

type Call = fn(&mut Device) -> Result<(), Error>;

fn set_vring(
    device: &mut Device,
    set: fn(&mut Device, u16, &VringConfig<'_>, &[IovaRange]) -> Result<(), Error>,
) -> Result<(), Error> {
    let config = VringConfig {
        size: 16,
        addresses: VringAddresses {
            descriptor: DeviceAddress(0),
            driver: DeviceAddress(0x1000),
            device: DeviceAddress(0x2000),
        },
        base: VringBase::initial(false),
        kick: None,
        call: None,
    };
    set(device, 0, &config, &[IovaRange::ALL])
}

const CALLS: [(Operation, Call); 20] = [
    (Operation::Access, |device| device.status().map(|_| ())),
    (Operation::Access, |device| device.read_config(0, &mut [0])),
    (Operation::Access, |device| device.write_config(0, &[0])),
    (Operation::Access, |device| device.set_config_call(None)),
    (Operation::AssignGroup, |device| device.set_group_asid(0, 0)),
    (Operation::Negotiate, |device| device.negotiate(VERSION_1)),
    (Operation::SetUp, |device| {
        set_vring(device, Device::set_vring)
    }),
    (Operation::Enable, |device| device.enable_vring(0)),
    (Operation::Start, Device::start),
    (Operation::Rebind, |device| device.set_call(0, None)),
    (Operation::Rebind, |device| device.set_kick(0, None)),
    (Operation::Suspend, Device::suspend),
    (Operation::Switch, |device| device.vring_base(0).map(|_| ())),
    (Operation::Switch, |device| device.release_eventfds(0)),
    (Operation::Switch, |device| device.park_vring(0)),
    (Operation::Switch, |device| {
        set_vring(device, Device::switch_vring)
    }),
    (Operation::Resume, Device::resume),
    (Operation::Reset, Device::reset),
    (Operation::Probe, |device| {
        // A refusal is no error: the device does not keep positions.
        assert!(!device.keeps_ring_positions()?);
        Err(Error::other("done"))
    }),
    (Operation::MapDoorbell, |device| {
        // A file that cannot be mapped this way has no doorbell.
        let _ = device.map_doorbell(0)?;
        Err(Error::other("done"))
    }),
];

fn is_unable(error: &Error) -> bool {
    error.to_string().starts_with("the device cannot")
}

#[test]
fn a_state_that_does_not_allow_an_operation_refuses_it_and_stays() {
    for state in STATES {
        for (operation, call) in CALLS {
            let mut device = refusing(state);
            let error = call(&mut device).unwrap_err();
            let unable = is_unable(&error);
            let allowed = state.allow(operation).is_ok();
            assert_eq!(unable, !allowed, "{state:?}: {operation:?}");
            if unable {
                assert_eq!(device.state(), state, "{operation:?}");
            }
        }
        let owned = refusing(state).own().unwrap_err();
        let unable = is_unable(&owned);
        assert_eq!(unable, state != State::Opened, "{state:?}");
    }
}

#[test]
fn a_transition_that_fails_leaves_the_state_that_is_true() {
    let after = |state, call: Call| {
        let mut device = refusing(state);
        assert!(call(&mut device).is_err());
        device.state()
    };
    assert_eq!(after(State::Running, Device::suspend), State::Running);
    assert_eq!(after(State::Suspended, Device::resume), State::Suspended);
    // The failure leads to a reset, which fails here as well.
    let negotiate: Call = |device| device.negotiate(VERSION_1);
    assert_eq!(after(State::Owned, negotiate), State::Lost);
    assert_eq!(after(State::Negotiated, Device::start), State::Lost);
    // Impossible features are rejected before anything is written.
    for features in [0, VERSION_1 | 1] {
        let mut device = refusing(State::Owned);
        assert!(device.negotiate(features).is_err());
        assert_eq!(device.state(), State::Owned);
    }
    for state in [State::Owned, State::Negotiated, State::Running] {
        assert_eq!(after(state, Device::reset), State::Lost);
    }
    let mut device = refusing(State::Running);
    device.acked = BackendFeatures::empty();
    let error = device.suspend().unwrap_err();
    assert_eq!(error.to_string(), "the device cannot suspend");
    assert_eq!(device.state(), State::Running);
    let error = device.enable_vring(0).unwrap_err();
    let text = "the device cannot enable a queue while it runs";
    assert_eq!(error.to_string(), text);
}

#[test]
fn a_closed_device_holds_no_file() {
    let mut device = refusing(State::Running);
    let file = Arc::downgrade(device.handle.file.as_ref().unwrap());
    let sink = DeviceSink {
        handle: device.handle.clone(),
    };
    let limits = IotlbLimits {
        range: IovaRange::ALL,
        address_spaces: 1,
        features: BackendFeatures::all(),
    };
    let mut iotlb = Iotlb::new(sink, limits);
    assert!(!device.is_removed());
    let closed = device.close(&mut iotlb);
    assert!(file.upgrade().is_some());
    drop(closed);
    assert!(file.upgrade().is_none());
    assert_eq!(device.state(), State::Lost);
    assert!(!device.is_removed());
    let error = device.raw().status().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    iotlb.remap_after_reset().unwrap();
    iotlb.batch(0).unwrap_err();
}
