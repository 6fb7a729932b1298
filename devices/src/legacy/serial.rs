//! The serial console: a 16550A UART on top of `vm-superio`.
//!
//! Owns the registers and the buffers of both directions. It must not know the terminal: the
//! machine gives it a writer, feeds it input and calls [`Serial::write_out`].
//!
//! Output. A vCPU never waits for the writer. Bytes that the writer does not take
//! ([`std::io::ErrorKind::WouldBlock`], see [`PolledWriter`](super::output::PolledWriter)) wait in
//! a buffer of 256 KiB. While the buffer is full the port reports a busy transmitter (THRE and TEMT
//! of the line status clear, no transmit interrupt). So does a real port with a slow line: drivers
//! wait, and nothing is lost. If a driver writes in spite of that, its bytes are lost and counted
//! (Linux's printk waits 10 ms for each).
//!
//! ```text
//!             buffer full
//!   ready ------------------> busy: LSR without THRE and TEMT
//!         <------------------
//!    room again: transmit interrupt, if enabled
//! ```
//!
//! Input. The receive FIFO takes 64 bytes. [`Serial::enqueue`] returns how many it took, and
//! [`Serial::input_space`] becomes readable when the guest has emptied it.

mod saved;

use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use vm_superio::serial::SerialEvents;
use vm_superio::{Serial as Uart, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::output::OutputBuffer;
use crate::bus::BusDevice;

pub use saved::SerialState;

/// Number of bytes that [`Serial`] occupies.
pub const SERIAL_LEN: u64 = 8;

const INTERRUPT_ENABLE: u8 = 1;
const LINE_CONTROL: u8 = 3;
const LINE_STATUS: u8 = 5;
/// Line control: offsets 0 and 1 are the baud rate divisor.
const DIVISOR_LATCH: u8 = 0x80;
/// Line status: transmitter holding register empty and transmitter empty.
const TRANSMITTER_READY: u8 = 0x20 | 0x40;

/// The output that is left after [`Serial::write_out`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// Nothing.
    Nothing,
    /// The writer takes no more: call again when it is writable.
    Output,
}

struct Interrupt(Arc<EventFd>);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        match self.0.write(1) {
            // The counter is at its maximum: the interrupt is already pending.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }
}

struct Events {
    input_space: Arc<EventFd>,
}

impl SerialEvents for Events {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // The only failure is a counter at its maximum, which is readable too.
        let _ = self.input_space.write(1);
    }
}

struct Inner {
    uart: Uart<Interrupt, Events, OutputBuffer>,
    /// The port was busy, and the driver waits for a transmit interrupt.
    owes_interrupt: bool,
}

impl Inner {
    fn read(&mut self, register: u8) -> u8 {
        let value = self.uart.read(register);
        if register == LINE_STATUS && self.uart.writer().is_full() {
            value & !TRANSMITTER_READY
        } else {
            value
        }
    }

    fn write(&mut self, register: u8, value: u8) {
        if let Err(error) = self.uart.write(register, value) {
            // The buffer takes everything, so only the interrupt can have failed.
            tracing::warn!(%error, "the serial port cannot interrupt the guest");
        }
        self.settle();
    }

    /// Sends the transmit interrupt that the driver waits for.
    fn settle(&mut self) {
        if self.uart.writer().is_full() {
            self.owes_interrupt = true;
        } else if self.owes_interrupt && self.uart.read(LINE_CONTROL) & DIVISOR_LATCH == 0 {
            self.owes_interrupt = false;
            // Writing the enabled interrupts again makes the UART raise those whose condition
            // holds.
            let enabled = self.uart.read(INTERRUPT_ENABLE);
            if let Err(error) = self.uart.write(INTERRUPT_ENABLE, enabled) {
                tracing::warn!(%error, "the serial port cannot interrupt the guest");
            }
        }
    }
}

/// The serial port.
pub struct Serial {
    inner: Mutex<Inner>,
    input_space: Arc<EventFd>,
    output_waits: EventFd,
}

vdpa::opaque_debug!(Serial);

