//! What the command line, diagnostics and the node daemon share.
//!
//! [`client`] asks a node's daemon: commands use it, and so do daemons among each other. [`listing`]
//! lays out named things with fields and has the formats of results, [`table`] lays out rows,
//! [`tree`] draws trees, and [`exit`] shows errors.
//! [`management`] makes listings of vDPA devices, functions and ports: commands print them, and the
//! daemon's API answers with them. Must not know any subcommand or endpoint.

pub mod client;
pub mod colour;
pub mod error;
pub mod exit;
mod format;
pub mod groups;
pub mod listing;
pub mod management;
pub mod table;
pub mod text;
pub mod tree;
mod virtio_names;
