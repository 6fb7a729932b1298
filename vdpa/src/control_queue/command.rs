//! Parses, checks and encodes control commands.
//!
//! ```text
//!   u8 class | u8 command | command-specific data        (device reads)
//!   u8 ack                                               (device writes)
//! ```
//! Multi-byte fields are little-endian. The bytes come from a guest: lengths must match exactly,
//! numbers must be within the negotiated limits, lists are capped. A command that does not parse
//! gets VIRTIO_NET_ERR and never reaches a device. The module does not depend on how a command
//! travels.

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_net as net;

use crate::Error;

/// Maximum length of a command in bytes, with its header. Room for two full MAC lists.
pub const COMMAND_LEN_MAX: usize = 16 * 1024;
/// Maximum entries of each of the two MAC lists.
pub const MAC_TABLE_MAX: usize = 1024;
/// Maximum entries of an RSS indirection table.
const INDIRECTION_TABLE_MAX: usize = 4096;
/// Number of VLAN ids.
const VLAN_IDS: u16 = 4096;

/// Class and command number (`linux/virtio_net.h`) as bytes; all fit in one byte.
const fn code(class: u32, command: u32) -> [u8; 2] {
    [class.to_le_bytes()[0], command.to_le_bytes()[0]]
}
const MAC_TABLE_SET: [u8; 2] = code(net::VIRTIO_NET_CTRL_MAC, net::VIRTIO_NET_CTRL_MAC_TABLE_SET);
const MAC_ADDR_SET: [u8; 2] = code(net::VIRTIO_NET_CTRL_MAC, net::VIRTIO_NET_CTRL_MAC_ADDR_SET);
const VLAN_ADD: [u8; 2] = code(net::VIRTIO_NET_CTRL_VLAN, net::VIRTIO_NET_CTRL_VLAN_ADD);
const VLAN_DEL: [u8; 2] = code(net::VIRTIO_NET_CTRL_VLAN, net::VIRTIO_NET_CTRL_VLAN_DEL);
const ANNOUNCE_ACK: [u8; 2] = code(
    net::VIRTIO_NET_CTRL_ANNOUNCE,
    net::VIRTIO_NET_CTRL_ANNOUNCE_ACK,
);
const VQ_PAIRS_SET: [u8; 2] = code(
    net::VIRTIO_NET_CTRL_MQ,
    net::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET,
);
const RSS_CONFIG: [u8; 2] = code(net::VIRTIO_NET_CTRL_MQ, net::VIRTIO_NET_CTRL_MQ_RSS_CONFIG);
const HASH_CONFIG: [u8; 2] = code(net::VIRTIO_NET_CTRL_MQ, net::VIRTIO_NET_CTRL_MQ_HASH_CONFIG);
const GUEST_OFFLOADS_SET: [u8; 2] = code(
    net::VIRTIO_NET_CTRL_GUEST_OFFLOADS,
    net::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET,
);
const RX_CLASS: u8 = code(net::VIRTIO_NET_CTRL_RX, 0)[0];

/// The features that are guest offloads. An offload's bit in the command is the feature's bit
/// (virtio 1.3, 5.1.6.5.6.1).
pub const GUEST_OFFLOADS: u64 = 1 << net::VIRTIO_NET_F_GUEST_CSUM
    | 1 << net::VIRTIO_NET_F_GUEST_TSO4
    | 1 << net::VIRTIO_NET_F_GUEST_TSO6
    | 1 << net::VIRTIO_NET_F_GUEST_ECN
    | 1 << net::VIRTIO_NET_F_GUEST_UFO
    | 1 << net::VIRTIO_NET_F_GUEST_USO4
    | 1 << net::VIRTIO_NET_F_GUEST_USO6
    | 1 << net::VIRTIO_NET_F_RSC_EXT;

/// An Ethernet address.
pub type MacAddress = [u8; 6];

