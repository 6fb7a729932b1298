//! Sends frames and verifies each that returns. They go from the NIC's own address to itself (a
//! device that loops them back), or to a peer that echoes them (see [`crate::echo`]).
//!
//! A frame begins with destination and source address (6 bytes each) and Ethernet type 0x88B5 (IEEE
//! 802 local experimental). The run's seed and the frame's number follow, little-endian (8 bytes
//! each), then a payload that both determine. So a received frame is checked byte by byte, and no
//! frame from outside this run can pass as its own. A frame of another run can be checked too, and
//! is counted separately.
//!
//! The kernel passes outgoing frames only to sockets for every Ethernet type. This socket is for
//! one type, and it also drops outgoing copies.

pub(crate) mod flood;

use crate::background::Control;
use crate::info;
use crate::network::{self, Address};
use crate::random::{Sequence, seed};
use lab::error::{Error, Result};
use lab::files;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// IEEE 802 local experimental Ethernet type 1.
const ETHERNET_TYPE: u16 = 0x88b5;

/// Bytes before the run's seed.
const ETHERNET_HEADER: usize = 14;

/// Bytes before the payload.
const HEADER: usize = ETHERNET_HEADER + 16;

/// The shortest frame: Ethernet's minimum without its checksum.
const MINIMUM_SIZE: usize = 60;

/// The most frames of one run that return to their sender: each number takes a byte to remember.
pub(crate) const MAXIMUM_COUNT: u64 = 10_000_000;

/// Bytes that the kernel may keep for the socket.
const RECEIVE_BUFFER: usize = 16 << 20;

/// If no frame returns for this long, those in flight count as lost.
const SILENCE: Duration = Duration::from_secs(2);

/// How many frames a paced sender may be late.
const CATCH_UP: u32 = 64;

/// What to send.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// How many frames.
    pub(crate) count: u64,
    /// Bytes of each, with the Ethernet header, without its checksum.
    pub(crate) size: usize,
    /// How many may be in flight at once.
    pub(crate) window: u64,
    /// The destination; `None` for the NIC itself.
    pub(crate) peer: Option<Address>,
}

/// The totals of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    sent: u64,
    received: u64,
    corrupt: u64,
    duplicate: u64,
    /// For the first frame that returned twice: its number, and how many had been sent by then.
    first_duplicate: Option<(u64, u64)>,
    /// Intact frames of other runs, such as a peer's flood.
    others: u64,
    lost: u64,
}

impl Totals {
    pub(crate) fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.corrupt += other.corrupt;
        self.duplicate += other.duplicate;
        self.first_duplicate = self.first_duplicate.or(other.first_duplicate);
        self.others += other.others;
        self.lost += other.lost;
    }

    pub(crate) fn to_json(self) -> Value {
        let mut said = json!({
            "tx": self.sent,
            "rx": self.received,
            "corrupt": self.corrupt,
            "duplicate": self.duplicate,
            "others": self.others,
            "lost": self.lost,
        });
        if let Some((number, sent)) = self.first_duplicate {
            said["first_duplicate"] = json!({ "number": number, "sent": sent });
        }
        said
    }
}

/// `frames`: sends and verifies frames, and reports with the NIC's own statistics.
pub(crate) fn exchange(nic: &str, plan: &Plan) -> Result<Value> {
    let before = info::statistics(nic);
    let started = Instant::now();
    let totals = send_and_verify(nic, plan)?;
    let elapsed = started.elapsed();
    Ok(described(nic, totals.to_json(), elapsed, &before))
}

/// One run of a flood, which ends when its control requests it or the NIC goes away.
///
/// # Errors
/// The run cannot start: there is no such NIC now.
pub(crate) fn flood_while(nic: &str, size: usize, control: &Control) -> Result<Totals> {
    let mut run = Run::new(nic, size, MAXIMUM_COUNT, None)?;
    control.begins();
    let ended = run.pour(|received| {
        control.count(received);
        control.running()
    });
    match ended {
        Ok(()) => run.drain()?,
        // The NIC went away, which is what this flood is there for.
        Err(_) => std::thread::sleep(Duration::from_millis(1)),
    }
    Ok(run.finish())
}

