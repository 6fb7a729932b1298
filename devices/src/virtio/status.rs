//! The virtio device status register (virtio 1.3, section 2.1) as one table.
//!
//! Owns which write is legal in which state, and its effect. It must not know features, queues or
//! backends.
//!
//! ```text
//!    0 --> ACKNOWLEDGE --> DRIVER --> FEATURES_OK --> DRIVER_OK
//!    |                       ^
//!    +-----------------------+  (both bits in one write)
//!
//!    any of them --> the same + FAILED        (then only 0)
//!    any of them --> the same + NEEDS_RESET   (set by the device; then only FAILED or 0)
//!    any of them --> 0                        (reset)
//! ```

use std::fmt;

/// The driver found the device.
pub const ACKNOWLEDGE: u8 = 1;
/// The driver knows how to drive the device.
pub const DRIVER: u8 = 2;
/// The driver is set up and the device runs.
pub const DRIVER_OK: u8 = 4;
/// Features are negotiated.
pub const FEATURES_OK: u8 = 8;
/// The device has met an error from which it cannot recover.
pub const NEEDS_RESET: u8 = 64;
/// The driver gave up.
pub const FAILED: u8 = 128;

/// The effect of a driver's write of the status register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// The write is illegal or adds nothing: the register stays as it is.
    Nothing,
    /// Reset the device.
    Reset,
    /// Set the register to this value; nothing else is needed.
    Set(DeviceStatus),
    /// Check the features; set the register to this value if the device accepts them.
    Negotiate(DeviceStatus),
    /// Start the device, then set the register to this value.
    Activate(DeviceStatus),
}

#[derive(Clone, Copy)]
enum Step {
    Set,
    Negotiate,
    Activate,
}

struct Transition {
    /// The register without NEEDS_RESET.
    from: u8,
    to: u8,
    step: Step,
    /// Whether it is legal while NEEDS_RESET is set.
    while_broken: bool,
}

const fn transition(from: u8, to: u8, step: Step) -> Transition {
    Transition {
        from,
        to,
        step,
        while_broken: false,
    }
}

/// A driver gives up.
const fn failure(from: u8) -> Transition {
    Transition {
        from,
        to: from | FAILED,
        step: Step::Set,
        while_broken: true,
    }
}

const ACKNOWLEDGED: u8 = ACKNOWLEDGE;
const DRIVEN: u8 = ACKNOWLEDGED | DRIVER;
const AGREED: u8 = DRIVEN | FEATURES_OK;
const RUNNING: u8 = AGREED | DRIVER_OK;

/// Every legal write except 0, which is legal in any state.
const TRANSITIONS: [Transition; 10] = [
    transition(0, ACKNOWLEDGED, Step::Set),
    transition(0, DRIVEN, Step::Set),
    transition(ACKNOWLEDGED, DRIVEN, Step::Set),
    transition(DRIVEN, AGREED, Step::Negotiate),
    transition(AGREED, RUNNING, Step::Activate),
    failure(0),
    failure(ACKNOWLEDGED),
    failure(DRIVEN),
    failure(AGREED),
    failure(RUNNING),
];

/// The status register.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceStatus(u8);

impl DeviceStatus {
    /// After reset.
    pub const RESET: Self = Self(0);
    /// ACKNOWLEDGE and DRIVER: the driver may choose features.
    pub const DRIVEN: Self = Self(DRIVEN);
    /// As [`DeviceStatus::DRIVEN`], and FEATURES_OK: the driver may program queues.
    pub const AGREED: Self = Self(AGREED);

    /// As [`DeviceStatus::AGREED`], and DRIVER_OK: the device works.
    pub const RUNNING: Self = Self(RUNNING);

    /// Returns a register that a driver and a device can have reached; else `None`.
    #[must_use]
    pub fn from_bits(bits: u8) -> Option<Self> {
        let driver = bits & !NEEDS_RESET;
        let reachable = driver == 0 || TRANSITIONS.iter().any(|known| known.to == driver);
        reachable.then_some(Self(bits))
    }

