//! The endpoints: one file each, one line here.

mod announce;
mod config;
mod device;
mod disks;
mod metrics;
mod nic;
mod nics;
mod nmi;
mod openapi;
mod power_button;
mod queue_watch;
mod reset;
mod vm;
mod watch;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::controller::Controller;
use super::error::{ApiError, ErrorBody};
use super::request_id;

#[cfg(test)]
pub(super) use openapi::document;

/// What the description has beside the endpoints.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Bellhop, the API of one machine",
        description = "HTTP/1.1 on a Unix socket. Errors have the body `ErrorBody`; every answer has the header `x-request-id`."
    ),
    components(schemas(ErrorBody))
)]
struct Description;

/// What every endpoint's handler gets.
type Api = axum::extract::State<Arc<Controller>>;

fn registered() -> OpenApiRouter<Arc<Controller>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(vm::show, vm::configure, vm::change))
        .routes(routes!(config::show))
        .routes(routes!(watch::wait))
        .routes(routes!(power_button::press))
        .routes(routes!(reset::reset))
        .routes(routes!(nmi::send))
        .routes(routes!(nics::list))
        .routes(routes!(nic::show, nic::put, nic::change, nic::remove))
        .routes(routes!(announce::announce))
        .routes(routes!(disks::list))
        .routes(routes!(metrics::show))
        .routes(routes!(openapi::show))
}

/// All of them, over `controller`.
pub(super) fn router(controller: Arc<Controller>) -> Router {
    let (router, _) = registered().split_for_parts();
    router
        .fallback(no_such_path)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn(request_id::name))
        .with_state(controller)
}

async fn no_such_path(request: Request) -> ApiError {
    ApiError::NoSuchPath(request.uri().path().to_owned())
}

async fn method_not_allowed(request: Request) -> ApiError {
    ApiError::Method {
        path: request.uri().path().to_owned(),
        method: request.method().to_string(),
    }
}

/// Carries out what has to wait for the machine, on a worker thread. It is
/// carried out to its end also if the client goes.
async fn on_worker<T: Send + 'static, E>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, ApiError>
where
    E: Send + 'static,
    ApiError: From<E>,
{
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(ApiError::Worker)??)
}
