//! What is wrong with a host, a device or a node: text and files for people who look for it.
//!
//! ```text
//!   doctor     is this host fit, and what mends it      files below a root
//!   probe      what a device is, and whether it works   vdpa::probe, vdpa::conformance
//!   topology   who uses what                            vdpa_mgmt::topology
//!   report     all of it and the daemon's in one file   doctor, topology, client
//! ```
//! `vdpa` and `vdpa-mgmt` do what needs their inside: they drive devices and read the tree. This
//! crate must not know any subcommand.

pub mod doctor;
pub mod probe;
pub mod report;
pub mod topology;
