//! `/v1/nics`: NICs that `bellhop nic create` or this daemon created, from their records.

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::KernelErrors;
use bellhop_common::listing::Listing;
use bellhop_common::management::nic;
use vdpa_mgmt::nic::Store;

use super::listings::HostNicListing;
use super::state::Api;
use crate::error::Error;

/// List NICs
///
/// NICs that `bellhop nic make` or the daemon created, also incomplete ones, as `bellhop nic list
/// -j`.
#[utoipa::path(get, path = "/v1/nics", operation_id = "list_nics", responses(
    (status = 200, description = "All NICs", body = HostNicListing),
    KernelErrors,
))]
pub(super) async fn list(State(node): Api) -> Result<Json<Listing>, Error> {
    let directory = node.paths.nics();
    let list = move || {
        let nics = Store::open(&directory)?.nics()?;
        Ok::<_, Error>(nic::listing(&nics)?)
    };
    Ok(Json(node.turns.run(list).await?))
}
