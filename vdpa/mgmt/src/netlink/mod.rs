//! Generic netlink and rtnetlink: one exchange after the other, on a dedicated thread.
//!
//! ```text
//!   caller ── Request ──> Worker (thread "netlink") ──> Socket ──> kernel
//!          <── messages or refusal ── Exchange <── datagrams ──┘
//! ```
//!
//! `message` has the wire format, `error` the reasons why there is no answer. `exchange` decides
//! from datagrams when an answer is complete; it does no I/O, so hostile answers are tested without
//! a kernel. `socket` is the file descriptor, `worker` the thread. The crate netlink-packet-core
//! provides headers, errors and attribute iteration; it has no dependencies. This module has no
//! code for links or for any family except the controller, which assigns the families' numbers.
//!
//! docs/design/decisions.md has the faults of rtnetlink and netlink-proto that this module avoids.

pub(super) mod attributes;
pub(super) mod error;
pub(super) mod exchange;
pub(super) mod family;
pub(super) mod message;
pub(super) mod socket;
pub(super) mod worker;
