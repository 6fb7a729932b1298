//! What every HTTP API of Bellhop's has in common: the machine's ([`crate::api`]) and the node
//! daemon's.
//!
//! Owns the limits on what a client may take ([`server`]), the socket's file ([`socket`]), bodies
//! and URLs ([`body`], [`parameters`]) and open files that come along ([`descriptors`]). Owns also
//! the form of errors ([`problem`]), descriptions ([`description`]), metrics ([`metrics`]), the ID
//! of each request ([`request_id`]), what a request may carry ([`request_rules`]) and the client's
//! side ([`client`]). It must not know the content of requests, nor machines.
//!
//! ```text
//!   Transport ──> server: slots, times, sizes ──> request_id ──> the API's router ─┐
//!     peer ───────────── request extension ──────────────────────────────^         v
//!                            endpoints <── request_rules: parameters, headers, content type
//!                                └──> Problem ──> ErrorBody, with the request's name
//! ```

pub mod body;
pub mod client;
pub mod description;
pub mod descriptors;
pub mod metrics;
pub mod parameters;
pub mod problem;
pub mod request_id;
pub mod request_rules;
pub mod server;
pub mod socket;
mod worker;

use axum::Router;
use axum::extract::Request;
use axum::middleware;

pub use bellhop_api::ErrorBody;
pub use problem::{HttpError, Problem};
pub use worker::on_worker;

/// `router` with what surrounds the endpoints of every API: a name for each request, and answers
/// to paths and methods that there are not.
pub fn surround<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    named(complete(router))
}

/// `router` with answers to paths and methods that there are not. What is laid around the result
/// sees these requests as well.
pub fn complete<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    router
        .fallback(no_such_path)
        .method_not_allowed_fallback(method_not_allowed)
}

/// `router` with a name for each request: the outermost layer, for it makes the bodies of errors.
pub fn named<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    router.layer(middleware::from_fn(request_id::name))
}

async fn no_such_path(request: Request) -> HttpError {
    HttpError::NoSuchPath(request.uri().path().to_owned())
}

async fn method_not_allowed(request: Request) -> HttpError {
    HttpError::Method {
        path: request.uri().path().to_owned(),
        method: request.method().to_string(),
    }
}
