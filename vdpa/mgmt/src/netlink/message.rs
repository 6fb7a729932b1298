//! A netlink message: a header of fixed size, then attributes.
//!
//! ```text
//!   generic netlink   struct genlmsghdr   4 bytes  (include/uapi/linux/genetlink.h)
//!   rtnetlink, links  struct ifinfomsg   16 bytes  (include/uapi/linux/rtnetlink.h)
//! ```
//!
//! Requests to rtnetlink are messages of netlink-packet-route. Answers keep their attributes raw,
//! since that crate rejects a whole message with one odd attribute.

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLA_F_NESTED, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST,
    NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};

use super::error::Malformed;

/// The netlink protocol, which sets the size of the header of its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// Generic netlink: `struct genlmsghdr`.
    Generic,
    /// rtnetlink, for links only: `struct ifinfomsg`.
    Route,
}

impl Protocol {
    /// Size of the header between `struct nlmsghdr` and the attributes, in bytes.
    pub(crate) fn header_length(self) -> usize {
        match self {
            Self::Generic => 4,
            Self::Route => 16,
        }
    }
}

/// The form of an answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Any number of messages, then an acknowledgement.
    Do,
    /// Messages in several datagrams, then NLMSG_DONE.
    Dump,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// `nlmsg_type`: in generic netlink the family's number.
    pub(crate) message_type: u16,
    pub(crate) mode: Mode,
    /// A header, then attributes.
    payload: Vec<u8>,
}

impl Request {
    /// A request to a generic netlink family: its number, a command, its version.
    pub(crate) fn generic(
        family: u16,
        command: u8,
        version: u8,
        mode: Mode,
        attributes: Vec<DefaultNla>,
    ) -> Self {
        let mut payload = vec![command, version, 0, 0];
        payload.extend(encoded(&attributes.as_slice()));
        Self {
            message_type: family,
            mode,
            payload,
        }
    }

    /// A request to rtnetlink.
    pub(crate) fn route(message_type: u16, mode: Mode, message: &impl Emitable) -> Self {
        Self {
            message_type,
            mode,
            payload: encoded(message),
        }
    }

    /// The encoded request.
    pub(crate) fn bytes(&self, sequence: u32) -> Vec<u8> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST
            | NLM_F_ACK
            | match self.mode {
                Mode::Do => 0,
                Mode::Dump => NLM_F_DUMP,
            };
        header.sequence_number = sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(Outgoing(self)));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }
}

struct Outgoing<'a>(&'a Request);

impl NetlinkSerializable for Outgoing<'_> {
    fn message_type(&self) -> u16 {
        self.0.message_type
    }

    fn buffer_len(&self) -> usize {
        self.0.payload.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.0.payload);
    }
}

/// A message of an answer, with raw attributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    /// `nlmsg_type`: in generic netlink the family's number.
    pub(crate) message_type: u16,
    /// The header before the attributes.
    pub(crate) header: Vec<u8>,
    /// Raw attributes.
    pub(crate) attributes: Vec<u8>,
}

impl Message {
    /// The command of a generic netlink message: the first byte of its header.
    pub(crate) fn command(&self) -> u8 {
        self.header.first().copied().unwrap_or_default()
    }
}

/// A message of an answer with header and attributes still together.
#[derive(Debug)]
pub(super) struct Incoming {
    message_type: u16,
    payload: Vec<u8>,
}

impl Incoming {
    /// Splits it into header and attributes.
    pub(super) fn message(mut self, protocol: Protocol) -> Result<Message, Malformed> {
        let length = protocol.header_length();
        if self.payload.len() < length {
            return Err(Malformed::new("message", "it is shorter than its header"));
        }
        let attributes = self.payload.split_off(length);
        Ok(Message {
            message_type: self.message_type,
            header: self.payload,
            attributes,
        })
    }
}

impl NetlinkDeserializable for Incoming {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        Ok(Self {
            message_type: header.message_type,
            payload: payload.to_vec(),
        })
    }
}

/// A string attribute, with the NUL that the kernel requires.
pub(crate) fn string(kind: u16, text: &str) -> DefaultNla {
    let mut value = text.as_bytes().to_vec();
    value.push(0);
    DefaultNla::new(kind, value)
}

/// The bytes of a message or of attributes.
pub(crate) fn encoded(message: &impl Emitable) -> Vec<u8> {
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    bytes
}

/// An attribute with a value in the machine's byte order.
pub(crate) fn value(kind: u16, bytes: &[u8]) -> DefaultNla {
    DefaultNla::new(kind, bytes.to_vec())
}

/// Nested attributes with the flag NLA_F_NESTED, as devlink requires.
pub(crate) fn nested_flagged(kind: u16, attributes: &[DefaultNla]) -> DefaultNla {
    nested(kind | NLA_F_NESTED, attributes)
}

/// Nested attributes without the flag.
pub(crate) fn nested(kind: u16, attributes: &[DefaultNla]) -> DefaultNla {
    DefaultNla::new(kind, encoded(&attributes))
}
