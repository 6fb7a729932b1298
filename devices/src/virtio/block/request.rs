//! Parses a descriptor chain into a checked block request (virtio 1.3, 5.2.6).
//!
//! Owns the layout of requests and every check on them. It must not know how they are carried out.
//! Every request that it returns lies inside the disk and inside guest memory.
//!
//! ```text
//!   readable:  header (16)                  | data of a write
//!              type, reserved: u32 each     |
//!              sector: u64, little-endian   |
//!   writable:  data of a read               | status (1)
//! ```
//! Descriptor boundaries inside that have no meaning (2.7.4).

use vdpa::iova::DeviceAddress;
use vdpa::memory::DeviceMemory;
use vdpa::ring::{Chain, Piece};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use vm_memory::{Bytes, GuestAddress};

use super::disk::SECTOR;
use crate::Error;

const HEADER: usize = 16;

/// The result of a request, as written to its status byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// Done.
    Ok,
    /// Failed, or not allowed.
    IoError,
    /// The device does not support this kind of request.
    Unsupported,
}

impl Status {
    /// Returns the byte for the driver.
    pub(crate) fn byte(self) -> u8 {
        let value = match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::IoError => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        // All three are below 3.
        u8::try_from(value).unwrap_or(1)
    }
}

/// A checked read or write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// Byte offset on the disk, a multiple of 512.
    pub(crate) offset: u64,
    /// Length in bytes, a multiple of 512 and not 0.
    pub(crate) len: u64,
    /// Guest memory, `len` bytes in total.
    pub(crate) data: Vec<Piece>,
}

/// An operation on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Io {
    /// From the disk into guest memory.
    Read(Transfer),
    /// From guest memory to the disk.
    Write(Transfer),
    /// Make all completed writes durable.
    Flush,
}

/// The operation of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Use the disk.
    Io(Io),
    /// Return the 20-byte identification string.
    GetId {
        /// Guest memory for it.
        data: Vec<Piece>,
    },
    /// Only report this status.
    Finished(Status),
}

impl Operation {
    /// Returns the number of bytes that it reads from the disk or writes to it.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Io(Io::Read(transfer) | Io::Write(transfer)) => transfer.len,
            Self::Io(Io::Flush) | Self::GetId { .. } | Self::Finished(_) => 0,
        }
    }
}

/// A request and the address of its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// The head of its chain.
    pub(crate) head: u16,
    /// Address of the status byte.
    pub(crate) status: DeviceAddress,
    /// The operation.
    pub(crate) operation: Operation,
}

/// The limits of requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Capacity of the disk in sectors.
    pub(crate) sectors: u64,
    /// Whether writes are refused.
    pub(crate) read_only: bool,
    /// Maximum bytes of data in one request.
    pub(crate) max_bytes: u64,
}

/// Checks a chain.
///
/// # Errors
/// The chain has no room for a header or for a status byte. Every other fault of a request is
/// reported as its status, also a header that is not mapped behind an IOMMU.
pub(crate) fn parse(
    memory: &DeviceMemory,
    chain: &Chain,
    limits: &Limits,
) -> Result<Request, Error> {
    let head = chain.id;
    let malformed = || {
        Error::other(format!(
            "a request at descriptor {head} lacks a complete header or a status byte"
        ))
    };
    let (readable, writable) = chain.split();
    let (header, to_device) = take_header(memory, readable).ok_or_else(malformed)?;
    let (from_device, status) = take_status(writable.to_vec()).ok_or_else(malformed)?;
    let kind_and_sector = header.map(|[t0, t1, t2, t3, _, _, _, _, sector @ ..]| {
        (
            u32::from_le_bytes([t0, t1, t2, t3]),
            u64::from_le_bytes(sector),
        )
    });
    let operation = match kind_and_sector {
        None => Operation::Finished(Status::IoError),
        Some((VIRTIO_BLK_T_IN, sector)) => transfer(sector, from_device, limits, Io::Read),
        // A device that offers RO must fail writes (5.2.6.2).
        Some((VIRTIO_BLK_T_OUT, _)) if limits.read_only => Operation::Finished(Status::IoError),
        Some((VIRTIO_BLK_T_OUT, sector)) => transfer(sector, to_device, limits, Io::Write),
        Some((VIRTIO_BLK_T_FLUSH, _)) => Operation::Io(Io::Flush),
        Some((VIRTIO_BLK_T_GET_ID, _)) => Operation::GetId { data: from_device },
        Some(_) => Operation::Finished(Status::Unsupported),
    };
    Ok(Request {
        head,
        status,
        operation,
    })
}

