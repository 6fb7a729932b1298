//! Parses a descriptor chain into a request of the virtio-iommu driver (virtio 1.3, 5.13.6).
//!
//! Owns the layout of requests and answers. It must not know domains and endpoints.
//!
//! ```text
//!   readable:  type (1), reserved (3), then by type        20, 36, 28 or 72 bytes
//!   writable:  properties of PROBE (512)                   | status (1), reserved (3)
//! ```
//! The readable part is copied once, before any check. The status is written last, into the last
//! four writable bytes. A chain without these four bytes cannot be answered.

use vdpa::iotlb::Access;
use vdpa::iova::IovaRange;
use vdpa::memory::GuestMemory;
use vdpa::ring::{Chain, Piece};
use vm_memory::{Bytes, GuestAddress};

use crate::Error;

/// Bytes of the properties in the answer to PROBE, for the configuration field `probe_size`.
pub(super) const PROBE_SIZE: u32 = 512;
const PROPERTIES: usize = 512;
/// The addresses at which devices write interrupts (MSI) on x86. They are never translated.
pub(super) const MSI: Option<IovaRange> = IovaRange::new(0xfee0_0000, 0xfeef_ffff);

/// The largest readable part: that of PROBE.
const READABLE_MAX: usize = 72;
const TAIL: u32 = 4;

// Types of requests.
const ATTACH: u8 = 1;
const DETACH: u8 = 2;
const MAP: u8 = 3;
const UNMAP: u8 = 4;
const PROBE: u8 = 5;

/// VIRTIO_IOMMU_ATTACH_F_BYPASS.
const ATTACH_F_BYPASS: u32 = 1;
/// VIRTIO_IOMMU_MAP_F_READ, VIRTIO_IOMMU_MAP_F_WRITE, and both.
const MAP_F_READ: u32 = 1;
const MAP_F_WRITE: u32 = 2;
const MAP_F_READ_WRITE: u32 = 3;

// Properties of an endpoint (virtio 1.3, 5.13.6.7).
const PROPERTY_RESV_MEM: u16 = 1;
const RESV_MEM_LEN: u16 = 20;
const RESV_MEM_MSI: u8 = 1;

/// The result of a request (virtio 1.3, 5.13.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    Unsupported,
    DeviceError,
    Invalid,
    OutOfRange,
    NoEntry,
    NoMemory,
}

impl Status {
    /// Returns the byte for the driver.
    fn byte(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Unsupported => 2,
            Self::DeviceError => 3,
            Self::Invalid => 4,
            Self::OutOfRange => 5,
            Self::NoEntry => 6,
            Self::NoMemory => 8,
        }
    }
}

/// A request whose fields have possible values by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Attach {
        domain: u32,
        endpoint: u32,
        bypass: bool,
    },
    Detach {
        domain: u32,
        endpoint: u32,
    },
    Map {
        domain: u32,
        range: IovaRange,
        gpa: u64,
        access: Access,
    },
    Unmap {
        domain: u32,
        range: IovaRange,
    },
    Probe {
        endpoint: u32,
    },
    /// Not a request that can be served; the answer.
    Refused(Status),
}

/// The place of the answer.
#[derive(Debug)]
pub(super) struct Reply {
    /// The ID of the chain.
    pub(super) chain: u16,
    writable: Vec<Piece>,
    len: u32,
}

/// Parses a chain.
///
/// # Errors
/// The chain has no room for a status, or its memory cannot be read.
pub(super) fn parse(memory: &GuestMemory, chain: &Chain) -> Result<(Reply, Request), Error> {
    let (readable, writable) = chain.split();
    let reply = Reply {
        chain: chain.id,
        writable: writable.to_vec(),
        len: total(writable),
    };
    if reply.len < TAIL {
        return Err(Error::other(format!(
            "a request at descriptor {} has {} writable bytes: a status needs {TAIL}",
            chain.id, reply.len
        )));
    }
    let mut bytes = [0; READABLE_MAX];
    let request = match read(memory, readable, &mut bytes)? {
        Some(bytes) => decode(bytes, reply.len - TAIL),
        None => Request::Refused(Status::Invalid),
    };
    Ok((reply, request))
}

