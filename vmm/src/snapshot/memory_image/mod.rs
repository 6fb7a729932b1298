//! Guest RAM as a sparse raw file.
//!
//! Owns what the file holds and how it is checked; must not know where the file lies (see
//! [`super::directory`]) nor what the guest keeps in its memory. Nothing may write to guest RAM
//! meanwhile: vCPUs are parked and devices stopped by who calls this.
//!
//! ```text
//!   memfd   | data | zeros | data | never touched .............. |   size of RAM
//!              |               |
//!   file    | data |  hole | data | hole ....................... |   same offsets, same length
//!           |<- 1 MiB ->|<- 1 MiB ->|
//!   digest    checksum    checksum    0 ...                          one per block
//! ```
//!
//! The file alone says nothing about its integrity; the [`MemoryDigest`] does, and is kept among the
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
