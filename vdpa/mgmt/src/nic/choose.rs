//! Chooses a free virtual function.
//!
//! A free function has no vDPA device, and no program has it through vfio-pci. Its network
//! interface is in this namespace, down, without an address and in no bridge or bond. If the driver
//! shows no interface here, that may be in another network namespace, so the function is not free.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::addresses;
use super::error::NicError;
use super::nics::Nics;
use super::taken::{Taken, TakenBecause};
use crate::error::existing;
use crate::pci::Function;

/// The directory of network interfaces in sysfs.
const INTERFACES: &str = "/sys/class/net";

/// The flag of an interface that is up (IFF_UP).
const IFF_UP: u32 = 1;

/// Drivers that leave a function without a network interface.
const WITHOUT_INTERFACE: [&str; 2] = ["vp-vdpa", "vfio-pci"];

impl Nics {
    /// The first free virtual function of `physical`, by number.
    ///
    /// # Errors
    /// [`NicError::NoneFree`] with a reason for each, or the kernel's error.
    pub(super) fn choose(&self, physical: &Function) -> Result<(u32, Function), NicError> {
        let mut taken = Vec::new();
        for one in self.look_at(physical) {
            match one? {
                (number, function, None) => return Ok((number, function)),
                (.., Some(user)) => taken.push(user),
            }
        }
        Err(NicError::NoneFree {
            physical: physical.address,
            taken,
        })
    }

    /// A virtual function of `physical` that is in use, if there is one.
    pub(super) fn used(&self, physical: &Function) -> Result<Option<Taken>, NicError> {
        for one in self.look_at(physical) {
            if let (.., Some(user)) = one? {
                return Ok(Some(user));
            }
        }
        Ok(None)
    }

    /// The existing virtual functions of `physical`, each with its number and its user.
    fn look_at(
        &self,
        physical: &Function,
    ) -> impl Iterator<Item = Result<(u32, Function, Option<Taken>), NicError>> {
        let all = physical.virtual_functions.iter();
        all.filter_map(|&(virtual_function, address)| {
            // `None` if it vanished meanwhile.
            let function = match existing(self.pci.function(address)).transpose()? {
                Ok(function) => function,
                Err(error) => return Some(Err(error.into())),
            };
            let because = self.taken(&function);
            Some(because.map(|because| {
                let taken = because.map(|because| Taken {
                    virtual_function,
                    address,
                    because,
                });
                (virtual_function, function, taken)
            }))
        })
    }

    /// Why a function is not free; `None` if it is.
    fn taken(&self, function: &Function) -> Result<Option<TakenBecause>, NicError> {
        if let Some(name) = function.vdpa_devices.first() {
            return Ok(Some(TakenBecause::VdpaDevice(name.clone())));
        }
        let Some(driver) = &function.driver else {
            return Ok(None);
        };
        if driver == "vfio-pci" {
            return Ok(Some(TakenBecause::Vfio));
        }
        if function.netdevs.is_empty() && !WITHOUT_INTERFACE.contains(&driver.as_str()) {
            return Ok(Some(TakenBecause::Hidden(driver.clone())));
        }
        host_use(function, self.patience)
    }
}

/// How this host uses an interface of a function; `None` if it uses none.
///
/// # Errors
/// The kernel's error.
pub fn host_use(function: &Function, patience: Duration) -> Result<Option<TakenBecause>, NicError> {
    let addressed = addresses::interfaces_with_one(patience)?;
    for interface in &function.netdevs {
        let directory = Path::new(INTERFACES).join(interface);
        // An interface that vanished meanwhile has none of these.
        let flags = text(&directory, "flags");
        let flags = flags.strip_prefix("0x").unwrap_or_default();
        if u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & IFF_UP != 0) {
            return Ok(Some(TakenBecause::Up(interface.clone())));
        }
        if directory.join("master").exists() {
            return Ok(Some(TakenBecause::Member(interface.clone())));
        }
        let index = text(&directory, "ifindex").parse();
        if index.is_ok_and(|index: u32| addressed.contains(&index)) {
            return Ok(Some(TakenBecause::Address(interface.clone())));
        }
    }
    Ok(None)
}

fn text(directory: &Path, file: &str) -> String {
    let text = fs::read_to_string(directory.join(file)).unwrap_or_default();
    text.trim().to_owned()
}
