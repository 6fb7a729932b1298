//! The flow of a frame. Frames of one flow go to one receive queue, so they keep their order.

use std::hash::{DefaultHasher, Hasher as _};

/// Ethernet types.
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: u16 = 0x8100;
const OUTER_VLAN: u16 = 0x88a8;
/// VLAN tags that are skipped.
const TAGS_MAX: usize = 2;
/// IP protocols whose header begins with two ports: TCP, UDP, SCTP.
const WITH_PORTS: [u8; 3] = [6, 17, 132];

/// A number that is the same for all frames of a flow: a hash of the IP addresses and ports, or of
/// the Ethernet addresses. `frame` begins with its Ethernet header, and may be anything.
pub(super) fn of(frame: &[u8]) -> u64 {
    let mut at = 12;
    for _ in 0..TAGS_MAX {
        if matches!(word(frame, at), Some(VLAN | OUTER_VLAN)) {
            at += 4;
        }
    }
    let packet = frame.get(at + 2..).unwrap_or_default();
    let parts = match word(frame, at) {
        Some(IPV4) => ipv4(packet),
        Some(IPV6) => ipv6(packet),
        _ => None,
    };
    let ethernet = || [frame.get(..12).unwrap_or(frame), &[]];
    let mut hasher = DefaultHasher::new();
    for part in parts.unwrap_or_else(ethernet) {
        hasher.write(part);
    }
    hasher.finish()
}

/// The addresses and the ports. All fragments have the same flow, so no ports.
fn ipv4(packet: &[u8]) -> Option<[&[u8]; 2]> {
    let length = usize::from(packet.first()? & 15) * 4;
    let is_fragment = word(packet, 6)? & 0x3fff != 0;
    let addresses = packet.get(12..20)?;
    let has_ports = !is_fragment && WITH_PORTS.contains(packet.get(9)?);
    Some([addresses, ports(packet, length, has_ports)])
}

/// The addresses, and the ports of a packet without extension headers.
fn ipv6(packet: &[u8]) -> Option<[&[u8]; 2]> {
    let addresses = packet.get(8..40)?;
    let has_ports = WITH_PORTS.contains(packet.get(6)?);
    Some([addresses, ports(packet, 40, has_ports)])
}

fn ports(packet: &[u8], at: usize, has_ports: bool) -> &[u8] {
    let ports = packet.get(at..at + 4).filter(|_| has_ports);
    ports.unwrap_or_default()
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*word))
}
