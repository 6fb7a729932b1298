//! The rings of disks that survive an `execve`. The next program inherits the filters, so it can
//! create none.
//!
//! Owns the variable that names the descriptors. It must not know the contents of a ring.

use std::fmt::Write as _;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use bellhop_common::error::Error;
use vdpa::causes::in_one_line;
use vmm::sandbox::rings::{self, ParameterBytes, RingFiles};

/// The parameters of the rings in hexadecimal, then for each `,RING:EVENTFD`. It is a variable of
/// its own: programs before it create their rings, and their filters allow it.
pub(super) const VARIABLE: &str = "BELLHOP_HAND_OVER_RINGS";

/// All rings of this process.
pub(super) struct Rings(Vec<Arc<RingFiles>>);

impl Rings {
    /// `None`: this process creates rings as it needs them, and so can the next program.
    pub(super) fn all() -> Option<Self> {
        rings::all().map(Self)
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().flat_map(|ring| ring.descriptors())
    }

    /// The value of the variable.
    pub(super) fn variable(&self) -> String {
        // One program has created all of them, with the same parameters.
        let parameters = self.0.first().map(|ring| ring.parameters());
        let numbers = self.0.iter().map(|ring| ring.descriptors());
        let numbers = numbers.map(|files| files.map(|file| file.as_raw_fd()));
        text(&parameters.unwrap_or([0; _]), numbers)
    }
}

fn text(parameters: &ParameterBytes, numbers: impl Iterator<Item = [RawFd; 2]>) -> String {
    let mut text = String::new();
    for byte in parameters {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    for [ring, completed] in numbers {
        let _ = write!(text, ",{ring}:{completed}");
    }
    text
}

fn parse(text: &str) -> Option<(ParameterBytes, Vec<[RawFd; 2]>)> {
    let mut parts = text.split(',');
    let digits = parts.next()?;
    let mut parameters: ParameterBytes = [0; _];
    if digits.len() != 2 * parameters.len() {
        return None;
    }
    for (byte, at) in parameters.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
    }
    let numbers = parts.map(|part| {
        let (ring, completed) = part.split_once(':')?;
        Some([ring.parse().ok()?, completed.parse().ok()?])
    });
    Some((parameters, numbers.collect::<Option<_>>()?))
}

/// Takes over the rings of the former program. Returns `false` if it has passed none, and needs
/// none if it gets the VM again.
pub(super) fn take(own: impl Fn(RawFd) -> Result<OwnedFd, Error>) -> Result<bool, Error> {
    let Some(value) = std::env::var_os(VARIABLE) else {
        return Ok(false);
    };
    let Some((parameters, numbers)) = value.to_str().and_then(parse) else {
        return Err(Error::failed(format!(
            "{VARIABLE} has the invalid value {value:?}: unset it"
        )));
    };
    let mut taken = Vec::with_capacity(numbers.len());
    for [ring, completed] in numbers {
        let (ring, completed) = (own(ring)?, own(completed)?);
        // SAFETY: needed because an `execve` leaves only numbers. The former program has passed
        // these rings with the parameters of `RingFiles::parameters`, as it has passed guest RAM.
        match unsafe { RingFiles::inherited(ring, completed, &parameters) } {
            Ok(ring) => taken.push(ring),
            // A disk fails if too few are left.
            Err(error) => tracing::warn!(
                error = in_one_line(&error),
                "cannot use an io_uring of the former program"
            ),
        }
    }
    rings::adopt(taken);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_read_as_it_is_written() {
        let parameters = std::array::from_fn(|at| u8::try_from(at).unwrap().wrapping_mul(37));
        for numbers in [vec![], vec![[3, 4]], vec![[7, 70], [700, 7000]]] {
            let text = text(&parameters, numbers.iter().copied());
            assert_eq!(parse(&text), Some((parameters, numbers)));
        }
        let good = text(&parameters, [].into_iter());
        for damaged in [
            String::new(),
            good[2..].to_owned(),
            format!("{good}00"),
            good.replacen("00", "+0", 1).replacen("25", "2g", 1),
            good.replacen("00", "é", 1),
            format!("{good},"),
            format!("{good},3"),
            format!("{good},3:x"),
            format!("{good},3:99999999999"),
        ] {
            assert_eq!(parse(&damaged), None, "{damaged}");
        }
    }
}
