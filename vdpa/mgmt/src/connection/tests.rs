#![allow(clippy::unwrap_used, reason = "tests")]
use netlink_packet_core::Emitable;
use proptest::prelude::*;

use super::super::config::ClassConfig;
use super::super::uapi::*;
use super::super::vendor_stats::QueueType;
use super::*;
use crate::netlink::message::Message;

fn message(command: u8, attributes: &[DefaultNla]) -> Message {
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    Message {
        message_type: 30,
        header: vec![command, 1, 0, 0],
        attributes: bytes,
    }
}

fn number32(kind: u16, number: u32) -> DefaultNla {
    value(kind, &number.to_ne_bytes())
}

fn number64(kind: u16, number: u64) -> DefaultNla {
    value(kind, &number.to_ne_bytes())
}

fn number16(kind: u16, number: u16) -> DefaultNla {
    value(kind, &number.to_ne_bytes())
}

fn device() -> Message {
    message(
        VDPA_CMD_DEV_NEW,
        &[
            string(VDPA_ATTR_MGMTDEV_BUS_NAME, "pci"),
            string(VDPA_ATTR_MGMTDEV_DEV_NAME, "0000:01:00.1"),
            string(VDPA_ATTR_DEV_NAME, "nic0"),
            number32(VDPA_ATTR_DEV_ID, 1),
            number32(VDPA_ATTR_DEV_VENDOR_ID, 0x15b3),
            number32(VDPA_ATTR_DEV_MAX_VQS, 3),
            number16(VDPA_ATTR_DEV_MAX_VQ_SIZE, 256),
            // An attribute of a future kernel.
            value(999, b"new"),
        ],
    )
}

fn config() -> Message {
    message(
        VDPA_CMD_DEV_CONFIG_GET,
        &[
            string(VDPA_ATTR_DEV_NAME, "nic0"),
            number32(VDPA_ATTR_DEV_ID, 1),
            // The padding of 64-bit values.
            value(0, &[]),
            number64(VDPA_ATTR_DEV_FEATURES, 1 << 32),
            value(VDPA_ATTR_DEV_NET_CFG_MACADDR, &[2, 0, 0, 0, 0, 1]),
            number16(VDPA_ATTR_DEV_NET_STATUS, 3),
            number16(VDPA_ATTR_DEV_NET_CFG_MTU, 1500),
        ],
    )
}

fn stats(features: u64, pairs: Option<u16>, index: u32) -> Message {
    let mut list = vec![
        string(VDPA_ATTR_DEV_NAME, "nic0"),
        number32(VDPA_ATTR_DEV_ID, 1),
        number64(VDPA_ATTR_DEV_NEGOTIATED_FEATURES, features),
    ];
    list.extend(pairs.map(|pairs| number16(VDPA_ATTR_DEV_NET_CFG_MAX_VQP, pairs)));
    list.extend([
        number32(VDPA_ATTR_DEV_QUEUE_INDEX, index),
        string(VDPA_ATTR_DEV_VENDOR_ATTR_NAME, "received_desc"),
        number64(VDPA_ATTR_DEV_VENDOR_ATTR_VALUE, u64::MAX),
        string(VDPA_ATTR_DEV_VENDOR_ATTR_NAME, "completed_desc"),
        number64(VDPA_ATTR_DEV_VENDOR_ATTR_VALUE, 2),
    ]);
    message(VDPA_CMD_DEV_VSTATS_GET, &list)
}

#[test]
fn a_device_is_read() {
    let read = VdpaDevice::of(&device()).unwrap();
    assert_eq!((read.name.as_str(), read.device_id), ("nic0", 1));
    assert_eq!(read.mgmtdev.to_string(), "pci/0000:01:00.1");
    assert_eq!(read.max_vq_size, Some(256));
    assert_eq!(read.min_vq_size, None);
}

