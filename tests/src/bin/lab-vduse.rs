//! A vDPA device in userspace (VDUSE) for management tests: `lab-vduse NAME net|block` creates it,
//! prints `ready`, and answers the kernel until its standard input ends.
//!
//! It never serves rings: a driver that negotiates and sends nothing finds a device like any other.
//! Numbers and structures come from include/uapi/linux/vduse.h, API version 0.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

const NAME_MAX: usize = 256;
/// Bytes of `struct vduse_dev_request` and of `struct vduse_dev_response`.
const MESSAGE: usize = 152;
const VDUSE_GET_VQ_STATE: u32 = 0;
const QUEUE_SIZE: u16 = 256;

/// VIRTIO_F_VERSION_1 and VIRTIO_F_ACCESS_PLATFORM, which VDUSE requires.
const TRANSPORT_FEATURES: u64 = 1 << 32 | 1 << 33;

/// `_IOW(0x81, number, size)`.
const fn write_request(number: u64, size: u64) -> u64 {
    1 << 30 | size << 16 | 0x81 << 8 | number
}

/// The device's class.
struct Class {
    device_id: u32,
    features: u64,
    queues: u32,
    config: Vec<u8>,
}

impl Class {
    fn of(name: &str) -> Option<Self> {
        match name {
            // VIRTIO_NET_F_MTU, MAC, STATUS; address, link up, one pair, MTU 1500.
            "net" => Some(Self {
                device_id: 1,
                features: 1 << 3 | 1 << 5 | 1 << 16,
                queues: 2,
                config: [
                    &[2, 0x5e, 0x10, 0x53, 0x11, 0x77][..],
                    &1_u16.to_le_bytes(),
                    &1_u16.to_le_bytes(),
                    &1500_u16.to_le_bytes(),
                ]
                .concat(),
            }),
            // A disk of 2048 sectors.
            "block" => Some(Self {
                device_id: 2,
                features: 0,
                queues: 1,
                config: [&2048_u64.to_le_bytes()[..], &[0; 52]].concat(),
            }),
            _ => None,
        }
    }

    /// `struct vduse_dev_config`, followed by the configuration space.
    fn description(&self, name: &str) -> Result<Vec<u8>, Box<dyn Error>> {
        let size = u32::try_from(self.config.len())?;
        Ok([
            &padded(name)?[..],
            &0_u32.to_ne_bytes(),
            &self.device_id.to_ne_bytes(),
            &(self.features | TRANSPORT_FEATURES).to_ne_bytes(),
            &self.queues.to_ne_bytes(),
            &4096_u32.to_ne_bytes(),
            &[0; 13 * 4],
            &size.to_ne_bytes(),
            &self.config,
        ]
        .concat())
    }
}

/// A NUL-terminated name for the kernel.
fn padded(name: &str) -> Result<[u8; NAME_MAX], Box<dyn Error>> {
    let mut bytes = [0; NAME_MAX];
    let place = bytes
        .get_mut(..name.len())
        .filter(|_| name.len() < NAME_MAX);
    place
        .ok_or("the name is too long")?
        .copy_from_slice(name.as_bytes());
    Ok(bytes)
}

/// Sends a request that only reads `argument`.
fn request(file: &File, number: u64, size: u64, argument: &[u8]) -> Result<(), std::io::Error> {
    // SAFETY: an ioctl needs a raw call. The kernel reads `size` bytes of the argument, and every
    // caller passes that much. For CREATE_DEV it also reads the configuration whose size the
    // structure gives.
    let result = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            write_request(number, size),
            argument.as_ptr(),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn open(name: &str) -> Result<File, std::io::Error> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/dev/vduse/{name}"))
}

/// devtmpfs shows the file a moment after the device is created.
fn open_soon(name: &str) -> Result<File, std::io::Error> {
    let begin = Instant::now();
    loop {
        match open(name) {
            Err(_) if begin.elapsed() < Duration::from_secs(5) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            outcome => return outcome,
        }
    }
}

/// Answers every message with success until standard input ends.
fn serve(device: &mut File) -> Result<(), Box<dyn Error>> {
    let input = std::io::stdin();
    loop {
        let mut ready = [
            PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN),
        ];
        poll(&mut ready, None)?;
        let (message, end) = (ready[0].revents(), ready[1].revents());
        if message.contains(PollFlags::IN) {
            let mut request = [0; MESSAGE];
            device.read_exact(&mut request)?;
            let (kind, rest) = request.split_at(4);
            let mut response = [0; MESSAGE];
            // The request's ID, result OK, and for a ring's state the same queue at index 0.
            response[..4].copy_from_slice(&rest[..4]);
            if kind == VDUSE_GET_VQ_STATE.to_ne_bytes() {
                response[24..28].copy_from_slice(&request[24..28]);
            }
            device.write_all(&response)?;
        } else if !end.is_empty() {
            return Ok(());
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, class] = &arguments[..] else {
        return Err("usage: lab-vduse NAME net|block".into());
    };
    let class = Class::of(class).ok_or("the class is net or block")?;
    let control = open("control")?;
    request(&control, 1, 8, &0_u64.to_ne_bytes())?;
    request(&control, 2, 336, &class.description(name)?)?;
    let mut device = open_soon(name)?;
    for index in 0..class.queues {
        // `struct vduse_vq_config`.
        let queue = [
            &index.to_ne_bytes()[..],
            &QUEUE_SIZE.to_ne_bytes(),
            &[0; 26],
        ]
        .concat();
        request(&device, 0x14, 32, &queue)?;
    }
    println!("ready");
    std::io::stdout().flush()?;
    let served = serve(&mut device);
    drop(device);
    request(&control, 3, 256, &padded(name)?)?;
    served
}
