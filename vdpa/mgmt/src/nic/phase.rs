//! The phases of creating a NIC, for progress and errors.

use std::fmt;

/// A phase of creating a NIC. Some leave no [`super::Step`]: a check or a wait needs no undoing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Checks that it can be done, before any change.
    Check,
    /// Creates the virtual functions of a physical function.
    CountVirtualFunctions,
    /// Searches for a free virtual function.
    ChooseVirtualFunction,
    /// Sets address, VLAN and rates of the virtual function.
    SetVirtualFunction,
    /// Binds a driver that is a vDPA parent.
    BindFunction,
    /// Waits for the management device.
    AwaitMgmtDevice,
    /// Adds the port of a subfunction.
    AddPort,
    /// Sets address and rates of the subfunction.
    ConfigurePort,
    /// Activates the subfunction.
    ActivatePort,
    /// Waits for the subfunction's own device.
    AwaitSubfunction,
    /// Makes the subfunction support vDPA devices: a parameter, and a reload.
    EnableVnet,
    /// Starts the process that serves a software NIC.
    Serve,
    /// Adds the vDPA device.
    AddDevice,
    /// Waits for `/dev/vhost-vdpa-N`.
    AwaitCharacterDevice,
    /// Connects the function.
    Connect,
}

impl fmt::Display for Phase {
    /// As a part of a sentence: "cannot …".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Check => "begin",
            Self::CountVirtualFunctions => "create virtual functions",
            Self::ChooseVirtualFunction => "choose a virtual function",
            Self::SetVirtualFunction => "set up the virtual function",
            Self::BindFunction => "bind the function to a vDPA driver",
            Self::AwaitMgmtDevice => "find the management device",
            Self::AddPort => "add the port of a subfunction",
            Self::ConfigurePort => "set up the subfunction",
            Self::ActivatePort => "activate the subfunction",
            Self::AwaitSubfunction => "find the subfunction",
            Self::EnableVnet => "enable vDPA on the subfunction",
            Self::Serve => "serve it",
            Self::AddDevice => "add the vDPA device",
            Self::AwaitCharacterDevice => "find the character device",
            Self::Connect => "connect it",
        })
    }
}
