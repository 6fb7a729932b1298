//! The machine.

pub mod config;
pub mod event_loop;
pub mod kvm;
pub mod machine;
pub mod vcpu;
