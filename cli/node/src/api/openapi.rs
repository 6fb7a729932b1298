//! `/v1/openapi.json`: the description of all this, made of the code that serves it.

use std::sync::OnceLock;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use vmm::http::description;

use crate::access;

/// The description; a copy is in the repository, and a test compares them.
pub(super) fn document() -> &'static str {
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    DOCUMENT.get_or_init(|| {
        let (_, mut registered) = super::registered().split_for_parts();
        access::describe(&mut registered);
        description::text(&registered)
    })
}

/// The description of this API, OpenAPI 3.1
#[utoipa::path(get, path = "/v1/openapi.json", operation_id = "get_openapi", responses(
    (status = 200, description = "The description", body = serde_json::Value),
))]
pub(super) async fn show() -> Response {
    ([(CONTENT_TYPE, "application/json")], document()).into_response()
}
