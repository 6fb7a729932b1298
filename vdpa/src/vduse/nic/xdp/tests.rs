//! The socket with a kernel of these tests, and the program in an interpreter.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::xdp::{XdpMmapOffsets, XdpRingOffset};
use vm_memory::Bytes as _;

use super::super::mapping::Mapping;
use super::super::tap::Vectors;
use super::super::{FRAME_MAX, HEADER};
use super::program::{self, Instruction, instructions};
use super::ring::{CHUNKS, RING_SIZE};
use super::socket::Descriptor;
use super::*;

const LAYOUT: XdpRingOffset = XdpRingOffset {
    producer: 0,
    consumer: 64,
    flags: Some(128),
    desc: 192,
};
const MTU: u16 = 1500;

/// The kernel's side of a socket, which may write anything.
struct Kernel {
    socket: Socket,
    umem: Mapping,
    rings: [Mapping; 4],
    wakeups: UnixDatagram,
    buffer: Vec<u8>,
}

const FILL: usize = 0;
const COMPLETION: usize = 1;
const RECEIVE: usize = 2;
const TRANSMIT: usize = 3;

impl Kernel {
    fn new() -> Self {
        let memory = |size| {
            let file = memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, size).unwrap();
            File::from(file)
        };
        let umem = memory(UMEM_SIZE as u64);
        let offsets = [
            libc::XDP_UMEM_PGOFF_FILL_RING,
            libc::XDP_UMEM_PGOFF_COMPLETION_RING,
            libc::XDP_PGOFF_RX_RING.cast_unsigned(),
            libc::XDP_PGOFF_TX_RING.cast_unsigned(),
        ];
        let len = 192 + 16 * RING_SIZE as usize;
        let rings = memory(offsets[COMPLETION] + len as u64);
        let layout = XdpMmapOffsets {
            rx: LAYOUT,
            tx: LAYOUT,
            fr: LAYOUT,
            cr: LAYOUT,
        };
        let (file, wakeups) = UnixDatagram::pair().unwrap();
        wakeups.set_nonblocking(true).unwrap();
        let file = OwnedFd::from(file);
        let socket = Socket::new(file, rings.as_fd(), umem.as_fd(), &layout, MTU).unwrap();
        Self {
            socket,
            umem: Mapping::new(umem.as_fd(), 0, UMEM_SIZE).unwrap(),
            rings: offsets.map(|offset| Mapping::new(rings.as_fd(), offset, len).unwrap()),
            wakeups,
            buffer: vec![0; FRAME_MAX],
        }
    }

    fn get(&self, ring: usize, field: usize) -> u32 {
        self.rings[ring].bytes().read_obj(field).unwrap()
    }

    fn set(&self, ring: usize, field: usize, value: u32) {
        self.rings[ring].bytes().write_obj(value, field).unwrap();
    }

    /// Takes an entry of a ring that the socket fills.
    fn take<T: vm_memory::ByteValued>(&self, ring: usize) -> Option<T> {
        let consumer = self.get(ring, 64);
        if self.get(ring, 0) == consumer {
            return None;
        }
        self.set(ring, 64, consumer.wrapping_add(1));
        let place = 192 + (consumer % RING_SIZE) as usize * size_of::<T>();
        Some(self.rings[ring].bytes().read_obj(place).unwrap())
    }

    /// Adds an entry to a ring that the socket empties.
    fn add<T: vm_memory::ByteValued>(&self, ring: usize, entry: T) {
        let producer = self.get(ring, 0);
        let place = 192 + (producer % RING_SIZE) as usize * size_of::<T>();
        self.rings[ring].bytes().write_obj(entry, place).unwrap();
        self.set(ring, 0, producer.wrapping_add(1));
    }

    /// A frame arrives, if the socket has given a chunk for it.
    fn arrive(&self, frame: &[u8]) -> bool {
        let Some(chunk) = self.take::<u64>(FILL) else {
            return false;
        };
        let address = chunk + u64::from(HEADROOM);
        let place = usize::try_from(address).unwrap();
        self.umem.bytes().write_slice(frame, place).unwrap();
        let len = u32::try_from(frame.len()).unwrap();
        self.add(
            RECEIVE,
            Descriptor {
                address,
                len,
                options: 0,
            },
        );
        true
    }

    /// The next frame that the socket sends. Its chunk is completed.
    fn sent(&self) -> Option<Vec<u8>> {
        let descriptor: Descriptor = self.take(TRANSMIT)?;
        let mut frame = vec![0; descriptor.len as usize];
        let place = usize::try_from(descriptor.address).unwrap();
        self.umem.bytes().read_slice(&mut frame, place).unwrap();
        self.add(COMPLETION, descriptor.address);
        Some(frame)
    }

    fn read(&mut self) -> Result<Option<Vec<u8>>, crate::Error> {
        let read = self.socket.read(&mut self.buffer)?;
        Ok(read.map(|read| self.buffer[..read].to_vec()))
    }

    /// Sends a frame in these pieces.
    fn write(&mut self, pieces: &[&[u8]]) -> bool {
        let vectors = pieces.iter().map(|piece| libc::iovec {
            iov_base: piece.as_ptr().cast_mut().cast(),
            iov_len: piece.len(),
        });
        let vectors = Vectors(vectors.collect());
        // SAFETY: needed for the call. `pieces` live until it returns.
        unsafe { self.socket.write(&vectors) }
    }
}