/// A switch of the receive filter (virtio 1.3, 5.1.6.5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RxMode {
    /// Receive everything.
    Promiscuous,
    /// Receive all multicast.
    AllMulticast,
    /// Receive all unicast.
    AllUnicast,
    /// Receive no multicast.
    NoMulticast,
    /// Receive no unicast.
    NoUnicast,
    /// Receive no broadcast.
    NoBroadcast,
}

impl RxMode {
    /// All modes, by ascending command number.
    const ALL: [(u32, Self); 6] = [
        (net::VIRTIO_NET_CTRL_RX_PROMISC, Self::Promiscuous),
        (net::VIRTIO_NET_CTRL_RX_ALLMULTI, Self::AllMulticast),
        (net::VIRTIO_NET_CTRL_RX_ALLUNI, Self::AllUnicast),
        (net::VIRTIO_NET_CTRL_RX_NOMULTI, Self::NoMulticast),
        (net::VIRTIO_NET_CTRL_RX_NOUNI, Self::NoUnicast),
        (net::VIRTIO_NET_CTRL_RX_NOBCAST, Self::NoBroadcast),
    ];

    fn code(self) -> [u8; 2] {
        let number = Self::ALL
            .iter()
            .find(|&&(_, mode)| mode == self)
            .map_or(0, |&(number, _)| number);
        code(net::VIRTIO_NET_CTRL_RX, number)
    }

    /// The feature that provides the mode.
    const fn feature(self) -> u32 {
        match self {
            Self::Promiscuous | Self::AllMulticast => net::VIRTIO_NET_F_CTRL_RX,
            _ => net::VIRTIO_NET_F_CTRL_RX_EXTRA,
        }
    }
}

/// The receive filter's address lists.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MacTable {
    /// Unicast addresses.
    pub unicast: Vec<MacAddress>,
    /// Multicast addresses.
    pub multicast: Vec<MacAddress>,
}

/// Receive-side scaling (virtio 1.3, 5.1.6.5.7).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RssConfig {
    /// Mask of hash types (VIRTIO_NET_RSS_HASH_TYPE_*).
    pub hash_types: u32,
    /// Receive queue for packets without a hash.
    pub unclassified_queue: u16,
    /// Receive queues by hash; a power of two of them.
    pub indirection_table: Vec<u16>,
    /// Transmit queues in use.
    pub max_tx_vq: u16,
    /// The hash key.
    pub key: Vec<u8>,
}

/// Hash calculation for reports (virtio 1.3, 5.1.6.5.6.4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashConfig {
    /// Mask of hash types (VIRTIO_NET_RSS_HASH_TYPE_*).
    pub hash_types: u32,
    /// The hash key.
    pub key: Vec<u8>,
}

/// A command that the VMM understands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Switches a receive mode.
    Rx {
        /// The mode.
        mode: RxMode,
        /// Whether the mode is on.
        on: bool,
    },
    /// Replaces the address lists.
    MacTableSet(MacTable),
    /// Sets the device's own address.
    MacAddrSet(MacAddress),
    /// Starts to receive a VLAN.
    VlanAdd(u16),
    /// Stops receiving a VLAN.
    VlanDel(u16),
    /// The guest has announced itself. The VMM answers; the device never gets the command.
    AnnounceAck,
    /// Uses this many queue pairs.
    VqPairsSet(u16),
    /// Configures receive-side scaling.
    RssConfig(RssConfig),
    /// Configures hash reports.
    HashConfig(HashConfig),
    /// Switches receive offloads; bits are those of the features.
    GuestOffloadsSet(u64),
}

/// The limits for commands, from the negotiated features and the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// The negotiated features.
    pub features: u64,
    /// `max_virtqueue_pairs` of the configuration; 1 without MQ and RSS.
    pub max_virtqueue_pairs: u16,
    /// `rss_max_key_size`.
    pub rss_max_key_size: u8,
    /// `rss_max_indirection_table_length`.
    pub rss_max_indirection_table_length: u16,
    /// `supported_hash_types`.
    pub supported_hash_types: u32,
}

/// The command is too short or too long for its kind, or longer than any may be.
fn wrong_length(len: usize) -> Error {
    Error::other(format!(
        "a control command of {len} bytes has the wrong length"
    ))
}

