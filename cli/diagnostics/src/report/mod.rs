//! A bundle for a support ticket: data about this host, its devices and its VMs, in one `.tar.gz`.
//!
//! Each source is one file with a function that adds to the [`Bundle`]; `SOURCES` is the list of
//! them. If a part cannot be collected, `errors.txt` has the reason and the other parts follow,
//! because people need a bundle when something does not work. Sources change nothing, open no vDPA
//! device, and wait for a limited time. Their files contain no secrets: tokens and keys are in
//! files that no source opens.

mod bundle;
mod context;
mod devices;
mod host;
mod logs;
mod machines;

use std::time::{SystemTime, UNIX_EPOCH};

pub use bundle::Bundle;
pub use context::Context;

type Source = fn(&Context, &mut Bundle);

/// The sources of parts, in order.
const SOURCES: [Source; 4] = [host::add, devices::add, machines::add, logs::add];

/// Collects all parts.
#[must_use]
pub fn collect(context: &Context, now: SystemTime) -> Bundle {
    let time = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut bundle = Bundle::new(time);
    for source in SOURCES {
        source(context, &mut bundle);
    }
    bundle
}

#[cfg(test)]
mod tests;