fn frame(len: usize, seed: usize) -> Vec<u8> {
    (seed..seed + len)
        .map(|at| u8::try_from(at % 251).unwrap())
        .collect()
}

#[test]
fn frames_pass_both_ways_while_the_rings_wrap() {
    let mut kernel = Kernel::new();
    let count = 3 * RING_SIZE as usize;
    for number in 0..count {
        let sent = frame(14 + number % 1500, number);
        assert!(kernel.arrive(&sent));
        let mut expected = vec![0; HEADER];
        expected.extend(&sent);
        assert_eq!(kernel.read().unwrap().unwrap(), expected);
        assert_eq!(kernel.read().unwrap(), None);

        let (first, second) = expected.split_at(number % expected.len());
        assert!(kernel.write(&[first, second]));
        assert_eq!(kernel.sent().unwrap(), sent);
        assert_eq!(kernel.sent(), None);
        kernel.socket.flush().unwrap();
    }
}

#[test]
fn a_kernel_that_sends_nothing_gets_as_many_frames_as_there_are_chunks() {
    let mut kernel = Kernel::new();
    let content = frame(HEADER + 60, 1);
    let sent = (0..2 * CHUNKS)
        .filter(|_| kernel.write(&[&content]))
        .count();
    assert_eq!(sent, CHUNKS as usize);
    kernel.socket.flush().unwrap();
    while kernel.sent().is_some() {}
    assert!(!kernel.write(&[&content]));
    kernel.socket.flush().unwrap();
    assert!(kernel.write(&[&content]));
    // Frames that arrive have chunks until all wait here.
    let arrived = (0..2 * CHUNKS).filter(|_| kernel.arrive(&content)).count();
    assert_eq!(arrived, CHUNKS as usize);
    kernel.socket.start(&mut vec![0; FRAME_MAX]).unwrap();
    assert_eq!(kernel.read().unwrap(), None);
    assert!(kernel.arrive(&content));
}

#[test]
fn frames_of_another_size_than_ethernet_has_are_dropped() {
    let mut kernel = Kernel::new();
    let max = usize::from(MTU + ETHERNET);
    for (len, is_sent) in [
        (0, false),
        (13, false),
        (14, true),
        (max, true),
        (max + 1, false),
    ] {
        assert_eq!(kernel.write(&[&frame(HEADER + len, 0)]), is_sent, "{len}");
    }
    assert!(!kernel.write(&[]));
    assert!(!kernel.write(&[&[0; HEADER - 1]]));
}

