//! OpenAPI descriptions: how they are written.
//!
//! Owns the text's form. It must not know what is described.

use axum::Router;
use axum::http::Method;
use utoipa::openapi::OpenApi;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa_axum::router::OpenApiRouter;

use super::request_rules::RequestRules;

/// The text that is served, and is in the repository: pretty-printed JSON with a line's end.
#[must_use]
pub fn text(description: &OpenApi) -> String {
    // Maps with keys of text can always be written.
    let mut text = serde_json::to_string_pretty(description).unwrap_or_default();
    text.push('\n');
    text
}

/// The operations of one path.
pub fn operations(item: &mut PathItem) -> impl Iterator<Item = (Method, &mut Operation)> {
    [
        (Method::GET, &mut item.get),
        (Method::PUT, &mut item.put),
        (Method::POST, &mut item.post),
        (Method::DELETE, &mut item.delete),
        (Method::OPTIONS, &mut item.options),
        (Method::HEAD, &mut item.head),
        (Method::PATCH, &mut item.patch),
        (Method::TRACE, &mut item.trace),
    ]
    .into_iter()
    .filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// The endpoints and the rules for their requests. Their description has been made with them, in
/// many small pieces of memory, and is seldom asked for: it is dropped, and its pages (a megabyte)
/// are given back to the kernel.
pub fn endpoints_and_rules<S: Clone + Send + Sync + 'static>(
    registered: OpenApiRouter<S>,
) -> (Router<S>, RequestRules) {
    let (router, mut description) = registered.split_for_parts();
    let rules = RequestRules::of(&mut description);
    drop(description);
    // SAFETY: needed because the standard library has no way to say so: glibc keeps what a thread
    // other than the main one has freed. The call takes the allocator's own locks, moves nothing
    // that is in use, and its argument is the number of bytes to keep at the end of the heap.
    unsafe { libc::malloc_trim(0) };
    (router, rules)
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;
