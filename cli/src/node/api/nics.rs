//! `/v1/nics`: NICs that `bellhop nic make` or this daemon made, from their records.

use axum::Json;
use axum::extract::State;
use vdpa_mgmt::nic::Store;
use vmm::http::ErrorBody;

use super::Api;
use crate::commands::nic;
use crate::listing::Listing;
use crate::node::error::Error;

/// NICs that were made here, those that are half made, too
#[utoipa::path(get, path = "/v1/nics", operation_id = "list_nics", responses(
    (status = 200, description = "As `bellhop nic list -j`: `{\"nic\": {NAME: …}}`", body = serde_json::Value),
    (status = 409, description = "The daemon may not ask, or vDPA is gone from this host", body = ErrorBody),
    (status = 500, description = "A record cannot be read, or the kernel's answer makes no sense", body = ErrorBody),
    (status = 503, description = "The kernel does not answer, or too many requests wait", body = ErrorBody),
))]
pub(super) async fn list(State(node): Api) -> Result<Json<Listing>, Error> {
    let directory = node.paths.nics();
    let list = move || {
        let nics = Store::open(&directory)?.nics()?;
        Ok::<_, Error>(nic::listing(&nics)?)
    };
    Ok(Json(node.turns.run(list).await?))
}