/// A field has an invalid value.
fn wrong_value(field: &str, value: u64) -> Error {
    Error::other(format!("a control command has {value} as its {field}"))
}

/// Takes fields from the front of a command.
struct Reader<'a> {
    rest: &'a [u8],
    len: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Error> {
        let (taken, rest) = self
            .rest
            .split_at_checked(count)
            .ok_or_else(|| wrong_length(self.len))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, Error> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, Error> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Error> {
        self.array().map(u64::from_le_bytes)
    }

    fn macs(&mut self) -> Result<Vec<MacAddress>, Error> {
        let entries = self.u32()?;
        let value = u64::from(entries);
        let count = usize::try_from(entries)
            .ok()
            .filter(|&count| count <= MAC_TABLE_MAX)
            .ok_or_else(|| wrong_value("number of MAC addresses", value))?;
        (0..count).map(|_| self.array()).collect()
    }

    fn key(&mut self, limits: &Limits) -> Result<Vec<u8>, Error> {
        let len = self.u8()?;
        check("hash key length", len, len <= limits.rss_max_key_size)?;
        self.take(usize::from(len)).map(<[u8]>::to_vec)
    }

    fn hash_types(&mut self, limits: &Limits) -> Result<u32, Error> {
        let types = self.u32()?;
        check(
            "hash types",
            types,
            types & !limits.supported_hash_types == 0,
        )?;
        Ok(types)
    }

    fn receive_queue(&mut self, limits: &Limits) -> Result<u16, Error> {
        let queue = self.u16()?;
        check("receive queue", queue, queue < limits.max_virtqueue_pairs)?;
        Ok(queue)
    }

    fn vlan(&mut self) -> Result<u16, Error> {
        let id = self.u16()?;
        check("VLAN id", id, id < VLAN_IDS)?;
        Ok(id)
    }

    fn rss(&mut self, limits: &Limits) -> Result<RssConfig, Error> {
        let hash_types = self.hash_types(limits)?;
        let mask = self.u16()?;
        let entries = usize::from(mask) + 1;
        let fits = entries.is_power_of_two()
            && entries <= usize::from(limits.rss_max_indirection_table_length)
            && entries <= INDIRECTION_TABLE_MAX;
        check("indirection table mask", mask, fits)?;
        let unclassified_queue = self.receive_queue(limits)?;
        let indirection_table = (0..entries)
            .map(|_| self.receive_queue(limits))
            .collect::<Result<_, _>>()?;
        let max_tx_vq = self.u16()?;
        let in_use = 1..=limits.max_virtqueue_pairs;
        check(
            "number of transmit queues",
            max_tx_vq,
            in_use.contains(&max_tx_vq),
        )?;
        let key = self.key(limits)?;
        Ok(RssConfig {
            hash_types,
            unclassified_queue,
            indirection_table,
            max_tx_vq,
            key,
        })
    }

    fn hash(&mut self, limits: &Limits) -> Result<HashConfig, Error> {
        let hash_types = self.hash_types(limits)?;
        self.take(8)?; // reserved
        let key = self.key(limits)?;
        Ok(HashConfig { hash_types, key })
    }
}

fn check(field: &'static str, value: impl Into<u64>, valid: bool) -> Result<(), Error> {
    if valid {
        return Ok(());
    }
    Err(wrong_value(field, value.into()))
}

fn negotiated(limits: &Limits, bit: u32) -> Result<(), Error> {
    if limits.features & (1 << bit) != 0 {
        return Ok(());
    }
    Err(Error::other(format!(
        "a control command needs feature bit {bit}, which was not negotiated"
    )))
}

