//! The process that moves the frames of a software NIC, in a sandbox.
//!
//! Standard input is the VDUSE device, and standard output the tap or the AF_XDP socket. The
//! in-flight record, further queues of the tap, and the memory of the socket are inherited by their
//! numbers. The process opens nothing, and has no privileges. A guest that takes it over has these
//! and the memory of its own VM.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd, RawFd};

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use vdpa::eventfd;
use vdpa::vduse::Device;
use vdpa::vduse::nic::{Nic, Port, Tap, xdp};
use vmm::sandbox;
use vmm::sandbox::seccomp::{self, Thread};

use super::{Arguments, failed};
use crate::commands::run::inherited as descriptors;

/// The user without files (65534). Each worker has namespaces and filters of its own, so all can
/// have the same user.
const USER: u32 = 65534;

pub(super) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let device = inherited(rustix::stdio::stdin())?;
    let ports = ports(arguments, inherited(rustix::stdio::stdout())?)?;
    let in_flight = arguments.in_flight;
    let in_flight = in_flight.ok_or_else(|| Error::failed("the NIC has no in-flight record"))?;
    let in_flight = further(in_flight)?;
    sandbox::enter_empty(USER).map_err(|error| {
        let message = error.to_string();
        Error::failed(message).because(error)
    })?;
    let stop = eventfd::new().map_err(Error::context("cannot create an eventfd"))?;
    let device = Device::from(File::from(device));
    let configuration = arguments.configuration();
    let nic = Nic::new(device, ports, in_flight, &configuration).map_err(failed)?;
    let confine = || seccomp::confine(Thread::SoftwareNic).map_err(io::Error::other);
    nic.serve(eventfd::descriptor(&stop), &confine)
        .map_err(failed)?;
    Ok(Code::Success)
}

/// The host's end, one for each queue pair. All that the filter would refuse is done here.
fn ports(arguments: &Arguments, first: OwnedFd) -> Result<Vec<Port>, Error> {
    let further = arguments.files.iter().copied().map(further);
    let further = further.collect::<Result<Vec<OwnedFd>, Error>>()?;
    if arguments.port().is_none() {
        let queues = std::iter::once(first).chain(further).collect();
        return Ok(Tap::inherited(queues).into_iter().map(Port::Tap).collect());
    }
    let [umem] = further.as_slice() else {
        return Err(Error::failed("a socket needs the memory for its frames"));
    };
    let mtu = arguments.configuration().mtu;
    let socket = xdp::Socket::inherited(first, umem.as_fd(), mtu).map_err(failed)?;
    Ok(vec![Port::Xdp(Box::new(socket))])
}

/// A file that is inherited by its number.
fn further(number: RawFd) -> Result<OwnedFd, Error> {
    let refused = |cause| Error::failed(format!("the file {number} of the NIC {cause}"));
    descriptors::own(number).map_err(refused)
}

/// A descriptor of its own for a file that the parent has opened.
fn inherited(file: std::os::fd::BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let owned = file.try_clone_to_owned();
    owned.map_err(Error::context("the parent passes the device and the port"))
}
