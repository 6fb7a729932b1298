use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{PipeReader, Read, Seek, SeekFrom, Write as _};
use std::os::fd::{AsFd, BorrowedFd};

use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::event_loop::Ready;

/// Reads like the terminal, but treats `!` as the request to leave.
struct Input<F>(F);

impl<F: AsFd> AsFd for Input<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<F: AsFd + Read + Send> ConsoleInput for Input<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead> {
        let count = self.0.read(buffer)?;
        Ok(match count {
            0 => ConsoleRead::Closed,
            _ if buffer[..count].contains(&b'!') => ConsoleRead::Leave,
            _ => ConsoleRead::Bytes(count),
        })
    }
}

/// A FIFO of 16 bytes, like a 16550's.
#[derive(Default)]
struct Fifo {
    fill: Cell<usize>,
    seen: RefCell<Vec<u8>>,
}

impl Receiver for Fifo {
    fn receive(&self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(16 - self.fill.get());
        self.fill.set(self.fill.get() + count);
        self.seen.borrow_mut().extend(&bytes[..count]);
        count
    }
}

fn pump(input: impl ConsoleInput + 'static, events: &EventLoop) -> InputPump {
    let mut pump = InputPump::idle();
    pump.attach(Box::new(input), events).unwrap();
    pump
}

/// An event loop that never blocks in `wait`.
fn events() -> (EventLoop, EventFd) {
    let events = EventLoop::new().unwrap();
    let always = vdpa::eventfd::new().unwrap();
    always.write(1).unwrap();
    events.add(always.as_raw_fd(), Token::Stop).unwrap();
    (events, always)
}

fn readable(events: &EventLoop) -> bool {
    let mut ready = Ready::default();
    events.wait(&mut ready).unwrap();
    ready.tokens().any(|token| token == Token::ConsoleInput)
}

fn pipe() -> (PipeReader, io::PipeWriter) {
    io::pipe().unwrap()
}

#[test]
fn a_slow_guest_loses_nothing() {
    let (events, _always) = events();
    let (reader, mut writer) = pipe();
    let mut pump = pump(Input(reader), &events);
    let fifo = Fifo::default();
    let text: Vec<u8> = (0..10_000u32)
        .map(|i| b"abcdefghijk"[i as usize % 11])
        .collect();
    writer.write_all(&text).unwrap();

    let mut held_back = false;
    while fifo.seen.borrow().len() < text.len() {
        if readable(&events) {
            assert_eq!(pump.readable(&fifo, &events), Pumped::Stay);
            assert!(pump.backlog.len() <= BACKLOG);
        } else {
            held_back |= pump.phase == Phase::Full;
            // The guest empties its FIFO, which signals room.
            assert!(fifo.fill.replace(0) > 0);
            assert_eq!(pump.room(&fifo, &events), Pumped::Stay);
        }
    }
    assert!(held_back, "more than fits was never held back");
    assert_eq!(*fifo.seen.borrow(), text);
    assert!(!readable(&events));

    drop(writer);
    assert!(readable(&events));
    assert_eq!(pump.readable(&fifo, &events), Pumped::Stay);
    assert!(!readable(&events), "a closed input must not spin the loop");
    assert_eq!(pump.room(&fifo, &events), Pumped::Stay);
}

#[test]
fn leaving_works_although_the_guest_takes_nothing() {
    let (events, _always) = events();
    let (reader, mut writer) = pipe();
    let mut pump = pump(Input(reader), &events);
    let fifo = Fifo::default();
    writer.write_all(&[b'x'; 300]).unwrap();
    while readable(&events) {
        assert_eq!(pump.readable(&fifo, &events), Pumped::Stay);
    }
    assert_eq!(fifo.fill.get(), 16);
    writer.write_all(b"!").unwrap();
    assert!(readable(&events));
    assert_eq!(pump.readable(&fifo, &events), Pumped::Leave);
    assert!(!readable(&events));
}

#[test]
fn room_alone_never_reads_a_terminal() {
    let (events, _always) = events();
    let (reader, _writer) = pipe();
    let mut pump = pump(Input(reader), &events);
    // This would block forever.
    assert_eq!(pump.room(&Fifo::default(), &events), Pumped::Stay);
}

#[test]
fn a_regular_file_is_read_as_room_comes() {
    let (events, _always) = events();
    let text: Vec<u8> = (0..150).map(|i| b'A' + i % 26).collect();
    // SAFETY: a new descriptor without another owner.
    let mut file: File = unsafe {
        std::os::fd::FromRawFd::from_raw_fd(libc::memfd_create(
            c"input".as_ptr(),
            libc::MFD_CLOEXEC,
        ))
    };
    file.write_all(&text).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    // A memfd can't be waited for, like any regular file.
    let mut pump = pump(Input(file), &events);
    assert!(pump.is_always_readable());
    let fifo = Fifo::default();
    for _ in 0..20 {
        assert_eq!(pump.room(&fifo, &events), Pumped::Stay);
        fifo.fill.set(0);
    }
    assert_eq!(*fifo.seen.borrow(), text);
    assert_eq!(pump.phase, Phase::Closed);
}

#[test]
fn reset_drops_input_of_the_old_guest() {
    let (events, _always) = events();
    let (reader, mut writer) = pipe();
    let mut pump = pump(Input(reader), &events);
    let fifo = Fifo::default();
    writer.write_all(&[b'o'; 5000]).unwrap();
    while readable(&events) {
        assert_eq!(pump.readable(&fifo, &events), Pumped::Stay);
    }
    assert_eq!(pump.phase, Phase::Full);
    pump.reset(&events);
    assert_eq!((pump.phase, pump.backlog.len()), (Phase::Reading, 0));
    assert!(readable(&events));
}
