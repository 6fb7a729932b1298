//! What a request says in its URL, checked.

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::error::ApiError;

/// The longest name of a device.
const NAME_MAX: usize = 64;

/// The name of a device in the path: 1 to 64 letters, digits, `.`, `_`, `:` or `-`.
#[derive(Debug)]
pub(super) struct DeviceName(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for DeviceName {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(name) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|error| ApiError::Parameter(error.body_text()))?;
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        if (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(known) {
            Ok(Self(name))
        } else {
            Err(ApiError::Parameter(format!(
                "a device's name has 1 to {NAME_MAX} letters, digits, dots, underscores, colons or hyphens"
            )))
        }
    }
}

/// The part of the URL behind the question mark.
#[derive(Debug)]
pub(super) struct Parameters<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(Self(value)),
            Err(error) => Err(ApiError::Parameter(error.body_text())),
        }
    }
}
