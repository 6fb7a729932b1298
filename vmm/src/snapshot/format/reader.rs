//! Reading a stream of sections that anybody may have written.

use std::collections::BTreeSet;
use std::io::{self, Read};

use super::error::{Place, ReadError, SectionId};
use super::name::SectionName;
use super::saved::Section;
use super::table::Table;
use super::{
    CHECKSUM_LEN, END_VERSION, FORMAT_VERSION, HEADER_LEN, Header, MAGIC, OLDEST_FORMAT_VERSION,
    SECTIONS_MAX, UNKNOWN_OPTIONAL_MAX,
};

/// Bytes of the end section's payload.
const END_LEN: u64 = 4;

/// A stream that is being read: an iterator over its sections, checked against a [`Table`], without
/// the unknown optional ones. It ends after the end section or the first error.
///
/// It reads not a byte more than the stream has, so the source of a connection can carry on
/// with something else ([`Reader::into_inner`]). Its small reads want a
/// [`BufReader`](std::io::BufReader) before a file. The source must block: who reads from a peer
/// sets a timeout.
#[derive(Debug)]
pub struct Reader<'a, R> {
    source: R,
    table: Table<'a>,
    seen: BTreeSet<SectionId>,
    /// Bytes of the stream that may still come.
    room: u64,
    done: bool,
}

impl<'a, R: Read> Reader<'a, R> {
    /// Reads the beginning of a stream.
    ///
    /// # Errors
    /// [`ReadError::NotASnapshot`], [`ReadError::NewerFormat`], [`ReadError::OlderFormat`],
    /// [`ReadError::Truncated`], [`ReadError::Io`].
    pub fn new(mut source: R, table: Table<'a>) -> Result<Self, ReadError> {
        let place = Place::Start;
        let mut magic = Vec::with_capacity(MAGIC.len());
        // Not all at once: what is shorter than the magic may still be something else.
        (&mut source)
            .take(MAGIC.len() as u64)
            .read_to_end(&mut magic)
            .map_err(|source| ReadError::Io { place, source })?;
        if !MAGIC.starts_with(&magic) {
            return Err(ReadError::NotASnapshot);
        }
        if magic.len() < MAGIC.len() {
            return Err(ReadError::Truncated { place });
        }
        let version = u32::from_le_bytes(exactly(&mut source, place)?);
        if version > FORMAT_VERSION {
            return Err(ReadError::NewerFormat {
                found: version,
                newest: FORMAT_VERSION,
            });
        }
        if version < OLDEST_FORMAT_VERSION {
            return Err(ReadError::OlderFormat {
                found: version,
                oldest: OLDEST_FORMAT_VERSION,
            });
        }
        let read = (MAGIC.len() + size_of::<u32>()) as u64;
        Ok(Self {
            source,
            table,
            seen: BTreeSet::new(),
            room: table.stream_max.saturating_sub(read),
            done: false,
        })
    }

    /// The source. Once the iterator has given `None` without an error before, it stands right
    /// behind the end section.
    pub fn into_inner(self) -> R {
        self.source
    }

    /// The next section that the table has; `None` is the end.
    fn next_known(&mut self) -> Result<Option<Section>, ReadError> {
        loop {
            let number = u32::try_from(self.seen.len())
                .unwrap_or(u32::MAX)
                .saturating_add(1);
            let bytes = exactly::<HEADER_LEN>(&mut self.source, Place::Header(number))?;
            let header = Header::from_bytes(&bytes)
                .map_err(|source| ReadError::BadName { number, source })?;
            let id = SectionId {
                name: header.name,
                instance: header.instance,
            };
            if header.name == SectionName::END {
                self.end(&bytes, header, number - 1)?;
                return Ok(None);
            }
            let known = self.admit(id, header.len)?;
            let payload = self.payload(id, &bytes, header.len)?;
            if known {
                return Ok(Some(Section {
                    name: header.name,
                    instance: header.instance,
                    version: header.version,
                    payload,
                }));
            }
            tracing::debug!(section = %id.name, instance = id.instance, "unknown section left out: it is optional");
        }
    }

    /// Whether a section is known. Refused is what must not come, before any of it is read.
    fn admit(&mut self, section: SectionId, len: u64) -> Result<bool, ReadError> {
        let kind = self.table.kind(section.name);
        let max = match kind {
            Some(kind) if section.instance >= kind.instances => {
                return Err(ReadError::TooManyInstances {
                    section,
                    instances: kind.instances,
                });
            }
            Some(kind) => kind.payload_max,
            None if section.name.is_optional() => UNKNOWN_OPTIONAL_MAX,
            None => return Err(ReadError::Unknown { section }),
        };
        if len > max {
            return Err(ReadError::TooLong { section, len, max });
        }
        let framing = (HEADER_LEN + CHECKSUM_LEN) as u64;
        self.room = self
            .room
            .checked_sub(framing)
            .and_then(|room| room.checked_sub(len))
            .ok_or(ReadError::StreamTooLong {
                max: self.table.stream_max,
            })?;
        if !self.seen.insert(section) {
            return Err(ReadError::Twice { section });
        }
        if self.seen.len() as u64 > u64::from(SECTIONS_MAX) {
            return Err(ReadError::TooManySections);
        }
        Ok(kind.is_some())
    }

    /// A payload, with its checksum checked.
    fn payload(
        &mut self,
        section: SectionId,
        header: &[u8; HEADER_LEN],
        len: u64,
    ) -> Result<Vec<u8>, ReadError> {
        let place = Place::Section(section);
        // Grows with what has come, not with what the header says is to come.
        let mut payload = Vec::new();
        (&mut self.source)
            .take(len)
            .read_to_end(&mut payload)
            .map_err(|source| ReadError::Io { place, source })?;
        if (payload.len() as u64) < len {
            return Err(ReadError::Truncated { place });
        }
        let expected = u32::from_le_bytes(exactly(&mut self.source, place)?);
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(header);
        checksum.update(&payload);
        if checksum.finalize() != expected {
            return Err(ReadError::Checksum { section });
        }
        Ok(payload)
    }

    fn end(
        &mut self,
        bytes: &[u8; HEADER_LEN],
        header: Header,
        found: u32,
    ) -> Result<(), ReadError> {
        if header.instance != 0 || header.version != END_VERSION || header.len != END_LEN {
            return Err(ReadError::BadEnd);
        }
        let id = SectionId {
            name: header.name,
            instance: 0,
        };
        let payload = self.payload(id, bytes, END_LEN)?;
        let expected = payload
            .first_chunk()
            .map(|count| u32::from_le_bytes(*count))
            .ok_or(ReadError::BadEnd)?;
        if expected == found {
            Ok(())
        } else {
            Err(ReadError::Count { found, expected })
        }
    }
}

impl<R: Read> Iterator for Reader<'_, R> {
    type Item = Result<Section, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = self.next_known();
        self.done = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}

/// The next `N` bytes.
fn exactly<const N: usize>(source: &mut impl Read, place: Place) -> Result<[u8; N], ReadError> {
    let mut bytes = [0; N];
    match source.read_exact(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(ReadError::Truncated { place })
        }
        Err(source) => Err(ReadError::Io { place, source }),
    }
}