impl Command {
    /// Parses and checks a command: all bytes that the device would read.
    ///
    /// # Errors
    /// The command or one of its values is invalid: the guest gets VIRTIO_NET_ERR.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, Error> {
        let len = bytes.len();
        if len > COMMAND_LEN_MAX {
            return Err(wrong_length(len));
        }
        let mut reader = Reader { rest: bytes, len };
        let code: [u8; 2] = reader.array()?;
        let unknown = || {
            let [class, command] = code;
            Error::other(format!(
                "control command {command} of class {class} is not known"
            ))
        };
        let need = |bit| negotiated(limits, bit);
        let command = match code {
            [RX_CLASS, _] => {
                let mode = RxMode::ALL.iter().find(|(_, mode)| mode.code() == code);
                let &(_, mode) = mode.ok_or_else(unknown)?;
                need(mode.feature())?;
                let on = reader.u8()?;
                check("switch", on, on <= 1)?;
                Self::Rx { mode, on: on == 1 }
            }
            MAC_TABLE_SET => {
                need(net::VIRTIO_NET_F_CTRL_RX)?;
                Self::MacTableSet(MacTable {
                    unicast: reader.macs()?,
                    multicast: reader.macs()?,
                })
            }
            MAC_ADDR_SET => {
                need(net::VIRTIO_NET_F_CTRL_MAC_ADDR)?;
                Self::MacAddrSet(reader.array()?)
            }
            VLAN_ADD | VLAN_DEL => {
                need(net::VIRTIO_NET_F_CTRL_VLAN)?;
                let id = reader.vlan()?;
                if code == VLAN_ADD {
                    Self::VlanAdd(id)
                } else {
                    Self::VlanDel(id)
                }
            }
            ANNOUNCE_ACK => {
                need(net::VIRTIO_NET_F_GUEST_ANNOUNCE)?;
                Self::AnnounceAck
            }
            VQ_PAIRS_SET => {
                need(net::VIRTIO_NET_F_MQ)?;
                let pairs = reader.u16()?;
                let possible = 1..=limits.max_virtqueue_pairs;
                check("number of queue pairs", pairs, possible.contains(&pairs))?;
                Self::VqPairsSet(pairs)
            }
            RSS_CONFIG => {
                need(net::VIRTIO_NET_F_RSS)?;
                Self::RssConfig(reader.rss(limits)?)
            }
            HASH_CONFIG => {
                need(net::VIRTIO_NET_F_HASH_REPORT)?;
                Self::HashConfig(reader.hash(limits)?)
            }
            GUEST_OFFLOADS_SET => {
                need(net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS)?;
                let offloads = reader.u64()?;
                let possible = GUEST_OFFLOADS & limits.features;
                check("offloads", offloads, offloads & !possible == 0)?;
                Self::GuestOffloadsSet(offloads)
            }
            _ => return Err(unknown()),
        };
        if reader.rest.is_empty() {
            return Ok(command);
        }
        Err(wrong_length(len))
    }

    /// Class and command numbers.
    #[must_use]
    pub fn code(&self) -> [u8; 2] {
        match self {
            Self::Rx { mode, .. } => mode.code(),
            Self::MacTableSet(_) => MAC_TABLE_SET,
            Self::MacAddrSet(_) => MAC_ADDR_SET,
            Self::VlanAdd(_) => VLAN_ADD,
            Self::VlanDel(_) => VLAN_DEL,
            Self::AnnounceAck => ANNOUNCE_ACK,
            Self::VqPairsSet(_) => VQ_PAIRS_SET,
            Self::RssConfig(_) => RSS_CONFIG,
            Self::HashConfig(_) => HASH_CONFIG,
            Self::GuestOffloadsSet(_) => GUEST_OFFLOADS_SET,
        }
    }

    /// The command as the device reads it: class, command, data.
    ///
    /// # Errors
    /// A list is longer than the format or [`COMMAND_LEN_MAX`] allows. That never happens for a
    /// parsed command.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        let mut bytes = self.code().to_vec();
        match self {
            Self::Rx { on, .. } => bytes.push(u8::from(*on)),
            Self::MacTableSet(table) => {
                for list in [&table.unicast, &table.multicast] {
                    let count = u32::try_from(list.len()).unwrap_or(u32::MAX);
                    check(
                        "number of MAC addresses",
                        count,
                        list.len() <= MAC_TABLE_MAX,
                    )?;
                    bytes.extend(count.to_le_bytes());
                    bytes.extend(list.as_flattened());
                }
            }
            Self::MacAddrSet(address) => bytes.extend(address),
            Self::VlanAdd(id) | Self::VlanDel(id) => bytes.extend(id.to_le_bytes()),
            Self::AnnounceAck => {}
            Self::VqPairsSet(pairs) => bytes.extend(pairs.to_le_bytes()),
            Self::RssConfig(config) => {
                let entries = config.indirection_table.len();
                let fits = entries.is_power_of_two() && entries <= INDIRECTION_TABLE_MAX;
                let mask = u16::try_from(entries.wrapping_sub(1)).unwrap_or(u16::MAX);
                check("indirection table mask", mask, fits)?;
                bytes.extend(config.hash_types.to_le_bytes());
                bytes.extend(mask.to_le_bytes());
                bytes.extend(config.unclassified_queue.to_le_bytes());
                for queue in &config.indirection_table {
                    bytes.extend(queue.to_le_bytes());
                }
                bytes.extend(config.max_tx_vq.to_le_bytes());
                encode_key(&mut bytes, &config.key)?;
            }
            Self::HashConfig(config) => {
                bytes.extend(config.hash_types.to_le_bytes());
                bytes.extend([0; 8]); // reserved
                encode_key(&mut bytes, &config.key)?;
            }
            Self::GuestOffloadsSet(offloads) => bytes.extend(offloads.to_le_bytes()),
        }
        Ok(bytes)
    }
}

