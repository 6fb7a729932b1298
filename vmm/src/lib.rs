//! Runs one virtual machine: builds and boots it, saves and migrates it, and serves its API.

pub mod acpi;
pub mod api;
pub mod boot;
mod byte_count;
pub mod console;
pub mod credentials;
mod error;
pub mod event_loop;
pub mod host;
pub mod http;
pub mod kvm;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod migration;
pub mod rotating_file;
pub mod sandbox;
pub mod snapshot;
pub mod vcpu;

pub use bellhop_api::config;
pub use error::{Error, ErrorKind};
