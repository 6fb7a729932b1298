//! Actions that have no answer: `/v1/vm/power-button`, `/v1/vm/reset`, `/v1/vm/nmi` and
//! `/v1/vm/nics/{id}/announce`.

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::responses::{BusyErrors, HostErrors, NameErrors};

use super::state::Api;
use crate::api::error::ApiError;
use crate::http::parameters::DeviceName;

/// Press the power button
///
/// Asks the guest to shut down, by ACPI. Once it has powered off, the state is Stopped and this
/// process exits.
#[utoipa::path(post, path = "/v1/vm/power-button", operation_id = "press_power_button", responses(
    (status = 204, description = "The button is pressed"),
    HostErrors,
))]
pub(super) async fn power_button(State(api): Api) -> Result<StatusCode, ApiError> {
    api.ask(|machine| machine.power_button()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Reset the machine
///
/// Resets the machine without asking the guest. It boots again in place; `boots` increases. A
/// paused machine stays paused at its first instruction.
#[utoipa::path(post, path = "/v1/vm/reset", operation_id = "reset_vm", responses(
    (status = 204, description = "The machine resets"),
    HostErrors,
))]
pub(super) async fn reset(State(api): Api) -> Result<StatusCode, ApiError> {
    api.ask(|machine| machine.reset()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Send a non-maskable interrupt
///
/// Sends it to the first vCPU. Linux logs it, or panics with `unknown_nmi_panic`, which helps with
/// a hung guest. A paused vCPU receives it when it resumes.
#[utoipa::path(post, path = "/v1/vm/nmi", operation_id = "send_nmi", responses(
    (status = 204, description = "It is sent"),
    HostErrors,
))]
pub(super) async fn nmi(State(api): Api) -> Result<StatusCode, ApiError> {
    api.ask(|machine| machine.nmi()).await?;
    Ok(StatusCode::NO_CONTENT)
}

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
