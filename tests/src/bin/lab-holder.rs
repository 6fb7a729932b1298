//! Opens a vDPA network device and runs it until it is killed.
//!
//! ```text
//!   lab-holder /dev/vhost-vdpa-N      prints "running" once a frame has come back
//! ```
//! For tests of what other processes see meanwhile and find afterwards. It keeps sending, so that
//! it is killed while the device works.

use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use vdpa::device::{Device, VringConfig};
use vdpa::features::{Policy, pass_through};
use vdpa::iotlb::{Access, Mapping};
use vdpa::memory::SharedBuffer;
use vdpa::ring::{Direction, DriverQueue, Piece, RingFeatures, RingLayout};
use vmm_sys_util::eventfd::EventFd;

/// Receive and transmit queue, in this order.
const QUEUES: u16 = 2;
const SIZE: u16 = 16;
const BUFFER: u32 = 4096;
const IOVA: u64 = 0x1000_0000;
/// Header and shortest Ethernet frame, in bytes.
const PACKET: u32 = 72;

/// How long it sleeps between two looks at a ring.
const PAUSE: Duration = Duration::from_micros(200);

/// One ring, its eventfds and its one buffer.
struct Queue {
    ring: DriverQueue,
    kick: EventFd,
    call: EventFd,
    piece: Piece,
}

impl Queue {
    fn give(&mut self) -> Result<(), Box<dyn Error>> {
        self.ring.add(&[self.piece])?;
        if self.ring.needs_kick()? {
            self.kick.write(1)?;
        }
        Ok(())
    }

    /// Waits until the device returns the buffer.
    fn take(&mut self) -> Result<(), Box<dyn Error>> {
        while self.ring.pop_used()?.is_none() {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

fn queue(
    memory: &Arc<SharedBuffer>,
    index: u16,
    features: RingFeatures,
) -> Result<Queue, Box<dyn Error>> {
    let layout = RingLayout::new(features.format(), SIZE)?;
    let offset = u64::from(index) * (layout.size() + u64::from(BUFFER));
    let buffer = offset + layout.size();
    let (len, direction) = match index {
        0 => (BUFFER, Direction::DeviceWrites),
        _ => (PACKET, Direction::DeviceReads),
    };
    // To the broadcast address, which every device accepts.
    memory.write(buffer + 12, &[0xff; 6])?;
    Ok(Queue {
        ring: DriverQueue::new(Arc::clone(memory), SIZE, offset, features)?,
        kick: vdpa::eventfd::new()?,
        call: vdpa::eventfd::new()?,
        piece: Piece {
            iova: memory.iova(buffer, u64::from(len))?,
            len,
            direction,
        },
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os()
        .nth(1)
        .ok_or("usage: lab-holder /dev/vhost-vdpa-N")?;
    let (mut device, mut iotlb) = Device::open(path)?.own()?;
    let info = device.info();
    let features = pass_through(info.features, info.device_id, Policy::default()).features;
    let ring = RingFeatures::of(features);
    let size =
        u64::from(QUEUES) * (RingLayout::new(ring.format(), SIZE)?.size() + u64::from(BUFFER));
    let memory = Arc::new(SharedBuffer::new(size, IOVA)?);
    let mapping = Mapping {
        region: Arc::clone(&memory) as _,
        offset: 0,
        access: Access::ReadWrite,
    };
    iotlb.map(0, IOVA, size, mapping)?;
    let (mut receive, mut transmit) = (queue(&memory, 0, ring)?, queue(&memory, 1, ring)?);

    device.negotiate(features)?;
    for (index, queue) in [(0, &receive), (1, &transmit)] {
        let config = VringConfig {
            size: SIZE,
            addresses: queue.ring.addresses(),
            base: queue.ring.initial_base(),
            kick: Some(&queue.kick),
            call: Some(&queue.call),
        };
        device.set_vring(index, &config, &[memory.range()])?;
        device.enable_vring(index)?;
    }
    device.start()?;
    let mut said = false;
    loop {
        receive.give()?;
        transmit.give()?;
        receive.take()?;
        transmit.take()?;
        if !said {
            println!("running");
            std::io::stdout().flush()?;
            said = true;
        }
        // It leaves processor time to the processes that observe it.
        std::thread::sleep(Duration::from_millis(1));
    }
}
