//! A bundle for a support ticket: what is known about this host, its devices and its machines, in one
//! `.tar.gz`.
//!
//! Each source is one file with a function that adds to the [`Bundle`]; `SOURCES` is the list of them.
//! A part that cannot be had is said in `errors.txt` with the reason, and the others come all the same:
//! a bundle is asked for when something does not work. Sources change nothing, open no vDPA device, and
//! wait for a limited time. Secrets are not in what they read: tokens and keys are in files that no source
//! opens.

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

/// Where parts come from, in their order.
const SOURCES: [Source; 4] = [host::add, devices::add, machines::add, logs::add];

/// Everything that can be had, as it is now.
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
