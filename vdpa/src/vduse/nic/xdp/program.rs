//! The XDP program, its map and its link, by bpf(2).
//!
//! The program has 21 instructions, so it is assembled here. A compiler and a loader for BPF would
//! be larger than all of this module. [`instructions`] has them with their meaning in C.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use zerocopy::{Immutable, IntoBytes};

use crate::control_queue::MacAddress;

// linux/bpf.h: commands, types, flags.
const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const BPF_PSEUDO_MAP_FD: u8 = 1;
const BPF_FUNC_REDIRECT_MAP: i32 = 51;
const XDP_PASS: i32 = 2;
/// Where a program runs (linux/if_link.h).
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// An instruction (`struct bpf_insn`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Instruction {
    /// The operation.
    pub(super) code: u8,
    /// The destination register in the lower half, the source register in the upper one.
    pub(super) registers: u8,
    pub(super) offset: i16,
    pub(super) immediate: i32,
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers: to | from << 4,
        offset,
        immediate,
    }
}

// Operations (include/uapi/linux/bpf_common.h, linux/bpf.h): class, size or operator, source.
pub(super) const LOAD_U32: u8 = 0x61;
pub(super) const LOAD_U16: u8 = 0x69;
pub(super) const LOAD_U8: u8 = 0x71;
pub(super) const LOAD_MAP: u8 = 0x18;
pub(super) const MOVE: u8 = 0xbf;
pub(super) const MOVE_IMMEDIATE: u8 = 0xb7;
pub(super) const ADD_IMMEDIATE: u8 = 0x07;
pub(super) const JUMP_IF_GREATER: u8 = 0x2d;
pub(super) const JUMP_IF_BIT: u8 = 0x45;
/// Compares 32 bits.
pub(super) const JUMP_UNLESS_EQUAL: u8 = 0x56;
pub(super) const CALL: u8 = 0x85;
pub(super) const EXIT: u8 = 0x95;

