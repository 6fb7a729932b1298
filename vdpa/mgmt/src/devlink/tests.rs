#![allow(clippy::unwrap_used, reason = "tests")]
use netlink_packet_core::{DefaultNla, Emitable, Nla};
use proptest::prelude::*;

use super::events::Event;
use super::operation::{Operation, no_instance, refused};
use super::uapi::*;
use super::*;
use crate::netlink::error::{Malformed, Refusal};
use crate::netlink::exchange::notifications;
use crate::netlink::family;
use crate::netlink::message::{Message, Mode, Protocol, Request, nested_flagged, string, value};

fn message(command: u8, attributes: &[DefaultNla]) -> Message {
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    Message {
        message_type: 30,
        header: vec![command, 1, 0, 0],
        attributes: bytes,
    }
}

fn n8(kind: u16, number: u8) -> DefaultNla {
    value(kind, &[number])
}

fn n16(kind: u16, number: u16) -> DefaultNla {
    value(kind, &number.to_ne_bytes())
}

fn n32(kind: u16, number: u32) -> DefaultNla {
    value(kind, &number.to_ne_bytes())
}

fn n64(kind: u16, number: u64) -> DefaultNla {
    value(kind, &number.to_ne_bytes())
}

fn nic() -> Handle {
    "pci/0000:06:00.0".parse().unwrap()
}

/// A message about the NIC with these attributes after its handle.
fn about(command: u8, attributes: &[DefaultNla]) -> Message {
    message(command, &[nic().attributes(), attributes.to_vec()].concat())
}

fn subfunction() -> Message {
    let nested = nested_flagged(
        DEVLINK_PORT_FN_ATTR_DEVLINK,
        &[
            string(DEVLINK_ATTR_BUS_NAME, "auxiliary"),
            string(DEVLINK_ATTR_DEV_NAME, "mlx5_core.sf.4"),
            n32(DEVLINK_ATTR_NETNS_ID, u32::MAX),
        ],
    );
    let function = [
        value(DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR, &[2, 0, 0, 0, 0, 1]),
        n8(DEVLINK_PORT_FN_ATTR_STATE, 1),
        n8(DEVLINK_PORT_FN_ATTR_OPSTATE, 1),
        // RoCE off, the others unknown.
        n64(
            DEVLINK_PORT_FN_ATTR_CAPS,
            u64::from_ne_bytes([0, 0, 0, 0, 1, 0, 0, 0]),
        ),
        nested,
        n32(DEVLINK_PORT_FN_ATTR_MAX_IO_EQS, 16),
        // An attribute of a future kernel.
        string(99, "new"),
    ];
    about(
        DEVLINK_CMD_PORT_NEW,
        &[
            n32(DEVLINK_ATTR_PORT_INDEX, 32768),
            n16(DEVLINK_ATTR_PORT_TYPE, 2),
            n32(DEVLINK_ATTR_PORT_NETDEV_IFINDEX, 7),
            string(DEVLINK_ATTR_PORT_NETDEV_NAME, "en6f0pf0sf88"),
            n8(DEVLINK_ATTR_PORT_SPLITTABLE, 0),
            n16(DEVLINK_ATTR_PORT_FLAVOUR, 7),
            n32(DEVLINK_ATTR_PORT_CONTROLLER_NUMBER, 0),
            n16(DEVLINK_ATTR_PORT_PCI_PF_NUMBER, 0),
            n32(DEVLINK_ATTR_PORT_PCI_SF_NUMBER, 88),
            nested_flagged(DEVLINK_ATTR_PORT_FUNCTION, &function),
        ],
    )
}

