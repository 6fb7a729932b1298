//! The state that the endpoints share.

use std::sync::Arc;

use crate::api::controller::Controller;

/// The argument of a handler that uses the VM.
pub(super) type Api = axum::extract::State<Arc<Controller>>;