#[test]
fn the_kernel_is_woken_only_if_it_waits() {
    let mut kernel = Kernel::new();
    let content = frame(HEADER + 60, 1);
    for (ring, is_woken) in [(TRANSMIT, true), (FILL, true), (COMPLETION, false)] {
        for other in [FILL, COMPLETION, RECEIVE, TRANSMIT] {
            kernel.set(other, 128, u32::from(other == ring));
        }
        assert!(kernel.write(&[&content]) && kernel.arrive(&content));
        kernel.read().unwrap().unwrap();
        kernel.socket.flush().unwrap();
        assert!(!kernel.socket.is_unsent());
        let woken = kernel.wakeups.recv(&mut [0; 8]).is_ok();
        // A wakeup of the fill ring reads, which the other end does not see.
        assert_eq!(woken, is_woken && ring == TRANSMIT);
    }
    // A queue of the port that is full: the rest is sent a moment later.
    kernel.set(TRANSMIT, 128, 1);
    assert!(kernel.write(&[&content]));
    rustix::io::ioctl_fionbio(&kernel.socket, true).unwrap();
    while rustix::net::send(&kernel.socket, &[0], rustix::net::SendFlags::DONTWAIT).is_ok() {}
    kernel.socket.flush().unwrap();
    assert!(kernel.socket.is_unsent());
    while kernel.wakeups.recv(&mut [0; 8]).is_ok() {}
    kernel.socket.flush().unwrap();
    assert!(!kernel.socket.is_unsent());
}

#[test]
fn impossible_reports_of_the_kernel_end_the_socket() {
    let descriptor = |address, len| Descriptor {
        address,
        len,
        options: 0,
    };
    for (address, len) in [
        (0, 4097),
        (4095, 2),
        (1, u32::MAX),
        (u64::MAX, 1),
        (u64::MAX, u32::MAX),
        (u64::from(CHUNKS) * CHUNK, 60),
        (UMEM_SIZE as u64, 60),
    ] {
        let mut kernel = Kernel::new();
        kernel.add(RECEIVE, descriptor(address, len));
        kernel.read().unwrap_err();
    }
    // More chunks than the kernel has.
    let mut kernel = Kernel::new();
    for _ in 0..CHUNKS {
        kernel.add(RECEIVE, descriptor(0, 60));
        kernel.read().unwrap().unwrap();
    }
    kernel.add(RECEIVE, descriptor(0, 60));
    kernel.read().unwrap_err();
    // Chunks that were not lent, or are returned twice.
    let first = u64::from(CHUNKS) * CHUNK;
    for address in [0, first, first + 1, UMEM_SIZE as u64, u64::MAX] {
        let mut kernel = Kernel::new();
        kernel.add(COMPLETION, address);
        kernel.socket.flush().unwrap_err();
    }
    let mut kernel = Kernel::new();
    assert!(kernel.write(&[&frame(HEADER + 60, 0)]));
    let lent: Descriptor = kernel.take(TRANSMIT).unwrap();
    kernel.add(COMPLETION, lent.address);
    kernel.add(COMPLETION, lent.address);
    kernel.socket.flush().unwrap_err();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever the kernel writes, each access stays in the UMEM.
    #[test]
    fn anything_of_the_kernel_is_handled(
        actions in prop::collection::vec(any::<(u8, u8, u64, u32)>(), 1..64)
    ) {
        let mut kernel = Kernel::new();
        let content = frame(HEADER + 200, 3);
        for (action, ring, number, len) in actions {
            let ring = usize::from(ring % 4);
            let small = u32::try_from(number % 5).unwrap();
            let near = number % (UMEM_SIZE as u64 + 2);
            let options = len;
            match action % 8 {
                0 => kernel.set(ring, 0, len),
                1 => kernel.set(ring, 64, len),
                2 => kernel.set(ring, 0, kernel.get(ring, 0).wrapping_add(small)),
                3 => kernel.set(ring, 64, kernel.get(ring, 64).wrapping_add(small)),
                4 => {
                    let (address, len) = (near, len % 5000);
                    kernel.add(RECEIVE, Descriptor { address, len, options });
                }
                5 => kernel.add(COMPLETION, near),
                6 => {
                    let _ = kernel.write(&[&content]);
                }
                _ => {
                    let _ = kernel.arrive(&content);
                }
            }
            let _ = kernel.read();
            let _ = kernel.socket.flush();
        }
    }
}

