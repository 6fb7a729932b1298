//! `/v1/doctor`: whether this host is ready for VMs on vDPA NICs.

use axum::Json;
use axum::extract::State;
use bellhop_diagnostics::doctor::{self, Host, Report};
use vmm::http::ErrorBody;

use super::listings::DoctorReport;
use super::state::{Api, SenderRole};
use crate::error::Error;

/// Check the host
///
/// Whether it is ready for virtual machines on vDPA NICs, and the commands that fix it, as `bellhop
/// doctor -o json`. Permissions are those of the daemon. Nothing is changed or opened.
#[utoipa::path(get, path = "/v1/doctor", operation_id = "get_doctor", responses(
    (status = 200, description = "The findings", body = DoctorReport),
    (status = 503, description = "Too many requests wait", body = ErrorBody),
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
) -> Result<Json<Report>, Error> {
    let check = || Ok::<_, Error>(doctor::report(&Host::this()));
    Ok(Json(node.kernel_permits.run(role, check).await?))
}
