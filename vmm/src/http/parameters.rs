//! The validated parameters in a request's URL.

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use bellhop_api::node::DeviceId;
use serde::de::DeserializeOwned;

use super::problem::HttpError;

/// The name of a device in the path: 1 to 64 letters, digits, `.`, `_`, `:` or `-`; not `.` or `..`
#[derive(Debug)]
pub struct DeviceName(
    /// The decoded name.
    pub String,
);

impl<S: Send + Sync> FromRequestParts<S> for DeviceName {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let PathParameters(name) =
            PathParameters::<String>::from_request_parts(parts, state).await?;
        match name.parse::<DeviceId>() {
            Ok(_) => Ok(Self(name)),
            Err(error) => Err(HttpError::Parameter(error.to_string())),
        }
    }
}

/// The parameters in the path.
#[derive(Debug)]
pub struct PathParameters<T>(
    /// The decoded parameters.
    pub T,
);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParameters<T> {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(Self(value)),
            Err(error) => Err(HttpError::Parameter(error.body_text())),
        }
    }
}

/// The part of the URL behind the question mark.
#[derive(Debug)]
pub struct Parameters<T>(
    /// The decoded parameters.
    pub T,
);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(Self(value)),
            Err(error) => Err(HttpError::Parameter(error.body_text())),
        }
    }
}
