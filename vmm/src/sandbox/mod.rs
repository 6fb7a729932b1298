//! What confines a VM's process: a captured VMM must not reach the host or other VMs.

pub mod landlock;
pub mod seccomp;
