//! The types of Bellhop's APIs: those of one VM ([`machine`]) and of the node daemon ([`node`]).
//!
//! Each request and each response is defined here once. Servers, the node daemon as a client of its
//! VMs, the command line and tests use these types. Both OpenAPI documents are generated from them.
//! Requests reject unknown fields. Responses ignore them, and map words of a later version to
//! `Unknown`, so a client understands a server of another version.
//!
//! Owns names and formats. It must not know how a request is executed or sent.

#[macro_use]
mod described;
#[macro_use]
mod name;

pub mod address;
pub mod config;
pub mod endpoint;
mod error;
pub mod host_port;
mod items;
pub mod machine;
pub mod merge_patch;
pub mod node;
pub mod responses;

pub use error::{ErrorBody, ErrorCode, FieldError, PROBLEM_JSON};
pub use items::Items;
