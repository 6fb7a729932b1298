//! A network driver in userspace: sends a broadcast frame, and prints each frame that arrives
//! within five seconds. On the simulator (`vdpasim_net`) the frame itself comes back.
//!
//! ```text
//! netdev /dev/vhost-vdpa-N
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vdpa::device::Device;
use vdpa::netdev::{Netdev, Options, Received};

/// Frames that one turn handles.
const BURST: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1);
    let path = path.ok_or("usage: netdev /dev/vhost-vdpa-N")?;
    let (device, iotlb) = Device::open(path)?.own()?;
    let mut nic = Netdev::start(device, iotlb, &Options::default())?;
    let mac = nic.driver.config().mac.unwrap_or([2, 0, 0, 0, 0, 1]);
    let pair = nic.driver.pairs.first_mut().ok_or("no queue pair")?;

    // To all stations, with the EtherType for local experiments (IEEE 802), 60 bytes.
    let mut frame = [&[0xff; 6][..], &mac, &[0x88, 0xb5], b"hello from userspace"].concat();
    frame.resize(60, 0);
    pair.transmit.send(&frame)?;
    pair.transmit.flush()?;

    let queue = &mut pair.receive;
    let end = Instant::now() + Duration::from_secs(5);
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        // Interrupts are off while there are frames, and on before the wait.
        queue.queue_mut().disable_interrupts()?;
        let mut copy = [0; 2048];
        let print = |frame: Received<'_>| match frame.copy_to(&mut copy) {
            Ok(bytes) => println!("{} bytes: {bytes:02x?}", bytes.len()),
            Err(error) => eprintln!("a frame is lost: {error}"),
        };
        if queue.poll(BURST, print)? > 0 || queue.queue_mut().enable_interrupts()? {
            continue;
        }
        let wait = Timespec::try_from(left)?;
        poll(&mut [PollFd::new(&*queue, PollFlags::IN)], Some(&wait))?;
        queue.queue_mut().clear_call()?;
    }
    Ok(())
}
