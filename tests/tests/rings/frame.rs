//! Frames that identify themselves: a queue pair, a number, and a payload that follows from both.
//! So a wrong, foreign or stale frame is detected.

/// `struct virtio_net_hdr_v1`.
pub(crate) const HEADER: usize = 12;
/// Bytes of a frame without virtio's header.
const FRAME: usize = 206;
/// Destination, source, type, pair, number.
const NAMED: usize = 6 + 6 + 2 + 2 + 4;
/// Local experimental Ethertype 1 (IEEE 802).
const TYPE: u16 = 0x88b5;

/// An Ethernet address.
pub(crate) type Mac = [u8; 6];

/// Frame `number` of a pair, with virtio's header before it.
pub(crate) fn make(to: Mac, from: Mac, pair: u16, number: u32) -> Vec<u8> {
    let mut packet = vec![0; HEADER];
    packet.extend_from_slice(&to);
    packet.extend_from_slice(&from);
    packet.extend_from_slice(&TYPE.to_be_bytes());
    packet.extend_from_slice(&pair.to_be_bytes());
    packet.extend_from_slice(&number.to_be_bytes());
    let mut state = u64::from(number) << 20 | u64::from(pair) << 8 | u64::from(from[5]);
    state |= 1 << 63;
    while packet.len() < HEADER + FRAME {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let left = HEADER + FRAME - packet.len();
        let bytes = state.to_le_bytes();
        packet.extend_from_slice(&bytes[..left.min(8)]);
    }
    packet
}

/// The number of a received packet; `None` for one that is not from this sender to this receiver (a
/// network has other traffic).
///
/// # Panics
/// The frame has the right addresses, but something else in it is wrong.
pub(crate) fn number(packet: &[u8], to: Mac, from: Mac, pair: u16) -> Option<u32> {
    let (named, number) = pair_and_number(packet, to, from)?;
    assert_eq!(named, pair, "frame {number} came by another pair's queue");
    Some(number)
}

/// Like [`number`], with the pair that the frame names: a switch may choose the queue.
///
/// # Panics
/// As [`number`].
pub(crate) fn pair_and_number(packet: &[u8], to: Mac, from: Mac) -> Option<(u16, u32)> {
    let frame = packet.get(HEADER..)?;
    if frame.len() < NAMED
        || frame[..6] != to
        || frame[6..12] != from
        || frame[12..14] != TYPE.to_be_bytes()
    {
        return None;
    }
    let pair = u16::from_be_bytes(frame[14..16].try_into().unwrap());
    let number = u32::from_be_bytes(frame[16..20].try_into().unwrap());
    let expected = make(to, from, pair, number);
    assert!(
        frame == &expected[HEADER..],
        "frame {number} of pair {pair} is damaged: {frame:02x?}"
    );
    Some((pair, number))
}
