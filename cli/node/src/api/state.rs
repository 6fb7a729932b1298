//! The state that the endpoints share.

use std::sync::Arc;

use crate::context::Node;

/// The state that every handler receives.
pub(super) type Api = axum::extract::State<Arc<Node>>;