/// Reads the header, `None` if it cannot be read, and returns the rest of the readable part.
fn take_header(
    memory: &DeviceMemory,
    readable: &[Piece],
) -> Option<(Option<[u8; HEADER]>, Vec<Piece>)> {
    let mut header = [0; HEADER];
    let mut is_read = true;
    let mut missing = &mut header[..];
    let mut rest = Vec::with_capacity(readable.len());
    for piece in readable {
        let len = missing.len().min(usize::try_from(piece.len).ok()?);
        let (now, later) = missing.split_at_mut(len);
        is_read &= memory.read_slice(now, GuestAddress(piece.iova.0)).is_ok();
        missing = later;
        let taken = u32::try_from(len).ok()?;
        if piece.len > taken {
            rest.push(Piece {
                iova: piece.iova.checked_add(u64::from(taken))?,
                len: piece.len - taken,
                ..*piece
            });
        }
    }
    missing
        .is_empty()
        .then_some((is_read.then_some(header), rest))
}

/// Removes the last writable byte.
fn take_status(mut writable: Vec<Piece>) -> Option<(Vec<Piece>, DeviceAddress)> {
    let last = writable.last_mut()?;
    let before = last.len.checked_sub(1)?;
    let status = last.iova.checked_add(u64::from(before))?;
    last.len = before;
    if before == 0 {
        writable.pop();
    }
    Some((writable, status))
}

