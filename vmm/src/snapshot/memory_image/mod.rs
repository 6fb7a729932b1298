//! Guest RAM as a sparse raw file.
//!
//! Owns the file's content and its checks. It must not know where the file is (see
//! [`super::directory`]) nor the content of the guest's memory. Nothing may write to guest RAM
//! meanwhile: the caller parks vCPUs and stops devices.
//!
//! ```text
//!   memfd   | data | zeros | data | never touched .............. |   size of RAM
//!              |               |
//!   file    | data |  hole | data | hole ....................... |   same offsets, same length
//!           |<- 1 MiB ->|<- 1 MiB ->|
//!   digest    checksum    checksum    0 ...                          one per block
//! ```
//!
//! The file alone does not prove its integrity; the [`MemoryDigest`] does, and is stored among the
//! sections of the state.

mod digest;
mod page_sums;
mod pages;
mod restore;
mod save;
#[cfg(test)]
mod tests;

pub use digest::{BLOCK_SIZE, DigestError, MemoryDigest};
pub use page_sums::PageSums;
pub use restore::{RestoreError, restore};
pub use save::{SaveError, save};
