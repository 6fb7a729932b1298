//! Requests on the wire: for the same words, Bellhop's requests carry the same attributes as
//! `devlink`'s. This includes requests that netdevsim refuses.

use std::collections::BTreeSet;

use lab::netlink_tap::{NetlinkTap, Request};
use vdpa_mgmt::devlink::{
    Cmode, Devlink, EncapMode, Eswitch, EswitchMode, InlineMode, ParamValue, ReloadAction,
};

use super::tool::{devlink, handle, ours, switchdev};

/// The controller of generic netlink, from which every program first requests the family.
const GENL_ID_CTRL: u16 = 16;

/// NLA_F_NESTED, and the bits of an attribute's type that are not flags.
const NLA_F_NESTED: u16 = 0x8000;
const NLA_TYPE_MASK: u16 = 0x3fff;

/// DEVLINK_ATTR_PORT_FUNCTION, the only attribute of requests that nests others.
const NESTS: [u16; 1] = [145];

/// DEVLINK_CMD_GET and DEVLINK_CMD_ESWITCH_GET: Bellhop uses them to find the reason of a refusal.
const QUESTIONS: [u8; 2] = [1, 29];

/// An attribute.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Tree {
    Value(u16, Vec<u8>),
    /// The flag says whether NLA_F_NESTED is set.
    Nest(u16, bool, BTreeSet<Tree>),
}

fn trees(mut bytes: &[u8]) -> BTreeSet<Tree> {
    let mut found = BTreeSet::new();
    while bytes.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let kind = u16::from_ne_bytes([bytes[2], bytes[3]]);
        let value = &bytes[4..length];
        let number = kind & NLA_TYPE_MASK;
        let tree = if NESTS.contains(&number) {
            Tree::Nest(number, kind & NLA_F_NESTED != 0, trees(value))
        } else {
            Tree::Value(kind, value.to_vec())
        };
        // iproute2 sends the same attribute twice in some requests.
        found.insert(tree);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    assert!(bytes.is_empty(), "{bytes:?}");
    found
}

/// The command and attributes of a request, with its version.
fn read(request: &Request) -> (u8, u8, BTreeSet<Tree>) {
    let header = &request.payload[..4];
    (header[0], header[1], trees(&request.payload[4..]))
}

/// Requests to families that `act` sent.
fn sent(tap: &NetlinkTap, act: impl FnOnce()) -> Vec<(u8, u8, BTreeSet<Tree>)> {
    tap.requests().unwrap();
    act();
    let requests = tap.requests().unwrap();
    let requests = requests
        .iter()
        .filter(|one| one.message_type > GENL_ID_CTRL);
    let requests: Vec<_> = requests.map(read).collect();
    assert!(!requests.is_empty(), "nothing was sent");
    requests
}

/// The request with this command.
#[track_caller]
fn with(command: u8, requests: &[(u8, u8, BTreeSet<Tree>)]) -> (u8, u8, BTreeSet<Tree>) {
    let mut found = requests.iter().filter(|one| one.0 == command);
    let one = found
        .next()
        .unwrap_or_else(|| panic!("no {command} in {requests:?}"));
    assert_eq!(found.next(), None);
    one.clone()
}

#[test]
fn commands_print_the_same_as_devlink() {
    let nic = switchdev(110);
    let tap = NetlinkTap::open().unwrap();
    let name = nic.handle();
    for line in [
        format!("port add {name} flavour pcisf pfnum 0 sfnum 88"),
        format!("port add {name} flavour pcisf pfnum 1"),
        format!("port add {name} flavour pcisf pfnum 1 sfnum 4294967295 controller 2"),
        format!("port add {name}/9 flavour pcisf pfnum 0 sfnum 1"),
        format!("port function set {name}/128 hw_addr 02:5e:10:53:77:01"),
        format!("port function set {name}/128 state active"),
        format!("port function set {name}/128 state inactive"),
        format!("port function set {name}/128 roce disable migratable enable"),
        format!("port function set {name}/128 ipsec_crypto enable ipsec_packet disable"),
        format!("port function set {name}/128 max_io_eqs 12"),
        format!("port function set {name}/128 hw_addr 02:5e:10:53:77:01 roce enable"),
        format!("port del {name}/128"),
        format!("port function rate add {name}/all tx_share 10mbit tx_max 1.5gbit"),
        format!("port function rate set {name}/128 tx_share 8mbit tx_max 800mbit parent all"),
        format!("port function rate set {name}/128 tx_priority 3 tx_weight 4"),
        format!("port function rate set {name}/128 tx_max 1GBps noparent"),
        format!("port function rate show {name}/128"),
        format!("port function rate show {name}/all"),
        format!("port function rate del {name}/all"),
        format!("port show {name}/128"),
        "port show".to_owned(),
        "port function rate show".to_owned(),
    ] {
        let theirs = sent(&tap, || drop(devlink(&line)));
        // The node that `devlink` adds is deleted before Bellhop adds its own.
        if line.contains("rate add") {
            drop(devlink(&format!("port function rate del {name}/all")));
        }
        let mut found = sent(&tap, || drop(ours(&line)));
        let asked = |one: &(u8, u8, BTreeSet<Tree>)| QUESTIONS.contains(&one.0);
        found.retain(|one| !asked(one));
        // iproute2 lists the ports first, for the names of their interfaces.
        let theirs = theirs.last().cloned().unwrap();
        assert_eq!(found, [theirs], "{line}");
    }
}

