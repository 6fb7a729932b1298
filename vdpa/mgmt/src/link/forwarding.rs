//! Makes a bridge learn that an address is behind one of its ports.
//!
//! ```text
//!   bridge fdb replace MAC dev PORT master dynamic use [vlan VLAN]
//!     RTM_NEWNEIGH ── struct ndmsg (12 bytes: family u8, padding u8 and u16, index i32,
//!                     state u16, flags u8, type u8)
//!                     NDA_LLADDR, NDA_VLAN
//! ```

use super::VlanId;
use super::uapi::*;
use crate::netlink::message::{Mode, Request, value};

/// Makes the bridge of the port with this index learn an address there, as from a received frame.
///
/// NTF_USE does that (`br_fdb_update`). An entry for another port is moved, and a new one ages as
/// usual. An entry set by an administrator keeps its state; without the flag a static entry would
/// become one that ages. The kernel requires NUD_REACHABLE for an entry that is neither permanent
/// nor static.
pub(super) fn learn(port: u32, mac: [u8; 6], vlan: Option<VlanId>) -> Request {
    let mut header = vec![AF_BRIDGE, 0, 0, 0];
    header.extend(port.to_ne_bytes());
    header.extend(NUD_REACHABLE.to_ne_bytes());
    header.extend([NTF_MASTER | NTF_USE, 0]);
    let mut attributes = vec![value(NDA_LLADDR, &mac)];
    attributes.extend(vlan.map(|vlan| value(NDA_VLAN, &vlan.get().to_ne_bytes())));
    Request {
        message_type: RTM_NEWNEIGH,
        header,
        mode: Mode::Do,
        attributes,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    /// The request equals that of `bridge fdb replace`, except for NLM_F_CREATE and NLM_F_REPLACE,
    /// which the kernel ignores with NTF_USE.
    #[test]
    #[cfg(target_endian = "little")]
    fn a_request_is_laid_out_as_the_kernel_reads_it() {
        let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
        let vlan = VlanId::try_from(100).unwrap();
        #[rustfmt::skip]
        let mut expected = vec![
            // struct nlmsghdr: length, RTM_NEWNEIGH, NLM_F_REQUEST | NLM_F_ACK, sequence number,
            // port.
            48, 0, 0, 0,  28, 0,  5, 0,  9, 0, 0, 0,  0, 0, 0, 0,
            // struct ndmsg: AF_BRIDGE, index, NUD_REACHABLE, NTF_MASTER | NTF_USE.
            7, 0, 0, 0,  0x21, 0x43, 0, 0,  2, 0,  5,  0,
            // NDA_LLADDR, padded to four bytes.
            10, 0, 2, 0,  0x52, 0x54, 0, 0x12, 0x34, 0x56, 0, 0,
            // NDA_VLAN.
            6, 0, 5, 0,  100, 0, 0, 0,
        ];
        assert_eq!(learn(0x4321, mac, Some(vlan)).bytes(9), expected);
        expected.truncate(40);
        expected[0] = 40;
        assert_eq!(learn(0x4321, mac, None).bytes(9), expected);
    }
}
