//! What every endpoint gets.

use std::sync::Arc;

use super::api::Turns;
use super::events::Events;
use super::machines::Machines;
use super::paths::Paths;

/// The node.
#[derive(Debug)]
pub(super) struct Node {
    /// Where things are kept.
    pub(super) paths: Paths,
    /// What has happened on the node.
    pub(super) events: Arc<Events>,
    /// Turns of requests to the kernel about NICs, devices and ports.
    pub(super) turns: Turns,
    /// Its virtual machines.
    pub(super) machines: Arc<Machines>,
}
