//! The setting of the ring watch.

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

/// Whether the VMM detects stuck queues: `"off"`, or the seconds until a stuck queue raises an
/// alarm. From 1 to 3600; the default is 5.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingWatch {
    /// Off: nothing wakes an idle VM.
    Off,
    /// On: the VMM reads the rings once a second.
    On {
        /// Seconds, at most [`RingWatch::MAX`].
        alarm_after: NonZeroU16,
    },
}

/// Neither `off` nor a valid number of seconds.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}: give off, or 1 to {max} seconds", max = RingWatch::MAX)]
pub struct RingWatchError(String);

impl RingWatch {
    /// The longest time, in seconds.
    pub const MAX: u16 = 3600;

    /// The time until a stuck queue raises an alarm; `None`: the watch is off.
    #[must_use]
    pub fn threshold(self) -> Option<Duration> {
        match self {
            Self::Off => None,
            Self::On { alarm_after } => Some(Duration::from_secs(alarm_after.get().into())),
        }
    }
}

impl Default for RingWatch {
    fn default() -> Self {
        const FIVE: NonZeroU16 = NonZeroU16::MIN.saturating_add(4);
        Self::On { alarm_after: FIVE }
    }
}

impl TryFrom<u64> for RingWatch {
    type Error = RingWatchError;

    fn try_from(seconds: u64) -> Result<Self, RingWatchError> {
        let fit = u16::try_from(seconds).ok().filter(|&fit| fit <= Self::MAX);
        fit.and_then(NonZeroU16::new)
            .map(|alarm_after| Self::On { alarm_after })
            .ok_or_else(|| RingWatchError(seconds.to_string()))
    }
}

impl FromStr for RingWatch {
    type Err = RingWatchError;

    fn from_str(text: &str) -> Result<Self, RingWatchError> {
        if text.eq_ignore_ascii_case("off") {
            return Ok(Self::Off);
        }
        let seconds = text.strip_suffix('s').unwrap_or(text).parse::<u64>();
        Self::try_from(seconds.map_err(|_| RingWatchError(format!("{text:?}")))?)
    }
}

impl fmt::Display for RingWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::On { alarm_after } => alarm_after.fmt(f),
        }
    }
}

impl Serialize for RingWatch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_str("off"),
            Self::On { alarm_after } => serializer.serialize_u16(alarm_after.get()),
        }
    }
}

impl<'de> Deserialize<'de> for RingWatch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OffOrSeconds;

        impl Visitor<'_> for OffOrSeconds {
            type Value = RingWatch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"off\", or a number of seconds")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<RingWatch, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, seconds: u64) -> Result<RingWatch, E> {
                seconds.try_into().map_err(E::custom)
            }

            // TOML's numbers are signed.
            fn visit_i64<E: de::Error>(self, seconds: i64) -> Result<RingWatch, E> {
                let seconds = u64::try_from(seconds);
                let seconds = seconds.map_err(|_| de::Error::custom("less than no seconds"));
                self.visit_u64(seconds?)
            }
        }

        deserializer.deserialize_any(OffOrSeconds)
    }
}
