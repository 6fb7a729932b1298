//! What the endpoints of virtual machines have in common: the name in the path, and errors.

use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use utoipa::IntoParams;
use vmm::http::Problem;

use crate::node::machines::error::VmError;
use crate::node::machines::spec::{BadVmName, VmName};

/// An error of a virtual machine, for a client.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) struct ApiError(#[from] VmError);

impl Problem for ApiError {
    fn kind(&self) -> (StatusCode, &'static str) {
        self.0.kind()
    }

    fn hint(&self) -> Option<&'static str> {
        self.0.hint()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.to_response()
    }
}

/// The name of a virtual machine in the path.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct VmPath {
    /// The virtual machine's name
    #[param(value_type = String, pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
    pub(super) name: VmName,
}

impl<S: Send + Sync> FromRequestParts<S> for VmPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        /// Whatever else is in the path.
        #[derive(Deserialize)]
        struct Name {
            name: String,
        }
        let bad = |_| ApiError(VmError::Name(BadVmName));
        let Path(Name { name }) = Path::from_request_parts(parts, state).await.map_err(bad)?;
        let name = name
            .parse()
            .map_err(|error: BadVmName| VmError::Name(error))?;
        Ok(Self { name })
    }
}
