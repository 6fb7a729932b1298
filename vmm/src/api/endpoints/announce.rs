//! `/v1/vm/nics/{id}/announce`.

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::responses::{BusyErrors, NameErrors};

use super::state::Api;
use crate::api::error::ApiError;
use crate::http::parameters::DeviceName;

/// Announce a NIC
///
/// Asks the guest to announce its address on this NIC, as after a migration (virtio 1.3,
/// 5.1.6.5.4). The guest does so later, by itself.
#[utoipa::path(post, path = "/v1/vm/nics/{id}/announce", operation_id = "announce_nic",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The NIC's name")), responses(
    (status = 204, description = "The guest is asked"),
    NameErrors, BusyErrors,
))]
pub(super) async fn announce(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<StatusCode, ApiError> {
    api.ask(move |machine| machine.announce(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}
