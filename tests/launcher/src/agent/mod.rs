//! The agent: how the lab runs commands in its host.
//!
//! One virtio-serial port carries frames (see [`protocol`]); outside it is a Unix socket. One
//! command runs at a time:
//!
//! ```text
//!   outside                          lab host
//!      │ ───────── Setup ─────────────▶ │  once: mounts, modules
//!      │ ◀──────── Hello ────────────── │  once, at start
//!      │ ───────── Execute ───────────▶ │  starts the child
//!      │ ── Stdin, StdinEnd, Signal, ─▶ │
//!      │    WindowSize                  │
//!      │ ◀─ Stdout, Stderr, ─────────── │
//!      │    StdinTaken                  │
//!      │ ◀───────── Alive ───────────── │  every 10 s: it does not hang
//!      │ ◀──────── Request ──────────── │  a program asks for something
//!      │ ───────── Answer ────────────▶ │  (see [`request`])
//!      │ ◀──────── Exited ───────────── │  ready for the next
//!      │ ───────── PowerOff ──────────▶ │
//! ```

pub mod client;
pub mod protocol;
pub mod request;
pub mod server;