fn encode_key(bytes: &mut Vec<u8>, key: &[u8]) -> Result<(), Error> {
    let len = u8::try_from(key.len()).map_err(|_| wrong_length(key.len()))?;
    bytes.push(len);
    bytes.extend(key);
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in crate::control_queue) fn limits() -> Limits {
        Limits {
            features: u64::MAX,
            max_virtqueue_pairs: 8,
            rss_max_key_size: 40,
            rss_max_indirection_table_length: 128,
            supported_hash_types: 0x1ff,
        }
    }

    pub(in crate::control_queue) fn command() -> impl Strategy<Value = Command> {
        let macs = || prop::collection::vec(any::<MacAddress>(), 0..5);
        let key = || prop::collection::vec(any::<u8>(), 0..=40);
        prop_oneof![
            (0usize..6, any::<bool>()).prop_map(|(index, on)| Command::Rx {
                mode: RxMode::ALL[index].1,
                on
            }),
            (macs(), macs()).prop_map(|(unicast, multicast)| Command::MacTableSet(MacTable {
                unicast,
                multicast
            })),
            any::<MacAddress>().prop_map(Command::MacAddrSet),
            (0u16..4096).prop_map(Command::VlanAdd),
            (0u16..4096).prop_map(Command::VlanDel),
            Just(Command::AnnounceAck),
            (1u16..=8).prop_map(Command::VqPairsSet),
            (0u32..0x200, 0u16..8, 0u32..8, 1u16..=8, key()).prop_map(
                |(hash_types, queue, power, max_tx_vq, key)| Command::RssConfig(RssConfig {
                    hash_types,
                    unclassified_queue: queue,
                    indirection_table: vec![queue; 1 << power],
                    max_tx_vq,
                    key,
                })
            ),
            (0u32..0x200, key())
                .prop_map(|(hash_types, key)| Command::HashConfig(HashConfig { hash_types, key })),
            any::<u64>().prop_map(|bits| Command::GuestOffloadsSet(bits & GUEST_OFFLOADS)),
        ]
    }

    proptest! {
        #[test]
        fn encoded_commands_parse_to_the_same(command in command()) {
            let bytes = command.encode().unwrap();
            prop_assert!(bytes.len() <= COMMAND_LEN_MAX);
            prop_assert_eq!(Command::parse(&bytes, &limits()).unwrap(), command);
            // One byte less or more is an error.
            for len in 0..bytes.len() {
                prop_assert!(Command::parse(&bytes[..len], &limits()).is_err());
            }
            let longer = [bytes, vec![0]].concat();
            prop_assert!(Command::parse(&longer, &limits()).is_err());
        }

        #[test]
        fn any_bytes_parse_to_themselves_or_fail(
            class in 0u8..7, number in 0u8..7,
            data in prop::collection::vec(prop_oneof![3 => 0u8..3, 1 => any::<u8>()], 0..64),
        ) {
            let bytes = [vec![class, number], data].concat();
            if let Ok(command) = Command::parse(&bytes, &limits()) {
                let mut expected = bytes;
                if expected[..2] == HASH_CONFIG {
                    expected[6..14].fill(0);
                }
                prop_assert_eq!(command.encode().unwrap(), expected);
            }
        }
    }

    fn parse(bytes: &[u8]) -> Command {
        Command::parse(bytes, &limits()).unwrap()
    }

    fn refusal(bytes: &[u8]) -> String {
        Command::parse(bytes, &limits()).unwrap_err().to_string()
    }

    #[test]
    fn bytes_of_known_commands() {
        assert_eq!(
            parse(&[1, 1, 2, 0, 0, 0, 0, 1]),
            Command::MacAddrSet([2, 0, 0, 0, 0, 1])
        );
        assert_eq!(parse(&[4, 0, 4, 0]), Command::VqPairsSet(4));
        assert_eq!(parse(&[2, 1, 0xff, 0x0f]), Command::VlanDel(4095));
        assert_eq!(
            parse(&[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]),
            Command::GuestOffloadsSet(2)
        );
        assert_eq!(
            parse(&[0, 5, 1]),
            Command::Rx {
                mode: RxMode::NoBroadcast,
                on: true
            }
        );
    }

    #[test]
    fn values_that_no_device_should_see() {
        for bytes in [
            &[0u8, 0, 2][..],
            &[2, 0, 0x00, 0x10],
            &[4, 0, 0, 0],
            &[4, 0, 9, 0],
            &[5, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            &[1, 0, 1, 4, 0, 0],
            &[1, 0, 0xff, 0xff, 0xff, 0xff],
            // RSS: unknown hash types, a table of 3, a table too long.
            &[4, 1, 0, 2, 0, 0],
            &[4, 1, 0, 0, 0, 0, 2, 0],
            &[4, 1, 0, 0, 0, 0, 255, 0],
        ] {
            assert!(refusal(bytes).contains(" as its "), "{bytes:?}");
        }
        for bytes in [&[0, 6, 1][..], &[6, 0], &[8, 0], &[255, 255], &[4, 3]] {
            assert!(refusal(bytes).ends_with("is not known"), "{bytes:?}");
        }
        let long = vec![1; COMMAND_LEN_MAX + 1];
        assert!(refusal(&long).ends_with("has the wrong length"));
    }

    #[test]
    fn the_longest_command_fits() {
        let list = vec![[1; 6]; MAC_TABLE_MAX];
        let table = |unicast: &[MacAddress], multicast: &[MacAddress]| {
            Command::MacTableSet(MacTable {
                unicast: unicast.to_vec(),
                multicast: multicast.to_vec(),
            })
        };
        let bytes = table(&list, &list).encode().unwrap();
        assert!(bytes.len() <= COMMAND_LEN_MAX);
        parse(&bytes);
        let longer = vec![[1; 6]; MAC_TABLE_MAX + 1];
        assert!(table(&longer, &[]).encode().is_err());
    }

    #[test]
    fn each_command_needs_its_feature() {
        let none = Limits {
            features: 0,
            ..limits()
        };
        for (bytes, bit) in [
            (&[0u8, 0, 1][..], 18),
            (&[0, 2, 1], 20),
            (&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], 18),
            (&[1, 1, 0, 0, 0, 0, 0, 0], 23),
            (&[2, 0, 1, 0], 19),
            (&[3, 0], 21),
            (&[4, 0, 1, 0], 22),
            (&[4, 1], 60),
            (&[4, 2], 57),
            (&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0], 2),
        ] {
            let error = Command::parse(bytes, &none).unwrap_err();
            assert!(error.to_string().contains(&format!("feature bit {bit},")));
        }
    }
}
