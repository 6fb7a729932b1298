//! Functions of VMs by VFIO: checked, bound to vfio-pci, given back.
//!
//! A process uses a function through files below `/dev/vfio`, which it opens by path. VFIO opens
//! the file of a group once at a time, so two VMs never share a function.

use vdpa_mgmt::nic::{DEFAULT_PATIENCE, host_use};
use vdpa_mgmt::pci::{Address, FormerDriver, Function, Pci};
use vmm::config::VfioConfig;
use vmm::sandbox::namespaces::Access;

use crate::error::{Error, UNUSABLE, conflict};
use crate::machines::sandbox::Files;
use crate::machines::spec::{VmName, addresses};

/// An error about a function that the client names.
fn of_client(error: vdpa_mgmt::Error) -> Error {
    let kind = match error.kind() {
        vdpa_mgmt::ErrorKind::InUse => conflict("in_use"),
        _ => UNUSABLE,
    };
    Error::transparent(kind, error)
}

fn function(address: Address) -> Result<Function, Error> {
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
    Pci::default().give_to_vfio(former).map_err(of_client)
}

/// Gives a function its former driver again.
pub(super) fn release(vm: &VmName, former: &FormerDriver) -> Result<(), Error> {
    let left = Pci::default().take_from_vfio(former).map_err(of_client)?;
    if let Some(why) = left {
        tracing::warn!(%vm, "leaving {why}");
    }
    Ok(())
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
