//! The names of a VM and of its devices in the path.

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use bellhop_api::node::BadDeviceId;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::error::Error;
use crate::machines::spec::{DeviceId, VmName, bad_vm_name};

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
        /// The VM's name; other parts of the path are ignored.
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

/// The names of a virtual machine and of one of its NICs or disks in the path.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct DevicePath {
    /// The virtual machine's name
    #[param(value_type = String, pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
    pub(super) name: VmName,
    /// The name of the NIC or disk
    #[param(value_type = String, pattern = "^[A-Za-z0-9._:-]{1,64}$")]
    pub(super) id: DeviceId,
}

impl DevicePath {
    /// Checks the name in a body, which may be omitted.
    pub(super) fn check(&self, in_body: Option<&str>) -> Result<(), Error> {
        let id = &self.id;
        if in_body.is_none_or(|given| given == id.as_str()) {
            return Ok(());
        }
        let message =
            format!("the path has the id {id}, but the body another one: omit it in the body");
        Err(Error::invalid(message))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for DevicePath {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let names = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((name, id)) = names.map_err(|_| BadDeviceId)?;
        Ok(Self {
            name: name.parse()?,
            id: id.parse()?,
        })
    }
}