/// One run of checked frames to a peer that echoes them, until its control ends it or the NIC goes
/// away.
///
/// # Errors
/// The run cannot start: there is no such NIC now.
pub(crate) fn exchange_while(nic: &str, plan: &Plan, control: &Control) -> Result<Totals> {
    let mut run = Run::new(nic, plan.size, plan.count, plan.peer)?;
    // As in `flood_while`.
    if run.send_while(plan, control).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(run.finish())
}

/// Like [`exchange_while`], for a NIC as in [`exchange_over`]. It does not go away.
///
/// # Errors
/// The NIC does not take or give frames.
pub(crate) fn exchange_while_over(
    link: impl Link,
    own: Address,
    maximum: usize,
    plan: &Plan,
    control: &Control,
) -> Result<Totals> {
    let mut run = Run::over(link, own, maximum, plan.size, plan.count, plan.peer)?;
    run.send_while(plan, control)?;
    Ok(run.finish())
}

/// Sends a frame each `interval` to the NIC's own address while `running` returns true, and passes
/// `arrived` the number of frames that have just returned. A delayed sender makes up for at most
/// [`CATCH_UP`] frames. So it keeps the rate on a shared processor, and a long stop causes no flood
/// later.
///
/// # Errors
/// The NIC does not take or give frames.
pub(crate) fn paced_while(
    nic: &str,
    size: usize,
    interval: Duration,
    running: impl Fn() -> bool,
    mut arrived: impl FnMut(u64),
) -> Result<Totals> {
    let mut run = Run::new(nic, size, MAXIMUM_COUNT, None)?;
    let mut due = Instant::now();
    while running() && run.totals.sent < MAXIMUM_COUNT {
        let now = Instant::now();
        if now >= due {
            // A full queue takes none: this frame's time has passed when there is room again.
            run.send()?;
            due = (due + interval).max(now.checked_sub(interval * CATCH_UP).unwrap_or(now));
        }
        match run.receive_all()? {
            0 => run
                .link
                .wait(PollFlags::IN, due.saturating_duration_since(now))?,
            frames => arrived(frames),
        }
    }
    run.drain()?;
    Ok(run.finish())
}

/// Sends `count` frames to the NIC's own address with a pause after each. While `running` returns
/// true, it reads none of them: they stay where the device has written them. Then it verifies each.
///
/// # Errors
/// The NIC does not take or give frames.
pub(crate) fn keep_while(
    nic: &str,
    count: u64,
    size: usize,
    pause: Duration,
    running: impl Fn() -> bool,
) -> Result<Totals> {
    let mut run = Run::new(nic, size, count, None)?;
    while running() {
        if run.totals.sent < count {
            // A full queue takes none; the next turn tries again.
            run.send()?;
        }
        std::thread::sleep(pause);
    }
    run.drain()?;
    Ok(run.finish())
}

/// Rejects a size that the NIC cannot send.
pub(crate) fn check_size(nic: &str, size: usize) -> Result<()> {
    Run::new(nic, size, 1, None).map(drop)
}

/// `pace`: sends frames with a pause after each, so that each is a kick of its own. Frames that
/// return are checked and counted, but not awaited. It ends early when the NIC takes no more
/// frames.
pub(crate) fn pace(nic: &str, count: u64, size: usize, pause: Duration) -> Result<Value> {
    let before = info::statistics(nic);
    let started = Instant::now();
    let mut run = Run::new(nic, size, count, None)?;
    let mut progress = Instant::now();
    while run.totals.sent < count {
        if run.send()? == Sent::Full {
            if progress.elapsed() > SILENCE {
                break;
            }
            run.link.wait(PollFlags::OUT, Duration::from_millis(10))?;
            continue;
        }
        progress = Instant::now();
        std::thread::sleep(pause);
        run.receive_all()?;
    }
    let elapsed = started.elapsed();
    // The NIC counts a frame only once its device has used it.
    let sent = Instant::now();
    while run.unsent()? > 0 && sent.elapsed() < SILENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(described(nic, run.totals.to_json(), elapsed, &before))
}

