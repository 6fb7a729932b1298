//! Which sections a reader knows, and how long each may be.

use std::marker::PhantomData;

use super::name::SectionName;
use super::saved::Saved;

/// One kind of section that a reader takes.
#[derive(Debug, Clone, Copy)]
pub struct SectionKind {
    pub(super) name: SectionName,
    /// Instances are `0..instances`.
    pub(super) instances: u32,
    /// Bytes of the payload.
    pub(super) payload_max: u64,
}

/// The name of `T`'s sections, checked when the program is compiled.
pub(super) struct NameOf<T>(PhantomData<T>);

impl<T: Saved> NameOf<T> {
    pub(super) const NAME: SectionName = match SectionName::new(T::NAME) {
        Ok(name) => name,
        Err(_) => panic!("Saved::NAME is no name of a section"),
    };
}

impl SectionKind {
    /// The sections that hold a `T`, with the instances 0 to `instances` - 1.
    #[must_use]
    pub const fn of<T: Saved>(instances: u32) -> Self {
        Self {
            name: NameOf::<T>::NAME,
            instances,
            payload_max: T::MAX_LEN,
        }
    }
}

/// All that a reader takes.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    kinds: &'a [SectionKind],
    /// Bytes of a whole stream, framing included.
    pub(super) stream_max: u64,
}

impl<'a> Table<'a> {
    /// Sections of these kinds, and at most `stream_max` bytes of them with their framing. That
    /// is also about the memory that reading them takes.
    #[must_use]
    pub const fn new(kinds: &'a [SectionKind], stream_max: u64) -> Self {
        Self { kinds, stream_max }
    }

    pub(super) fn kind(&self, name: SectionName) -> Option<&'a SectionKind> {
        self.kinds.iter().find(|kind| kind.name == name)
    }
}
