//! A device with features: its rings, starting it, and suspending, switching
//! and resuming it.
//!
//! It must not know how ownership and features came about; the diagram of the
//! states is in the parent module.

use vmm_sys_util::eventfd::EventFd;

use super::info::refused;
use super::{
    DRIVER_OK, Device, DeviceError, Failed, Negotiated, Owned, Running, Suspended, VringBase,
    VringConfig, queue_refused,
};
use crate::iova::IovaRange;
use crate::uapi::{self, BackendFeatures};

impl Device<Negotiated> {
    /// Puts a queue group into an address space. Lasts until the next reset.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchGroup`], or whatever the device refuses.
    pub fn set_group_asid(&mut self, group: u32, asid: u32) -> Result<(), DeviceError> {
        self.group_asid(group, asid)
    }

    /// Sets a queue up. Its areas must lie inside `allowed`: guest RAM for a
    /// ring of the guest's, the private window for one of our own.
    ///
    /// # Errors
    /// [`DeviceError::Vring`] before anything is written, or whatever the
    /// device refuses.
    pub fn set_vring(
        &mut self,
        queue: u16,
        config: &VringConfig<'_>,
        allowed: &[IovaRange],
    ) -> Result<(), DeviceError> {
        self.write_vring(queue, config, allowed)
    }

    /// Enables a queue, which virtio asks to be done before DRIVER_OK.
    ///
    /// # Errors
    /// No such queue, or whatever the device refuses.
    pub fn enable_vring(&mut self, queue: u16) -> Result<(), DeviceError> {
        self.vring_enable(queue, true)
    }

    /// Sets DRIVER_OK: the device begins to work.
    ///
    /// # Errors
    /// The device refused, and was reset.
    pub fn start(self) -> Result<Device<Running>, Failed<Owned>> {
        match self.add_status(DRIVER_OK) {
            Ok(()) => Ok(self.with_state(Running)),
            Err(error) => Err(self.fall_back(error)),
        }
    }
}

impl Device<Running> {
    /// Re-binds or unbinds the eventfd that the device signals. Give one
    /// spurious signal to the new one: a call may have gone to the old one.
    ///
    /// # Errors
    /// No such queue, or whatever the device refuses.
    pub fn set_call(&self, queue: u16, call: Option<&EventFd>) -> Result<(), DeviceError> {
        self.bind_call(queue, call)
    }

    /// Re-binds or unbinds the eventfd by which the driver kicks. Give one
    /// spurious kick to the new one.
    ///
    /// # Errors
    /// No such queue, or whatever the device refuses.
    pub fn set_kick(&self, queue: u16, kick: Option<&EventFd>) -> Result<(), DeviceError> {
        self.bind_kick(queue, kick)
    }

    /// Enables a queue that was set up before DRIVER_OK.
    ///
    /// # Errors
    /// [`DeviceError::Unable`] if ENABLE_AFTER_DRIVER_OK was not acknowledged,
    /// else whatever the device refuses.
    pub fn enable_vring(&mut self, queue: u16) -> Result<(), DeviceError> {
        if !self
            .backend_features()
            .contains(BackendFeatures::ENABLE_AFTER_DRIVER_OK)
        {
            return Err(DeviceError::Unable {
                ability: "enable a queue while it runs",
            });
        }
        self.vring_enable(queue, true)
    }

    /// Whether [`Device::suspend`] can work.
    #[must_use]
    pub fn can_suspend(&self) -> bool {
        self.backend_features().contains(BackendFeatures::SUSPEND)
    }

    /// Stops the device; its ring state stays and can be read.
    ///
    /// # Errors
    /// The device can't, or refused; it runs on.
    pub fn suspend(self) -> Result<Device<Suspended>, Failed<Running>> {
        if !self.can_suspend() {
            return Err(self.failed(DeviceError::Unable { ability: "suspend" }));
        }
        match refused("VHOST_VDPA_SUSPEND", self.handle.call(uapi::suspend())) {
            Ok(()) => Ok(self.with_state(|Running(state)| Suspended(state))),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl Device<Suspended> {
    /// Where the device stopped in a ring.
    ///
    /// # Errors
    /// No such queue, no ring state on this parent, or nonsense.
    pub fn vring_base(&self, queue: u16) -> Result<VringBase, DeviceError> {
        self.info().queue(queue)?;
        let number = self
            .handle
            .vring_state(uapi::get_vring_base(), queue)
            .map_err(queue_refused(queue, "VHOST_GET_VRING_BASE"))?;
        VringBase::from_kernel(number, self.is_packed()).ok_or(DeviceError::Nonsense {
            what: "as the position in a split ring",
            value: u64::from(number),
        })
    }

    /// Unbinds both eventfds of a queue, for another device that is to have them: the
    /// kernel gives the hardware interrupt that goes past it (irq bypass) to one device per eventfd.
    ///
    /// # Errors
    /// No such queue, or whatever the device refuses.
    pub fn release_eventfds(&mut self, queue: u16) -> Result<(), DeviceError> {
        self.info().queue(queue)?;
        self.bind_kick(queue, None)?;
        self.bind_call(queue, None)
    }

    /// Takes a queue out of work, in place: disabled, without eventfds. After
    /// [`Device::resume`] the device no longer touches its rings and buffers;
    /// [`Device::switch_vring`] brings it back.
    ///
    /// # Errors
    /// No such queue, or whatever the device refuses.
    pub fn park_vring(&mut self, queue: u16) -> Result<(), DeviceError> {
        // Safe here only: see `switch_vring`.
        self.vring_enable(queue, false)?;
        self.bind_kick(queue, None)?;
        self.bind_call(queue, None)
    }

    /// Gives a queue another ring, or the same one with other addresses, in
    /// place: disabled, set up anew, enabled; applied by [`Device::resume`].
    ///
    /// # Errors
    /// [`DeviceError::Vring`] before anything is written, or whatever the
    /// device refuses; the queue may then be disabled, and only a reset makes
    /// it whole.
    pub fn switch_vring(
        &mut self,
        queue: u16,
        config: &VringConfig<'_>,
        allowed: &[IovaRange],
    ) -> Result<(), DeviceError> {
        self.check_vring(queue, config, allowed)?;
        // Safe here only: a parent without SUSPEND takes the 0 for a broken
        // driver, and the state Suspended proves that this one has SUSPEND.
        self.vring_enable(queue, false)?;
        self.write_vring(queue, config, allowed)?;
        self.vring_enable(queue, true)
    }

    /// Lets the device go on.
    ///
    /// # Errors
    /// The device can't (not every one that suspends can), or refused; it
    /// stays suspended.
    pub fn resume(self) -> Result<Device<Running>, Failed<Suspended>> {
        if !self.backend_features().contains(BackendFeatures::RESUME) {
            return Err(self.failed(DeviceError::Unable { ability: "resume" }));
        }
        match refused("VHOST_VDPA_RESUME", self.handle.call(uapi::resume())) {
            Ok(()) => Ok(self.with_state(|Suspended(state)| Running(state))),
            Err(error) => Err(self.failed(error)),
        }
    }
}
