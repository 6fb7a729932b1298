//! Decoding of numbers and texts from a payload, with every bound checked.

use super::FrameError;

/// The rest of a payload.
#[derive(Debug)]
pub(super) struct Bytes<'a> {
    name: &'static str,
    rest: &'a [u8],
}

impl<'a> Bytes<'a> {
    /// Starts with the whole payload of the message called `name`.
    pub(super) fn of(name: &'static str, rest: &'a [u8]) -> Self {
        Self { name, rest }
    }

    /// The error for a defect of this message.
    pub(super) fn bad(&self, problem: &'static str) -> FrameError {
        FrameError::Payload {
            name: self.name,
            problem,
        }
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (array, rest) = self
            .rest
            .split_first_chunk()
            .ok_or(self.bad("is cut short"))?;
        self.rest = rest;
        Ok(*array)
    }

    pub(super) fn u8(&mut self) -> Result<u8, FrameError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, FrameError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, FrameError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a length of two bytes, then that many bytes of text.
    pub(super) fn text(&mut self, max: usize) -> Result<String, FrameError> {
        let len = usize::from(self.u16()?);
        let (text, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(self.bad("is cut short"))?;
        self.rest = rest;
        self.printable(text, max)
    }

    /// Reads the rest as text.
    pub(super) fn rest_as_text(&mut self, max: usize) -> Result<String, FrameError> {
        let text = self.rest();
        self.printable(text, max)
    }

    /// Reads the rest.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// Fails if bytes are left.
    pub(super) fn end(&self) -> Result<(), FrameError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.bad("has data after its end"))
        }
    }

    /// The peer's text goes to logs and terminals: no control character in it may reach them.
    fn printable(&self, text: &[u8], max: usize) -> Result<String, FrameError> {
        if text.len() > max {
            return Err(self.bad("has too long a text"));
        }
        let text = std::str::from_utf8(text).map_err(|_| self.bad("is not UTF-8"))?;
        Ok(text
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect())
    }
}

/// The longest prefix of `text` of at most `max` bytes that ends between characters.
pub(super) fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len()))
        .rev()
        .find(|&end| text.is_char_boundary(end))
        .unwrap_or(0);
    text.get(..end).unwrap_or("")
}
