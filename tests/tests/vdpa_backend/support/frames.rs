//! Ethernet frames with a checked payload, sent to a device that loops them back.

use super::BROADCAST;

/// Bytes of `struct virtio_net_hdr_v1`, which precedes each frame.
pub(crate) const HEADER: usize = 12;
/// Lengths to send, in bytes without the header; header and frame together are
/// at most the simulator's 4 KiB.
pub(crate) const LENGTHS: [usize; 6] = [60, 61, 128, 590, 1514, 4084];
/// The address that frames are sent from.
const SENDER: [u8; 6] = [0x02, 0x5e, 0x10, 0x53, 0x11, 0xee];
/// Frames in flight at once; drivers have at least as many receive buffers.
const UNDER_WAY: usize = 8;

/// A network driver whose device sends frames back.
pub(crate) trait Loopback {
    /// Sends header and frame. Does not wait for the device.
    fn send(&mut self, packet: &[u8]);
    /// The next received header and frame; `None` after some seconds without one.
    fn receive(&mut self) -> Option<Vec<u8>>;
}

/// Header and frame number `sequence`, with pseudo-random payload.
pub(crate) fn packet(sequence: u32, length: usize, destination: [u8; 6]) -> Vec<u8> {
    let mut packet = vec![0; HEADER];
    packet.extend_from_slice(&destination);
    packet.extend_from_slice(&SENDER);
    // Ethertype "local experimental 1".
    packet.extend_from_slice(&[0x88, 0xb5]);
    packet.extend_from_slice(&sequence.to_be_bytes());
    let mut state = u64::from(sequence) << 8 | 0x9e37_79b9_7f4a_7c15;
    while packet.len() < HEADER + length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        packet.extend_from_slice(&state.to_le_bytes()[..1]);
    }
    packet
}

/// The frame of a received packet. The header's content depends on the device.
fn frame(packet: &[u8]) -> &[u8] {
    &packet[HEADER..]
}

/// Sends `count` frames of several lengths to `destinations` in turn and
/// checks that each comes back once, in order and unchanged.
pub(crate) fn exchange(nic: &mut impl Loopback, count: u32, destinations: &[[u8; 6]]) {
    let packets: Vec<Vec<u8>> = (0..count)
        .zip(LENGTHS.iter().cycle())
        .zip(destinations.iter().cycle())
        .map(|((sequence, &length), &destination)| packet(sequence, length, destination))
        .collect();
    let mut sent = 0;
    for received in 0..packets.len() {
        while sent < packets.len() && sent < received + UNDER_WAY {
            nic.send(&packets[sent]);
            sent += 1;
        }
        let got = nic.receive();
        let got = got.unwrap_or_else(|| panic!("frame {received} of {count} did not come back"));
        assert_eq!(frame(&got), frame(&packets[received]), "frame {received}");
    }
}

/// Checks that a frame to `foreign` does not return, and that the next one, to `own` or to the
/// broadcast address, does.
pub(crate) fn is_not_delivered(nic: &mut impl Loopback, foreign: [u8; 6], own: [u8; 6]) {
    for destination in [own, BROADCAST] {
        nic.send(&packet(1, 60, foreign));
        let wanted = packet(2, 60, destination);
        nic.send(&wanted);
        assert_eq!(frame(&nic.receive().unwrap()), frame(&wanted));
    }
}
