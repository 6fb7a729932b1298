//! The process that moves the frames of a software NIC, in a sandbox.
//!
//! Standard input is the VDUSE device, and standard output the tap. It opens nothing, and has no
//! privileges: a guest that takes it over has these two and the memory of its own VM.

use std::fs::File;
use std::os::fd::OwnedFd;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use vdpa::eventfd;
use vdpa::vduse::Device;
use vdpa::vduse::nic::{Nic, Tap};
use vmm::sandbox;
use vmm::sandbox::seccomp::Thread;

use super::{Arguments, failed};

/// The user without files (65534). Each worker has namespaces and filters of its own, so all can
/// have the same user.
const USER: u32 = 65534;

pub(super) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let device = inherited(rustix::stdio::stdin())?;
    let tap = inherited(rustix::stdio::stdout())?;
    sandbox::enter_empty(USER, Thread::SoftwareNic).map_err(|error| {
        let message = error.to_string();
        Error::failed(message).because(error)
    })?;
    let stop = eventfd::new().map_err(Error::context("cannot create an eventfd"))?;
    let device = Device::from(File::from(device));
    let configuration = arguments.configuration();
    let mut nic = Nic::new(device, Tap::inherited(tap), &configuration).map_err(failed)?;
    nic.serve(eventfd::descriptor(&stop)).map_err(failed)?;
    Ok(Code::Success)
}

/// A descriptor of its own for a file that the parent has opened.
fn inherited(file: std::os::fd::BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let owned = file.try_clone_to_owned();
    owned.map_err(Error::context("the parent passes the device and the tap"))
}
