//! Answers about the disks and the functions of a VM, which its process describes while it runs.
//!
//! It must not know what such a device is.

use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::machine::VmState;
use bellhop_api::node::Role;

use crate::context::Node;
use crate::error::Error;
use crate::machines::error::no_vm;
use crate::machines::spec::{VmName, VmSpec};
use crate::machines::vmm::Vmm;

/// A VM's spec, and the client of its process if the VM runs.
pub(super) fn look(node: &Node, role: Role, name: &VmName) -> Result<(VmSpec, Option<Vmm>), Error> {
    let view = node.machines.show(name)?;
    let record = view.record.ok_or_else(|| no_vm(name))?;
    let state = view.live.and_then(|live| live.state);
    let vmm = match state {
        Some(VmState::Running | VmState::Paused) => Some(node.machines.vmm_for(name, role)?),
        _ => None,
    };
    Ok((record.spec, vmm))
}

/// The answer to the removal of a device that the guest must release first. `info`: its description
/// after the request.
pub(super) fn removal(info: Result<Response, Error>) -> Result<Response, Error> {
    match info {
        // The guest has released the device before this answer.
        Err(error) if error.answer().0 == StatusCode::NOT_FOUND => {
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        asked => Ok((StatusCode::ACCEPTED, asked?).into_response()),
    }
}
