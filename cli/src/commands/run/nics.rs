//! NICs that `bellhop run` creates for its VM (`--nic`), and deletes when the VM ends.
//!
//! ```text
//!   bellhop run --nic bridge=br0 …        creates the NICs, waits, deletes them
//!     └─ bellhop run --vdpa path=… …      the VM, which may be in a sandbox
//! ```
//! A record of each NIC is in the same place as those of `bellhop nic create`. So after `kill -9`,
//! `bellhop nic list` shows a NIC that is left, and `bellhop nic delete` deletes it.
//!
//! While it waits, the first process repairs software NICs, as a daemon does for those of its VMs.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, set_parent_process_death_signal,
};
use serde::Deserialize;
use vdpa_mgmt::connectivity::Connectivity;
use vdpa_mgmt::link::VlanId;
use vdpa_mgmt::nic::{NicRequest, Nics, PortQueue, SOFTWARE, Store};
use vmm::config::{FeatureMask, MacAddress, from_key_value};

use crate::commands::nic::keep::Keeper;
use crate::commands::nic::watch::Watch;
use crate::signals::StopSignals;

/// The interval of checks of the NICs. A signal that arrives just before a wait is passed on after
/// it.
const PERIOD: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// A NIC to create.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewNic {
    bridge: Option<String>,
    vlan: Option<u16>,
    port: Option<String>,
    queue: Option<u16>,
    from: Option<String>,
    mac: Option<MacAddress>,
    mtu: Option<u16>,
    queue_pairs: Option<u16>,
    poll: Option<u8>,
    device_features: Option<FeatureMask>,
    id: Option<String>,
}

impl NewNic {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let nic: Self = from_key_value(text).map_err(|error| error.to_string())?;
        nic.request("").map_err(|error| error.to_string())?;
        Ok(nic)
    }

    fn request(&self, name: &str) -> Result<NicRequest, Error> {
        let port = match (&self.bridge, self.vlan, &self.port, self.queue) {
            (Some(_), _, None, None) => None,
            (None, None, Some(port), Some(queue)) => Some(PortQueue::new(port, queue)?),
            _ => {
                return Err(Error::wrong(
                    "name either `bridge`, which may have a `vlan`, or both `port` and `queue`",
                ));
            }
        };
        let from = match &self.from {
            None if port.is_some() => SOFTWARE,
            from => from.as_deref().unwrap_or_default(),
        };
        let vlan = self.vlan.map(VlanId::try_from).transpose()?;
        Ok(NicRequest {
            owner: Some(owner()),
            mac: self.mac.map(MacAddress::bytes),
            mtu: self.mtu,
            max_vqp: self.queue_pairs,
            poll_percent: self.poll,
            device_features: self.device_features.map(|mask| mask.0),
            connectivity: self.bridge.clone().map(|bridge| Connectivity {
                bridge: Some(bridge),
                vlan,
                mtu: None,
            }),
            port,
            ..NicRequest::new(name, from)
        })
    }
}

/// The owner of this VM's NICs in their records.
fn owner() -> String {
    format!("bellhop run, process {}", std::process::id())
}

/// Runs the VM in another process, on NICs that exist as long as it.
pub(super) fn run(wanted: &[NewNic]) -> Result<Code, Error> {
    let nics = Nics::open()?;
    let mut watch = Watch::start(Store::open_default()?.lock()?)?;
    let created = create(&nics, wanted, &mut watch);
    let signals = watch.release();
    let ended = created.and_then(|(devices, keepers)| wait(start(&devices)?, keepers, &signals));
    delete();
    ended
}

/// Creates the NICs. Returns the options of `--vdpa` for them, and a keeper of each software NIC.
fn create<'a>(
    nics: &'a Nics,
    wanted: &[NewNic],
    watch: &mut Watch,
) -> Result<(Vec<String>, Vec<Keeper<'a>>), Error> {
    let mut devices = Vec::new();
    let mut keepers = Vec::new();
    for (index, wanted) in wanted.iter().enumerate() {
        let name = format!("run{}n{index}", std::process::id());
        let mut request = wanted.request(&name)?;
        let others = watch.store().nics()?;
        let id = wanted.id.as_ref().unwrap_or(&name);
        if let (None, Some(bridge)) = (&wanted.from, &wanted.bridge) {
            let choice = nics.best_source(&request, bridge, &others)?;
            // Standard error may be closed; the NIC is no worse for it.
            let _ = writeln!(
                std::io::stderr(),
                "NIC {id}: from={}, because {}",
                choice.from,
                choice.because
            );
            request.from = choice.from;
        }
        let nic = nics.make(&request, &others, watch)?;
        let path = nics.character_device(&nic)?;
        devices.push(format!("path={},id={id}", path.display()));
        if nic.is_software() {
            keepers.push(Keeper::new(nics, nic));
        }
    }
    Ok((devices, keepers))
}