/// Sends `count` frames to a peer that floods. It waits until the device has taken all of them and
/// as many of the peer's have arrived, or for silence. The peer's missing frames count as lost.
pub(crate) fn converse(nic: &str, peer: Address, count: u64, size: usize) -> Result<Totals> {
    let mut run = Run::new(nic, size, count, Some(peer))?;
    let mut progress = Instant::now();
    while run.totals.sent < count || run.totals.others < count || run.unsent()? > 0 {
        if run.totals.sent < count && run.send()? == Sent::Gone {
            progress = Instant::now();
        }
        if run.receive_all()? > 0 {
            progress = Instant::now();
        } else {
            run.link.wait(PollFlags::IN, Duration::from_millis(5))?;
        }
        if progress.elapsed() > SILENCE {
            break;
        }
    }
    let mut totals = run.totals;
    totals.lost = count.saturating_sub(totals.others);
    Ok(totals)
}

/// Adds the duration and the NIC's counts over it.
pub(crate) fn described(
    nic: &str,
    mut value: Value,
    elapsed: Duration,
    before: &serde_json::Map<String, Value>,
) -> Value {
    if let Some(object) = value.as_object_mut() {
        let elapsed = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        object.insert("elapsed_us".into(), elapsed.into());
        let after = info::statistics(nic);
        object.insert("statistics".into(), info::difference(before, &after));
    }
    value
}

/// Sends the planned frames, with at most a window of them in flight, and waits for all of them or
/// for silence.
pub(crate) fn send_and_verify(nic: &str, plan: &Plan) -> Result<Totals> {
    Run::new(nic, plan.size, plan.count, plan.peer)?.complete(plan)
}

/// Like [`exchange`], for a NIC that the kernel does not drive: its address is `own`, and `maximum`
/// are the bytes of its largest frame.
pub(crate) fn exchange_over(
    link: impl Link,
    own: Address,
    maximum: usize,
    plan: &Plan,
) -> Result<Value> {
    let run = Run::over(link, own, maximum, plan.size, plan.count, plan.peer)?;
    run.complete(plan).map(Totals::to_json)
}

/// Whether a frame went out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    Gone,
    /// The NIC's queue is full; try later.
    Full,
}

/// A way to a NIC: the kernel's, by a packet socket, or a driver in this process.
pub(crate) trait Link {
    fn send(&mut self, frame: &[u8]) -> Result<Sent>;

    /// Receives one frame without waiting.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Option<usize>>;

    /// Waits until a frame arrives or can be sent, or shorter.
    fn wait(&mut self, what: PollFlags, limit: Duration) -> Result<()>;
}

impl Link for OwnedFd {
    fn send(&mut self, frame: &[u8]) -> Result<Sent> {
        match rustix::net::send(self, frame, rustix::net::SendFlags::DONTWAIT) {
            Ok(_) => Ok(Sent::Gone),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS | rustix::io::Errno::INTR) => {
                Ok(Sent::Full)
            }
            Err(error) => Err(Error::system("send a frame")(error)),
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        receive(self, buffer)
    }

    fn wait(&mut self, what: PollFlags, limit: Duration) -> Result<()> {
        let limit = Timespec::try_from(limit)
            .map_err(|_| Error::invalid("the wait", "it is out of range"))?;
        match poll(&mut [PollFd::new(self, what)], Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::system("wait for frames")(error)),
        }
    }
}

/// One run: its way to the NIC, its seed, and which numbers have returned.
struct Run<L> {
    link: L,
    seed: u64,
    count: u64,
    /// Sent frames return and are counted.
    expects_back: bool,
    frame: Vec<u8>,
    buffer: Vec<u8>,
    expected: Vec<u8>,
    seen: Vec<bool>,
    totals: Totals,
}

impl Run<OwnedFd> {
    fn new(nic: &str, size: usize, count: u64, peer: Option<Address>) -> Result<Self> {
        let (own, maximum) = (network::address(nic)?, maximum_size(nic)?);
        Self::over(packet_socket(nic)?, own, maximum, size, count, peer)
    }

