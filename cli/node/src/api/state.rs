//! The state that the endpoints share.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use bellhop_api::node::Role;

use crate::context::Node;

/// The state that every handler receives.
pub(super) type Api = axum::extract::State<Arc<Node>>;

/// The role of a request's sender, which selects its share of a budget.
#[derive(Debug, Clone, Copy)]
pub(super) struct SenderRole(pub(super) Role);

impl<S: Sync> FromRequestParts<S> for SenderRole {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        // Access control adds it to every request.
        let role = parts.extensions.get().copied();
        Ok(Self(role.unwrap_or(Role::Read)))
    }
}
