//! Numbered frames with a checksum, sent and checked through `vdpa::netdev`.
//!
//! ```text
//! destination 6 | source 6 | 0x88b5 | queue u16 | number u32 | filling | FNV-1a of all before, u64
//! ```

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vdpa::device::Device;
use vdpa::netdev::{Netdev, Options, RxQueue, TxQueue};

/// Long enough for a busy emulated processor.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes before the filling, and after it.
const FRONT: usize = 20;
const BACK: usize = 8;

/// How the receiver learns of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It polls continuously, interrupts off.
    Poll,
    /// It sleeps on the call eventfd when there is none.
    Interrupts,
}

/// Starts a device.
pub(crate) fn start(path: &Path, options: &Options) -> Netdev {
    let (device, iotlb) = Device::open(path).unwrap().own().unwrap();
    Netdev::start(device, iotlb, options).unwrap()
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Makes frame `number` of `queue`, of `len` bytes, at least 28.
pub(crate) fn frame(
    into: &mut Vec<u8>,
    to: [u8; 6],
    from: [u8; 6],
    queue: u16,
    number: u32,
    len: usize,
) {
    into.clear();
    into.extend_from_slice(&to);
    into.extend_from_slice(&from);
    into.extend_from_slice(&[0x88, 0xb5]);
    into.extend_from_slice(&queue.to_be_bytes());
    into.extend_from_slice(&number.to_be_bytes());
    let mut state = u64::from(number) << 16 | 0x9e37_79b9;
    while into.len() < len - BACK {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        into.push(state.to_le_bytes()[0]);
    }
    let sum = checksum(into);
    into.extend_from_slice(&sum.to_be_bytes());
}

/// Queue and number of a frame between these two, with a valid checksum; `None` for other frames. A
/// switch also floods frames of others, and keeps them until a device takes them.
fn parse(frame: &[u8], to: [u8; 6], from: [u8; 6]) -> Option<(u16, u32)> {
    let front = [&to[..], &from, &[0x88, 0xb5]].concat();
    if frame.len() < FRONT + BACK || !frame.starts_with(&front) {
        return None;
    }
    let (body, sum) = frame.split_at(frame.len() - BACK);
    assert_eq!(sum, checksum(body).to_be_bytes(), "a frame is damaged");
    let queue = u16::from_be_bytes([body[14], body[15]]);
    let number = u32::from_be_bytes([body[16], body[17], body[18], body[19]]);
    Some((queue, number))
}

/// One direction of traffic between two queues.
pub(crate) struct Flow {
    pub(crate) to: [u8; 6],
    pub(crate) from: [u8; 6],
    pub(crate) count: u32,
    pub(crate) window: u32,
    /// Lengths of frames, in turn.
    pub(crate) lengths: &'static [usize],
    pub(crate) mode: Mode,
}

impl Flow {
    pub(crate) fn new(from: [u8; 6], to: [u8; 6]) -> Self {
        Self {
            to,
            from,
            count: 2000,
            window: 32,
            lengths: &[60, 61, 128, 590, 1514],
            mode: Mode::Poll,
        }
    }

    /// Sends all frames; each must come once, undamaged.
    #[track_caller]
    pub(crate) fn run(&self, transmit: &mut TxQueue, receive: &mut RxQueue) {
        let tag = transmit.queue().index();
        let mut seen = vec![false; usize::try_from(self.count).unwrap()];
        let (mut sent, mut received) = (0u32, 0u32);
        let (mut out, mut copy) = (Vec::new(), vec![0; 16384]);
        let mut moved = Instant::now();
        receive.queue_mut().disable_interrupts().unwrap();
        transmit.queue_mut().disable_interrupts().unwrap();
        while received < self.count {
            let before = (sent, received);
            // Without a free buffer there will be no receive interrupt.
            let mut full = false;
            while sent < self.count && sent - received < self.window {
                let length = self.lengths[usize::try_from(sent).unwrap() % self.lengths.len()];
                frame(&mut out, self.to, self.from, tag, sent, length);
                full = !transmit.send(&out).unwrap();
                if full {
                    break;
                }
                sent += 1;
            }
            if sent != before.0 {
                transmit.flush().unwrap();
            }
            receive
                .poll(64, |frame| {
                    let frame = frame.copy_to(&mut copy).unwrap();
                    let Some((queue, number)) = parse(frame, self.to, self.from) else {
                        return;
                    };
                    assert_eq!(queue, tag, "a frame of another queue");
                    let slot = &mut seen[usize::try_from(number).unwrap()];
                    assert!(!*slot, "frame {number} came twice");
                    *slot = true;
                    received += 1;
                })
                .unwrap();
            if (sent, received) != before {
                moved = Instant::now();
            } else if self.mode == Mode::Interrupts && !full {
                sleep(receive);
            } else {
                std::thread::yield_now();
            }
            assert!(
                moved.elapsed() < PATIENCE,
                "{received} of {sent} came; receive {:?} transmit {:?}",
                receive.queue().positions(),
                transmit.queue().positions()
            );
        }
        let begin = Instant::now();
        while transmit.queue().outstanding() > 0 {
            transmit.reap().unwrap();
            assert!(begin.elapsed() < PATIENCE, "buffers do not come back");
            std::thread::yield_now();
        }
    }
}

/// Waits for the queue's interrupt as the documentation of `netdev` describes.
fn sleep(queue: &mut RxQueue) {
    if !queue.queue_mut().enable_interrupts().unwrap() {
        let limit = Timespec::try_from(PATIENCE).unwrap();
        let mut fds = [PollFd::new(queue, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&limit)).unwrap();
        assert_eq!(ready, 1, "no interrupt: {:?}", queue.queue().positions());
        queue.queue_mut().clear_call().unwrap();
    }
    queue.queue_mut().disable_interrupts().unwrap();
}

/// Both directions between the first pairs of two devices.
#[track_caller]
pub(crate) fn both_ways(flow: &Flow, one: &mut Netdev, other: &mut Netdev) {
    flow.run(
        &mut one.driver.pairs[0].transmit,
        &mut other.driver.pairs[0].receive,
    );
    let back = Flow {
        to: flow.from,
        from: flow.to,
        ..*flow
    };
    back.run(
        &mut other.driver.pairs[0].transmit,
        &mut one.driver.pairs[0].receive,
    );
}
