//! A generic netlink message: `struct genlmsghdr` and attributes
//! (include/uapi/linux/genetlink.h).

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};

/// Size of `struct genlmsghdr`: command, version, two reserved bytes.
const GENL_HDRLEN: usize = 4;

/// What an answer to a request looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Any number of messages, then an acknowledgement.
    Do,
    /// Messages in several datagrams, then NLMSG_DONE.
    Dump,
}

/// A request to a family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// The family's number: the message type.
    pub(crate) family: u16,
    pub(crate) command: u8,
    /// The family's version.
    pub(crate) version: u8,
    pub(crate) mode: Mode,
    /// In the order in which they are sent.
    pub(crate) attributes: Vec<DefaultNla>,
}

impl Request {
    /// The request on the wire.
    pub(super) fn bytes(&self, sequence: u32) -> Vec<u8> {
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
        self.0.family
    }

    fn buffer_len(&self) -> usize {
        GENL_HDRLEN + self.0.attributes.as_slice().buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        let (header, attributes) = buffer.split_at_mut(GENL_HDRLEN);
        header.copy_from_slice(&[self.0.command, self.0.version, 0, 0]);
        self.0.attributes.as_slice().emit(attributes);
    }
}

/// A message of an answer, its attributes not yet looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    /// The family's number.
    pub(crate) family: u16,
    pub(crate) command: u8,
    /// Attributes as they came.
    pub(crate) attributes: Vec<u8>,
}

impl NetlinkDeserializable for Message {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let Some((generic, attributes)) = payload.split_at_checked(GENL_HDRLEN) else {
            return Err(DecodeError::buffer_too_small(payload.len(), GENL_HDRLEN));
        };
        Ok(Self {
            family: header.message_type,
            command: generic.first().copied().unwrap_or_default(),
            attributes: attributes.to_vec(),
        })
    }
}

/// A string attribute, with the NUL that the kernel relies on.
pub(crate) fn string(kind: u16, text: &str) -> DefaultNla {
    let mut value = text.as_bytes().to_vec();
    value.push(0);
    DefaultNla::new(kind, value)
}

/// An attribute with a value of the machine's byte order.
pub(crate) fn value(kind: u16, bytes: &[u8]) -> DefaultNla {
    DefaultNla::new(kind, bytes.to_vec())
}
