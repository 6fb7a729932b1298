//! Management objects of the host as listings: one file per kind of object.

pub mod dev;
pub mod mgmtdev;
pub mod nic;
pub mod port;
pub mod vf;
