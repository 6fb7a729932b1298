//! Writing a stream of sections.

use std::collections::BTreeSet;
use std::io::Write;

use super::error::{Place, SectionId, WriteError};
use super::name::SectionName;
use super::saved::{Saved, Section};
use super::{END_VERSION, FORMAT_VERSION, Header, MAGIC, SECTIONS_MAX};

/// A stream that is being written. Whoever drops it without [`Writer::finish`] leaves one that every
/// reader refuses as truncated.
#[derive(Debug)]
pub struct Writer<W> {
    destination: W,
    written: BTreeSet<SectionId>,
}

impl<W: Write> Writer<W> {
    /// Begins a stream. The destination gets many small pieces: give a
    /// [`BufWriter`](std::io::BufWriter) unless it is in memory.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn new(mut destination: W) -> Result<Self, WriteError> {
        let mut start = MAGIC.to_vec();
        start.extend(FORMAT_VERSION.to_le_bytes());
        destination
            .write_all(&start)
            .map_err(|source| WriteError::Io {
                place: Place::Start,
                source,
            })?;
        Ok(Self {
            destination,
            written: BTreeSet::new(),
        })
    }

    /// Writes a value as a section.
    ///
    /// # Errors
    /// As [`Section::encode`] and [`Writer::section`]. The stream is lost then.
    pub fn put<T: Saved>(self, instance: u32, value: &T) -> Result<Self, WriteError> {
        self.section(&Section::encode(instance, value)?)
    }

    /// Writes a section that was encoded before.
    ///
    /// # Errors
    /// [`WriteError::Twice`], [`WriteError::ReservedName`], [`WriteError::TooManySections`],
    /// [`WriteError::Io`]. The stream is lost then.
    pub fn section(mut self, section: &Section) -> Result<Self, WriteError> {
        if section.name == SectionName::END {
            return Err(WriteError::ReservedName);
        }
        let id = section.id();
        if !self.written.insert(id) {
            return Err(WriteError::Twice { section: id });
        }
        if self.count() > SECTIONS_MAX {
            return Err(WriteError::TooManySections);
        }
        self.raw(section)?;
        Ok(self)
    }

    /// Writes the end section, flushes and gives the destination back, which then can carry on with
    /// something else.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn finish(mut self) -> Result<W, WriteError> {
        let end = Section {
            name: SectionName::END,
            instance: 0,
            version: END_VERSION,
            payload: self.count().to_le_bytes().to_vec(),
        };
        self.raw(&end)?;
        self.destination.flush().map_err(|source| WriteError::Io {
            place: Place::Section(end.id()),
            source,
        })?;
        Ok(self.destination)
    }

    /// Sections so far, the one that is being written included.
    fn count(&self) -> u32 {
        u32::try_from(self.written.len()).unwrap_or(u32::MAX)
    }

    fn raw(&mut self, section: &Section) -> Result<(), WriteError> {
        let header = Header {
            name: section.name,
            instance: section.instance,
            version: section.version,
            // Lossless: usize is 64 bits wide on x86-64.
            len: section.payload.len() as u64,
        }
        .to_bytes();
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&header);
        checksum.update(&section.payload);
        self.destination
            .write_all(&header)
            .and_then(|()| self.destination.write_all(&section.payload))
            .and_then(|()| {
                self.destination
                    .write_all(&checksum.finalize().to_le_bytes())
            })
            .map_err(|source| WriteError::Io {
                place: Place::Section(section.id()),
                source,
            })
    }
}
