//! A request's body: limited in size and time, JSON, and nothing unknown in it.
//!
//! The content type is not looked at: there is only one.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::header::CONTENT_LENGTH;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::Deserialize as _;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::error::ApiError;

/// The largest body, in bytes: a machine with many devices has some KiB.
pub(super) const BODY_MAX: usize = 64 * 1024;
/// How long a body may take to come.
pub(super) const BODY_TIME: Duration = Duration::from_secs(10);

/// The body as a `T`.
#[derive(Debug)]
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> Result<Self, ApiError> {
        let declared = request.headers().get(CONTENT_LENGTH);
        let declared = declared
            .and_then(|length| length.to_str().ok())
            .and_then(|length| length.parse::<usize>().ok());
        if declared.is_some_and(|length| length > BODY_MAX) {
            return Err(ApiError::TooLarge);
        }
        let bytes = tokio::time::timeout(BODY_TIME, receive(request.into_body()))
            .await
            .map_err(|_| ApiError::TooSlow)??;
        parse(&bytes).map(Self)
    }
}

async fn receive(body: Body) -> Result<Vec<u8>, ApiError> {
    match Limited::new(body, BODY_MAX).collect().await {
        Ok(collected) => Ok(collected.to_bytes().into()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::TooLarge),
        Err(error) => Err(ApiError::Receive(axum::Error::new(error))),
    }
}

/// Reads all of `bytes` as JSON.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // First whether it is JSON at all: so that a mistake in its form is not taken for a missing field.
    let mut whole = serde_json::Deserializer::from_slice(bytes);
    IgnoredAny::deserialize(&mut whole)
        .and_then(|_| whole.end())
        .map_err(ApiError::Malformed)?;
    let mut json = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        ApiError::Invalid {
            at: if path == "." {
                String::new()
            } else {
                format!(" at {path}")
            },
            reason: error.into_inner().to_string(),
        }
    })
}