fn physical() -> Message {
    about(
        DEVLINK_CMD_PORT_NEW,
        &[
            n32(DEVLINK_ATTR_PORT_INDEX, 1),
            n16(DEVLINK_ATTR_PORT_TYPE, 3),
            n16(DEVLINK_ATTR_PORT_DESIRED_TYPE, 2),
            string(DEVLINK_ATTR_PORT_IBDEV_NAME, "mlx5_0"),
            n16(DEVLINK_ATTR_PORT_FLAVOUR, 0),
            n32(DEVLINK_ATTR_PORT_NUMBER, 3),
            n32(DEVLINK_ATTR_PORT_SPLIT_GROUP, 3),
            n32(DEVLINK_ATTR_PORT_SPLIT_SUBPORT_NUMBER, 1),
            n8(DEVLINK_ATTR_PORT_SPLITTABLE, 1),
            n32(DEVLINK_ATTR_PORT_LANES, 4),
        ],
    )
}

fn param() -> Message {
    let one = |cmode, data: Option<DefaultNla>| {
        let cmode = n8(DEVLINK_ATTR_PARAM_VALUE_CMODE, cmode);
        let list: Vec<DefaultNla> = [cmode].into_iter().chain(data).collect();
        nested_flagged(DEVLINK_ATTR_PARAM_VALUE, &list)
    };
    let values = [
        one(1, Some(value(DEVLINK_ATTR_PARAM_VALUE_DATA, &[]))),
        one(2, None),
    ];
    let param = [
        string(DEVLINK_ATTR_PARAM_NAME, "enable_vnet"),
        value(DEVLINK_ATTR_PARAM_GENERIC, &[]),
        n8(DEVLINK_ATTR_PARAM_TYPE, NLA_FLAG),
        nested_flagged(DEVLINK_ATTR_PARAM_VALUES_LIST, &values),
    ];
    about(
        DEVLINK_CMD_PARAM_GET,
        &[nested_flagged(DEVLINK_ATTR_PARAM, &param)],
    )
}

fn instance() -> Message {
    let entry = |limit, count| {
        nested_flagged(
            DEVLINK_ATTR_RELOAD_STATS_ENTRY,
            &[
                n8(DEVLINK_ATTR_RELOAD_STATS_LIMIT, limit),
                n32(DEVLINK_ATTR_RELOAD_STATS_VALUE, count),
            ],
        )
    };
    let entries = [entry(0, 5), entry(1, 6)];
    let info = [
        n8(DEVLINK_ATTR_RELOAD_ACTION, 2),
        nested_flagged(DEVLINK_ATTR_RELOAD_ACTION_STATS, &entries),
    ];
    let info = nested_flagged(DEVLINK_ATTR_RELOAD_ACTION_INFO, &info);
    let stats = nested_flagged(DEVLINK_ATTR_RELOAD_STATS, &[info]);
    let nested: Handle = "auxiliary/mlx5_core.sf.4".parse().unwrap();
    about(
        DEVLINK_CMD_NEW,
        &[
            n8(DEVLINK_ATTR_RELOAD_FAILED, 1),
            nested_flagged(DEVLINK_ATTR_DEV_STATS, &[stats]),
            nested_flagged(DEVLINK_ATTR_NESTED_DEVLINK, &nested.attributes()),
        ],
    )
}

fn info() -> Message {
    let version = |kind, name: &str, version: &str| {
        nested_flagged(
            kind,
            &[
                string(DEVLINK_ATTR_INFO_VERSION_NAME, name),
                string(DEVLINK_ATTR_INFO_VERSION_VALUE, version),
            ],
        )
    };
    about(
        DEVLINK_CMD_INFO_GET,
        &[
            string(DEVLINK_ATTR_INFO_DRIVER_NAME, "mlx5_core"),
            string(DEVLINK_ATTR_INFO_SERIAL_NUMBER, "1"),
            string(DEVLINK_ATTR_INFO_BOARD_SERIAL_NUMBER, "2"),
            version(DEVLINK_ATTR_INFO_VERSION_FIXED, "fw.psid", "X"),
            version(DEVLINK_ATTR_INFO_VERSION_RUNNING, "fw", "22.1"),
            version(DEVLINK_ATTR_INFO_VERSION_RUNNING, "fw.version", "22.1"),
            version(DEVLINK_ATTR_INFO_VERSION_STORED, "fw", "22.2"),
        ],
    )
}

