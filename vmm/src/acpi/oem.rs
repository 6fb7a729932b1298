//! The OEM fields in the header of each table.

/// OEM ID of all tables.
pub(super) const OEM_ID: [u8; 6] = *b"BELHOP";
/// OEM table ID of all tables.
pub(super) const OEM_TABLE_ID: [u8; 8] = *b"BELLHOP ";
/// OEM revision of all tables.
pub(super) const OEM_REVISION: u32 = 1;
