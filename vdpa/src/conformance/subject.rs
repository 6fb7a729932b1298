//! The device under test, opened afresh for each rule.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use super::verdict::{Verdict, skipped};
use crate::device::Device;
use crate::iotlb::Iotlb;
use crate::netdev::{Kick, Netdev, Options};
use crate::probe::send_one;
use crate::uapi::BackendFeatures;

/// Maximum time for the device to send a frame or an interrupt.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

pub(super) const STUCK: &str = "the device moves no frames: see memory.reach";

/// Opens the device for each rule. See the module.
#[derive(Debug)]
pub(super) struct Subject<'a> {
    path: &'a Path,
    device_id: u32,
    /// The device failed to move frames before: no other rule waits for that again.
    stuck: Cell<bool>,
}

/// The fate of the frames that the device got.
#[derive(Debug)]
pub(super) enum Moved {
    /// The device used all of them.
    All,
    /// The device did not use some of them.
    Stuck,
    /// The device broke the ring.
    Broken(crate::Error),
}

impl<'a> Subject<'a> {
    pub(super) fn new(path: &'a Path, device_id: u32) -> Self {
        Self {
            path,
            device_id,
            stuck: Cell::new(false),
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.path
    }

    pub(super) fn own(&self) -> Result<(Device, Iotlb), Verdict> {
        Ok(Device::open(self.path)?.own()?)
    }

    /// Negotiates all features that the library's own driver supports.
    pub(super) fn negotiate(&self) -> Result<(Device, Iotlb), Verdict> {
        let (mut device, iotlb) = self.own()?;
        let offered = device.info().features;
        let features = match self.device_id {
            VIRTIO_ID_NET => Options::default().features(offered),
            _ => offered & (1 << 32),
        };
        device.negotiate(features)?;
        Ok((device, iotlb))
    }

    /// Skips a rule about network devices if the device is of another class.
    pub(super) fn is_network(&self) -> Result<(), Verdict> {
        if self.device_id == VIRTIO_ID_NET {
            return Ok(());
        }
        Err(skipped("not a network device"))
    }

    /// Skips a rule that needs frames if the device failed to move them before.
    pub(super) fn moves_frames(&self) -> Result<(), Verdict> {
        self.is_network()?;
        if self.stuck.get() {
            return Err(skipped(STUCK));
        }
        Ok(())
    }

    /// Starts the device with one queue pair, kicked by eventfd.
    pub(super) fn start(&self, wanted: BackendFeatures) -> Result<Netdev, Verdict> {
        let (device, iotlb) = Device::open(self.path)?.own_with(wanted)?;
        let options = Options {
            kick: Kick::Eventfd,
            ..Options::default()
        };
        Ok(Netdev::start(device, iotlb, &options)?)
    }

    /// Starts the device and checks that it moves frames. If it moves none, another rule fails and
    /// this one is skipped.
    pub(super) fn working(&self, frames: usize) -> Result<Netdev, Verdict> {
        self.moves_frames()?;
        let mut netdev = self.start(BackendFeatures::all())?;
        match exercise(&mut netdev, frames) {
            Moved::All => Ok(netdev),
            Moved::Stuck => {
                self.stuck.set(true);
                Err(skipped(STUCK))
            }
            Moved::Broken(_) => Err(skipped("the device breaks its rings: see completion")),
        }
    }
}

/// Has the device send frames to an unassigned address, one after the other.
pub(super) fn exercise(netdev: &mut Netdev, frames: usize) -> Moved {
    let Ok(transmit) = netdev.driver.transmit() else {
        return Moved::Stuck;
    };
    for _ in 0..frames {
        let sent = send_one(transmit);
        match sent.and_then(|_| transmit.drain(PATIENCE)) {
            Ok(true) => {}
            Ok(false) => return Moved::Stuck,
            Err(error) => return Moved::Broken(error),
        }
    }
    Moved::All
}
