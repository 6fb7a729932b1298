//! The machine.

pub mod kvm;
pub mod vcpu;
