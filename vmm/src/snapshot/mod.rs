//! What a machine is when it does not run: its state as named sections, its memory as a
//! sparse file, and the directory that holds both.
//!
//! ```text
//!   NAME/            0700, there only when it is whole      directory
//!     state          named sections                         format
//!     memory         guest RAM, holes where it is zero      memory_image
//! ```
//!
//! [`mod@format`] is also what a migration sends, so it needs nothing but `Read` and `Write`.
//! Nothing here knows what a section means: each part of the machine says so by [`format::Saved`].
//! Snapshots come from files and peers, so nothing in them is trusted.

pub mod directory;
pub mod format;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
#[cfg(test)]
mod golden;
pub mod memory_image;

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::decode_anything;
