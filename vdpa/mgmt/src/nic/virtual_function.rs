//! Prepares a virtual function of a physical function, up to its management device.
//!
//! ```text
//!   none exist ──> sriov_numvfs: 0 ──> n      an existing number is never changed
//!   free one ──> address, rates through the physical function's interface
//!            ──> is it a management device already (its driver is a vDPA parent)? ──> unchanged
//!                virtio device ──> vp-vdpa
//! ```

use super::error::NicError;
use super::making::Making;
use super::nics::Nics;
use super::origin::has_representors;
use super::phase::Phase;
use super::record::MadeNic;
use super::request::NicRequest;
use super::step::{Settings, Step};
use super::taken::Taken;
use crate::journal::Outcome;
use crate::pci::{Address, Function, no_driver, no_sriov};
use crate::sriov::{Links, Setting};
use crate::{ErrorKind, MgmtDeviceName};

/// The driver that makes virtio functions vDPA parents.
const VIRTIO_PARENT: &str = "vp-vdpa";

/// Vendor of virtio devices (virtio 1.3, 4.1.2).
const VIRTIO_VENDOR: u32 = 0x1af4;

/// Default number of virtual functions.
const COUNT: u32 = 8;

impl Nics {
    /// Checks whether a virtual function can fulfil the request, as far as that is known before any
    /// change.
    pub(super) fn check_virtual_function(
        &self,
        request: &NicRequest,
        physical: &Function,
    ) -> Result<(), NicError> {
        if let Some(wanted) = &request.connectivity
            && (wanted.bridge.is_some() || wanted.mtu.is_some())
            && !has_representors(physical.address)?
        {
            return Err(NicError::LegacyMode(physical.address));
        }
        if physical.virtual_functions.is_empty() {
            let total = physical.total_vfs.unwrap_or_default();
            return match request.virtual_functions {
                Some(0) => Err(NicError::NoCount),
                Some(count) if count > total => Ok(physical.check_count(count)?),
                _ if total == 0 => Err(no_sriov(physical.address).into()),
                _ => Ok(()),
            };
        }
        let (_, function) = self.choose(physical)?;
        self.parent(&function).map(drop)
    }

    /// The driver that makes a function a management device; `None` if it is one already.
    pub(super) fn parent(&self, function: &Function) -> Result<Option<&'static str>, NicError> {
        if self.has_mgmt_device(&mgmtdev(function)?)? {
            return Ok(None);
        }
        match self.parent_of_virtio(function)? {
            None => Err(NicError::NoParent {
                function: function.address,
                driver: function.driver.clone(),
            }),
            driver => Ok(driver),
        }
    }

    /// The driver that makes a virtio function a management device; `None` for other functions.
    pub(super) fn parent_of_virtio(
        &self,
        function: &Function,
    ) -> Result<Option<&'static str>, NicError> {
        if self.pci.vendor(function.address)? != Some(VIRTIO_VENDOR) {
            return Ok(None);
        }
        if !self.pci.has_driver(VIRTIO_PARENT) {
            return Err(no_driver(VIRTIO_PARENT).into());
        }
        Ok(Some(VIRTIO_PARENT))
    }
}