fn total(pieces: &[Piece]) -> u32 {
    let lengths = pieces.iter().map(|piece| piece.len);
    lengths.fold(0, u32::saturating_add)
}

/// Copies the readable part; `None` if it is longer than any request.
fn read<'a>(
    memory: &GuestMemory,
    pieces: &[Piece],
    bytes: &'a mut [u8; READABLE_MAX],
) -> Result<Option<&'a [u8]>, Error> {
    let mut rest = &mut bytes[..];
    for piece in pieces {
        let len = usize::try_from(piece.len).unwrap_or(usize::MAX);
        let Some((now, later)) = rest.split_at_mut_checked(len) else {
            return Ok(None);
        };
        memory
            .read_slice(now, GuestAddress(piece.iova.0))
            .map_err(Error::context("cannot read a request"))?;
        rest = later;
    }
    let unused = rest.len();
    Ok(bytes.get(..READABLE_MAX - unused))
}

/// Decodes the readable part. `extra` is the number of writable bytes before the status.
fn decode(bytes: &[u8], extra: u32) -> Request {
    let mut fields = Fields(bytes);
    let Some([kind, reserved @ ..]) = fields.take::<4>() else {
        return Request::Refused(Status::Invalid);
    };
    let request = match kind {
        ATTACH => fields.attach(),
        DETACH => fields.detach(),
        MAP => fields.map(),
        UNMAP => fields.unmap(),
        PROBE => fields.probe(),
        _ => return Request::Refused(Status::Unsupported),
    };
    let properties = if kind == PROBE { PROBE_SIZE } else { 0 };
    match request {
        Some(request) if fields.0.is_empty() && extra == properties && reserved == [0; 3] => {
            request
        }
        _ => Request::Refused(Status::Invalid),
    }
}

