//! The name of a virtual machine in the path.

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::error::Error;
use crate::machines::spec::{VmName, bad_vm_name};

/// The name of a virtual machine in the path.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct VmPath {
    /// The virtual machine's name
    #[param(value_type = String, pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
    pub(super) name: VmName,
}

impl<S: Send + Sync> FromRequestParts<S> for VmPath {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        /// Whatever else is in the path.
        #[derive(Deserialize)]
        struct Name {
            name: String,
        }
        let path = Path::from_request_parts(parts, state).await;
        let Path(Name { name }) = path.map_err(|_| bad_vm_name())?;
        Ok(Self {
            name: name.parse()?,
        })
    }
}
