//! A vDPA device in userspace (VDUSE) for management tests: `lab-vduse NAME net|block` creates it,
//! prints `ready`, and answers the kernel until its standard input ends.
//!
//! It never serves rings: a driver that negotiates and sends nothing finds a device like any other.

use std::error::Error;
use std::io::Write as _;
use std::os::fd::AsFd as _;

use vdpa::vduse::{Control, Description};

const QUEUE_SIZE: u16 = 256;

/// VIRTIO_F_VERSION_1 and VIRTIO_F_ACCESS_PLATFORM, which VDUSE requires.
const TRANSPORT_FEATURES: u64 = 1 << 32 | 1 << 33;

fn description(class: &str) -> Option<Description> {
    let (device_id, features, queues, config) = match class {
        // VIRTIO_NET_F_MTU, MAC, STATUS; address, link up, one pair, MTU 1500.
        "net" => (
            1,
            1 << 3 | 1 << 5 | 1 << 16,
            2,
            [
                &[2, 0x5e, 0x10, 0x53, 0x11, 0x77][..],
                &1_u16.to_le_bytes(),
                &1_u16.to_le_bytes(),
                &1500_u16.to_le_bytes(),
            ]
            .concat(),
        ),
        // A disk of 2048 sectors.
        "block" => (2, 0, 1, [&2048_u64.to_le_bytes()[..], &[0; 52]].concat()),
        _ => return None,
    };
    Some(Description {
        device_id,
        features: features | TRANSPORT_FEATURES,
        queues: vec![QUEUE_SIZE; queues],
        config,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, class] = &arguments[..] else {
        return Err("usage: lab-vduse NAME net|block".into());
    };
    let description = description(class).ok_or("the class is net or block")?;
    let control = Control::open()?;
    let (created, device) = control.create(name, &description)?;
    println!("ready");
    std::io::stdout().flush()?;
    let served = device.idle(std::io::stdin().as_fd());
    drop((device, created));
    Ok(served?)
}