fn rate() -> Message {
    about(
        DEVLINK_CMD_RATE_NEW,
        &[
            n16(DEVLINK_ATTR_RATE_TYPE, 1),
            string(DEVLINK_ATTR_RATE_NODE_NAME, "group1"),
            n64(DEVLINK_ATTR_RATE_TX_SHARE, 125_000),
            n64(DEVLINK_ATTR_RATE_TX_MAX, u64::MAX),
            n32(DEVLINK_ATTR_RATE_TX_PRIORITY, 1),
            n32(DEVLINK_ATTR_RATE_TX_WEIGHT, 2),
            string(DEVLINK_ATTR_RATE_PARENT_NODE_NAME, "all"),
        ],
    )
}

fn health() -> Message {
    let reporter = [
        string(DEVLINK_ATTR_HEALTH_REPORTER_NAME, "fw_fatal"),
        n8(DEVLINK_ATTR_HEALTH_REPORTER_STATE, 1),
        n64(DEVLINK_ATTR_HEALTH_REPORTER_ERR_COUNT, 2),
        n64(DEVLINK_ATTR_HEALTH_REPORTER_RECOVER_COUNT, 1),
        n64(DEVLINK_ATTR_HEALTH_REPORTER_GRACEFUL_PERIOD, 500),
        n8(DEVLINK_ATTR_HEALTH_REPORTER_AUTO_RECOVER, 1),
        n64(DEVLINK_ATTR_HEALTH_REPORTER_DUMP_TS_NS, 1 << 60),
        n8(DEVLINK_ATTR_HEALTH_REPORTER_AUTO_DUMP, 0),
    ];
    about(
        DEVLINK_CMD_HEALTH_REPORTER_RECOVER,
        &[nested_flagged(DEVLINK_ATTR_HEALTH_REPORTER, &reporter)],
    )
}

fn eswitch() -> Message {
    about(
        DEVLINK_CMD_ESWITCH_GET,
        &[
            n16(DEVLINK_ATTR_ESWITCH_MODE, 1),
            n8(DEVLINK_ATTR_ESWITCH_INLINE_MODE, 3),
            n8(DEVLINK_ATTR_ESWITCH_ENCAP_MODE, 1),
        ],
    )
}

fn reloaded() -> Message {
    let both = u64::from_ne_bytes([6, 0, 0, 0, 6, 0, 0, 0]);
    about(
        DEVLINK_CMD_RELOAD,
        &[n64(DEVLINK_ATTR_RELOAD_ACTIONS_PERFORMED, both)],
    )
}

fn all() -> Vec<Message> {
    vec![
        subfunction(),
        physical(),
        param(),
        instance(),
        info(),
        rate(),
        health(),
        eswitch(),
        reloaded(),
    ]
}

/// Runs every decoder on any message.
fn decode(message: &Message) {
    decode_anything(message);
    let list = std::slice::from_ref(message);
    let _ = family::number(list, DEVLINK_GENL_NAME);
    let _ = family::group(list, DEVLINK_GENL_NAME, DEVLINK_GENL_MCGRP_CONFIG_NAME);
}

