//! Code that the command line, diagnostics and the node daemon share.
//!
//! [`client`] sends requests to a node's daemon, for commands and for other daemons. [`listing`]
//! lays out named objects with fields and has the formats of results, [`table`] lays out rows,
//! [`tree`] draws trees, and [`exit`] prints errors. [`management`] creates listings of vDPA
//! devices, functions and ports: commands print them, and the daemon's API returns them.
//! [`private_file`] replaces files of one user. [`log_rate`] limits log lines. Must not know any
//! subcommand or endpoint.

pub mod client;
pub mod colour;
pub mod error;
pub mod exit;
mod format;
pub mod groups;
mod json;
pub mod listing;
pub mod log_rate;
pub mod management;
pub mod private_file;
pub mod table;
pub mod text;
pub mod tree;
mod virtio_names;