/// The fields of a request that are not decoded yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (now, later) = self.0.split_first_chunk()?;
        self.0 = later;
        Some(*now)
    }

    fn number(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn address(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Takes reserved bytes, which must be 0.
    fn reserved<const N: usize>(&mut self) -> Option<()> {
        self.take::<N>().filter(|bytes| *bytes == [0; N]).map(drop)
    }

    fn attach(&mut self) -> Option<Request> {
        let (domain, endpoint, flags) = (self.number()?, self.number()?, self.number()?);
        self.reserved::<4>()?;
        (flags & !ATTACH_F_BYPASS == 0).then_some(Request::Attach {
            domain,
            endpoint,
            bypass: flags != 0,
        })
    }

    fn detach(&mut self) -> Option<Request> {
        let (domain, endpoint) = (self.number()?, self.number()?);
        self.reserved::<8>()?;
        Some(Request::Detach { domain, endpoint })
    }

    fn map(&mut self) -> Option<Request> {
        let domain = self.number()?;
        let (first, last) = (self.address()?, self.address()?);
        let (gpa, flags) = (self.address()?, self.number()?);
        let access = match flags {
            MAP_F_READ => Access::ReadOnly,
            MAP_F_WRITE => Access::WriteOnly,
            MAP_F_READ_WRITE => Access::ReadWrite,
            // Without any access, for MMIO (not offered), or unknown.
            _ => return None,
        };
        Some(match IovaRange::new(first, last) {
            Some(range) => Request::Map {
                domain,
                range,
                gpa,
                access,
            },
            None => Request::Refused(Status::OutOfRange),
        })
    }

    fn unmap(&mut self) -> Option<Request> {
        let domain = self.number()?;
        let (first, last) = (self.address()?, self.address()?);
        self.reserved::<4>()?;
        Some(match IovaRange::new(first, last) {
            Some(range) => Request::Unmap { domain, range },
            None => Request::Refused(Status::OutOfRange),
        })
    }

    fn probe(&mut self) -> Option<Request> {
        let endpoint = self.number()?;
        self.reserved::<64>()?;
        Some(Request::Probe { endpoint })
    }
}

impl Reply {
    /// Writes the answer to `request`, and returns the number of bytes.
    ///
    /// # Errors
    /// Guest memory cannot be written.
    pub(super) fn write(
        &self,
        memory: &GuestMemory,
        request: &Request,
        status: Status,
    ) -> Result<u32, Error> {
        let before = self.len - TAIL;
        let mut written = TAIL;
        if matches!(request, Request::Probe { .. }) {
            let properties = match status {
                Status::Ok => properties(),
                _ => [0; PROPERTIES],
            };
            self.put(memory, 0, &properties)?;
            written += PROBE_SIZE;
        }
        self.put(memory, before, &[status.byte(), 0, 0, 0])?;
        Ok(written)
    }

    /// Writes at `offset` of the writable part, which has room for it.
    fn put(&self, memory: &GuestMemory, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let (mut skip, mut rest) = (offset, bytes);
        for piece in &self.writable {
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let room = usize::try_from(piece.len - skip).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at(rest.len().min(room));
            // No wrap: the whole piece lies in guest memory.
            let at = GuestAddress(piece.iova.0.wrapping_add(u64::from(skip)));
            memory
                .write_slice(now, at)
                .map_err(Error::context("cannot answer a request"))?;
            (skip, rest) = (0, later);
            if rest.is_empty() {
                break;
            }
        }
        Ok(())
    }
}

/// Returns the properties of every endpoint: the addresses of interrupts. A property of type 0 and
/// length 0 ends the list.
fn properties() -> [u8; PROPERTIES] {
    let mut bytes = [0; PROPERTIES];
    let Some(msi) = MSI else {
        return bytes;
    };
    let property = [
        &PROPERTY_RESV_MEM.to_le_bytes()[..],
        &RESV_MEM_LEN.to_le_bytes(),
        &[RESV_MEM_MSI, 0, 0, 0],
        &msi.first().to_le_bytes(),
        &msi.last().to_le_bytes(),
    ]
    .concat();
    for (to, from) in bytes.iter_mut().zip(property) {
        *to = from;
    }
    bytes
}

#[cfg(any(test, feature = "fuzz"))]
pub(super) mod encode {
    //! Requests as a driver writes them.

    use super::*;

    pub(in super::super) fn attach(domain: u32, endpoint: u32, flags: u32) -> Vec<u8> {
        let fields = [domain, endpoint, flags, 0].map(u32::to_le_bytes).concat();
        [vec![ATTACH, 0, 0, 0], fields].concat()
    }

    pub(in super::super) fn detach(domain: u32, endpoint: u32) -> Vec<u8> {
        let fields = [domain, endpoint, 0, 0].map(u32::to_le_bytes).concat();
        [vec![DETACH, 0, 0, 0], fields].concat()
    }

    pub(in super::super) fn map(domain: u32, at: [u64; 3], flags: u32) -> Vec<u8> {
        let (domain, flags) = (domain.to_le_bytes(), flags.to_le_bytes());
        let at = at.map(u64::to_le_bytes).concat();
        [&[MAP, 0, 0, 0], &domain[..], &at, &flags].concat()
    }

    pub(in super::super) fn unmap(domain: u32, at: [u64; 2]) -> Vec<u8> {
        let at = at.map(u64::to_le_bytes).concat();
        [&[UNMAP, 0, 0, 0], &domain.to_le_bytes()[..], &at, &[0; 4]].concat()
    }

    pub(in super::super) fn probe(endpoint: u32) -> Vec<u8> {
        [&[PROBE, 0, 0, 0], &endpoint.to_le_bytes()[..], &[0; 64]].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: [u64; 2] = [0x1000, 0x2fff];

    fn valid() -> Vec<(Vec<u8>, u32, Request)> {
        let range = IovaRange::new(RANGE[0], RANGE[1]).unwrap();
        let map = |flags| encode::map(7, [RANGE[0], RANGE[1], 0x8000], flags);
        let mapped = |access| Request::Map {
            domain: 7,
            range,
            gpa: 0x8000,
            access,
        };
        let attached = |bypass| Request::Attach {
            domain: 7,
            endpoint: 9,
            bypass,
        };
        let detached = Request::Detach {
            domain: 7,
            endpoint: 9,
        };
        vec![
            (encode::attach(7, 9, 0), 0, attached(false)),
            (encode::attach(7, 9, 1), 0, attached(true)),
            (encode::detach(7, 9), 0, detached),
            (map(1), 0, mapped(Access::ReadOnly)),
            (map(2), 0, mapped(Access::WriteOnly)),
            (map(3), 0, mapped(Access::ReadWrite)),
            (
                encode::unmap(7, RANGE),
                0,
                Request::Unmap { domain: 7, range },
            ),
            (encode::probe(9), 512, Request::Probe { endpoint: 9 }),
        ]
    }

    const INVALID: Request = Request::Refused(Status::Invalid);

    #[test]
    fn requests_are_decoded_and_other_lengths_are_not() {
        for (bytes, extra, request) in valid() {
            assert_eq!(decode(&bytes, extra), request);
            for len in 0..bytes.len() {
                assert_eq!(decode(&bytes[..len], extra), INVALID, "{request:?} {len}");
            }
            let longer = [&bytes[..], &[0]].concat();
            assert_eq!(decode(&longer, extra), INVALID, "{request:?}");
            for other in [1, 4, 511, 513] {
                assert_eq!(decode(&bytes, other), INVALID, "{request:?} {other}");
            }
        }
    }

    #[test]
    fn reserved_bytes_and_unknown_flags_are_refused() {
        // The reserved bytes of each type, beside those of the head.
        let reserved = [(0, 16..20), (2, 12..20), (6, 24..28), (7, 8..72)];
        for (number, (bytes, extra, _)) in valid().into_iter().enumerate() {
            let own = reserved.iter().find(|(other, _)| *other == number);
            let own = own.map_or(0..0, |(_, own)| own.clone());
            for at in (1..4).chain(own) {
                let mut bytes = bytes.clone();
                bytes[at] = 0x80;
                assert_eq!(
                    decode(&bytes, extra),
                    INVALID,
                    "request {number}, byte {at}"
                );
            }
        }
        for flags in [2, 3, 1 << 31] {
            assert_eq!(decode(&encode::attach(1, 1, flags), 0), INVALID);
        }
        for flags in [0, 4, 7, 1 << 31] {
            let map = encode::map(1, [0, 0xfff, 0], flags);
            assert_eq!(decode(&map, 0), INVALID, "{flags}");
        }
    }

    #[test]
    fn unknown_types_and_empty_ranges_have_their_own_status() {
        for kind in [0, 6, 255] {
            let mut bytes = encode::probe(1);
            bytes[0] = kind;
            let unsupported = Request::Refused(Status::Unsupported);
            assert_eq!(decode(&bytes, 512), unsupported);
        }
        let empty = Request::Refused(Status::OutOfRange);
        assert_eq!(decode(&encode::map(1, [0x1000, 0xfff, 0], 1), 0), empty);
        assert_eq!(decode(&encode::unmap(1, [u64::MAX, 0]), 0), empty);
    }

    #[test]
    fn the_properties_name_the_addresses_of_interrupts() {
        let bytes = properties();
        let expected = [
            1, 0, 20, 0, 1, 0, 0, 0, 0, 0, 0xe0, 0xfe, 0, 0, 0, 0, 0xff, 0xff, 0xef, 0xfe, 0, 0, 0,
            0,
        ];
        assert_eq!(bytes[..24], expected);
        assert!(bytes[24..].iter().all(|byte| *byte == 0));
    }
}
