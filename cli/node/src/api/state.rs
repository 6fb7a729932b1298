//! The state that the endpoints share.

use std::sync::Arc;

use crate::context::Node;

/// What every endpoint's handler gets.
pub(super) type Api = axum::extract::State<Arc<Node>>;