/// Starts the process of the VM. It ends if this one does.
fn start(devices: &[String]) -> Result<Child, Error> {
    let mut words = Vec::new();
    let mut given = std::env::args_os().skip(1);
    while let Some(word) = given.next() {
        if word == "--nic" {
            given.next();
        } else if !word.as_encoded_bytes().starts_with(b"--nic=") {
            words.push(word);
        }
    }
    for device in devices {
        words.extend(["--vdpa".into(), device.into()]);
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg0("bellhop").args(words);
    // SAFETY: there is no safe way to follow the parent's end. The closure runs between fork and
    // exec, and makes one system call, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command
        .spawn()
        .map_err(Error::context("cannot start the process of the VM"))
}

/// Waits for the end of the VM, repairs its NICs, and passes on a signal to stop.
fn wait(
    mut child: Child,
    mut keepers: Vec<Keeper<'_>>,
    signals: &StopSignals,
) -> Result<Code, Error> {
    let failed = "cannot wait for the process of the VM";
    let pid = Pid::from_child(&child);
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(Error::context(failed))?;
    let mut is_forwarded = false;
    loop {
        if let Some(status) = child.try_wait().map_err(Error::context(failed))? {
            return Ok(Code::of(status));
        }
        if signals.received().is_some() && !is_forwarded {
            is_forwarded = true;
            // It may have ended meanwhile.
            let _ = pidfd_send_signal(&pidfd, Signal::TERM);
        }
        // Also after a signal: the guest may need its NIC to stop, and the kernel waits for the
        // NIC's process when the VM closes the device.
        keepers.retain_mut(is_kept);
        let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
        match poll(&mut ended, Some(&PERIOD)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::context(failed)(error)),
        }
    }
}

/// Repairs a NIC if necessary. Returns whether it still exists.
fn is_kept(keeper: &mut Keeper<'_>) -> bool {
    let looked = keeper.look();
    if let Err(error) = &looked {
        let error: &dyn std::error::Error = error;
        tracing::error!(error, "a NIC of the VM is not repaired any more");
    }
    matches!(looked, Ok(Some(_)))
}

/// Deletes the NICs of this process. A failure is logged: the VM has ended.
pub(super) fn delete() {
    let deleted = || -> Result<(), Error> {
        let mut store = Store::open_default()?.lock()?;
        let own = store.nics()?.into_iter();
        let owner = owner();
        for nic in own.filter(|nic| nic.owner() == Some(&owner)) {
            Nics::open()?.remove(&nic, &mut store)?;
        }
        Ok(())
    };
    if let Err(error) = deleted() {
        let error: &dyn std::error::Error = &error;
        tracing::error!(
            error,
            "a NIC of the VM is left: `bellhop nic list` shows it"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_the_bridge_or_port_and_more() {
        let text = "bridge=br0,vlan=100,mac=52:54:00:12:34:56,id=net0,queue_pairs=4,poll=30,\
                    device_features=0x100000020";
        let request = NewNic::parse(text).unwrap().request("run1n0").unwrap();
        let connectivity = request.connectivity.unwrap();
        assert_eq!(connectivity.to_string(), "bridge=br0,vlan=100");
        assert_eq!(request.mac, Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
        assert_eq!((request.max_vqp, request.poll_percent), (Some(4), Some(30)));
        assert_eq!(request.device_features, Some(0x1_0000_0020));
        let of_port = NewNic::parse("port=eth1,queue=3").unwrap();
        let of_port = of_port.request("run1n0").unwrap();
        assert_eq!(of_port.from, SOFTWARE);
        assert_eq!(of_port.port.unwrap().to_string(), "port=eth1,queue=3");
        assert_eq!(of_port.connectivity, None);
        for wrong in [
            "vlan=100",
            "queue=0",
            "port=eth1",
            "bridge=br0,port=eth1,queue=0",
            "bridge=br0,queue=0",
            "port=eth1,queue=0,vlan=100",
            "port=a/b,queue=0",
            "bridge=br0,vlan=4095",
            "bridge=br0,vlan=x",
            "br0",
            "bridge=br0,speed=1",
            "bridge=br0,poll=256",
            "bridge=br0,device_features=all",
        ] {
            NewNic::parse(wrong).unwrap_err();
        }
    }
}
