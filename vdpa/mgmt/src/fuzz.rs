//! The entry point to all decoders of this crate, for the fuzz target in `tests/fuzz`. The property
//! test below covers the same without it.
//!
//! The first byte selects the meaning of the others: a stream of datagrams, the attributes of one
//! message, or a uevent.

use super::config::DeviceConfig;
use super::device::{MgmtDevice, VdpaDevice};
use super::netlink::exchange::{Exchange, Progress, notifications};
use super::netlink::family;
use super::netlink::message::{Message, Mode, Protocol};
use super::vendor_stats::VendorStats;
use super::{devlink, link, sriov, uevent};

/// Decodes `input` with every decoder. For any input, nothing panics and every call ends.
pub fn decode_anything(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else {
        return;
    };
    let protocol = match choice & 1 {
        0 => Protocol::Generic,
        _ => Protocol::Route,
    };
    match choice >> 1 & 3 {
        0 => stream(protocol, Mode::Do, rest),
        1 => stream(protocol, Mode::Dump, rest),
        2 => {
            let length = protocol.header_length().min(rest.len());
            let (header, attributes) = rest.split_at(length);
            let mut header = header.to_vec();
            header.resize(protocol.header_length(), 0);
            message(&Message {
                message_type: 16,
                header,
                attributes: attributes.to_vec(),
            });
        }
        _ => {
            uevent::decode_anything(rest);
            for message in notifications(rest, protocol).iter().flatten() {
                self::message(message);
            }
        }
    }
}

/// Datagrams, each preceded by its length in two bytes: the answer to request number 1.
fn stream(protocol: Protocol, mode: Mode, mut rest: &[u8]) {
    let mut exchange = Exchange::new(1, mode, protocol);
    while let Some((length, after)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
        let (datagram, after) = after.split_at(length);
        rest = after;
        match exchange.feed(datagram) {
            Ok(Progress::Waiting) => {}
            Ok(_) => break,
            Err(_) => return,
        }
    }
    for message in &exchange.answer().messages {
        self::message(message);
    }
}

fn message(message: &Message) {
    let _ = (VdpaDevice::of(message), MgmtDevice::of(message));
    let _ = (DeviceConfig::of(message), VendorStats::of(message));
    let list = std::slice::from_ref(message);
    let _ = family::number(list, "vdpa");
    let _ = family::group(list, "devlink", "config");
    link::decode_anything(message);
    sriov::decode_anything(message);
    devlink::decode_anything(message);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An attribute in a message.
    fn frame(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(value.len() + 4).unwrap_or_default();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// Messages with attributes of each kind, and datagrams.
    fn valid() -> Vec<Vec<u8>> {
        let mut seeds = Vec::new();
        for choice in 0..8 {
            for kinds in [1..60, 60..120, 120..180_u16] {
                let mut input = vec![choice];
                input.extend([0; 16].iter().take(if choice & 1 == 0 { 4 } else { 16 }));
                for kind in kinds {
                    let inner = frame(kind, &[1, 0, 0, 0, 0, 0, 0, 0]);
                    input.extend(frame(kind, &inner));
                }
                seeds.push(input);
            }
        }
        seeds.push(b"\x06add@/devices/vdpa0\0ACTION=add\0SUBSYSTEM=vdpa\0".to_vec());
        seeds
    }

    #[test]
    fn the_corpus_of_the_management_is_decoded() {
        crate::corpus::replay("mgmt", valid, decode_anything);
    }

    proptest! {
        #[test]
        fn anything_is_decoded_without_a_panic(
            input in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            decode_anything(&input);
        }

        /// Lists with correct lengths and known types, nested twice.
        #[test]
        fn framed_attributes_are_decoded_without_a_panic(
            choice in 4_u8..6,
            outer in prop::collection::vec(
                (
                    1_u16..180,
                    prop::collection::vec(
                        (1_u16..180, prop::collection::vec(any::<u8>(), 0..9)),
                        0..4,
                    ),
                ),
                0..8,
            ),
        ) {
            let mut input = vec![choice];
            input.extend([0; 16].iter().take(if choice & 1 == 0 { 4 } else { 16 }));
            for (kind, inner) in outer {
                let inner = inner.iter().flat_map(|(kind, value)| frame(*kind, value));
                input.extend(frame(kind, &inner.collect::<Vec<u8>>()));
            }
            decode_anything(&input);
        }
    }
}
