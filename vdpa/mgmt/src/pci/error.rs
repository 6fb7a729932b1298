//! What can go wrong with PCI functions, and what the user can do about it.

use std::io;
use std::path::PathBuf;

use super::Address;
use crate::in_use::InUse;
use vdpa::device::holder::{Holder, sentence};

/// Why a PCI function could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// There is no such function.
    #[error(
        "there is no PCI function {0}; `bellhop vf show` lists those with SR-IOV, `lspci -D` all"
    )]
    NoFunction(Address),
    /// There is no such network interface here.
    #[error("there is no network interface {0} in this network namespace; `ip link` lists them")]
    NoInterface(String),
    /// There is no such driver.
    #[error("there is no PCI driver {driver}; load it with `modprobe {driver}`")]
    NoDriver {
        /// The driver.
        driver: String,
    },
    /// A vDPA device on the function is open: what takes the function from its driver would
    /// wait for that.
    #[error("a vDPA device on {function} is open")]
    VdpaInUse {
        /// The function.
        function: Address,
        /// The device and who has it.
        #[source]
        source: InUse,
    },
    /// A program has the function through VFIO: what takes it from `vfio-pci` would wait for that.
    #[error("{function} is in use by {} through {}: end that first", sentence(holders), path.display())]
    VfioInUse {
        /// The function.
        function: Address,
        /// The file that is open.
        path: PathBuf,
        /// Who has it open.
        holders: Vec<Holder>,
    },
    /// The caller may not do that.
    #[error("no permission to change {function}: run this as root")]
    NotPermitted {
        /// The function.
        function: Address,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The old driver did not let go.
    #[error("the driver {driver} does not let go of {function}")]
    Unbind {
        /// The function.
        function: Address,
        /// Its driver.
        driver: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The new driver did not take the function, which has its old one again if it can.
    #[error(
        "the driver {driver} does not take {function}; it now has {}. The kernel's log (`dmesg`) may say more",
        now.as_deref().unwrap_or("no driver")
    )]
    Bind {
        /// The function.
        function: Address,
        /// The new driver.
        driver: String,
        /// The function's driver now.
        now: Option<String>,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The function has no SR-IOV.
    #[error(
        "{0} cannot have virtual functions; `bellhop vf show` lists what can (the firmware may have SR-IOV switched off)"
    )]
    NoSriov(Address),
    /// It is a virtual function itself.
    #[error("{function} is a virtual function; name its physical function, pci/{physical}")]
    Virtual {
        /// The function.
        function: Address,
        /// Its physical function.
        physical: Address,
    },
    /// It cannot have so many virtual functions.
    #[error("{function} can have {total} virtual functions at most, not {count}")]
    TooMany {
        /// The function.
        function: Address,
        /// How many were asked for.
        count: u32,
        /// How many it can have.
        total: u32,
    },
    /// The kernel did not make or take away virtual functions.
    #[error(
        "cannot give {function} {count} virtual functions, it now has {now}{}",
        remedy(source)
    )]
    Count {
        /// The function.
        function: Address,
        /// How many were asked for.
        count: u32,
        /// How many it has now.
        now: u32,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// sysfs could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// What was read.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl PciError {
    /// What a refused write means: no right to it, or something else.
    pub(crate) fn permission(
        function: Address,
        source: io::Error,
        other: impl FnOnce(io::Error) -> Self,
    ) -> Self {
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotPermitted { function, source },
            _ => other(source),
        }
    }
}

/// What errno of `sriov_numvfs` mean (drivers/pci/pci-sysfs.c, drivers/pci/iov.c).
fn remedy(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOENT) => {
            ": it has no driver, or one that knows no SR-IOV; bind it to its NIC driver first"
        }
        Some(libc::EBUSY) => {
            ": its driver is not ready or has them in use; try again when its link is up"
        }
        Some(libc::ENOMEM) => {
            ": the firmware of this machine left too few bus numbers or too little address space (try `pci=realloc`)"
        }
        _ => "",
    }
}
