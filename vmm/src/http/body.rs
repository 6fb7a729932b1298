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

use super::problem::HttpError;

/// The largest body, in bytes: a machine with many devices has some KiB.
pub const BODY_MAX: usize = 64 * 1024;
/// How long a body may take to come.
pub const BODY_TIME: Duration = Duration::from_secs(10);

/// The body as a `T`.
#[derive(Debug)]
pub struct JsonBody<T>(
    /// What it says.
    pub T,
);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, _state: &S) -> Result<Self, HttpError> {
        let declared = request.headers().get(CONTENT_LENGTH);
        let declared = declared
            .and_then(|length| length.to_str().ok())
            .and_then(|length| length.parse::<usize>().ok());
        if declared.is_some_and(|length| length > BODY_MAX) {
            return Err(HttpError::TooLarge);
        }
        let bytes = tokio::time::timeout(BODY_TIME, receive(request.into_body()))
            .await
            .map_err(|_| HttpError::TooSlow)??;
        parse(&bytes).map(Self)
    }
}

async fn receive(body: Body) -> Result<Vec<u8>, HttpError> {
    match Limited::new(body, BODY_MAX).collect().await {
        Ok(collected) => Ok(collected.to_bytes().into()),
        Err(error) if error.is::<LengthLimitError>() => Err(HttpError::TooLarge),
        Err(error) => Err(HttpError::Receive(axum::Error::new(error))),
    }
}

/// Reads all of `bytes` as JSON.
///
/// # Errors
/// [`HttpError::Malformed`]; [`HttpError::Invalid`], which names the field.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, HttpError> {
    // First whether it is JSON at all: so that a mistake in its form is not taken for a missing field.
    let mut whole = serde_json::Deserializer::from_slice(bytes);
    IgnoredAny::deserialize(&mut whole)
        .and_then(|_| whole.end())
        .map_err(HttpError::Malformed)?;
    let mut json = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        HttpError::Invalid {
            at: if path == "." {
                String::new()
            } else {
                format!(" at {path}")
            },
            reason: error.into_inner().to_string(),
        }
    })
}
