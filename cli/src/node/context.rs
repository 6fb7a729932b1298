//! What every endpoint gets.

use std::sync::Arc;

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
    /// Its virtual machines.
    pub(super) machines: Machines,
}