    /// The register.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Whether all of `bits` are set.
    #[must_use]
    pub fn has(self, bits: u8) -> bool {
        self.0 & bits == bits
    }

    /// Returns the register with NEEDS_RESET set.
    #[must_use]
    pub fn broken(self) -> Self {
        Self(self.0 | NEEDS_RESET)
    }

    /// Returns the effect of the driver's write of `written`. NEEDS_RESET in it is ignored: only
    /// the device sets it.
    #[must_use]
    pub fn write(self, written: u8) -> Request {
        if written == 0 {
            return Request::Reset;
        }
        let broken = self.0 & NEEDS_RESET;
        let (from, to) = (self.0 & !NEEDS_RESET, written & !NEEDS_RESET);
        let legal = |known: &&Transition| {
            known.from == from && known.to == to && (broken == 0 || known.while_broken)
        };
        let Some(known) = TRANSITIONS.iter().find(legal) else {
            return Request::Nothing;
        };
        let next = Self(to | broken);
        match known.step {
            Step::Set => Request::Set(next),
            Step::Negotiate => Request::Negotiate(next),
            Step::Activate => Request::Activate(next),
        }
    }
}

impl fmt::Debug for DeviceStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceStatus({:#04x})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule in the words of the specification, not as a table. It covers every register that a
    /// driver can reach, with every byte that it can write.
    fn rule(current: u8, written: u8) -> Request {
        if written == 0 {
            return Request::Reset;
        }
        let driver_bits = 0x8f;
        let old = current & driver_bits;
        let new = written & driver_bits;
        let added = new & !old;
        let status = DeviceStatus(current | added);
        // Reserved bits, cleared bits, and a driver that gave up.
        if written & 0x30 != 0 || old & !new != 0 || old & 0x80 != 0 {
            return Request::Nothing;
        }
        if added == 0x80 {
            return Request::Set(status);
        }
        // A device that needs a reset accepts nothing else.
        if current & 0x40 != 0 {
            return Request::Nothing;
        }
        match (old, added) {
            (0, 1) | (0, 3) | (1, 2) => Request::Set(status),
            (3, 8) => Request::Negotiate(status),
            (11, 4) => Request::Activate(status),
            _ => Request::Nothing,
        }
    }

    #[test]
    fn all_writes_in_all_states() {
        for current in 0..=255u8 {
            for written in 0..=255u8 {
                let request = DeviceStatus(current).write(written);
                if DeviceStatus::from_bits(current).is_some() {
                    assert_eq!(
                        request,
                        rule(current, written),
                        "{current:#x} <- {written:#x}"
                    );
                } else {
                    // Unreachable; only reset may lead out.
                    let expected = if written == 0 {
                        Request::Reset
                    } else {
                        Request::Nothing
                    };
                    assert_eq!(request, expected, "{current:#x} <- {written:#x}");
                }
            }
        }
    }

    #[test]
    fn reachable_states_are_closed_and_complete() {
        let mut reached = vec![0u8];
        let mut next = 0;
        while let Some(&current) = reached.get(next) {
            next += 1;
            for written in 0..=255 {
                let status = match DeviceStatus(current).write(written) {
                    Request::Nothing => continue,
                    Request::Reset => DeviceStatus::RESET,
                    Request::Set(to) | Request::Negotiate(to) | Request::Activate(to) => to,
                };
                for status in [status, status.broken()] {
                    if !reached.contains(&status.bits()) {
                        reached.push(status.bits());
                    }
                }
            }
        }
        reached.sort_unstable();
        let known: Vec<u8> = (0..=255)
            .filter(|bits| DeviceStatus::from_bits(*bits).is_some())
            .collect();
        assert_eq!(reached, known);
        assert_eq!(known.len(), 20);
    }
}