impl Making<'_> {
    /// All phases from a physical function to a vDPA device. Returns the virtual function.
    pub(super) fn virtual_function(
        &mut self,
        request: &NicRequest,
        physical: Function,
    ) -> Result<Address, NicError> {
        let physical = self.count(request, physical)?;
        let name = physical.address.to_string();
        let (number, function) = self.phase(Phase::ChooseVirtualFunction, &name, |making| {
            making.free(&physical)
        })?;
        let has_mac = self.set(request, &physical, number)?;
        self.phase = Phase::BindFunction;
        if let Some(driver) = self.nics.parent(&function)? {
            self.bind(&function, driver)?;
        }
        self.phase = Phase::AwaitMgmtDevice;
        let mgmtdev = mgmtdev(&function)?;
        self.await_mgmt_device(&mgmtdev)?;
        self.add_device_with_address(request, &mgmtdev, has_mac)?;
        Ok(function.address)
    }

    /// Creates virtual functions, if there are none.
    fn count(&mut self, request: &NicRequest, physical: Function) -> Result<Function, NicError> {
        let address = physical.address;
        if !physical.virtual_functions.is_empty() {
            // Created for another recorded NIC: the last one removes them.
            let counts = |step: &&Step| -> bool {
                matches!(step, Step::CountVirtualFunctions { physical, .. } if *physical == address)
            };
            let mut steps = self.others.iter().flat_map(MadeNic::steps);
            if let Some(step) = steps.find(counts) {
                self.step(step.clone(), |_| Outcome::Done(()))?;
            }
            return Ok(physical);
        }
        let count = request.count(&physical);
        let step = Step::CountVirtualFunctions {
            physical: address,
            count,
        };
        self.step(step, |nics| {
            match nics.pci.count_from_zero(address, count) {
                Ok(function) => Outcome::Done(function),
                Err(error) => Outcome::NotDone(error.into()),
            }
        })
    }

    /// Chooses a free virtual function. Their drivers may still be starting.
    fn free(&mut self, physical: &Function) -> Result<(u32, Function), NicError> {
        let nics = self.nics;
        let counted = matches!(self.last_step(), Some(Step::CountVirtualFunctions { .. }));
        if !counted {
            return nics.choose(physical);
        }
        self.wait("a virtual function that is ready", || {
            match nics.choose(physical) {
                Ok(found) => Ok(Some(found)),
                Err(NicError::NoneFree { taken, .. })
                    if taken.iter().any(Taken::may_be_starting) =>
                {
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        })
    }

    /// Applies settings through the physical function. Returns whether that sets the address.
    fn set(
        &mut self,
        request: &NicRequest,
        physical: &Function,
        number: u32,
    ) -> Result<bool, NicError> {
        let wanted = settings(request);
        if wanted.is_empty() {
            return Ok(false);
        }
        self.phase = Phase::SetVirtualFunction;
        let interface = physical.netdevs.first();
        let interface = interface.ok_or(NicError::NoInterface(physical.address))?;
        let links = Links::open()?;
        let link = links.link(interface)?;
        let mut all = link.virtual_functions.iter();
        let now = all.find(|one| one.index == number);
        let step = Step::SetVirtualFunction {
            physical: physical.address,
            virtual_function: number,
            settings: Settings::of(&wanted),
            former: now
                .map(|now| Settings::former(&wanted, now))
                .unwrap_or_default(),
        };
        let set = self.step(step, |_| match links.set(interface, number, &wanted) {
            Ok(()) => Outcome::Done(true),
            Err(error) => match error.kind() {
                ErrorKind::NotUndone | ErrorKind::NoAnswer { sent: true } => {
                    Outcome::Unknown(error.into())
                }
                _ => Outcome::NotDone(error.into()),
            },
        });
        match set {
            // The management device may accept the address.
            Err(NicError::Mgmt(error))
                if error.kind() == ErrorKind::NotSupported
                    && matches!(wanted.as_slice(), [Setting::Mac(_)]) =>
            {
                Ok(false)
            }
            set => set,
        }
    }

    fn bind(&mut self, function: &Function, driver: &str) -> Result<(), NicError> {
        let step = Step::BindFunction {
            function: function.address,
            driver: driver.to_owned(),
            former_driver: function.driver.clone(),
            former_override: function.driver_override.clone(),
        };
        self.step(step, |nics| match nics.pci.bind(function.address, driver) {
            Ok(_) => Outcome::Done(()),
            // It has tried to restore the old driver, and may have failed.
            Err(error) if error.kind() == ErrorKind::NotUndone => Outcome::Unknown(error.into()),
            Err(error) => Outcome::NotDone(error.into()),
        })
    }
}

/// The management device of a function, existing or future.
fn mgmtdev(function: &Function) -> Result<MgmtDeviceName, NicError> {
    Ok(format!("pci/{}", function.address).parse()?)
}

impl NicRequest {
    /// The number of virtual functions to create on a physical function without any.
    pub(super) fn count(&self, physical: &Function) -> u32 {
        let most = physical.total_vfs.unwrap_or_default();
        self.virtual_functions.unwrap_or(COUNT.min(most))
    }
}

/// The settings to apply to a virtual function.
pub(super) fn settings(request: &NicRequest) -> Vec<Setting> {
    let mac = request.mac.map(Setting::Mac);
    mac.into_iter()
        .chain(request.rates.map(Setting::Rates))
        .collect()
}