impl Serial {
    /// Creates a port that signals `interrupt` (IRQ 4 for the first one). The thread of the sending
    /// vCPU writes the guest's output to `output`, which must not block: see
    /// [`PolledWriter`](super::output::PolledWriter).
    ///
    /// # Errors
    /// No eventfd can be created.
    pub fn new(interrupt: Arc<EventFd>, output: Box<dyn Write + Send>) -> io::Result<Self> {
        let input_space = Arc::new(vdpa::eventfd::new()?);
        let events = Events {
            input_space: Arc::clone(&input_space),
        };
        let uart = Uart::with_events(Interrupt(interrupt), events, OutputBuffer::new(output));
        Ok(Self {
            inner: Mutex::new(Inner {
                uart,
                owes_interrupt: false,
            }),
            input_space,
            output_waits: vdpa::eventfd::new()?,
        })
    }

    /// Passes input to the guest and returns the number of bytes taken. Offer the others again when
    /// [`Serial::input_space`] becomes readable.
    pub fn enqueue(&self, input: &[u8]) -> usize {
        let mut inner = self.inner.lock();
        let room = inner.uart.fifo_capacity().min(input.len());
        let Some(taken) = input.get(..room).filter(|taken| !taken.is_empty()) else {
            return 0;
        };
        match inner.uart.enqueue_raw_bytes(taken) {
            Ok(count) => count,
            Err(vm_superio::serial::Error::Trigger(error)) => {
                // The bytes are in the FIFO; only the interrupt is missing.
                tracing::warn!(%error, "the serial port cannot interrupt the guest");
                room
            }
            Err(_) => 0,
        }
    }

    /// Returns the eventfd that becomes readable when the guest has emptied the receive FIFO. Read
    /// it before the next [`Serial::enqueue`].
    #[must_use]
    pub fn input_space(&self) -> &EventFd {
        &self.input_space
    }

    /// Returns the eventfd that becomes readable when output is buffered: wait until the writer's
    /// file is writable, then call [`Serial::write_out`].
    #[must_use]
    pub fn output_waits(&self) -> &EventFd {
        &self.output_waits
    }

    /// Writes buffered output, as far as the writer takes it. Call it once more at the end, so that
    /// the last lines are not lost.
    pub fn write_out(&self) -> Pending {
        let _ = self.output_waits.read();
        let mut inner = self.inner.lock();
        inner.uart.writer_mut().write_out();
        inner.settle();
        if inner.uart.writer().is_empty() {
            Pending::Nothing
        } else {
            Pending::Output
        }
    }

    /// Returns the number of bytes lost since the start: written to a busy port, or to a writer
    /// that failed.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.inner.lock().uart.writer().lost()
    }

    /// Restores the state after power-on. Input that the guest has not read is dropped; buffered
    /// output stays. No vCPU may be running.
    pub fn reset(&self) {
        const LINE_CONTROL_DEFAULT: u8 = 3;
        const MODEM_CONTROL: u8 = 4;
        const MODEM_CONTROL_DEFAULT: u8 = 8;
        const DATA_READY: u8 = 1;
        let mut inner = self.inner.lock();
        // Not through `Inner::write`, which would send an interrupt.
        for (register, value) in [
            (LINE_CONTROL, LINE_CONTROL_DEFAULT),
            (INTERRUPT_ENABLE, 0),
            (MODEM_CONTROL, MODEM_CONTROL_DEFAULT),
        ] {
            if let Err(error) = inner.uart.write(register, value) {
                tracing::warn!(%error, "cannot reset the serial port");
            }
        }
        while inner.uart.read(LINE_STATUS) & DATA_READY != 0 {
            inner.uart.read(0);
        }
        // Reading it clears pending interrupts.
        inner.uart.read(2);
        inner.owes_interrupt = false;
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut inner = self.inner.lock();
        for (register, byte) in (offset..=u64::MAX).zip(data) {
            *byte = match u8::try_from(register) {
                Ok(register) if u64::from(register) < SERIAL_LEN => inner.read(register),
                _ => 0xff,
            };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut inner = self.inner.lock();
        let waited = !inner.uart.writer().is_empty();
        for (register, &value) in (offset..=u64::MAX).zip(data) {
            if let Ok(register) = u8::try_from(register)
                && u64::from(register) < SERIAL_LEN
            {
                inner.write(register, value);
            }
        }
        if !waited && !inner.uart.writer().is_empty() {
            // The only failure is a counter at its maximum, which is readable too.
            let _ = self.output_waits.write(1);
        }
    }
}

#[cfg(test)]
mod tests;
