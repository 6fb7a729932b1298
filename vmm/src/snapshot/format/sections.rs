//! All sections of a stream, to be taken one by one.

use std::collections::BTreeMap;
use std::io::{self, Read};

use super::error::{Place, ReadError, SectionId};
use super::reader::Reader;
use super::saved::{Saved, Section};
use super::table::{NameOf, Table};

/// The sections of a whole stream that nothing has taken yet.
///
/// ```text
///   read, read_file ──> Sections ──take, take_optional, take_all──> values
///                          └───finish───> error if something is left over
/// ```
#[derive(Debug, Default)]
pub struct Sections {
    sections: BTreeMap<SectionId, Section>,
}

impl Sections {
    /// Reads a stream to its end section and not a byte further. All of it is checked before any of
    /// it is used.
    ///
    /// # Errors
    /// What [`Reader`] says.
    pub fn read(source: &mut impl Read, table: Table<'_>) -> Result<Self, ReadError> {
        let sections = Reader::new(source, table)?
            .map(|section| section.map(|section| (section.id(), section)))
            .collect::<Result<_, _>>()?;
        Ok(Self { sections })
    }

    /// As [`Sections::read`], of a source after which nothing may come.
    ///
    /// # Errors
    /// What [`Reader`] says; [`ReadError::AfterEnd`].
    pub fn read_file(source: &mut impl Read, table: Table<'_>) -> Result<Self, ReadError> {
        let sections = Self::read(source, table)?;
        let mut byte = [0];
        match source.read_exact(&mut byte) {
            Ok(()) => Err(ReadError::AfterEnd),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(sections),
            Err(source) => Err(ReadError::Io {
                place: Place::AfterEnd,
                source,
            }),
        }
    }

    /// Takes and decodes a section that must be there.
    ///
    /// # Errors
    /// [`ReadError::Missing`]; what [`Section::decode`] says.
    pub fn take<T: Saved>(&mut self, instance: u32) -> Result<T, ReadError> {
        self.take_optional(instance)?.ok_or(ReadError::Missing {
            section: SectionId {
                name: NameOf::<T>::NAME,
                instance,
            },
        })
    }

    /// Takes and decodes a section that need not be there.
    ///
    /// # Errors
    /// What [`Section::decode`] says.
    pub fn take_optional<T: Saved>(&mut self, instance: u32) -> Result<Option<T>, ReadError> {
        let section = SectionId {
            name: NameOf::<T>::NAME,
            instance,
        };
        self.sections
            .remove(&section)
            .map(|section| section.decode())
            .transpose()
    }

    /// Takes and decodes all sections of one kind, by ascending instance. They must be
    /// numbered from 0 without a gap: a lost vCPU must not go unnoticed.
    ///
    /// # Errors
    /// [`ReadError::Missing`] for the first gap; what [`Section::decode`] says.
    pub fn take_all<T: Saved>(&mut self) -> Result<Vec<T>, ReadError> {
        let name = NameOf::<T>::NAME;
        let all = SectionId { name, instance: 0 }..=SectionId {
            name,
            instance: u32::MAX,
        };
        let instances = self.sections.range(all).count();
        (0..)
            .take(instances)
            .map(|instance| self.take(instance))
            .collect()
    }

    /// Whether a section is still there.
    #[must_use]
    pub fn contains<T: Saved>(&self, instance: u32) -> bool {
        self.sections.contains_key(&SectionId {
            name: NameOf::<T>::NAME,
            instance,
        })
    }

    /// Ends the restore: what nothing took was meant for something that this machine has not.
    ///
    /// # Errors
    /// [`ReadError::Leftover`] with the first such section. Sections whose name says that they
    /// are optional may be left over.
    pub fn finish(self) -> Result<(), ReadError> {
        self.sections
            .into_keys()
            .find(|section| !section.name.is_optional())
            .map_or(Ok(()), |section| Err(ReadError::Leftover { section }))
    }
}
