//! The process that moves the frames of a software NIC, in a sandbox.
//!
//! Standard input is the VDUSE device, and standard output the tap. Further queues of the tap are
//! inherited by their numbers. The process opens nothing, and has no privileges: a guest that takes
//! it over has these and the memory of its own VM.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use vdpa::eventfd;
use vdpa::vduse::Device;
use vdpa::vduse::nic::{Nic, Tap};
use vmm::sandbox;
use vmm::sandbox::seccomp::{self, Thread};

use super::{Arguments, failed};
use crate::commands::run::inherited as descriptors;

/// The user without files (65534). Each worker has namespaces and filters of its own, so all can
/// have the same user.
const USER: u32 = 65534;

pub(super) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let device = inherited(rustix::stdio::stdin())?;
    let mut tap = vec![inherited(rustix::stdio::stdout())?];
    for &number in &arguments.queues {
        let queue = descriptors::own(number);
        let failed = |cause| Error::failed(format!("the queue {number} of the tap {cause}"));
        tap.push(queue.map_err(failed)?);
    }
    sandbox::enter_empty(USER).map_err(|error| {
        let message = error.to_string();
        Error::failed(message).because(error)
    })?;
    let stop = eventfd::new().map_err(Error::context("cannot create an eventfd"))?;
    let device = Device::from(File::from(device));
    let configuration = arguments.configuration();
    let nic = Nic::new(device, Tap::inherited(tap), &configuration).map_err(failed)?;
    let confine = || seccomp::confine(Thread::SoftwareNic).map_err(io::Error::other);
    nic.serve(eventfd::descriptor(&stop), &confine)
        .map_err(failed)?;
    Ok(Code::Success)
}

/// A descriptor of its own for a file that the parent has opened.
fn inherited(file: std::os::fd::BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let owned = file.try_clone_to_owned();
    owned.map_err(Error::context("the parent passes the device and the tap"))
}
