//! Functions of VMs by VFIO: checked, bound to vfio-pci, given back.
//!
//! A process uses a function through files below `/dev/vfio`, which it opens by path. VFIO opens
//! the file of a group once at a time, so two VMs never share a function.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vdpa_mgmt::nic::{DEFAULT_PATIENCE, host_use};
use vdpa_mgmt::pci::{Address, FormerDriver, Function, Pci};
use vmm::config::VfioConfig;
use vmm::sandbox::namespaces::Access;

use crate::error::{Error, UNUSABLE, conflict};
use crate::machines::sandbox::Files;
use crate::machines::spec::{VmName, addresses};

/// How long the kernel may take to release a function from vfio-pci, and the former driver to take
/// it.
const RELEASE_TIME: Duration = Duration::from_secs(20);

/// Functions that threads of this process give back now.
static RELEASED_NOW: Mutex<BTreeSet<Address>> = Mutex::new(BTreeSet::new());

/// An error about a function that the client names.
fn of_client(error: vdpa_mgmt::Error) -> Error {
    let kind = match error.kind() {
        vdpa_mgmt::ErrorKind::InUse => conflict("in_use"),
        _ => UNUSABLE,
    };
    Error::transparent(kind, error)
}

/// A function, unless a thread still waits for its release. The kernel holds its lock meanwhile,
/// and an access to its driver would wait, too.
fn function(address: Address) -> Result<Function, Error> {
    if RELEASED_NOW.lock().contains(&address) {
        return Err(not_released(address));
    }
    Pci::default().function(address).map_err(of_client)
}

/// Checks whether a VM that does not run can have a function. Returns its driver if that is none of
/// VFIO's.
pub(super) fn check(config: &VfioConfig) -> Result<Option<FormerDriver>, Error> {
    let host = config.host().unwrap_or_default();
    let address = host.parse().map_err(of_client)?;
    let function = function(address)?;
    let checked = Pci::default().check_vfio(&function, config.allow_pf);
    checked.map_err(of_client)?;
    if function.has_vfio_driver() {
        return Ok(None);
    }
    if let Some(used) = host_use(&function, DEFAULT_PATIENCE)? {
        let message = format!("this host uses {address}: it {used}; free the interface first");
        return Err(Error::conflict("in_use", message));
    }
    Ok(Some(FormerDriver {
        function: address,
        driver: function.driver,
        driver_override: function.driver_override,
    }))
}

/// Binds a function to vfio-pci, unless it is.
pub(super) fn bind(former: &FormerDriver) -> Result<(), Error> {
    function(former.function)?;
    Pci::default().give_to_vfio(former).map_err(of_client)
}

/// Gives a function its former driver again.
///
/// vfio-pci does not release a function that a process has open. The process of a VM can hide that
/// from `/proc`, by a descriptor in flight between two sockets. So a thread waits for the kernel.
/// The caller, which has the lock of the VM, waits for a limited time.
pub(super) fn release(vm: &VmName, former: &FormerDriver) -> Result<(), Error> {
    let end = Instant::now() + RELEASE_TIME;
    let address = former.function;
    while !RELEASED_NOW.lock().insert(address) {
        if Instant::now() > end {
            return Err(not_released(address));
        }
        thread::sleep(Duration::from_millis(20));
    }
    let (done, outcome) = mpsc::channel();
    let former = former.clone();
    let thread = thread::Builder::new().name("release".to_owned());
    let spawned = thread.spawn(move || {
        let left = Pci::default().take_from_vfio(&former);
        RELEASED_NOW.lock().remove(&address);
        // The receiver may have given up.
        let _ = done.send(left);
    });
    if let Err(error) = spawned {
        RELEASED_NOW.lock().remove(&address);
        return Err(Error::context("cannot start a thread")(error));
    }
    let left = outcome.recv_timeout(end.saturating_duration_since(Instant::now()));
    let left = left.map_err(|_| not_released(address))?;
    if let Some(why) = left.map_err(of_client)? {
        tracing::warn!(%vm, "leaving {why}");
    }
    Ok(())
}

fn not_released(address: Address) -> Error {
    let message = format!("the kernel has not released {address} from vfio-pci yet");
    let hint = "a process has it open, and may hide that: end the VM that had it";
    Error::conflict("in_use", message).hint(hint)
}

/// The files through which a VM's process uses functions.
pub(super) fn files(functions: &[VfioConfig]) -> Result<Files, Error> {
    let mut files = Files::new();
    for address in addresses(functions) {
        files.extend(files_of(address)?);
    }
    Ok(files)
}

/// The files through which a VM's process uses one function.
pub(in crate::machines) fn files_of(address: Address) -> Result<Files, Error> {
    let paths = Pci::default().files_for_vfio(&function(address)?)?;
    Ok(paths
        .into_iter()
        .map(|path| (path, Access::Write))
        .collect())
}
