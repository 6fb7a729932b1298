//! Operations of a device with negotiated features: set up rings, start, suspend, switch rings,
//! resume.
//!
//! Ownership and negotiation are in `negotiate.rs`, and the diagram of the states is in `state.rs`.

use vmm_sys_util::eventfd::EventFd;

use super::info::nonsense;
use super::state::unable;
use super::{DRIVER_OK, Device, Operation, State, VringBase, VringConfig};
use crate::Error;
use crate::iova::IovaRange;
use crate::uapi::{self, BackendFeatures, vhost_vring_addr};

impl Device {
    /// Sets up a queue. Its areas must lie inside `allowed`: guest RAM for a guest's ring, the
    /// private window for a ring of the VMM.
    ///
    /// # Errors
    /// The ring breaks a rule, before anything is written; or the device refuses.
    pub fn set_vring(
        &mut self,
        queue: u16,
        config: &VringConfig<'_>,
        allowed: &[IovaRange],
    ) -> Result<(), Error> {
        self.check(Operation::SetUp)?;
        self.check_vring(queue, config, allowed)?;
        self.write_vring(queue, config)
    }

    /// Enables a queue. Virtio requires this before DRIVER_OK. Afterwards it needs the backend
    /// feature ENABLE_AFTER_DRIVER_OK, and a queue that was set up before.
    ///
    /// # Errors
    /// The device runs and lacks that feature, there is no such queue, or the device refuses.
    pub fn enable_vring(&mut self, queue: u16) -> Result<(), Error> {
        self.check(Operation::Enable)?;
        let late = BackendFeatures::ENABLE_AFTER_DRIVER_OK;
        if self.state == State::Running && !self.acked.contains(late) {
            return Err(unable("enable a queue while it runs"));
        }
        self.vring_enable(queue, true)
    }

    /// Sets DRIVER_OK: the device starts to work.
    ///
    /// # Errors
    /// The device refused, and was reset.
    pub fn start(&mut self) -> Result<(), Error> {
        self.perform(Operation::Start, |device| device.add_status(DRIVER_OK))
    }

    /// Rebinds or unbinds the eventfd that the running device signals. The caller then signals the
    /// new one once: a call may have gone to the old one.
    ///
    /// # Errors
    /// No such queue, or the device refuses.
    pub fn set_call(&self, queue: u16, call: Option<&EventFd>) -> Result<(), Error> {
        self.check(Operation::Rebind)?;
        self.bind_call(queue, call)
    }

    /// Rebinds or unbinds the eventfd by which the driver kicks the running device. The caller then
    /// gives the new one a spurious kick.
    ///
    /// # Errors
    /// No such queue, or the device refuses.
    pub fn set_kick(&self, queue: u16, kick: Option<&EventFd>) -> Result<(), Error> {
        self.check(Operation::Rebind)?;
        self.bind_kick(queue, kick)
    }

    /// Whether [`Device::suspend`] can work.
    #[must_use]
    pub fn can_suspend(&self) -> bool {
        self.acked.contains(BackendFeatures::SUSPEND)
    }

    /// Suspends the device; its ring state stays and can be read.
    ///
    /// # Errors
    /// The device cannot suspend, or refused; it continues to run.
    pub fn suspend(&mut self) -> Result<(), Error> {
        self.perform(Operation::Suspend, |device| {
            if !device.can_suspend() {
                return Err(unable("suspend"));
            }
            let suspended = device.handle.call(uapi::suspend());
            suspended.map_err(Error::refused("VHOST_VDPA_SUSPEND"))
        })
    }

    /// Resumes the suspended device.
    ///
    /// # Errors
    /// The device cannot resume (not every one that suspends can), or refused; it stays suspended.
    pub fn resume(&mut self) -> Result<(), Error> {
        self.perform(Operation::Resume, |device| {
            if !device.acked.contains(BackendFeatures::RESUME) {
                return Err(unable("resume"));
            }
            let resumed = device.handle.call(uapi::resume());
            resumed.map_err(Error::refused("VHOST_VDPA_RESUME"))
        })
    }

    /// The position of the suspended device in a ring.
    ///
    /// # Errors
    /// No such queue, no ring state on this parent, or an implausible position.
    pub fn vring_base(&self, queue: u16) -> Result<VringBase, Error> {
        self.check(Operation::Switch)?;
        self.info.queue(queue)?;
        let number = self
            .handle
            .vring_state(uapi::get_vring_base(), queue)
            .map_err(Error::queue_refused(queue, "VHOST_GET_VRING_BASE"))?;
        VringBase::from_kernel(number, self.is_packed())
            .ok_or_else(|| nonsense(number, "as the position in a split ring"))
    }

