//! Diagnostics of a host, a device or a node: text and files for people.
//!
//! ```text
//!   doctor     is this host ready, and how to fix it    files below a root
//!   probe      a device's description and its tests      vdpa::probe, vdpa::conformance
//!   topology   which process uses which device           vdpa_mgmt::topology
//!   report     all of it and the daemon's in one file   doctor, topology, client
//! ```
//! `vdpa` and `vdpa-mgmt` contain the parts that need their internals: they drive devices and read
//! the tree. This crate must not know any subcommand.

pub mod doctor;
pub mod probe;
pub mod report;
pub mod topology;
