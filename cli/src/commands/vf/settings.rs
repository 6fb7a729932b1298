//! The words of `bellhop vf set`.

use bellhop_common::error::Error;
use vdpa_mgmt::sriov::{LinkState, Links, Rates, Setting, Vlan, VlanProtocol};

use crate::commands::parse::{self, Words, choice};

pub(super) const HELP: &str = "\
Words:
  mac MACADDR          its address, such as 52:54:00:12:34:56; 00:00:00:00:00:00 lets it choose one
  vlan VLANID          the NIC puts its frames into this VLAN, invisibly to the function: 1 to 4094;
                       0 for none
  qos QOS              their priority, 0 to 7
  proto PROTOCOL       their tag: 802.1Q (default) or 802.1ad
  rate RATE            its maximum rate, in Mbit/s; 0 for no limit. The same: max_tx_rate RATE
  min_tx_rate RATE     its guaranteed rate, in Mbit/s
  spoofchk on|off      drop its frames with a sender address other than its own
  state auto|enable|disable
                       its link: as the NIC's, always up, always down
  trust on|off         let it change its address and receive all frames

If the NIC rejects one of them, the command restores the earlier ones.

Examples:
  bellhop vf set enp1s0 0 mac 52:54:00:12:34:56 vlan 100 qos 3
  bellhop vf set pci/0000:01:00.0 1 rate 1000 spoofchk on trust off";

const WORDS: [&str; 10] = [
    "mac",
    "vlan",
    "qos",
    "proto",
    "rate",
    "max_tx_rate",
    "min_tx_rate",
    "spoofchk",
    "state",
    "trust",
];

/// Parses words. The kernel sets both rates together, so `rates_now` supplies the missing one.
pub(super) fn read(
    words: &[String],
    rates_now: impl FnOnce() -> Result<Rates, vdpa_mgmt::Error>,
) -> Result<Vec<Setting>, Error> {
    let words = Words::parse(words, &WORDS)?;
    let mut settings = Vec::new();
    settings.extend(words.take("mac", mac)?.map(Setting::Mac));
    let qos = words.take("qos", parse::number)?;
    let protocol = words.take("proto", protocol)?;
    match words.take("vlan", parse::number)? {
        Some(id) => settings.push(Setting::Vlan(Vlan::new(
            id,
            qos.unwrap_or_default(),
            protocol.unwrap_or(VlanProtocol::Dot1Q),
        )?)),
        None if qos.is_some() || protocol.is_some() => {
            return Err(parse::missing("vlan"));
        }
        None => {}
    }
    let on_or_off = parse::one_of([("on", true), ("off", false)]);
    let spoof_check = words.take("spoofchk", &on_or_off)?.map(Setting::SpoofCheck);
    let link_state = parse::one_of([
        ("auto", LinkState::Auto),
        ("enable", LinkState::Enable),
        ("disable", LinkState::Disable),
    ]);
    let link_state = words.take("state", link_state)?.map(Setting::LinkState);
    let trust = words.take("trust", on_or_off)?.map(Setting::Trust);
    let min = words.take("min_tx_rate", parse::number)?;
    let max = words.take("max_tx_rate", parse::number)?;
    let max = match (words.take("rate", parse::number)?, max) {
        (Some(_), Some(_)) => return Err(parse::twice("rate")),
        (rate, max) => rate.or(max),
    };
    // Last, because it may query the kernel.
    let rates = match (min, max) {
        (None, None) => None,
        (Some(min), Some(max)) => Some(Rates::new(min, max)?),
        (min, max) => {
            let now = rates_now()?;
            Some(Rates::new(min.unwrap_or(now.min), max.unwrap_or(now.max))?)
        }
    };
    settings.extend(rates.map(Setting::Rates));
    settings.extend([spoof_check, link_state, trust].into_iter().flatten());
    Ok(settings)
}

/// The current rates of a virtual function; none if its driver does not report them.
pub(super) fn rates_now(
    links: &Links,
    interface: &str,
    virtual_function: u32,
) -> Result<Rates, vdpa_mgmt::Error> {
    let link = links.link(interface)?;
    let mut functions = link.virtual_functions.into_iter();
    let found = functions.find(|one| one.index == virtual_function);
    Ok(found.and_then(|one| one.rates).unwrap_or_default())
}

/// A unicast address, or zero.
fn mac(word: &'static str, value: &str) -> Result<[u8; 6], Error> {
    match value {
        "00:00:00:00:00:00" => Ok([0; 6]),
        _ => parse::mac(word, value),
    }
}

fn protocol(word: &'static str, value: &str) -> Result<VlanProtocol, Error> {
    let known = [
        ("802.1Q", VlanProtocol::Dot1Q),
        ("802.1ad", VlanProtocol::Dot1Ad),
    ];
    // iproute2 accepts both upper and lower case.
    let found = known
        .into_iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(value));
    found
        .map(|one| one.1)
        .ok_or_else(|| choice(word, value, "802.1Q or 802.1ad"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn read_text(text: &str) -> Result<Vec<Setting>, Error> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        read(&words, || Ok(Rates { min: 10, max: 20 }))
    }

    #[test]
    fn words_become_settings() {
        let all = "trust on state disable spoofchk off rate 100 min_tx_rate 50 \
                   proto 802.1ad qos 3 vlan 7 mac 02:00:00:00:00:01";
        let vlan = Vlan::new(7, 3, VlanProtocol::Dot1Ad).unwrap();
        let settings = [
            Setting::Mac([2, 0, 0, 0, 0, 1]),
            Setting::Vlan(vlan),
            Setting::Rates(Rates { min: 50, max: 100 }),
            Setting::SpoofCheck(false),
            Setting::LinkState(LinkState::Disable),
            Setting::Trust(true),
        ];
        assert_eq!(read_text(all).unwrap(), settings);
        let nothing = [Setting::Mac([0; 6]), Setting::Vlan(Vlan::NONE)];
        let text = "vlan 0 mac 00:00:00:00:00:00";
        assert_eq!(read_text(text).unwrap(), nothing);
    }

    #[test]
    fn the_other_rate_stays() {
        let rates = |min, max| [Setting::Rates(Rates { min, max })];
        assert_eq!(read_text("rate 40").unwrap(), rates(10, 40));
        assert_eq!(read_text("max_tx_rate 40").unwrap(), rates(10, 40));
        assert_eq!(read_text("min_tx_rate 5").unwrap(), rates(5, 20));
    }

    #[test]
    fn invalid_words_are_reported() {
        for (text, words) in [
            ("qos 3", "vlan is missing"),
            ("vlan 0 qos 3", "need a VLAN"),
            ("vlan 4095", "1 to 4094"),
            ("vlan 65536", "vlan \"65536\""),
            ("vlan 5 qos 8", "0 to 7"),
            ("vlan 5 proto 802.3", "802.1Q or 802.1ad"),
            ("trust yes", "on or off"),
            ("state up", "auto, enable or disable"),
            ("rate 5 max_tx_rate 5", "twice"),
            ("min_tx_rate 30", "above max_tx_rate 20"),
            ("rate -1", "rate \"-1\""),
            ("mac 01:00:00:00:00:00", "01:00:00:00:00:00"),
            ("address 1", "unknown word"),
            ("mac", "no value"),
        ] {
            let error = read_text(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