#[test]
fn the_port_of_a_subfunction_is_read() {
    let port = Port::of(&subfunction()).unwrap();
    assert_eq!(port.handle, nic().port(32768));
    assert_eq!(port.port_type, Some(PortType::Ethernet));
    let netdev = port.netdev.unwrap();
    assert_eq!(
        (netdev.index, netdev.name.as_str()),
        (Some(7), "en6f0pf0sf88")
    );
    let pci = PciNumbers {
        controller: Some(0),
        pfnum: 0,
        external: None,
    };
    assert_eq!(port.flavour, Some(Flavour::PciSf { pci, sfnum: 88 }));
    let function = port.function.unwrap();
    assert_eq!(function.hw_addr.unwrap(), [2, 0, 0, 0, 0, 1]);
    assert_eq!(function.state, Some(FunctionState::Active));
    assert_eq!(function.opstate, Some(FunctionOpstate::Attached));
    assert_eq!(function.max_io_eqs, Some(16));
    let roce_off = Capabilities {
        roce: Some(false),
        ..Default::default()
    };
    assert_eq!(function.capabilities, roce_off);
    let nested = function.devlink.unwrap();
    assert_eq!(nested.handle.to_string(), "auxiliary/mlx5_core.sf.4");
    assert_eq!(nested.namespace, Some(-1));
}

#[test]
fn a_physical_port_is_read() {
    let port = Port::of(&physical()).unwrap();
    let panel = FrontPanel {
        number: Some(3),
        split_group: Some(3),
        split_subport: Some(1),
    };
    assert_eq!(port.flavour, Some(Flavour::Physical(panel)));
    assert_eq!((port.splittable, port.lanes), (Some(true), Some(4)));
    assert_eq!(port.port_type, Some(PortType::InfiniBand));
    assert_eq!(port.desired_type, Some(PortType::Ethernet));
    assert_eq!((port.netdev, port.function), (None, None));
}

#[test]
fn every_flavour_has_its_numbers() {
    let read = |flavour, numbers: &[DefaultNla]| {
        let mut list = vec![
            n32(DEVLINK_ATTR_PORT_INDEX, 1),
            n16(DEVLINK_ATTR_PORT_FLAVOUR, flavour),
        ];
        list.extend_from_slice(numbers);
        Port::of(&about(DEVLINK_CMD_PORT_NEW, &list)).map(|port| port.flavour.unwrap())
    };
    let pf = n16(DEVLINK_ATTR_PORT_PCI_PF_NUMBER, 1);
    let external = n8(DEVLINK_ATTR_PORT_EXTERNAL, 1);
    let pci = PciNumbers {
        controller: None,
        pfnum: 1,
        external: Some(true),
    };
    let numbers = [pf.clone(), external.clone()];
    assert_eq!(read(3, &numbers).unwrap(), Flavour::PciPf(pci));
    let numbers = [
        pf.clone(),
        external,
        n16(DEVLINK_ATTR_PORT_PCI_VF_NUMBER, 9),
    ];
    assert_eq!(read(4, &numbers).unwrap(), Flavour::PciVf { pci, vfnum: 9 });
    assert_eq!(read(1, &[]).unwrap(), Flavour::Cpu(FrontPanel::default()));
    assert_eq!(read(2, &[]).unwrap(), Flavour::Dsa(FrontPanel::default()));
    assert_eq!(read(5, &[]).unwrap(), Flavour::Virtual);
    assert_eq!(read(6, &[]).unwrap(), Flavour::Unused);
    assert_eq!(read(200, &[]).unwrap(), Flavour::Other(200));
    for (flavour, numbers) in [(3, vec![]), (4, vec![pf.clone()]), (7, vec![pf])] {
        assert!(read(flavour, &numbers).is_err(), "{flavour}");
    }
}