#[test]
fn configurations_are_read() {
    let read = DeviceConfig::of(&config()).unwrap();
    assert_eq!(read.device_features, Some(1 << 32));
    assert_eq!(read.negotiated_features, None);
    let ClassConfig::Net(net) = read.class else {
        panic!("{read:?}")
    };
    assert_eq!((net.link_up(), net.announce()), (Some(true), Some(true)));
    assert_eq!((net.mtu, net.max_vq_pairs), (Some(1500), None));
    assert_eq!(net.mac, Some([2, 0, 0, 0, 0, 1]));

    let block = message(
        VDPA_CMD_DEV_CONFIG_GET,
        &[
            string(VDPA_ATTR_DEV_NAME, "disk0"),
            number32(VDPA_ATTR_DEV_ID, 2),
            number64(VDPA_ATTR_DEV_BLK_CFG_CAPACITY, 262_144),
            value(VDPA_ATTR_DEV_BLK_READ_ONLY, &[1]),
            value(VDPA_ATTR_DEV_BLK_FLUSH, &[0]),
        ],
    );
    let ClassConfig::Block(block) = DeviceConfig::of(&block).unwrap().class else {
        panic!()
    };
    assert_eq!(block.capacity, Some(262_144));
    assert_eq!((block.read_only, block.flush), (Some(true), Some(false)));
    assert_eq!(block.seg_max, None);
}

#[test]
fn counters_keep_their_order_and_queues_their_purpose() {
    let read = VendorStats::of(&stats(1 << 17, None, 2)).unwrap();
    let names: Vec<&str> = read.counters.iter().map(|one| one.0.as_str()).collect();
    assert_eq!(names, ["received_desc", "completed_desc"]);
    assert_eq!(read.counters[0].1, u64::MAX);
    for (features, pairs, index, expected) in [
        (1 << 17, None, 0, QueueType::Receive),
        (1 << 17, None, 1, QueueType::Transmit),
        (1 << 17, None, 2, QueueType::Control),
        (0, None, 2, QueueType::Receive),
        (1 << 17 | 1 << 22, Some(4), 8, QueueType::Control),
        (1 << 17 | 1 << 22, Some(4), 2, QueueType::Receive),
        (u64::MAX, Some(u16::MAX), u32::MAX, QueueType::Transmit),
    ] {
        let read = VendorStats::of(&stats(features, pairs, index)).unwrap();
        assert_eq!(read.queue_type(), Some(expected));
    }
    let nameless = message(
        VDPA_CMD_DEV_VSTATS_GET,
        &[number64(VDPA_ATTR_DEV_VENDOR_ATTR_VALUE, 2)],
    );
    assert!(VendorStats::of(&nameless).is_err());
}

#[test]
fn missing_or_long_attributes_are_errors() {
    for missing in [
        VDPA_ATTR_DEV_NAME,
        VDPA_ATTR_MGMTDEV_DEV_NAME,
        VDPA_ATTR_DEV_ID,
    ] {
        let all = [
            string(VDPA_ATTR_MGMTDEV_DEV_NAME, "m"),
            string(VDPA_ATTR_DEV_NAME, "d"),
            number32(VDPA_ATTR_DEV_ID, 1),
        ];
        let some: Vec<DefaultNla> = all
            .into_iter()
            .filter(|one| netlink_packet_core::Nla::kind(one) != missing)
            .collect();
        let error = VdpaDevice::of(&message(VDPA_CMD_DEV_NEW, &some)).unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
    }
    let long = message(
        VDPA_CMD_DEV_NEW,
        &[
            string(VDPA_ATTR_MGMTDEV_DEV_NAME, "m"),
            string(VDPA_ATTR_DEV_NAME, "d"),
            number64(VDPA_ATTR_DEV_ID, 1),
        ],
    );
    assert!(VdpaDevice::of(&long).is_err());
    let many = message(VDPA_CMD_DEV_NEW, &vec![string(900, ""); 2000]);
    assert!(VdpaDevice::of(&many).is_err());
}