    /// Unbinds both eventfds of a suspended device's queue, so that another device can use them.
    /// The kernel gives the interrupt bypass (irq bypass) of an eventfd to one device only.
    ///
    /// # Errors
    /// No such queue, or the device refuses.
    pub fn release_eventfds(&mut self, queue: u16) -> Result<(), Error> {
        self.check(Operation::Switch)?;
        self.bind_kick(queue, None)?;
        self.bind_call(queue, None)
    }

    /// Takes a queue of a suspended device out of service, in place: disabled, without eventfds.
    /// After [`Device::resume`] the device no longer accesses its rings and buffers;
    /// [`Device::switch_vring`] brings it back.
    ///
    /// # Errors
    /// No such queue, or the device refuses.
    pub fn park_vring(&mut self, queue: u16) -> Result<(), Error> {
        self.check(Operation::Switch)?;
        // Safe only here: see `switch_vring`.
        self.vring_enable(queue, false)?;
        self.bind_kick(queue, None)?;
        self.bind_call(queue, None)
    }

    /// Gives a queue of a suspended device another ring, or the same one at other addresses. It
    /// works in place: disabled, set up anew, enabled; [`Device::resume`] applies it.
    ///
    /// # Errors
    /// The ring breaks a rule, before anything is written; or the device refuses. The queue may
    /// then be disabled until the device is reset.
    pub fn switch_vring(
        &mut self,
        queue: u16,
        config: &VringConfig<'_>,
        allowed: &[IovaRange],
    ) -> Result<(), Error> {
        self.check(Operation::Switch)?;
        self.check_vring(queue, config, allowed)?;
        // Safe only here: a parent without SUSPEND treats the 0 as a broken driver, and the state
        // Suspended proves that this one has SUSPEND.
        self.vring_enable(queue, false)?;
        self.write_vring(queue, config)?;
        self.vring_enable(queue, true)
    }

    fn check_vring(
        &self,
        queue: u16,
        config: &VringConfig<'_>,
        allowed: &[IovaRange],
    ) -> Result<(), Error> {
        let maximum = self.info.queue(queue)?.max_size;
        config
            .check(maximum, self.is_packed(), allowed)
            .map_err(|source| Error::other(format!("cannot set up queue {queue}")).because(source))
    }

    fn write_vring(&self, queue: u16, config: &VringConfig<'_>) -> Result<(), Error> {
        let handle = &self.handle;
        let index = u32::from(queue);
        handle
            .set_vring_state(uapi::set_vring_num(), index, u32::from(config.size))
            .map_err(Error::queue_refused(queue, "VHOST_SET_VRING_NUM"))?;
        handle
            .set_vring_state(uapi::set_vring_base(), index, config.base.to_kernel())
            .map_err(Error::queue_refused(queue, "VHOST_SET_VRING_BASE"))?;
        let addresses = vhost_vring_addr {
            index,
            flags: 0,
            desc_user_addr: config.addresses.descriptor.0,
            used_user_addr: config.addresses.device.0,
            avail_user_addr: config.addresses.driver.0,
            log_guest_addr: 0,
        };
        handle
            .write(uapi::set_vring_addr(), &addresses)
            .map_err(Error::queue_refused(queue, "VHOST_SET_VRING_ADDR"))?;
        self.bind_kick(queue, config.kick)?;
        self.bind_call(queue, config.call)
    }

    fn vring_enable(&self, queue: u16, enable: bool) -> Result<(), Error> {
        self.info.queue(queue)?;
        let (index, num) = (u32::from(queue), u32::from(enable));
        self.handle
            .set_vring_state(uapi::set_vring_enable(), index, num)
            .map_err(Error::queue_refused(queue, "VHOST_VDPA_SET_VRING_ENABLE"))
    }

    fn bind_kick(&self, queue: u16, kick: Option<&EventFd>) -> Result<(), Error> {
        self.info.queue(queue)?;
        self.handle
            .set_vring_file(uapi::set_vring_kick(), queue, kick)
            .map_err(Error::queue_refused(queue, "VHOST_SET_VRING_KICK"))
    }

    fn bind_call(&self, queue: u16, call: Option<&EventFd>) -> Result<(), Error> {
        self.info.queue(queue)?;
        self.handle
            .set_vring_file(uapi::set_vring_call(), queue, call)
            .map_err(Error::queue_refused(queue, "VHOST_SET_VRING_CALL"))
    }
}