/// Checks the position and length of a read or write.
fn transfer(
    sector: u64,
    data: Vec<Piece>,
    limits: &Limits,
    direction: fn(Transfer) -> Io,
) -> Operation {
    // No overflow: a whole chain has a 32-bit length.
    let len: u64 = data.iter().map(|piece| u64::from(piece.len)).sum();
    let fits = len.is_multiple_of(SECTOR)
        && len <= limits.max_bytes
        && sector
            .checked_add(len / SECTOR)
            .is_some_and(|end| end <= limits.sectors);
    match sector.checked_mul(SECTOR) {
        Some(_) if fits && len == 0 => Operation::Finished(Status::Ok),
        Some(offset) if fits => Operation::Io(direction(Transfer { offset, len, data })),
        _ => Operation::Finished(Status::IoError),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, prop_oneof, proptest};
    use vdpa::ring::Direction;

    use super::super::super::userspace_queue::driver::{BUFFERS, RAM, memory};
    use super::*;

    const LIMITS: Limits = Limits {
        sectors: 100,
        read_only: false,
        max_bytes: 64 * 512,
    };

    fn reads(iova: u64, len: u32) -> Piece {
        Piece {
            iova: DeviceAddress(iova),
            len,
            direction: Direction::DeviceReads,
        }
    }

    fn writes(iova: u64, len: u32) -> Piece {
        Piece {
            iova: DeviceAddress(iova),
            len,
            direction: Direction::DeviceWrites,
        }
    }

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        header
    }

    fn parsed(kind: u32, sector: u64, readable: u32, writable: u32, limits: &Limits) -> Operation {
        let memory = DeviceMemory::from(memory());
        memory
            .write_slice(&header(kind, sector), GuestAddress(BUFFERS))
            .unwrap();
        let chain = Chain {
            id: 3,
            pieces: vec![
                reads(BUFFERS, 16 + readable),
                writes(BUFFERS + 0x1000, writable),
            ],
        };
        parse(&memory, &chain, limits).unwrap().operation
    }

    #[test]
    fn sectors_and_lengths_are_bounded() {
        let io_error = Operation::Finished(Status::IoError);
        for (sector, len, ok) in [
            (0, 512, true),
            (99, 512, true),
            (100, 512, false),
            (99, 1024, false),
            (u64::MAX, 512, false),
            // 2^55 sectors are 2^64 bytes: the product wraps to 0.
            (1 << 55, 512, false),
            (u64::MAX / 512, 512, false),
            (0, 513, false),
            (0, 511, false),
            (0, 64 * 512, true),
            (0, 65 * 512, false),
        ] {
            let read = parsed(VIRTIO_BLK_T_IN, sector, 0, len + 1, &LIMITS);
            let write = parsed(VIRTIO_BLK_T_OUT, sector, len, 1, &LIMITS);
            if ok {
                let offset = sector * 512;
                assert_eq!(
                    read,
                    Operation::Io(Io::Read(Transfer {
                        offset,
                        len: len.into(),
                        data: vec![writes(BUFFERS + 0x1000, len)],
                    }))
                );
                assert_eq!(
                    write,
                    Operation::Io(Io::Write(Transfer {
                        offset,
                        len: len.into(),
                        data: vec![reads(BUFFERS + 16, len)],
                    }))
                );
            } else {
                assert_eq!(read, io_error);
                assert_eq!(write, io_error);
            }
        }
        let empty = parsed(VIRTIO_BLK_T_IN, 100, 0, 1, &LIMITS);
        assert_eq!(empty, Operation::Finished(Status::Ok));
    }

    #[test]
    fn kinds() {
        let read_only = Limits {
            read_only: true,
            ..LIMITS
        };
        assert_eq!(
            parsed(VIRTIO_BLK_T_OUT, 0, 512, 1, &read_only),
            Operation::Finished(Status::IoError)
        );
        assert_eq!(
            parsed(VIRTIO_BLK_T_FLUSH, 0, 0, 1, &LIMITS),
            Operation::Io(Io::Flush)
        );
        for unknown in [2, 11, 13, u32::MAX] {
            assert_eq!(
                parsed(unknown, 0, 0, 1, &LIMITS),
                Operation::Finished(Status::Unsupported)
            );
        }
    }

    #[test]
    fn framing_has_no_meaning() {
        let memory = DeviceMemory::from(memory());
        for (index, byte) in (0..).zip(header(VIRTIO_BLK_T_IN, 5)) {
            // One byte per descriptor, backwards in memory.
            memory
                .write_obj(byte, GuestAddress(BUFFERS + 0x100 - index))
                .unwrap();
        }
        let header = (0..16).map(|index| reads(BUFFERS + 0x100 - index, 1));
        let rest = [writes(BUFFERS + 0x1000, 12), writes(BUFFERS + 0x2000, 501)];
        let chain = Chain {
            id: 0,
            pieces: header.chain(rest).collect(),
        };
        let request = parse(&memory, &chain, &LIMITS).unwrap();
        assert_eq!(request.status, DeviceAddress(BUFFERS + 0x2000 + 500));
        assert_eq!(
            request.operation,
            Operation::Io(Io::Read(Transfer {
                offset: 5 * 512,
                len: 512,
                data: vec![writes(BUFFERS + 0x1000, 12), writes(BUFFERS + 0x2000, 500)],
            }))
        );
    }

    #[test]
    fn without_header_or_status_there_is_no_request() {
        let memory = DeviceMemory::from(memory());
        for pieces in [
            vec![writes(BUFFERS, 1)],
            vec![reads(BUFFERS, 15), writes(BUFFERS, 1)],
            vec![reads(BUFFERS, 16)],
        ] {
            let chain = Chain { id: 9, pieces };
            let error = parse(&memory, &chain, &LIMITS).unwrap_err();
            assert!(error.to_string().contains("at descriptor 9"));
        }
    }

    proptest! {
        #[test]
        fn requests_stay_inside_disk_and_memory(
            kind in prop_oneof![0..14u32, any::<u32>()],
            sector in prop_oneof![0..101u64, any::<u64>()],
            lens in proptest::collection::vec(1..0x1000u32, 1..6),
            status_len in 1..0x1000u32,
        ) {
            let memory = DeviceMemory::from(memory());
            memory.write_slice(&header(kind, sector), GuestAddress(BUFFERS)).unwrap();
            let mut pieces = vec![reads(BUFFERS, 16)];
            pieces.extend(lens.iter().map(|&len| reads(BUFFERS + 0x1000, len)));
            pieces.extend(lens.iter().map(|&len| writes(BUFFERS, len)));
            pieces.push(writes(BUFFERS, status_len));
            let request = parse(&memory, &Chain { id: 0, pieces }, &LIMITS).unwrap();
            prop_assert!(request.status.0 < RAM as u64);
            if let Operation::Io(
                Io::Read(Transfer { offset, len, data })
                | Io::Write(Transfer { offset, len, data }),
            ) = request.operation
            {
                prop_assert!(offset + len <= LIMITS.sectors * 512);
                prop_assert_eq!(len, data.iter().map(|s| u64::from(s.len)).sum::<u64>());
                prop_assert!(data.iter().all(|s| s.len > 0));
            }
        }
    }
}
