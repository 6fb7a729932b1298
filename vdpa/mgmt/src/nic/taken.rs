//! Virtual functions that are in use, with the reason.

use std::fmt;

use crate::pci::Address;

/// A virtual function that is not free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// Its number.
    pub virtual_function: u32,
    /// Its address.
    pub address: Address,
    /// The reason.
    pub because: TakenBecause,
}

/// Why a virtual function is not free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TakenBecause {
    /// It has a vDPA device.
    VdpaDevice(String),
    /// Programs use it through vfio-pci.
    Vfio,
    /// Its interface is up.
    Up(String),
    /// Its interface has an address.
    Address(String),
    /// Its interface belongs to a bridge or bond.
    Member(String),
    /// Its driver shows no interface in this network namespace.
    Hidden(String),
}

impl Taken {
    /// Whether that may change by itself, moments after the function appeared.
    pub(super) fn may_be_starting(&self) -> bool {
        matches!(self.because, TakenBecause::Hidden(_))
    }
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let because = &self.because;
        write!(f, "{} ({}) {because}", self.virtual_function, self.address)
    }
}

impl fmt::Display for TakenBecause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VdpaDevice(name) => write!(f, "has the vDPA device {name}"),
            Self::Vfio => f.write_str("is bound to vfio-pci"),
            Self::Up(interface) => write!(f, "has the interface {interface}, which is up"),
            Self::Address(interface) => {
                write!(f, "has the interface {interface}, which has an address")
            }
            Self::Member(interface) => write!(
                f,
                "has the interface {interface}, which is in a bridge or bond"
            ),
            Self::Hidden(driver) => write!(
                f,
                "has the driver {driver} and no interface here (it may be in another network \
                 namespace)"
            ),
        }
    }
}
