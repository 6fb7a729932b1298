//! OpenAPI descriptions: how they are written.
//!
//! Owns the text's form. It must not know what is described.

use axum::Router;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;

/// The text that is served, and is in the repository: pretty-printed JSON with a line's end.
#[must_use]
pub fn text(description: &OpenApi) -> String {
    // Maps with keys of text can always be written.
    let mut text = serde_json::to_string_pretty(description).unwrap_or_default();
    text.push('\n');
    text
}

/// The endpoints alone. Their description has been made with them, in many small
/// pieces of memory, and is seldom asked for: it is dropped, and its pages (a megabyte) are given
/// back to the kernel.
pub fn endpoints_alone<S: Clone + Send + Sync + 'static>(
    registered: OpenApiRouter<S>,
) -> Router<S> {
    let (router, description) = registered.split_for_parts();
    drop(description);
    // SAFETY: needed because the standard library has no way to say so: glibc keeps what a thread
    // other than the main one has freed. The call takes the allocator's own locks, moves nothing
    // that is in use, and its argument is the number of bytes to keep at the end of the heap.
    unsafe { libc::malloc_trim(0) };
    router
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;
