//! Probes a device and checks whether it works, for `bellhop probe`.
//!
//! ```text
//!   probe(path) --> Identity        asked, nothing is started
//!               --> [Check]         tried one after the other on the running device:
//!                     start, traffic, doorbell, interrupt, suspend, ring state, resume
//! ```
//! A check that cannot run because an earlier one failed reports that. The module runs the checks;
//! it does not format results.

mod checks;
mod echo;
mod identity;
mod sysfs;

use std::path::Path;

pub use self::checks::{Check, Outcome, ProbeOptions};
pub(crate) use self::checks::{expected_base, send_one, wait};
pub use self::identity::{Feature, Identity};
pub use self::sysfs::Place;
use crate::Error;
use crate::device::Device;

/// The results of a probe.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Report {
    /// The identity that the device reports.
    pub identity: Identity,
    /// The checks, in this order.
    pub checks: Vec<Check>,
}

impl Report {
    /// Whether no check failed.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.checks
            .iter()
            .all(|check| check.outcome != Outcome::Failed)
    }
}

/// Probes the device at `path`, which resets it. `progress` receives the name of each check.
///
/// # Errors
/// The device cannot be opened or queried; later failures are in the report.
pub fn probe(
    path: &Path,
    options: &ProbeOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<Report, Error> {
    let device = Device::open(path)?;
    let ask = |source: Error| Error::other("cannot query the device's description").because(source);
    let (device, iotlb) = device.own().map_err(ask)?;
    let identity = Identity::of(path, &device).map_err(ask)?;
    let checks = checks::all(device, iotlb, &identity, options, progress);
    Ok(Report { identity, checks })
}