#[test]
fn parameters_have_the_kernels_type() {
    let read = Param::of(&param()).unwrap();
    assert_eq!((read.name.as_str(), read.generic), ("enable_vnet", true));
    assert_eq!(read.value(Cmode::Driverinit), Some(&ParamValue::Flag(true)));
    assert_eq!(read.value(Cmode::Permanent), Some(&ParamValue::Flag(false)));
    assert_eq!(read.value(Cmode::Runtime), None);
    read.check(Cmode::Driverinit, &ParamValue::Flag(false))
        .unwrap();
    let error = read
        .check(Cmode::Driverinit, &ParamValue::U8(1))
        .unwrap_err();
    let expected = "the parameter enable_vnet of pci/0000:06:00.0 is a flag, not a u8";
    assert_eq!(error.to_string(), expected);
    let error = read
        .check(Cmode::Runtime, &ParamValue::Flag(true))
        .unwrap_err();
    assert!(error.to_string().ends_with("cannot be set as runtime"));

    let typed = |kind, data: DefaultNla| {
        let list = [n8(DEVLINK_ATTR_PARAM_VALUE_CMODE, 0), data];
        let values = [nested_flagged(DEVLINK_ATTR_PARAM_VALUE, &list)];
        let list = [
            string(DEVLINK_ATTR_PARAM_NAME, "p"),
            n8(DEVLINK_ATTR_PARAM_TYPE, kind),
            nested_flagged(DEVLINK_ATTR_PARAM_VALUES_LIST, &values),
        ];
        let list = [nested_flagged(DEVLINK_ATTR_PARAM, &list)];
        let param = Param::of(&about(DEVLINK_CMD_PARAM_GET, &list))?;
        Ok::<_, Malformed>(param.value(Cmode::Runtime).unwrap().clone())
    };
    let data = DEVLINK_ATTR_PARAM_VALUE_DATA;
    assert_eq!(typed(NLA_U8, n8(data, 7)).unwrap(), ParamValue::U8(7));
    assert_eq!(typed(NLA_U16, n16(data, 7)).unwrap(), ParamValue::U16(7));
    assert_eq!(typed(NLA_U32, n32(data, 7)).unwrap(), ParamValue::U32(7));
    assert_eq!(typed(NLA_U64, n64(data, 7)).unwrap(), ParamValue::U64(7));
    let text = ParamValue::String("flash".to_owned());
    assert_eq!(typed(NLA_STRING, string(data, "flash")).unwrap(), text);
    assert!(typed(NLA_U32, n8(data, 7)).is_err());
    assert!(typed(NLA_U32, n8(1000, 7)).is_err());
    assert!(matches!(
        typed(77, n8(data, 7)).unwrap(),
        ParamValue::Other { kind: 77, .. }
    ));
}

#[test]
fn unsettable_parameters_are_not_sent() {
    let long = ParamValue::String("x".repeat(32));
    for bad in [long, ParamValue::String("a\0b".to_owned())] {
        assert!(param::setting(Cmode::Runtime, &bad).is_err());
    }
    let requests = |hw_addr| {
        FunctionSettings {
            hw_addr,
            ..Default::default()
        }
        .requests()
    };
    let error = |hw_addr| requests(hw_addr).unwrap_err().to_string();
    assert!(error(None).contains("no value to set"));
    for address in [[0; 6], [1, 0, 0, 0, 0, 1], [0xff; 6]] {
        assert!(error(Some(address)).contains("unicast"), "{address:?}");
    }
}

#[test]
fn a_functions_state_comes_after_all_else() {
    let settings = FunctionSettings {
        hw_addr: Some([2, 0, 0, 0, 0, 1]),
        capabilities: Capabilities {
            roce: Some(true),
            migratable: Some(false),
            ..Default::default()
        },
        max_io_eqs: Some(8),
        state: Some(FunctionState::Active),
    };
    let requests = settings.requests().unwrap();
    let names: Vec<_> = requests.iter().map(|one| one.0).collect();
    assert_eq!(names, ["settings", "state"]);
    let kinds = |list: &[DefaultNla]| list.iter().map(Nla::kind).collect::<Vec<_>>();
    assert_eq!(kinds(&requests[0].1), [1, 4, 6]);
    assert_eq!(kinds(&requests[1].1), [2]);
    let flags = settings.capabilities.flags().unwrap();
    assert_eq!((flags.value, flags.selector), (1, 3));
    let alone = FunctionSettings {
        hw_addr: Some([2, 0, 0, 0, 0, 1]),
        ..Default::default()
    };
    assert_eq!(alone.requests().unwrap()[0].0, "hw_addr");
}