#[test]
fn an_answer_has_one_entry() {
    let read = |answer: &[Message]| family::one(answer, VDPA_CMD_DEV_NEW, VdpaDevice::of);
    assert!(read(&[device()]).is_ok());
    assert!(read(&[config(), device()]).is_ok());
    for answer in [vec![], vec![device(), device()], vec![config()]] {
        assert!(read(&answer).is_err());
    }
}

#[test]
fn attributes_cut_anywhere_are_errors_or_fewer() {
    for whole in [device(), config(), stats(1, Some(1), 0)] {
        for length in 0..whole.attributes.len() {
            let cut = Message {
                attributes: whole.attributes[..length].to_vec(),
                ..whole.clone()
            };
            // A read stays within the rest of the list.
            let _ = (VdpaDevice::of(&cut), DeviceConfig::of(&cut));
            let _ = (VendorStats::of(&cut), MgmtDevice::of(&cut));
            let _ = family::number(std::slice::from_ref(&cut), "vdpa");
        }
    }
}

proptest! {
    #[test]
    fn any_attributes_do_no_harm(
        mut attributes in prop::collection::vec(any::<u8>(), 0..200),
        kinds in prop::collection::vec(1_u8..40, 0..20),
    ) {
        // Lists with correct lengths and known types.
        let mut framed = Vec::new();
        for kind in kinds {
            let end = attributes.len().min(usize::from(kind) % 10);
            let value: Vec<u8> = attributes.drain(..end).collect();
            let length = u16::try_from(value.len() + 4).unwrap();
            framed.extend(length.to_ne_bytes());
            framed.extend(u16::from(kind).to_ne_bytes());
            framed.extend(&value);
            framed.resize(framed.len().next_multiple_of(4), 0);
        }
        framed.extend(attributes);
        let hostile = Message { message_type: 16, header: vec![1, 1, 0, 0], attributes: framed };
        let _ = (VdpaDevice::of(&hostile), DeviceConfig::of(&hostile));
        let _ = (VendorStats::of(&hostile), MgmtDevice::of(&hostile));
        let _ = family::number(std::slice::from_ref(&hostile), "vdpa");
    }
}

fn add(mgmtdev: &MgmtDeviceName) -> Operation<'_> {
    let name = "nic0";
    Operation::Add { name, mgmtdev }
}

#[test]
fn refusals_become_remedies() {
    let mgmtdev = "m".parse().unwrap();
    let add = || add(&mgmtdev);
    let sentence = |operation: Operation<'_>, errno, words| {
        refused(&operation, Refusal::of(errno, words)).to_string()
    };
    let delete = || Operation::Delete("nic0");
    assert!(sentence(delete(), libc::ENODEV, None).contains("bellhop dev show"));
    assert!(sentence(delete(), libc::EPERM, None).contains("CAP_NET_ADMIN"));
    assert!(sentence(add(), libc::ENODEV, None).contains("bellhop mgmtdev show"));
    assert!(sentence(add(), libc::EEXIST, None).contains("nic0 is taken"));
    assert_eq!(sentence(add(), libc::EINVAL, None), "cannot add nic0 on m");
    let words = Some("vdpa: Some provided attributes are not supported: 0x3000");
    assert!(sentence(add(), libc::EOPNOTSUPP, words).contains("mtu, max_vqp"));
    for words in [None, Some("0x"), Some("0x1"), Some("not supported")] {
        let text = sentence(add(), libc::EOPNOTSUPP, words);
        assert_eq!(text, "cannot add nic0 on m");
    }
    let stats = Operation::ShowVendorStats {
        name: "nic0",
        queue_index: 1,
    };
    assert!(sentence(stats, libc::EAGAIN, None).contains("no driver"));
}

#[test]
fn the_source_is_the_kernels_answer_and_printed_once() {
    let error = refused(
        &add(&"m".parse().unwrap()),
        Refusal::of(libc::EINVAL, Some("vdpa: why")),
    );
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("vdpa: why"));
    assert!(!error.to_string().contains("why"));
}
