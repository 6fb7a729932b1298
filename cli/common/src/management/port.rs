//! Ports and rates as listings, with the keys of iproute2's `devlink`.

use vdpa_mgmt::devlink::{
    Flavour, FrontPanel, NestedDevlink, PciNumbers, Port, PortFunction, PortType, Rate, RateObject,
};

use crate::listing::{Entry, Layout, Listing, Value};
use crate::text::address;

/// Fields of a block.
type Fields = Vec<(String, Value)>;

/// A listing of ports.
#[must_use]
pub fn listing(ports: &[Port]) -> Listing {
    Listing {
        section: "port",
        layout: Layout::LineThenBlocks,
        entries: ports.iter().map(port).collect(),
    }
}

/// A listing of rates.
#[must_use]
pub fn rate_listing(rates: &[Rate]) -> Listing {
    Listing {
        section: "rate",
        layout: Layout::LineThenBlocks,
        entries: rates.iter().map(rate).collect(),
    }
}

/// A port.
fn port(port: &Port) -> Entry {
    let desired = port.desired_type;
    let desired = desired.filter(|_| port.port_type.is_some() && desired != port.port_type);
    let entry = Entry::new(port.handle.to_string())
        .with_some("type", port.port_type.map(port_type))
        .with_some("des_type", desired.map(port_type))
        .with_some(
            "netdev",
            port.netdev.as_ref().map(|netdev| netdev.name.as_str()),
        )
        .with_some("ibdev", port.ibdev.as_deref());
    let entry = match port.flavour {
        Some(flavour) => with_flavour(entry, flavour),
        None => entry,
    };
    let function = port.function.as_ref();
    entry
        .with_flag("splittable", port.splittable)
        .with_number("lanes", port.lanes)
        .with(
            "function",
            function.map(|one| Value::Block(self::function(one))),
        )
}

fn with_flavour(entry: Entry, flavour: Flavour) -> Entry {
    let named = |entry: Entry, name: &str| entry.with_text("flavour", name);
    let panel = |entry: Entry, panel: FrontPanel| {
        entry
            .with_number("port", panel.number)
            .with_number("split_group", panel.split_group)
    };
    let place = |entry: Entry, pci: PciNumbers| {
        entry
            .with_number("controller", pci.controller)
            .with_number("pfnum", Some(pci.pfnum))
    };
    match flavour {
        Flavour::Physical(one) => panel(named(entry, "physical"), one),
        Flavour::Cpu(one) => panel(named(entry, "cpu"), one),
        Flavour::Dsa(one) => panel(named(entry, "dsa"), one),
        Flavour::PciPf(pci) => {
            place(named(entry, "pcipf"), pci).with_flag("external", pci.external)
        }
        Flavour::PciVf { pci, vfnum } => place(named(entry, "pcivf"), pci)
            .with_number("vfnum", Some(vfnum))
            .with_flag("external", pci.external),
        Flavour::PciSf { pci, sfnum } => place(named(entry, "pcisf"), pci)
            .with_number("sfnum", Some(sfnum))
            .with_flag("external", pci.external),
        Flavour::Virtual => named(entry, "virtual"),
        Flavour::Unused => named(entry, "unused"),
        Flavour::Other(_) => named(entry, "<unknown flavour>"),
    }
}

fn function(function: &PortFunction) -> Fields {
    let mut fields = Fields::new();
    let mut text = |key: &str, text: Option<String>| {
        fields.extend(text.map(|text| (key.to_owned(), Value::Text(text))));
    };
    text("hw_addr", function.hw_addr.as_deref().map(address));
    let state = |word: Option<&str>| word.unwrap_or("<unknown state>").to_owned();
    text("state", function.state.map(|one| state(one.word())));
    text("opstate", function.opstate.map(|one| state(one.word())));
    let switch = |flag: bool| if flag { "enable" } else { "disable" }.to_owned();
    let capabilities = function.capabilities;
    text("roce", capabilities.roce.map(switch));
    text("migratable", capabilities.migratable.map(switch));
    text("ipsec_crypto", capabilities.ipsec_crypto.map(switch));
    text("ipsec_packet", capabilities.ipsec_packet.map(switch));
    if let Some(number) = function.max_io_eqs {
        fields.push(("max_io_eqs".to_owned(), Value::Number(number.into())));
    }
    if let Some(devlink) = &function.devlink {
        fields.push(("nested_devlink".to_owned(), Value::Block(nested(devlink))));
    }
    fields
}

fn nested(nested: &NestedDevlink) -> Fields {
    let namespace = nested.namespace.map(|number| {
        let number = match u64::try_from(number) {
            Ok(number) => Value::Number(number),
            Err(_) => Value::Text("unknown".to_owned()),
        };
        ("netnsid".to_owned(), number)
    });
    let fields = Value::Named(namespace.into_iter().collect());
    vec![(nested.handle.to_string(), fields)]
}

fn port_type(port_type: PortType) -> &'static str {
    port_type.word().unwrap_or("<unknown type>")
}

fn rate(rate: &Rate) -> Entry {
    let kind = match rate.object {
        RateObject::Leaf(_) => "leaf",
        RateObject::Node(_) => "node",
    };
    let speed = |bytes: u64| (bytes != 0).then_some(Value::Rate(bytes));
    let number = |number: Option<u32>| number.filter(|&number| number != 0);
    Entry::new(rate.object.to_string())
        .with_text("type", kind)
        .with("tx_share", speed(rate.tx_share))
        .with("tx_max", speed(rate.tx_max))
        .with_number("tx_priority", number(rate.tx_priority))
        .with_number("tx_weight", number(rate.tx_weight))
        .with_some("parent", rate.parent.as_deref())
}