#[test]
fn address_and_state_are_two_requests() {
    let nic = switchdev(111);
    let tap = NetlinkTap::open().unwrap();
    let name = nic.handle();
    let line = format!("port function set {name}/128 hw_addr 02:5e:10:53:77:01 state active");
    let theirs = sent(&tap, || drop(devlink(&line)));
    let theirs = theirs.last().cloned().unwrap();
    // netdevsim refuses the first request, so the second is not sent.
    let ours = sent(&tap, || drop(ours(&line)));
    let function = |request: &(u8, u8, BTreeSet<Tree>)| {
        let found = request.2.iter().find_map(|tree| match tree {
            Tree::Nest(145, true, inside) => Some(inside.clone()),
            _ => None,
        });
        found.unwrap()
    };
    let (all, first) = (function(&theirs), function(&ours[0]));
    assert_eq!(ours[0].0, theirs.0);
    assert_eq!((all.len(), first.len()), (2, 1));
    assert!(first.is_subset(&all));
    assert!(
        matches!(first.first(), Some(Tree::Value(1, _))),
        "{first:?}"
    );
}

#[test]
fn the_library_returns_the_same_as_devlink() {
    let nic = switchdev(112);
    let tap = NetlinkTap::open().unwrap();
    let name = nic.handle();
    let handle = handle(&nic);
    let connection = Devlink::open().unwrap();
    let same = |command: u8, line: String, act: &dyn Fn()| {
        let theirs = with(command, &sent(&tap, || drop(devlink(&line))));
        let ours = with(command, &sent(&tap, act));
        assert_eq!(ours, theirs, "{line}");
    };
    let param = |name: &'static str, value: ParamValue| {
        let (connection, handle) = (&connection, handle.clone());
        move || drop(connection.set_param(&handle, name, Cmode::Driverinit, &value))
    };
    let line = |words: &str| format!("dev param set {name} {words} cmode driverinit");
    // `devlink` does not send a value that is already set, so each tool sets another value.
    same(
        39,
        line("name max_macs value 19"),
        &param("max_macs", ParamValue::U32(19)),
    );
    same(
        39,
        line("name test1 value false"),
        &param("test1", ParamValue::Flag(false)),
    );
    same(
        39,
        line("name test1 value true"),
        &param("test1", ParamValue::Flag(true)),
    );
    let eswitch = |eswitch: Eswitch| {
        let (connection, handle) = (&connection, handle.clone());
        move || drop(connection.set_eswitch(&handle, eswitch))
    };
    let mode = Eswitch {
        mode: Some(EswitchMode::Legacy),
        ..Default::default()
    };
    let line = |words: &str| format!("dev eswitch set {name} {words}");
    same(30, line("mode legacy"), &eswitch(mode));
    let modes = Eswitch {
        mode: Some(EswitchMode::Switchdev),
        inline_mode: Some(InlineMode::Transport),
        encap_mode: Some(EncapMode::Basic),
    };
    let words = "mode switchdev inline-mode transport encap-mode basic";
    same(30, line(words), &eswitch(modes));
    same(
        37,
        format!("dev reload {name} action driver_reinit"),
        &|| {
            drop(connection.reload(&handle, ReloadAction::DriverReinit));
        },
    );
    same(37, format!("dev reload {name} action fw_activate"), &|| {
        drop(connection.reload(&handle, ReloadAction::FwActivate));
    });
}
