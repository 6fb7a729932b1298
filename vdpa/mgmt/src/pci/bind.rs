//! Rebinds a PCI function to another driver.
//!
//! A driver binds to the functions in its id table. Other functions need `driver_override`, the
//! name of the only driver that may bind to them. So a driver is first tried without an override.
//! Then no override stays where none is needed, for instance after restoring the NIC's own driver.
//!
//! ```text
//!   unused ──> unbind ──> no override, bind ──> bound
//!                              └─ENODEV──> override, bind ──> bound
//!                  any failure after the unbind: old override ──> old driver
//! ```

use std::io;

use super::{Address, Function, Pci};
use crate::error::{Error, ErrorKind};
use crate::name::is_name;
use crate::sysfs::write;

impl Pci {
    /// Checks whether [`Pci::bind`] can bind the function, and returns it. Nothing is changed.
    ///
    /// # Errors
    /// `InUse` with the holders, `Unusable`; or as [`Pci::function`].
    pub fn check_bind(&self, address: Address, driver: &str) -> Result<Function, Error> {
        let function = self.function(address)?;
        if !self.has_driver(driver) {
            return Err(no_driver(driver));
        }
        if function.driver.as_deref() != Some(driver) {
            self.check_unused(&function)?;
        }
        Ok(function)
    }

    /// Binds the function at `address` to the driver `driver`, and returns its new state. Nothing
    /// happens if it has that driver. vDPA devices on the function are deleted, and so are virtual
    /// functions if its driver removes them.
    ///
    /// # Errors
    /// `InUse` with the holders, `Unusable`, `NotPermitted`; `NotUndone` after an attempt to
    /// restore the old driver; or as [`Pci::function`].
    pub fn bind(&self, address: Address, driver: &str) -> Result<Function, Error> {
        let function = self.check_bind(address, driver)?;
        if function.driver.as_deref() == Some(driver) {
            return Ok(function);
        }
        if let Some(old) = &function.driver {
            self.unbind(address, old)?;
        }
        if let Err(source) = self.take(address, driver) {
            self.put_back(&function);
            let now = self.function(address).ok().and_then(|one| one.driver);
            return Err(bind_error(address, driver, now.as_deref(), source));
        }
        self.function(address)
    }

    /// Whether the driver is loaded.
    pub(crate) fn has_driver(&self, driver: &str) -> bool {
        is_name(driver) && self.drivers.join(driver).is_dir()
    }

    /// Restores the driver and the override that the function had before it was bound to `driver`,
    /// even if that binding was not finished.
    ///
    /// # Errors
    /// As [`Pci::bind`].
    pub(crate) fn restore(
        &self,
        function: &Function,
        driver: &str,
        former_driver: Option<&str>,
        former_override: Option<&str>,
    ) -> Result<(), Error> {
        let address = function.address;
        match former_driver {
            Some(former) => drop(self.bind(address, former)?),
            None if function.driver.is_some() => {
                self.check_unused(function)?;
                self.unbind(address, driver)?;
            }
            None => {}
        }
        // `bind` has chosen the override that the former driver needs; the former override is
        // restored here.
        let now = self.function(address)?.driver_override;
        if now.as_deref() != former_override && (now.as_deref() == Some(driver) || now.is_none()) {
            self.set_override(address, former_override.unwrap_or_default())
                .map_err(|source| {
                    let driver = former_driver.unwrap_or(driver);
                    bind_error(address, driver, former_driver, source)
                })?;
        }
        Ok(())
    }

    /// Unbinds a function from its driver.
    fn unbind(&self, address: Address, driver: &str) -> Result<(), Error> {
        self.tell(driver, "unbind", address).map_err(|source| {
            let message = |_: &_| format!("the driver {driver} does not release {address}");
            Error::write(&address.to_string(), source, ErrorKind::Refused, message)
        })
    }

    /// Binds a driver to a function that has none.
    fn take(&self, address: Address, driver: &str) -> io::Result<()> {
        self.set_override(address, "")?;
        match self.tell(driver, "bind", address) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                self.set_override(address, driver)?;
                self.tell(driver, "bind", address)
            }
            outcome => outcome,
        }
    }

    /// Restores the driver override and the driver of the function.
    fn put_back(&self, function: &Function) {
        let address = function.address;
        let former = function.driver_override.as_deref().unwrap_or_default();
        if let Err(error) = self.set_override(address, former) {
            tracing::warn!(%address, former, %error, "cannot restore the driver override");
        }
        let Some(old) = &function.driver else {
            return;
        };
        // A restored override for another driver prevents this one from binding.
        let outcome = match self.tell(old, "bind", address) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => self
                .set_override(address, old)
                .and_then(|()| self.tell(old, "bind", address))
                .and_then(|()| self.set_override(address, former)),
            outcome => outcome,
        };
        if let Err(error) = outcome {
            tracing::warn!(%address, driver = old, %error, "cannot rebind the old driver");
        }
    }

    /// Makes this the only driver that may bind to the function; any may if the name is empty.
    fn set_override(&self, address: Address, driver: &str) -> io::Result<()> {
        let path = self.directory(address).join("driver_override");
        write(&path, &format!("{driver}\n"))
    }

    /// Writes the function's address to a driver's file.
    fn tell(&self, driver: &str, file: &str, address: Address) -> io::Result<()> {
        write(&self.drivers.join(driver).join(file), &address.to_string())
    }
}

/// There is no such driver.
pub(crate) fn no_driver(driver: &str) -> Error {
    let message = format!("there is no PCI driver {driver}; load it with `modprobe {driver}`");
    Error::new(ErrorKind::Unusable, message)
}

/// The new driver did not bind to the function, which has its old one again if possible.
fn bind_error(address: Address, driver: &str, now: Option<&str>, source: io::Error) -> Error {
    let now = now.unwrap_or("no driver");
    let message = |_: &_| {
        format!(
            "the driver {driver} rejects {address}, which now has {now}; the kernel log (`dmesg`) \
             may show why"
        )
    };
    Error::write(&address.to_string(), source, ErrorKind::NotUndone, message)
}
