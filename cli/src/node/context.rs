//! What every endpoint gets.

use super::events::Events;
use super::paths::Paths;

/// The node.
#[derive(Debug)]
pub(super) struct Node {
    /// Where things are kept.
    pub(super) paths: Paths,
    /// What has happened on the node.
    pub(super) events: Events,
}
