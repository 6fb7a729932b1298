//! KVM's device for VFIO: KVM learns which devices are passed through.
//!
//! KVM then honours devices without cache coherency, and posts their interrupts to a running vCPU.
//! The `vfio-ioctls` crate adds and removes the groups. It must not know the devices.

use std::sync::Arc;

use kvm_bindings::{kvm_create_device, kvm_device_type_KVM_DEV_TYPE_VFIO};
use kvm_ioctls::VmFd;
use vfio_ioctls::VfioDeviceFd;

use crate::Error;

/// Creates the device, of which a VM has at most one.
///
/// # Errors
/// The host's KVM has no support for VFIO.
pub fn create(vm: &VmFd) -> Result<Arc<VfioDeviceFd>, Error> {
    let mut request = kvm_create_device {
        type_: kvm_device_type_KVM_DEV_TYPE_VFIO,
        ..Default::default()
    };
    let device = vm
        .create_device(&mut request)
        .map_err(Error::failed("KVM_CREATE_DEVICE for VFIO"))?;
    Ok(Arc::new(VfioDeviceFd::new_from_kvm(device)))
}
