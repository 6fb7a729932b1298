//! A machine that does not run: its state as named sections, its memory as a sparse file, and the
//! directory with both.
//!
//! ```text
//!   NAME/            0700, appears only when complete       directory
//!     state          named sections                         format
//!     memory         guest RAM, holes where it is zero      memory_image
//! ```
//!
//! A migration sends [`mod@format`] too, so it needs nothing but `Read` and `Write`. This module
//! must not know the meaning of a section: each part of the machine defines its own by
//! [`format::Saved`]. Snapshots come from files and peers, so their content is untrusted.

pub mod directory;
pub mod format;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
#[cfg(test)]
mod golden;
pub mod memory_image;

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::decode_anything;
