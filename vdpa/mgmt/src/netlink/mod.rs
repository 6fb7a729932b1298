//! Generic netlink and rtnetlink: one exchange after the other, on a thread of its own.
//!
//! ```text
//!   caller ── Request ──> Worker (thread "netlink") ──> Socket ──> kernel
//!          <── messages or refusal ── Exchange <── datagrams ──┘
//! ```
//!
//! `message` is the wire format, `error` tells why there is no answer, `exchange` decides from datagrams when an answer is
//! complete (it does no I/O, so hostile answers are tested without a kernel), `socket` is
//! the file descriptor, `worker` the thread. The crate netlink-packet-core gives headers,
//! errors and attribute iteration; it has no dependencies. Must not know any family
//! but the controller that gives families their numbers, nor any link.

pub(super) mod attributes;
pub(super) mod error;
pub(super) mod exchange;
pub(super) mod family;
pub(super) mod message;
pub(super) mod socket;
pub(super) mod worker;
