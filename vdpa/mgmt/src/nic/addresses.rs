//! Finds the network interfaces that have an IP address.
//!
//! ```text
//!   RTM_GETADDR, dump of all families ──> RTM_NEWADDR: struct ifaddrmsg (8 bytes: family u8,
//!                                         prefix length u8, flags u8, scope u8, index u32),
//!                                         attributes
//! ```
//!
//! Only the index is read. The header of links is 16 bytes long, so the first attribute, which each
//! address has, is split off as a part of the header.

use std::collections::HashSet;
use std::io;
use std::time::Duration;

use netlink_packet_route::address::{AddressHeader, AddressMessage};

use crate::error::Error;
use crate::netlink::error::CallError;
use crate::netlink::message::{Message, Mode, Protocol, Request};
use crate::netlink::worker::Worker;

/// Indexes of the interfaces in this network namespace that have an address.
pub(super) fn interfaces_with_one(patience: Duration) -> Result<HashSet<u32>, Error> {
    let worker = Worker::start(Protocol::Route, patience)?;
    let request = Request::route(libc::RTM_GETADDR, Mode::Dump, &AddressMessage::default());
    let answer = worker.call(request).map_err(|error| {
        Error::netlink(match error {
            CallError::Socket(error) => error,
            error => io::Error::other(error),
        })
    })?;
    Ok(answer.messages.iter().filter_map(index).collect())
}

fn index(message: &Message) -> Option<u32> {
    if message.message_type != libc::RTM_NEWADDR {
        return None;
    }
    let header = AddressHeader::parse(&message.header).ok()?;
    Some(header.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_one_or_there_is_none() {
        // No interface has index 0. The others depend on the machine.
        let found = interfaces_with_one(Duration::from_secs(10)).unwrap();
        assert!(!found.contains(&0));
    }

    #[test]
    fn other_messages_and_short_ones_are_ignored() {
        let mut message = Message {
            message_type: libc::RTM_NEWADDR,
            header: vec![2, 24, 0, 0, 7, 0, 0, 0, 8, 0, 1, 0, 10, 0, 0, 1],
            attributes: Vec::new(),
        };
        assert_eq!(index(&message), Some(u32::from_ne_bytes([7, 0, 0, 0])));
        message.header.truncate(7);
        assert_eq!(index(&message), None);
        message.message_type = libc::RTM_GETADDR;
        assert_eq!(index(&message), None);
    }
}
