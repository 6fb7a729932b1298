//! Attributes of an answer, checked: consecutive `struct nlattr`, each aligned to four bytes.
//!
//! Unknown attributes are ignored, for compatibility with newer kernels. Of a repeated attribute
//! the last one counts, as in the kernel's own parser.

use netlink_packet_core::{NlasIterator, parse_mac, parse_u8, parse_u16, parse_u32, parse_u64};

use super::error::Malformed;

/// Size of `struct nlattr`.
const NLA_HDRLEN: usize = 4;

/// More attributes than any kernel message has; a port in every second VLAN has the most.
const ATTRIBUTES_MAX: usize = 4096;

/// `struct nla_bitfield32` (include/uapi/linux/netlink.h): 8 bytes in the machine's byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bitfield32 {
    /// The flags.
    pub(crate) value: u32,
    /// The mask of valid flags.
    pub(crate) selector: u32,
}

impl Bitfield32 {
    /// Its encoding.
    pub(crate) fn bytes(self) -> Vec<u8> {
        [self.value.to_ne_bytes(), self.selector.to_ne_bytes()].concat()
    }
}

/// The attributes of one message.
#[derive(Debug)]
pub(crate) struct Attributes<'a> {
    list: Vec<(u16, &'a [u8])>,
}

impl<'a> Attributes<'a> {
    /// Checks lengths; each getter checks its value.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut list = Vec::new();
        for attribute in NlasIterator::new(bytes) {
            let attribute =
                attribute.map_err(|error| Malformed::new("attributes", error.to_string()))?;
            if list.len() == ATTRIBUTES_MAX {
                return Err(Malformed::new("attributes", "there are too many"));
            }
            let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
            // The slice covers the rest of the list. The length was checked.
            let rest = attribute.into_inner();
            list.push((kind, rest.get(NLA_HDRLEN..length).unwrap_or_default()));
        }
        Ok(Self { list })
    }

    /// All attributes in order: type and value.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &'a [u8])> {
        self.list.iter().copied()
    }

    /// The values of all attributes of a type, in order.
    pub(crate) fn each(&self, kind: u16) -> impl Iterator<Item = &'a [u8]> {
        self.iter()
            .filter(move |one| one.0 == kind)
            .map(|one| one.1)
    }

    fn find(&self, kind: u16) -> Option<&'a [u8]> {
        self.each(kind).last()
    }

    pub(crate) fn u8(&self, kind: u16) -> Result<Option<u8>, Malformed> {
        self.number(kind, parse_u8)
    }

    pub(crate) fn u16(&self, kind: u16) -> Result<Option<u16>, Malformed> {
        self.number(kind, parse_u16)
    }

    pub(crate) fn u32(&self, kind: u16) -> Result<Option<u32>, Malformed> {
        self.number(kind, parse_u32)
    }

    pub(crate) fn u64(&self, kind: u16) -> Result<Option<u64>, Malformed> {
        self.number(kind, parse_u64)
    }

    /// An 8-bit number that is on or off.
    pub(crate) fn flag(&self, kind: u16) -> Result<Option<bool>, Malformed> {
        Ok(self.u8(kind)?.map(|flag| flag != 0))
    }

    pub(crate) fn mac(&self, kind: u16) -> Result<Option<[u8; 6]>, Malformed> {
        self.number(kind, parse_mac)
    }

    fn number<T>(
        &self,
        kind: u16,
        parse: fn(&[u8]) -> Result<T, netlink_packet_core::DecodeError>,
    ) -> Result<Option<T>, Malformed> {
        let Some(value) = self.find(kind) else {
            return Ok(None);
        };
        parse(value)
            .map(Some)
            .map_err(|error| Malformed::attribute(kind, error.to_string()))
    }

    /// The raw value.
    pub(crate) fn bytes(&self, kind: u16) -> Option<&'a [u8]> {
        self.find(kind)
    }

    /// Whether the attribute is present: a flag has no value.
    pub(crate) fn has(&self, kind: u16) -> bool {
        self.find(kind).is_some()
    }

    /// The attributes nested in an attribute. Callers name each level that they enter, so the depth
    /// is limited.
    pub(crate) fn nested(&self, kind: u16) -> Result<Option<Self>, Malformed> {
        self.find(kind).map(Self::parse).transpose()
    }

    /// The nested attributes of one that the message must have.
    pub(crate) fn needed_nested(&self, kind: u16) -> Result<Self, Malformed> {
        needed(kind, self.nested(kind)?)
    }

    pub(crate) fn string(&self, kind: u16) -> Option<String> {
        self.find(kind).map(text)
    }

    /// A string that the message must have.
    pub(crate) fn needed_string(&self, kind: u16) -> Result<String, Malformed> {
        needed(kind, self.string(kind).filter(|text| !text.is_empty()))
    }

    /// `struct nla_bitfield32`: flags, and the mask of valid ones.
    pub(crate) fn bitfield32(&self, kind: u16) -> Result<Option<Bitfield32>, Malformed> {
        let Some(bytes) = self.u64(kind)?.map(u64::to_ne_bytes) else {
            return Ok(None);
        };
        let [a, b, c, d, e, f, g, h] = bytes;
        Ok(Some(Bitfield32 {
            value: u32::from_ne_bytes([a, b, c, d]),
            selector: u32::from_ne_bytes([e, f, g, h]),
        }))
    }

    /// A number that the message must have.
    pub(crate) fn needed_u8(&self, kind: u16) -> Result<u8, Malformed> {
        needed(kind, self.u8(kind)?)
    }

    /// A number that the message must have.
    pub(crate) fn needed_u16(&self, kind: u16) -> Result<u16, Malformed> {
        needed(kind, self.u16(kind)?)
    }

    /// A number that the message must have.
    pub(crate) fn needed_u32(&self, kind: u16) -> Result<u32, Malformed> {
        needed(kind, self.u32(kind)?)
    }
}

/// Fails if the message lacks the attribute.
pub(crate) fn needed<T>(kind: u16, found: Option<T>) -> Result<T, Malformed> {
    found.ok_or_else(|| Malformed::attribute(kind, "it is missing"))
}

/// A string up to its NUL. Bytes that are not UTF-8 are replaced: a device with such a name must
/// not hide all others.
pub(crate) fn text(value: &[u8]) -> String {
    let end = value.iter().position(|&byte| byte == 0);
    let value = value.get(..end.unwrap_or(value.len())).unwrap_or_default();
    String::from_utf8_lossy(value).into_owned()
}

/// A value of a repeated attribute.
pub(crate) fn number(kind: u16, value: &[u8]) -> Result<u64, Malformed> {
    parse_u64(value).map_err(|error| Malformed::attribute(kind, error.to_string()))
}