/// Runs a program for a frame as the kernel would: whether it goes to the socket. Jumps, registers
/// and accesses outside the frame panic.
fn redirects(program: &[Instruction], queue: u32, frame: &[u8]) -> bool {
    const DATA: u64 = 0x1000;
    const CONTEXT: u64 = 0x10_0000;
    let end = DATA + frame.len() as u64;
    let mut registers = [None; 11];
    registers[1] = Some(CONTEXT);
    let mut at = 0;
    loop {
        let Instruction {
            code,
            registers: packed,
            offset,
            immediate,
        } = program[at];
        let (to, from) = (usize::from(packed & 15), usize::from(packed >> 4));
        let value = i64::from(immediate).cast_unsigned();
        let get = |register: usize| -> u64 { registers[register].unwrap() };
        let mut jump = false;
        let bytes = |len: usize| {
            let at = usize::try_from(get(from) + u64::from(offset.cast_unsigned()) - DATA).unwrap();
            let mut number = [0; 8];
            number[..len].copy_from_slice(&frame[at..at + len]);
            Some(u64::from_le_bytes(number))
        };
        match code {
            program::LOAD_U32 if get(from) == CONTEXT => {
                registers[to] = Some(match offset {
                    0 => DATA,
                    4 => end,
                    16 => queue.into(),
                    _ => panic!("no such field"),
                });
            }
            program::LOAD_U32 => registers[to] = bytes(4),
            program::LOAD_U16 => registers[to] = bytes(2),
            program::LOAD_U8 => registers[to] = bytes(1),
            program::LOAD_MAP => {
                registers[to] = Some(value);
                at += 1;
            }
            program::MOVE => registers[to] = Some(get(from)),
            program::MOVE_IMMEDIATE => registers[to] = Some(value),
            program::ADD_IMMEDIATE => registers[to] = Some(get(to) + value),
            program::JUMP_IF_GREATER => jump = get(to) > get(from),
            program::JUMP_IF_BIT => jump = get(to) & value != 0,
            program::JUMP_UNLESS_EQUAL => {
                let lower = get(to) & u64::from(u32::MAX);
                jump = lower != u64::from(immediate.cast_unsigned());
            }
            program::CALL => {
                assert_eq!((immediate, get(1), get(2), get(3)), (51, 77, 0, 2));
                return true;
            }
            program::EXIT => {
                assert_eq!(get(0), 2);
                return false;
            }
            _ => panic!("operation {code:#x}"),
        }
        at += 1;
        if jump {
            at += usize::try_from(offset).unwrap();
        }
    }
}

#[test]
fn the_program_takes_frames_of_the_queue_for_the_nic_and_for_groups() {
    let mac = [0x52, 0x54, 0xff, 0xfe, 0xfd, 0xfc];
    let program = instructions(77, 3, mac);
    let to = |address: [u8; 6], len: usize| {
        let mut frame = frame(len, 9);
        let known = len.min(6);
        frame[..known].copy_from_slice(&address[..known]);
        frame
    };
    for len in [14, 60, 1514] {
        assert!(redirects(&program, 3, &to(mac, len)));
        assert!(redirects(&program, 3, &to([0xff; 6], len)));
        assert!(redirects(&program, 3, &to([1, 0, 0x5e, 0, 0, 1], len)));
        for queue in [0, 2, 4, u32::MAX] {
            assert!(!redirects(&program, queue, &to(mac, len)));
            assert!(!redirects(&program, queue, &to([0xff; 6], len)));
        }
        for byte in 0..6 {
            let mut other = mac;
            other[byte] ^= 0x80;
            assert!(!redirects(&program, 3, &to(other, len)), "{byte}");
        }
    }
    for len in 0..14 {
        assert!(!redirects(&program, 3, &to(mac, len)));
    }
}