#[test]
fn instances_and_their_information_are_read() {
    let read = Instance::of(&instance()).unwrap();
    assert!(read.reload_failed);
    assert_eq!(read.reloads.len(), 2);
    assert_eq!(read.reloads[1].action, ReloadAction::FwActivate);
    assert_eq!(read.reloads[1].limit, ReloadLimit::NoReset);
    assert_eq!(read.reloads[1].count, 6);
    assert!(read.remote_reloads.is_empty());
    let nested = &read.nested[0];
    assert_eq!(nested.handle.to_string(), "auxiliary/mlx5_core.sf.4");
    assert_eq!(nested.namespace, None);

    let read = Info::of(&info()).unwrap();
    assert_eq!(read.driver.as_deref(), Some("mlx5_core"));
    assert_eq!(read.running.len(), 2);
    assert_eq!(read.stored, [("fw".to_owned(), "22.2".to_owned())]);
}

#[test]
fn rates_eswitches_reporters_and_reloads_are_read() {
    let read = Rate::of(&rate()).unwrap();
    assert_eq!(read.object.to_string(), "pci/0000:06:00.0/group1");
    assert_eq!((read.tx_share, read.tx_max), (125_000, u64::MAX));
    assert_eq!((read.tx_priority, read.tx_weight), (Some(1), Some(2)));
    assert_eq!(read.parent.as_deref(), Some("all"));
    let leaf = [
        n32(DEVLINK_ATTR_PORT_INDEX, 128),
        n16(DEVLINK_ATTR_RATE_TYPE, 1),
    ];
    assert!(Rate::of(&about(DEVLINK_CMD_RATE_NEW, &leaf)).is_err());

    let read = Eswitch::of(&eswitch()).unwrap();
    assert_eq!(read.mode, Some(EswitchMode::Switchdev));
    assert_eq!(read.inline_mode, Some(InlineMode::Transport));
    assert_eq!(read.encap_mode, Some(EncapMode::Basic));

    let read = HealthReporter::of(&health()).unwrap();
    assert_eq!(read.state, HealthState::Error);
    assert_eq!((read.error_count, read.recover_count), (2, 1));
    assert_eq!(read.auto_dump, Some(false));

    let both = [ReloadAction::DriverReinit, ReloadAction::FwActivate];
    assert_eq!(reload::performed(&reloaded()).unwrap(), both);
}

#[test]
fn events_are_distinct() {
    let of = |command, message: Message| {
        let header = vec![command, 1, 0, 0];
        Event::of(&Message { header, ..message }).unwrap()
    };
    let gone = of(DEVLINK_CMD_PORT_DEL, subfunction());
    assert_eq!(gone, Some(Event::PortGone(nic().port(32768))));
    let gone = of(DEVLINK_CMD_DEL, instance());
    assert_eq!(gone, Some(Event::InstanceGone(nic())));
    assert!(matches!(
        of(DEVLINK_CMD_PARAM_NEW, param()),
        Some(Event::Param(_))
    ));
    let failed = of(DEVLINK_CMD_HEALTH_REPORTER_RECOVER, health());
    assert!(matches!(failed, Some(Event::Health(_))));
    // A trap, and a command of a future kernel.
    assert_eq!(of(63, instance()), None);
    assert_eq!(of(250, instance()), None);
}

