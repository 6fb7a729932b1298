//! Who watches a NIC being made or removed: keeps the record, shows progress, may interrupt.

use std::fmt;
use std::io;

use super::record::MadeNic;

/// A part of making a NIC. Not each leaves a [`super::Step`]: looking and waiting need no undoing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Looking whether it can be done, before anything is touched.
    Check,
    /// Giving a physical function its virtual functions.
    CountVirtualFunctions,
    /// Looking for a virtual function that nobody uses.
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

/// What goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity<'a> {
    /// A phase begins: this is done, to or with the named thing.
    Begin(Phase, &'a str),
    /// A phase is done.
    End(Phase),
    /// The kernel is waited for.
    Wait(&'a str),
    /// A step is undone.
    Undo(&'a str),
    /// Something is left as others have changed it, or because they use it, and why.
    Leave(&'a str),
}

/// What goes on with which NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The NIC's name.
    pub name: &'a str,
    /// What goes on.
    pub activity: Activity<'a>,
}

/// Who watches.
pub trait Observer {
    /// Keeps the record. It must be in a safe place when this returns: what comes next is not done
    /// before. A record without steps need not be kept.
    ///
    /// # Errors
    /// What the place says; nothing more is done then, and what was done is undone.
    fn keep(&mut self, nic: &MadeNic) -> io::Result<()>;

    /// Hears what goes on.
    fn progress(&mut self, _progress: &Progress<'_>) {}

    /// Whether to stop and undo what was done. It is asked when a phase begins, when it is done, and
    /// while something is waited for; not while steps are undone.
    fn interrupted(&mut self) -> bool {
        false
    }
}

/// Keeps no record and shows nothing: for NICs that live no longer than their process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn keep(&mut self, _: &MadeNic) -> io::Result<()> {
        Ok(())
    }
}