    /// Bytes of memory of frames that were sent but not taken by the device.
    fn unsent(&self) -> Result<i32> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: needed because no safe wrapper reads this from a socket (SIOCOUTQ, the same
        // number as TIOCOUTQ). The descriptor is open and the pointer is to an integer that lives
        // across the call.
        let asked = unsafe { libc::ioctl(self.link.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        if asked < 0 {
            return Err(Error::system("ask for unsent frames")(
                io::Error::last_os_error(),
            ));
        }
        Ok(bytes)
    }
}

impl<L: Link> Run<L> {
    /// A run between the NIC with address `own` and a peer, or itself. `maximum`: bytes of its
    /// largest frame.
    fn over(
        link: L,
        own: Address,
        maximum: usize,
        size: usize,
        count: u64,
        peer: Option<Address>,
    ) -> Result<Self> {
        if count > MAXIMUM_COUNT {
            return Err(Error::invalid(
                "N",
                format!("it is more than {MAXIMUM_COUNT}"),
            ));
        }
        if !(MINIMUM_SIZE..=maximum).contains(&size) {
            return Err(Error::invalid(
                "SIZE",
                format!("it is not in {MINIMUM_SIZE}..={maximum} (header and MTU)"),
            ));
        }
        let seed = seed()?;
        let peer = peer.unwrap_or(own);
        Ok(Self {
            link,
            seed,
            count,
            expects_back: true,
            expected: template(own, peer, seed, size),
            frame: template(peer, own, seed, size),
            buffer: receive_buffer(maximum),
            seen: Vec::new(),
            totals: Totals::default(),
        })
    }

    fn send(&mut self) -> Result<Sent> {
        fill(&mut self.frame, self.seed, self.totals.sent);
        let sent = self.link.send(&self.frame)?;
        if sent == Sent::Gone {
            self.totals.sent += 1;
            if self.expects_back {
                self.seen.push(false);
            }
        }
        Ok(sent)
    }

    /// Sends without waiting for frames to return, while `running` returns true. `running` receives
    /// the number of frames that have returned since its last call.
    fn pour(&mut self, mut running: impl FnMut(u64) -> bool) -> Result<()> {
        let mut received = 0;
        while running(received) && (!self.expects_back || self.totals.sent < MAXIMUM_COUNT) {
            if self.send()? == Sent::Full {
                self.link
                    .wait(PollFlags::IN | PollFlags::OUT, Duration::from_millis(10))?;
            }
            received = self.receive_all()?;
        }
        Ok(())
    }

    /// Like [`Run::pour`], with a frame each `interval`, and the next few at once after a stop.
    fn drip(&mut self, interval: Duration, mut running: impl FnMut(u64) -> bool) -> Result<()> {
        let mut due = Instant::now();
        let mut received = 0;
        while running(received) {
            let now = Instant::now();
            if now >= due {
                // A full queue takes none: the frame is skipped.
                self.send()?;
                due = (due + interval).max(now.checked_sub(interval * CATCH_UP).unwrap_or(now));
            }
            received = self.receive_all()?;
            if received == 0 {
                self.link
                    .wait(PollFlags::IN, due.saturating_duration_since(now))?;
            }
        }
        Ok(())
    }

    /// Sends the planned frames, with at most a window of them in flight, while `running` returns
    /// true, as in [`Run::pour`].
    fn send_windows(&mut self, plan: &Plan, mut running: impl FnMut(u64) -> bool) -> Result<()> {
        // Frames given up as lost no longer fill the window.
        let mut given_up = 0;
        let mut progress = Instant::now();
        let mut received = 0;
        while self.totals.sent < plan.count && running(received) {
            let back = self.totals.received + given_up;
            let under_way = self.totals.sent.saturating_sub(back);
            let mut full = under_way >= plan.window;
            if !full {
                full = self.send()? == Sent::Full;
            }
            received = self.receive_all()?;
            if received > 0 {
                progress = Instant::now();
            } else if full {
                if progress.elapsed() > SILENCE {
                    given_up += under_way;
                    progress = Instant::now();
                }
                self.link.wait(PollFlags::IN, Duration::from_millis(20))?;
            }
        }
        Ok(())
    }

    /// Sends frames until the control ends it, and waits for all of them or for silence.
    fn send_while(&mut self, plan: &Plan, control: &Control) -> Result<()> {
        control.begins();
        self.send_windows(plan, |received| {
            control.count(received);
            control.running()
        })?;
        self.drain()
    }

    /// Sends the planned frames and waits for all of them or for silence.
    fn complete(mut self, plan: &Plan) -> Result<Totals> {
        if plan.window == 0 {
            return Err(Error::invalid("WINDOW", "it is 0: nothing could be sent"));
        }
        self.send_windows(plan, |_| true)?;
        self.drain()?;
        Ok(self.finish())
    }

    /// Reads all frames that have arrived; returns how many were intact.
    fn receive_all(&mut self) -> Result<u64> {
        let intact = |totals: &Totals| totals.received + totals.others;
        let before = intact(&self.totals);
        while let Some(length) = self.link.receive(&mut self.buffer)? {
            self.check(length);
        }
        Ok(intact(&self.totals) - before)
    }

    fn check(&mut self, length: usize) {
        let frame = self.buffer.get(..length).unwrap_or_default();
        let number = number_of(frame);
        fill(&mut self.expected, self.seed, number.unwrap_or_default());
        let seen = number
            .filter(|number| *number < self.count)
            .and_then(|number| self.seen.get_mut(usize::try_from(number).ok()?));
        match seen {
            Some(seen) if frame == self.expected.as_slice() => {
                if *seen {
                    self.totals.duplicate += 1;
                    let first = self.totals.first_duplicate;
                    let this = number.map(|number| (number, self.totals.sent));
                    self.totals.first_duplicate = first.or(this);
                } else {
                    *seen = true;
                    self.totals.received += 1;
                }
            }
            _ if seed_of(frame) != Some(self.seed) && is_intact(frame) => self.totals.others += 1,
            _ => self.totals.corrupt += 1,
        }
    }

    /// Waits for the rest until all are back or no more frames come.
    fn drain(&mut self) -> Result<()> {
        let mut progress = Instant::now();
        while self.totals.received < self.totals.sent && progress.elapsed() < SILENCE {
            if self.receive_all()? > 0 {
                progress = Instant::now();
            } else {
                self.link.wait(PollFlags::IN, Duration::from_millis(20))?;
            }
        }
        Ok(())
    }

    fn finish(self) -> Totals {
        Totals {
            lost: self.totals.sent - self.totals.received,
            ..self.totals
        }
    }
}

/// The largest frame that the NIC sends, in bytes.
pub(crate) fn maximum_size(nic: &str) -> Result<usize> {
    let mtu: usize = attribute(nic, "mtu")?;
    Ok(mtu.saturating_add(ETHERNET_HEADER))
}

/// A buffer for any frame, even one that is longer than allowed.
pub(crate) fn receive_buffer(maximum: usize) -> Vec<u8> {
    vec![0; maximum.max(2048)]
}

pub(crate) fn attribute<T: std::str::FromStr>(nic: &str, name: &str) -> Result<T> {
    files::read_text(&Path::new("/sys/class/net").join(nic).join(name))?
        .trim()
        .parse()
        .map_err(|_| Error::invalid(nic, format!("its {name} is not a number in range")))
}

/// A frame without number and payload.
fn template(to: Address, from: Address, seed: u64, size: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(size);
    frame.extend_from_slice(&to);
    frame.extend_from_slice(&from);
    frame.extend_from_slice(&ETHERNET_TYPE.to_be_bytes());
    frame.extend_from_slice(&seed.to_le_bytes());
    frame.resize(size, 0);
    frame
}

/// Sets a frame's number and the payload that follows from it.
fn fill(frame: &mut [u8], seed: u64, number: u64) {
    if let Some(field) = frame.get_mut(HEADER - 8..HEADER) {
        field.copy_from_slice(&number.to_le_bytes());
    }
    if let Some(payload) = frame.get_mut(HEADER..) {
        Sequence::new(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d)).fill(payload);
    }
}

fn number_of(frame: &[u8]) -> Option<u64> {
    let field = frame.get(HEADER - 8..HEADER)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}

fn seed_of(frame: &[u8]) -> Option<u64> {
    let field = frame.get(ETHERNET_HEADER..HEADER - 8)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}

/// True if the payload follows from the seed and the number in the frame itself. So any guest can
/// check any guest's frames.
pub(crate) fn is_intact(frame: &[u8]) -> bool {
    let (Some(seed), Some(number)) = (seed_of(frame), number_of(frame)) else {
        return false;
    };
    let mut expected = frame.to_vec();
    fill(&mut expected, seed, number);
    frame.len() >= MINIMUM_SIZE && frame == expected
}

/// A packet socket (packet(7)) for one NIC and [`ETHERNET_TYPE`] only.
pub(crate) fn packet_socket(nic: &str) -> Result<OwnedFd> {
    let index: i32 = attribute(nic, "ifindex")?;
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: needed because no safe wrapper binds a packet socket. The call
    // takes three integers and returns a new descriptor or −1. Protocol 0: it
    // receives nothing until it is bound.
    let descriptor = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if descriptor < 0 {
        return Err(Error::system("create a packet socket")(
            io::Error::last_os_error(),
        ));
    }
    // SAFETY: needed to have the descriptor closed. It was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // SAFETY: needed because the C structure has no constructor. All fields
    // are integers, for which zero is valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or_default();
    address.sll_protocol = ETHERNET_TYPE.to_be();
    address.sll_ifindex = index;
    let length = libc::socklen_t::try_from(size_of_val(&address)).unwrap_or_default();
    // SAFETY: needed because no safe wrapper binds a packet socket. The pointer
    // is to a whole `sockaddr_ll` of the given length that lives across the call.
    let bound = unsafe { libc::bind(descriptor, (&raw const address).cast(), length) };
    if bound < 0 {
        return Err(Error::system("bind the packet socket")(
            io::Error::last_os_error(),
        ));
    }
    // A frame that the device returned must not be lost in the socket.
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER)
        .map_err(Error::system("enlarge the packet socket's buffer"))?;
    Ok(socket)
}