#[test]
fn a_datagram_may_hold_several_events() {
    let datagram = |message: &Message| {
        let list: Vec<DefaultNla> =
            crate::netlink::attributes::Attributes::parse(&message.attributes)
                .unwrap()
                .iter()
                .map(|(kind, value)| DefaultNla::new(kind, value.to_vec()))
                .collect();
        Request::generic(30, message.command(), 1, Mode::Do, list).bytes(0)
    };
    let both = [datagram(&health()), datagram(&physical())].concat();
    let read = notifications(&both, Protocol::Generic).unwrap();
    let read: Vec<_> = read.iter().map(|one| Event::of(one).unwrap()).collect();
    assert!(matches!(
        read[..],
        [Some(Event::Health(_)), Some(Event::Port(_))]
    ));
    for length in 0..both.len() {
        let cut = notifications(&both[..length], Protocol::Generic);
        assert!(cut.is_err() || cut.unwrap().len() < 2);
    }
}

#[test]
fn an_answer_has_one_entry() {
    let read = |answer: &[Message]| family::one(answer, DEVLINK_CMD_PORT_NEW, Port::of);
    assert!(read(&[physical()]).is_ok());
    assert!(read(&[param(), physical()]).is_ok());
    for answer in [vec![], vec![physical(), physical()], vec![param()]] {
        assert!(read(&answer).is_err());
    }
}

#[test]
fn a_group_is_found_by_name() {
    let group = |name, id| [string(1, name), n32(2, id)];
    let groups = [
        nested_flagged(1, &group("other", 5)),
        nested_flagged(2, &group("config", 6)),
    ];
    let list = [string(2, "devlink"), n16(1, 30), nested_flagged(7, &groups)];
    let answer = Message {
        message_type: 16,
        ..message(1, &list)
    };
    let answer = std::slice::from_ref(&answer);
    assert_eq!(family::number(answer, "devlink").unwrap(), 30);
    assert_eq!(family::group(answer, "devlink", "config").unwrap(), 6);
    assert!(family::group(answer, "devlink", "none").is_err());
    assert!(family::group(answer, "vdpa", "config").is_err());
}

#[test]
fn attributes_cut_anywhere_are_errors_or_fewer() {
    for whole in all() {
        for length in 0..whole.attributes.len() {
            decode(&Message {
                attributes: whole.attributes[..length].to_vec(),
                ..whole.clone()
            });
        }
    }
}

#[test]
fn wrong_sizes_are_errors() {
    // Each attribute of a message in turn gets a wrong length for its type.
    for (whole, of) in [
        (
            subfunction(),
            (|m| Port::of(m).is_err()) as fn(&Message) -> bool,
        ),
        (eswitch(), |m| Eswitch::of(m).is_err()),
        (rate(), |m| Rate::of(m).is_err()),
    ] {
        let list = crate::netlink::attributes::Attributes::parse(&whole.attributes).unwrap();
        let list: Vec<(u16, Vec<u8>)> = list.iter().map(|(k, v)| (k, v.to_vec())).collect();
        let strings = [1, 2, 7, 8, 168, 169];
        for position in 0..list.len() {
            if strings.contains(&list[position].0) || list[position].0 == DEVLINK_ATTR_PORT_FUNCTION
            {
                continue;
            }
            let mut changed = list.clone();
            changed[position].1.push(0);
            changed[position].1.extend([0; 8]);
            let changed: Vec<DefaultNla> = changed
                .into_iter()
                .map(|(k, v)| DefaultNla::new(k, v))
                .collect();
            assert!(of(&message(whole.command(), &changed)), "{position}");
        }
    }
    let address = value(DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR, &[0; MAX_ADDR_LEN + 1]);
    let port = [
        n32(DEVLINK_ATTR_PORT_INDEX, 1),
        nested_flagged(DEVLINK_ATTR_PORT_FUNCTION, &[address]),
    ];
    assert!(Port::of(&about(DEVLINK_CMD_PORT_NEW, &port)).is_err());
}

#[test]
fn deep_nests_are_not_followed() {
    let mut deep = n32(DEVLINK_ATTR_NESTED_DEVLINK, 1);
    // As deep as a 16-bit length allows.
    for kind in std::iter::repeat_n(
        [
            DEVLINK_ATTR_PARAM,
            DEVLINK_ATTR_PORT_FUNCTION,
            DEVLINK_ATTR_NESTED_DEVLINK,
        ],
        5000,
    )
    .flatten()
    {
        deep = nested_flagged(kind, &[deep]);
    }
    decode(&about(DEVLINK_CMD_PORT_NEW, &[deep]));
}

