//! Split virtqueues (virtio 1.3, section 2.7): both sides, and a guest's ring.
//!
//! ```text
//!   descriptor table      entry i at 16 i:  u64 address, u32 length, u16 flags, u16 next
//!   avail ring            u16 flags, u16 index, u16 ring[size], u16 used_event
//!   used ring             u16 flags, u16 index, {u32 id, u32 length}[size], u16 avail_event
//! ```
//! All fields are little-endian. With IN_ORDER descriptors are taken in the order of the table
//! (2.7.5), and one used element may complete several chains.

mod device;
mod driver;
mod guest;

pub use self::device::DeviceQueue;
pub(crate) use self::driver::{Driver, table_entry};
pub use self::guest::{GuestRing, Suppression};

const AVAIL_F_NO_INTERRUPT: u16 = 1;
pub(crate) const USED_F_NO_NOTIFY: u16 = 1;

#[cfg(test)]
mod tests;
