//! The parts of making a NIC, as progress and errors name them.

use std::fmt;

/// A part of making a NIC. Not each leaves a [`super::Step`]: looking and waiting need no undoing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Looking whether it can be done, before anything is touched.
    Check,
    /// Giving a physical function its virtual functions.
    CountVirtualFunctions,
    /// Looking for a free virtual function.
    ChooseVirtualFunction,
    /// Address, VLAN and rates of the virtual function.
    SetVirtualFunction,
    /// A driver that is a vDPA parent.
    BindFunction,
    /// Waiting for the management device.
    AwaitMgmtDevice,
    /// Adding the port of a subfunction.
    AddPort,
    /// Address and rates of the subfunction.
    ConfigurePort,
    /// Making the subfunction active.
    ActivatePort,
    /// Waiting for the subfunction's own device.
    AwaitSubfunction,
    /// Having the subfunction make vDPA devices: a parameter, and a reload.
    EnableVnet,
    /// Adding the vDPA device.
    AddDevice,
    /// Waiting for `/dev/vhost-vdpa-N`.
    AwaitCharacterDevice,
    /// Connecting the function.
    Connect,
}

impl fmt::Display for Phase {
    /// As a part of a sentence: "cannot …".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Check => "begin",
            Self::CountVirtualFunctions => "give the NIC virtual functions",
            Self::ChooseVirtualFunction => "choose a virtual function",
            Self::SetVirtualFunction => "set up the virtual function",
            Self::BindFunction => "give the function a vDPA driver",
            Self::AwaitMgmtDevice => "see the management device come",
            Self::AddPort => "add the port of a subfunction",
            Self::ConfigurePort => "set up the subfunction",
            Self::ActivatePort => "make the subfunction active",
            Self::AwaitSubfunction => "see the subfunction come",
            Self::EnableVnet => "have the subfunction make vDPA devices",
            Self::AddDevice => "add the vDPA device",
            Self::AwaitCharacterDevice => "see the character device come",
            Self::Connect => "connect it",
        })
    }
}