/// Receives one frame without waiting; outgoing copies are skipped.
pub(crate) fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<Option<usize>> {
    loop {
        // SAFETY: needed because the C structure has no constructor. All
        // fields are integers, for which zero is valid.
        let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut length = libc::socklen_t::try_from(size_of_val(&from)).unwrap_or_default();
        let descriptor: BorrowedFd<'_> = std::os::fd::AsFd::as_fd(socket);
        // SAFETY: needed because no safe wrapper returns a packet's type. The
        // buffer and the address are writable for the lengths given and live
        // across the call.
        let count = unsafe {
            libc::recvfrom(
                descriptor.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                libc::MSG_DONTWAIT,
                (&raw mut from).cast(),
                &raw mut length,
            )
        };
        if let Ok(count) = usize::try_from(count) {
            if from.sll_pkttype == libc::PACKET_OUTGOING {
                continue;
            }
            return Ok(Some(count));
        }
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock => Ok(None),
            io::ErrorKind::Interrupted => continue,
            _ => Err(Error::system("receive a frame")(error)),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_differ_by_number_and_keep_their_size() {
        let mut one = template([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], 7, 64);
        let mut two = one.clone();
        fill(&mut one, 7, 1);
        fill(&mut two, 7, 2);
        assert_eq!(one.len(), 64);
        assert_eq!(one[..22], two[..22]);
        assert_ne!(one[30..], two[30..]);
        assert_eq!(number_of(&one), Some(1));
        assert_eq!(number_of(&one[..20]), None);
        assert!(is_intact(&one) && !is_intact(&one[..HEADER]) && !is_intact(&[]));
        one[63] ^= 1;
        assert!(!is_intact(&one));
    }

    #[test]
    fn totals_add_up() {
        let mut sum = Totals::default();
        let one = Totals {
            sent: 3,
            received: 2,
            corrupt: 1,
            duplicate: 0,
            first_duplicate: None,
            others: 0,
            lost: 1,
        };
        sum.add(&one);
        sum.add(&one);
        assert_eq!((sum.sent, sum.lost), (6, 2));
        assert_eq!(sum.to_json()["tx"], 6);
    }
}