/// The program for a NIC with this address at a queue. In C:
///
/// ```text
///   int pass(struct xdp_md *frame) {
///       if (frame->rx_queue_index != QUEUE) return XDP_PASS;
///       u8 *data = frame->data, *end = frame->data_end;
///       if (data + ETH_HLEN > end) return XDP_PASS;
///       if (!(data[0] & 1) && memcmp(data, MAC, 6)) return XDP_PASS;   // bit 0: a group
///       return bpf_redirect_map(&socket, 0, XDP_PASS);                 // XDP_PASS: no socket
///   }
/// ```
pub(super) fn instructions(map: RawFd, queue: u32, mac: MacAddress) -> [Instruction; 21] {
    let [a, b, c, d, e, f] = mac;
    let first = i32::from_ne_bytes([a, b, c, d]);
    let last = i32::from(u16::from_ne_bytes([e, f]));
    [
        // r2 = rx_queue_index
        instruction(LOAD_U32, 2, 1, 16, 0),
        instruction(JUMP_UNLESS_EQUAL, 2, 0, 17, queue.cast_signed()),
        // r2 = data, r3 = data_end, r4 = data + 14
        instruction(LOAD_U32, 2, 1, 0, 0),
        instruction(LOAD_U32, 3, 1, 4, 0),
        instruction(MOVE, 4, 2, 0, 0),
        instruction(ADD_IMMEDIATE, 4, 0, 0, libc::ETH_HLEN),
        instruction(JUMP_IF_GREATER, 4, 3, 12, 0),
        // A group address.
        instruction(LOAD_U8, 5, 2, 0, 0),
        instruction(JUMP_IF_BIT, 5, 0, 4, 1),
        // The NIC's address.
        instruction(LOAD_U32, 5, 2, 0, 0),
        instruction(JUMP_UNLESS_EQUAL, 5, 0, 8, first),
        instruction(LOAD_U16, 5, 2, 4, 0),
        instruction(JUMP_UNLESS_EQUAL, 5, 0, 6, last),
        // return bpf_redirect_map(r1 = map, r2 = 0, r3 = XDP_PASS). The map takes two instructions.
        instruction(LOAD_MAP, 1, BPF_PSEUDO_MAP_FD, 0, map),
        instruction(0, 0, 0, 0, 0),
        instruction(MOVE_IMMEDIATE, 2, 0, 0, 0),
        instruction(MOVE_IMMEDIATE, 3, 0, 0, XDP_PASS),
        instruction(CALL, 0, 0, 0, BPF_FUNC_REDIRECT_MAP),
        instruction(EXIT, 0, 0, 0, 0),
        // The target of the jumps: return XDP_PASS.
        instruction(MOVE_IMMEDIATE, 0, 0, 0, XDP_PASS),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}

/// Creates the map of one socket.
pub(super) fn map() -> io::Result<OwnedFd> {
    #[derive(IntoBytes, Immutable)]
    #[repr(C)]
    struct Attributes {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
    }
    create(
        BPF_MAP_CREATE,
        &Attributes {
            map_type: BPF_MAP_TYPE_XSKMAP,
            key_size: 4,
            value_size: 4,
            max_entries: 1,
        },
    )
}

/// Puts the socket into the map. The map forgets it when it is closed.
pub(super) fn set_socket(map: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> io::Result<()> {
    #[derive(IntoBytes, Immutable)]
    #[repr(C)]
    struct Attributes {
        map_fd: RawFd,
        padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let (key, value) = (0_u32, socket.as_raw_fd());
    let attributes = Attributes {
        map_fd: map.as_raw_fd(),
        padding: 0,
        key: address(&raw const key),
        value: address(&raw const value),
        flags: 0,
    };
    // SAFETY: the kernel reads a key and a value of four bytes each, which live until it returns.
    unsafe { bpf(BPF_MAP_UPDATE_ELEM, &attributes) }.map(drop)
}

/// Loads the program.
pub(super) fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    #[derive(IntoBytes, Immutable)]
    #[repr(C)]
    struct Attributes {
        prog_type: u32,
        insn_cnt: u32,
        insns: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log_buf: u64,
        kern_version: u32,
        prog_flags: u32,
        prog_name: [u8; 16],
        prog_ifindex: u32,
        expected_attach_type: u32,
    }
    create(
        BPF_PROG_LOAD,
        &Attributes {
            prog_type: BPF_PROG_TYPE_XDP,
            insn_cnt: u32::try_from(program.len()).map_err(io::Error::other)?,
            insns: address(program.as_ptr()),
            license: address(c"Apache-2.0 OR MIT".as_ptr()),
            log_level: 0,
            log_size: 0,
            log_buf: 0,
            kern_version: 0,
            prog_flags: 0,
            prog_name: *b"bellhop_swnic\0\0\0",
            prog_ifindex: 0,
            expected_attach_type: BPF_XDP,
        },
    )
}

/// Attaches the program to a port until the link is closed: in the driver, or else in the kernel's
/// network stack.
pub(super) fn attach(program: BorrowedFd<'_>, interface: u32) -> io::Result<OwnedFd> {
    #[derive(IntoBytes, Immutable)]
    #[repr(C)]
    struct Attributes {
        prog_fd: RawFd,
        target_ifindex: u32,
        attach_type: u32,
        flags: u32,
    }
    let with = |flags| {
        let attributes = Attributes {
            prog_fd: program.as_raw_fd(),
            target_ifindex: interface,
            attach_type: BPF_XDP,
            flags,
        };
        create(BPF_LINK_CREATE, &attributes)
    };
    with(XDP_FLAGS_DRV_MODE).or_else(|error| match error.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST | libc::EPERM | libc::ENODEV) => Err(error),
        // The driver has no XDP, or not with this MTU or these queues.
        _ => with(XDP_FLAGS_SKB_MODE),
    })
}

fn address<T>(pointer: *const T) -> u64 {
    // Lossless: pointers have 64 bits on all supported hosts with vhost-vdpa.
    u64::try_from(pointer.addr()).unwrap_or(u64::MAX)
}

/// A call that returns a new file.
fn create<T: IntoBytes + Immutable>(command: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: all pointers in the attributes of this module are those of borrowed arguments or of
    // constants, so they live until the kernel returns.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: the kernel has just installed this descriptor for the caller alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// bpf(2).
///
/// # Safety
/// Each address in the attributes must be that of memory which the command may access.
unsafe fn bpf<T: IntoBytes + Immutable>(command: libc::c_int, attributes: &T) -> io::Result<RawFd> {
    // SAFETY: there is no safe interface to bpf(2). The kernel reads `size` bytes of attributes,
    // which have no padding (`IntoBytes`). The caller vouches for the addresses in them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            attributes.as_bytes().as_ptr(),
            size_of::<T>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    RawFd::try_from(result).map_err(io::Error::other)
}
