//! The device under test, opened afresh for each rule.

use std::cell::Cell;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use super::verdict::{Verdict, skipped};
use crate::device::Device;
use crate::iotlb::Iotlb;
use crate::netdev::{Kick, Netdev, Options, TxQueue};
use crate::probe::send_one;
use crate::uapi::BackendFeatures;

/// How long a device may take for a frame, or an interrupt.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

const STUCK: &str = "the device moves no frames: see memory.reach";

/// See the module.
#[derive(Debug)]
pub(super) struct Subject<'a> {
    path: &'a Path,
    device_id: u32,
    /// It was seen not to move frames: no other rule waits for that again.
    stuck: Cell<bool>,
}

/// What came of frames given to the device.
#[derive(Debug)]
pub(super) enum Moved {
    /// All were used.
    All,
    /// Some were not.
    Stuck,
    /// The ring was broken.
    Broken(crate::Error),
}

type Fallible<T> = Result<T, Box<dyn Error>>;

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

    pub(super) fn own(&self) -> Fallible<(Device, Iotlb)> {
        Ok(Device::open(self.path)?.own()?)
    }

    /// With all features that the library's own driver takes.
    pub(super) fn negotiate(&self) -> Fallible<(Device, Iotlb)> {
        let (mut device, iotlb) = self.own()?;
        let offered = device.info().features;
        let features = match self.device_id {
            VIRTIO_ID_NET => Options::default().features(offered),
            _ => offered & (1 << 32),
        };
        device.negotiate(features)?;
        Ok((device, iotlb))
    }

    /// Why frames can't be moved; `None`: they can.
    pub(super) fn no_frames(&self) -> Option<Verdict> {
        (self.device_id != VIRTIO_ID_NET).then(|| skipped("not a network device"))
    }

    /// The verdict on a rule that needs frames, once none moved.
    pub(super) fn known_stuck(&self) -> Option<Verdict> {
        self.stuck.get().then(|| skipped(STUCK))
    }

    /// Running with one queue pair, kicked by eventfd.
    pub(super) fn start(&self, wanted: BackendFeatures) -> Fallible<Netdev> {
        let (device, iotlb) = Device::open(self.path)?.own_with(wanted)?;
        let options = Options {
            kick: Kick::Eventfd,
            ..Options::default()
        };
        Ok(Netdev::start(device, iotlb, &options)?)
    }

    /// Running, and seen to move frames. Where it does not, that is another rule's
    /// failure, and this one is skipped.
    pub(super) fn working(&self, frames: usize) -> Fallible<Result<Netdev, Verdict>> {
        if let Some(verdict) = self.no_frames() {
            return Ok(Err(verdict));
        }
        if let Some(verdict) = self.known_stuck() {
            return Ok(Err(verdict));
        }
        let mut netdev = self.start(BackendFeatures::all())?;
        Ok(match exercise(&mut netdev, frames) {
            Moved::All => Ok(netdev),
            Moved::Stuck => {
                self.stuck.set(true);
                Err(skipped(STUCK))
            }
            Moved::Broken(_) => Err(skipped("the device breaks its rings: see completion")),
        })
    }
}

/// Has the device send frames to nobody, one after the other.
pub(super) fn exercise(netdev: &mut Netdev, frames: usize) -> Moved {
    let Some(pair) = netdev.driver.pairs.first_mut() else {
        return Moved::Stuck;
    };
    for _ in 0..frames {
        let sent = send_one(&mut pair.transmit);
        match sent.and_then(|_| drain(&mut pair.transmit, PATIENCE)) {
            Ok(true) => {}
            Ok(false) => return Moved::Stuck,
            Err(error) => return Moved::Broken(error),
        }
    }
    Moved::All
}

/// Whether the device gives all buffers back in time.
pub(super) fn drain(transmit: &mut TxQueue, limit: Duration) -> Result<bool, crate::Error> {
    let begin = Instant::now();
    while transmit.queue().outstanding() > 0 {
        transmit.reap()?;
        if begin.elapsed() > limit {
            return Ok(false);
        }
        std::thread::yield_now();
    }
    Ok(true)
}
