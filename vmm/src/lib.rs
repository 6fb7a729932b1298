//! The machine.

pub mod config;
pub mod kvm;
pub mod vcpu;
