use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::output::CAPACITY;
use super::*;
use crate::saved::through_a_file;

/// A writer that takes only a limited number of bytes.
#[derive(Clone, Default)]
struct Slow {
    room: Arc<AtomicUsize>,
    written: Arc<Mutex<Vec<u8>>>,
}

impl Write for Slow {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let count = data.len().min(self.room.load(Ordering::Relaxed));
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.room.fetch_sub(count, Ordering::Relaxed);
        self.written.lock().extend(&data[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn port(room: usize) -> (Serial, Slow, Arc<EventFd>) {
    let interrupt = Arc::new(vdpa::eventfd::new().unwrap());
    let writer = Slow::default();
    writer.room.store(room, Ordering::Relaxed);
    let serial = Serial::new(Arc::clone(&interrupt), Box::new(writer.clone())).unwrap();
    (serial, writer, interrupt)
}

fn get(serial: &Serial, register: u8) -> u8 {
    let mut data = [0];
    serial.read(register.into(), &mut data);
    data[0]
}

fn interrupted(interrupt: &EventFd) -> bool {
    interrupt.read().is_ok()
}

#[test]
fn output_passes_through() {
    let (serial, writer, interrupt) = port(100);
    for byte in b"hello" {
        serial.write(0, &[*byte]);
    }
    assert_eq!(*writer.written.lock(), b"hello");
    assert!(!interrupted(&interrupt));
    assert!(serial.output_waits().read().is_err());
    serial.write(1, &[2]);
    assert!(interrupted(&interrupt));
    assert_eq!(get(&serial, LINE_STATUS), TRANSMITTER_READY);
}

#[test]
fn a_slow_writer_makes_the_port_busy_and_loses_nothing() {
    let (serial, writer, interrupt) = port(3);
    for at in 0..CAPACITY + 3 {
        assert_ne!(get(&serial, LINE_STATUS) & TRANSMITTER_READY, 0);
        serial.write(0, &[u8::try_from(at % 251).unwrap()]);
    }
    // One signal that output waits.
    assert_eq!(serial.output_waits().read().unwrap(), 1);
    assert_eq!(get(&serial, LINE_STATUS) & TRANSMITTER_READY, 0);
    assert_eq!(serial.lost(), 0);

    // A driver that writes nevertheless loses bytes, and does not hang.
    serial.write(0, b"!");
    assert_eq!(serial.lost(), 1);

    // The driver waits for a transmit interrupt.
    serial.write(1, &[2]);
    get(&serial, 2);
    let _ = interrupt.read();
    assert_eq!(serial.write_out(), Pending::Output);
    assert!(!interrupted(&interrupt));
    writer.room.store(10, Ordering::Relaxed);
    assert_eq!(serial.write_out(), Pending::Output);
    assert!(interrupted(&interrupt));
    assert_eq!(get(&serial, 2) & 0x0f, 2);
    assert_ne!(get(&serial, LINE_STATUS) & TRANSMITTER_READY, 0);

    writer.room.store(usize::MAX, Ordering::Relaxed);
    assert_eq!(serial.write_out(), Pending::Nothing);
    let written = writer.written.lock();
    assert_eq!(written.len(), CAPACITY + 3);
    assert!(
        (0..)
            .zip(written.iter())
            .all(|(at, &byte)| u32::from(byte) == at % 251)
    );
}

#[test]
fn the_owed_interrupt_waits_for_the_divisor_latch() {
    let (serial, writer, interrupt) = port(0);
    for _ in 0..CAPACITY {
        serial.write(0, b"x");
    }
    serial.write(1, &[2]);
    get(&serial, 2);
    serial.write(LINE_CONTROL.into(), &[DIVISOR_LATCH]);
    let _ = interrupt.read();
    writer.room.store(usize::MAX, Ordering::Relaxed);
    serial.write_out();
    assert!(!interrupted(&interrupt));
    serial.write(LINE_CONTROL.into(), &[3]);
    assert!(interrupted(&interrupt));
}

#[test]
fn input_respects_the_fifo() {
    let (serial, _, interrupt) = port(0);
    serial.write(1, &[1]);
    let input: Vec<u8> = (0..100).collect();
    assert_eq!(serial.enqueue(&input), 64);
    assert!(interrupted(&interrupt));
    assert_eq!(serial.enqueue(&input[64..]), 0);
    assert_eq!(serial.enqueue(&[]), 0);
    let mut received = Vec::new();
    while get(&serial, LINE_STATUS) & 1 != 0 {
        received.push(get(&serial, 0));
        let empty = received.len() == 64;
        assert_eq!(serial.input_space().read().is_ok(), empty);
    }
    assert_eq!(received, input[..64]);
    assert_eq!(serial.enqueue(&input[64..]), 36);
}

#[test]
fn odd_accesses_are_harmless() {
    let (serial, writer, _) = port(100);
    for offset in [0, 6, 7, 8, 255, 256, u64::MAX - 8] {
        let mut data = [0; 8];
        serial.read(offset, &mut data);
        serial.read(offset, &mut []);
        if offset > 5 {
            serial.write(offset, &[0xff; 8]);
        }
    }
    let mut beyond = [0; 2];
    serial.read(7, &mut beyond);
    assert_eq!(beyond[1], 0xff);
    // Loopback: sent bytes come back and are not output.
    serial.write(4, &[0x10]);
    for _ in 0..200 {
        serial.write(0, b"z");
    }
    assert_eq!(serial.enqueue(b"abc"), 0);
    assert!(writer.written.lock().is_empty());
}

#[test]
fn reset_forgets_the_old_guest() {
    let (serial, writer, interrupt) = port(0);
    serial.write(1, &[3]);
    serial.write(0, b"x");
    assert_eq!(serial.enqueue(b"typed"), 5);
    serial.write(3, &[0x80]);
    while interrupted(&interrupt) {}
    serial.reset();
    assert_eq!(get(&serial, LINE_CONTROL), 3);
    assert_eq!(get(&serial, INTERRUPT_ENABLE), 0);
    assert_eq!(get(&serial, LINE_STATUS), TRANSMITTER_READY);
    assert!(!interrupted(&interrupt));
    // The old guest's output is still to be written.
    writer.room.store(1, Ordering::Relaxed);
    assert_eq!(serial.write_out(), Pending::Nothing);
    assert_eq!(*writer.written.lock(), b"x");
    // A second reset has no effect.
    serial.reset();
    assert!(!interrupted(&interrupt));
}

#[test]
fn a_port_continues_on_another_host() {
    let (source, _, interrupt) = port(0);
    source.write(LINE_CONTROL.into(), &[DIVISOR_LATCH | 3]);
    source.write(0, &[0x34, 0x12]);
    source.write(LINE_CONTROL.into(), &[3]);
    source.write(INTERRUPT_ENABLE.into(), &[3]);
    source.write(7, &[0xa5]);
    assert_eq!(source.enqueue(b"typed"), 5);
    assert!(interrupted(&interrupt));
    let state = through_a_file(&source.save());
    assert_eq!((state.divisor, state.scratch), (0x1234, 0xa5));
    assert_eq!(source.save(), state, "saving changes nothing");

    let (destination, writer, interrupt) = port(100);
    destination.restore(&state).unwrap();
    assert_eq!(destination.save(), state);
    assert!(interrupted(&interrupt), "input is pending");
    let typed: Vec<u8> = (0..5).map(|_| get(&destination, 0)).collect();
    assert_eq!(typed, b"typed");
    assert!(destination.input_space().read().is_ok());
    destination.write(0, b"!");
    assert_eq!(*writer.written.lock(), b"!");
}

#[test]
fn a_driver_that_waits_for_a_busy_port_is_notified_on_another_host() {
    let (source, _, interrupt) = port(0);
    source.write(INTERRUPT_ENABLE.into(), &[2]);
    let _ = get(&source, 2);
    for _ in 0..CAPACITY {
        source.write(0, b"x");
        let _ = get(&source, 2);
    }
    let _ = interrupted(&interrupt);
    let state = source.save();
    assert!(state.transmitter_was_busy);
    let (destination, _, interrupt) = port(100);
    destination.restore(&state).unwrap();
    assert!(interrupted(&interrupt));
    assert_eq!(get(&destination, LINE_STATUS), TRANSMITTER_READY);
}

#[test]
fn impossible_ports_change_nothing() {
    let (serial, _, _) = port(100);
    assert_eq!(serial.enqueue(b"kept"), 4);
    let good = serial.save();
    for bad in [
        SerialState {
            received: vec![0; 65],
            ..good.clone()
        },
        SerialState {
            interrupt_enable: 0x10,
            ..good.clone()
        },
        SerialState {
            interrupt_identification: 0,
            ..good.clone()
        },
        SerialState {
            interrupt_identification: 3,
            ..good.clone()
        },
        SerialState {
            interrupt_identification: 0xc1,
            ..good.clone()
        },
    ] {
        let error = serial.restore(&bad).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("the saved serial port is impossible"),
            "{text}"
        );
        assert_eq!(serial.save(), good);
    }
}