#[test]
fn names_with_slashes_are_malformed() {
    for (bus, device) in [("pci", "a/b"), ("..", "x"), ("", "x"), ("pci", "")] {
        let list = [
            string(DEVLINK_ATTR_BUS_NAME, bus),
            string(DEVLINK_ATTR_DEV_NAME, device),
            n32(DEVLINK_ATTR_PORT_INDEX, 1),
        ];
        assert!(Port::of(&message(DEVLINK_CMD_PORT_NEW, &list)).is_err());
    }
}

proptest! {
    #[test]
    fn changed_messages_do_no_harm(
        which in 0_usize..9,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        command: u8,
    ) {
        let mut message = all()[which].clone();
        let length = message.attributes.len();
        for (index, byte) in changes {
            message.attributes[index.index(length)] = byte;
        }
        decode(&message);
        message.header[0] = command;
        decode(&message);
    }

    #[test]
    fn any_bytes_do_no_harm(attributes in prop::collection::vec(any::<u8>(), 0..400), command: u8) {
        let _ = notifications(&attributes, Protocol::Generic);
        decode(&Message { message_type: 16, header: vec![command, 1, 0, 0], attributes });
    }

    #[test]
    fn handles_survive_being_written(text in "[a-z]{1,8}/[a-z0-9:._]{1,20}", index: u32) {
        prop_assume!(text.parse::<Handle>().is_ok());
        let port = text.parse::<Handle>().unwrap().port(index);
        prop_assert_eq!(port.to_string().parse::<PortHandle>().unwrap(), port);
    }
}

#[test]
fn refusals_become_remedies() {
    let error =
        |operation: Operation<'_>, errno| refused(&operation, Refusal::of(errno, None)).to_string();
    let (handle, port) = (&nic(), &nic().port(3));
    let add = || Operation::AddPort {
        handle,
        sfnum: Some(88),
    };
    assert!(error(add(), libc::EPERM).contains("CAP_NET_ADMIN"));
    assert!(error(add(), libc::ENODEV).contains("no devlink instance pci/0000:06:00.0"));
    assert!(error(add(), libc::EEXIST).contains("subfunction 88 already"));
    assert!(error(add(), libc::EOPNOTSUPP).contains("does not support"));
    let delete = Operation::DeletePort(port);
    assert!(error(delete, libc::ENODEV).contains("no port pci/0000:06:00.0/3"));
    let node: RateObject = "pci/0000:06:00.0/g".parse().unwrap();
    let add = Operation::AddRate(&node);
    assert!(error(add, libc::EEXIST).contains("rate node pci/0000:06:00.0/g already"));
    let delete = Operation::DeleteRate(&node);
    assert!(error(delete, libc::ENODEV).contains("no rate node"));
    let leaf = RateObject::Leaf(port.clone());
    assert!(error(Operation::SetRate(&leaf), libc::ENODEV).contains("no port"));
    let show = Operation::ShowParam { handle, name: "x" };
    assert!(error(show, libc::EINVAL).contains("has no parameter x"));
    let list = Operation::List("ports");
    assert_eq!(error(list, libc::ENOMEM), "cannot list devlink ports");
    let text = no_instance(&nic(), Refusal::of(libc::ENODEV, None)).to_string();
    assert!(text.contains("no devlink instance"), "{text}");
}

#[test]
fn the_source_is_the_kernels_answer_and_printed_once() {
    let error = refused(
        &Operation::Reload(&nic()),
        Refusal::of(libc::EINVAL, Some("why")),
    );
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("why"));
    assert!(!error.to_string().contains("why"));
}
