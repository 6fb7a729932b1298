//! The common parts of Bellhop's HTTP APIs: the VM's ([`crate::api`]) and the node daemon's.
//!
//! Owns the limits of clients ([`server`], [`budget`]), the socket's file ([`socket`]), bodies and
//! URLs ([`body`], [`parameters`]) and passed open files ([`descriptors`]). Owns also the form of
//! errors ([`problem`]), descriptions ([`description`]), metrics ([`metrics`]) and the ID of each
//! request ([`request_id`]). The rules for requests ([`request_rules`]) and the client ([`client`])
//! are here too. It must not know the content of requests, nor VMs, but for the records of devices
//! in metrics.
//!
//! ```text
//!   Transport ──> server: places, times, sizes ─> request_id ──> the API's router ─┐
//!     peer ───────────── request extension ──────────────────────────────^         v
//!                            endpoints <── request_rules: parameters, headers, content type
//!                                └──> Problem ──> ErrorBody, with the request's ID
//! ```

mod admission;
pub mod body;
pub mod budget;
pub mod client;
pub mod description;
pub mod descriptors;
mod early_answer;
pub mod metrics;
pub mod parameters;
pub mod problem;
pub mod request_id;
pub mod request_rules;
#[cfg(any(test, feature = "testing"))]
pub mod request_text;
pub mod server;
pub mod socket;
mod worker;

use axum::Router;
use axum::extract::Request;
use axum::middleware;

pub use bellhop_api::ErrorBody;
pub use problem::{HttpError, Problem};
pub use worker::on_worker;

/// Adds the common layers of every API to `router`: an ID for each request, and answers for paths
/// and methods that do not exist.
pub fn surround<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    named(complete(router))
}

/// Adds answers for paths and methods that do not exist to `router`. Layers around the result also
/// see these requests.
pub fn complete<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    router
        .fallback(no_such_path)
        .method_not_allowed_fallback(method_not_allowed)
}

/// Adds an ID for each request to `router`: the outermost layer, because it creates the bodies of
/// errors.
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
