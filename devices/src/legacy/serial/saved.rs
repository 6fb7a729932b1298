//! The serial port's saved state.
//!
//! Output that the writer has not taken yet is excluded. The guest has already sent it, and it goes
//! to the console of the machine on which it was sent ([`Serial::write_out`]).

use serde::{Deserialize, Serialize};
use vm_superio::Serial as Uart;
use vm_superio::serial::Error as UartError;
use vm_superio::serial::SerialState as UartState;

use super::{Events, Interrupt, OutputBuffer, Serial};
use crate::Error;
use crate::saved::{ensure, interrupt_failed};

const DEVICE: &str = "serial port";
/// Maximum bytes in the receive FIFO.
const FIFO_SIZE: usize = 64;
/// Interrupts that can be enabled.
const INTERRUPT_ENABLE_MASK: u8 = 0x0f;
/// Interrupt identification: nothing is pending, transmitter empty, data received.
const NONE_PENDING: u8 = 1;
const PENDING_MASK: u8 = 2 | 4;
/// Line status: data ready.
const DATA_READY: u8 = 1;
/// Modem status: the line is connected (carrier, clear to send, data set ready).
const CONNECTED: u8 = 0xb0;

/// A saved serial port. Line and modem status follow from the rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState {
    /// The baud rate divisor.
    pub divisor: u16,
    /// Interrupt enable; bits 3:0.
    pub interrupt_enable: u8,
    /// Interrupt identification: 1 (nothing pending), or bits 1 and 2.
    pub interrupt_identification: u8,
    /// Line control.
    pub line_control: u8,
    /// Modem control.
    pub modem_control: u8,
    /// Scratch.
    pub scratch: u8,
    /// The bytes received and not read yet, the oldest first; at most 64 bytes.
    pub received: Vec<u8>,
    /// Whether the transmitter was busy, so that the driver waits for an interrupt.
    pub transmitter_was_busy: bool,
}

impl Serial {
    /// Returns the registers and the content of the receive FIFO.
    #[must_use]
    pub fn save(&self) -> SerialState {
        let inner = self.inner.lock();
        let state = inner.uart.state();
        SerialState {
            divisor: u16::from_le_bytes([state.baud_divisor_low, state.baud_divisor_high]),
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            modem_control: state.modem_control,
            scratch: state.scratch,
            received: state.in_buffer,
            transmitter_was_busy: inner.owes_interrupt,
        }
    }

    /// Restores a saved port; buffered output stays. Enabled pending interrupts are sent again (one
    /// too many is harmless), so interrupt controllers must be restored first. No vCPU may be
    /// running.
    ///
    /// # Errors
    /// A FIFO that is too long, or bits that do not exist; or the interrupt cannot be set.
    pub fn restore(&self, state: &SerialState) -> Result<(), Error> {
        ensure(
            state.interrupt_enable & !INTERRUPT_ENABLE_MASK == 0,
            DEVICE,
            "unknown bits in interrupt enable",
        )?;
        let pending = state.interrupt_identification;
        ensure(
            pending == NONE_PENDING || (pending != 0 && pending & !PENDING_MASK == 0),
            DEVICE,
            "unknown bits in interrupt identification",
        )?;
        ensure(
            state.received.len() <= FIFO_SIZE,
            DEVICE,
            "more than 64 bytes in the receive FIFO",
        )?;
        let [baud_divisor_low, baud_divisor_high] = state.divisor.to_le_bytes();
        let ready = if state.received.is_empty() {
            0
        } else {
            DATA_READY
        };
        let uart_state = UartState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: pending,
            line_control: state.line_control,
            line_status: super::TRANSMITTER_READY | ready,
            modem_control: state.modem_control,
            modem_status: CONNECTED,
            scratch: state.scratch,
            in_buffer: state.received.clone(),
        };
        let mut inner = self.inner.lock();
        let interrupt = Interrupt(inner.uart.interrupt_evt().0.clone());
        let events = Events {
            input_space: self.input_space.clone(),
        };
        let nowhere = OutputBuffer::new(Box::new(std::io::sink()));
        let mut uart =
            Uart::from_state(&uart_state, interrupt, events, nowhere).map_err(|error| {
                let source = match error {
                    UartError::Trigger(source) | UartError::IOError(source) => source,
                    UartError::FullFifo => std::io::ErrorKind::InvalidData.into(),
                };
                interrupt_failed(DEVICE, source)
            })?;
        std::mem::swap(uart.writer_mut(), inner.uart.writer_mut());
        inner.uart = uart;
        inner.owes_interrupt = state.transmitter_was_busy;
        inner.settle();
        Ok(())
    }
}
