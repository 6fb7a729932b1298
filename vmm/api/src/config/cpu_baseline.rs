//! The CPU model of the guest.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

described! {
    /// The guest's CPU model: the host's, or a level of the x86-64 psABI.
    ///
    /// With a level the guest can migrate between different hosts that support it. The names are
    /// those of compilers and of QEMU.
    #[derive(
        Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
    )]
    pub enum CpuBaseline {
        /// As of 2008: up to SSE4.2 and POPCNT.
        #[serde(rename = "x86-64-v2")]
        V2,
        /// As of 2013: AVX2, BMI2, FMA, and AES.
        #[serde(rename = "x86-64-v3")]
        V3,
        /// As of 2017: AVX-512 F, BW, CD, DQ and VL.
        #[serde(rename = "x86-64-v4")]
        V4,
        /// All features of the host's processor that KVM supports.
        #[default]
        #[serde(rename = "host", alias = "Host")]
        Host,
    }
}

/// Not the name of a baseline.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a CPU model: give host, x86-64-v2, x86-64-v3 or x86-64-v4")]
pub struct CpuBaselineError(String);

impl CpuBaseline {
    /// All baselines. Each except [`CpuBaseline::Host`] includes the ones before it.
    pub const ALL: [Self; 4] = [Self::V2, Self::V3, Self::V4, Self::Host];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V2 => "x86-64-v2",
            Self::V3 => "x86-64-v3",
            Self::V4 => "x86-64-v4",
            Self::Host => "host",
        }
    }

    /// Whether the guest sees the host's CPU. Configurations then omit the field, like those of
    /// versions without baselines.
    #[must_use]
    pub fn is_host(&self) -> bool {
        *self == Self::Host
    }
}

impl fmt::Display for CpuBaseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CpuBaseline {
    type Err = CpuBaselineError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut all = Self::ALL.into_iter();
        all.find(|baseline| baseline.name().eq_ignore_ascii_case(text))
            .ok_or_else(|| CpuBaselineError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_same_in_files_and_on_the_command_line() {
        for baseline in CpuBaseline::ALL {
            assert_eq!(baseline.to_string().parse(), Ok(baseline));
            let json = serde_json::to_string(&baseline).unwrap();
            assert_eq!(json, format!("\"{baseline}\""));
            assert_eq!(
                serde_json::from_str::<CpuBaseline>(&json).unwrap(),
                baseline
            );
        }
        let error = "x86-64-v5".parse::<CpuBaseline>().unwrap_err().to_string();
        assert!(
            error.contains("x86-64-v5") && error.contains("x86-64-v2"),
            "{error}"
        );
        for word in ["Host", "HOST", "X86-64-V3"] {
            assert!(word.parse::<CpuBaseline>().is_ok(), "{word}");
        }
        let host = serde_json::from_str::<CpuBaseline>("\"Host\"").unwrap();
        assert!(host.is_host());
    }
}
