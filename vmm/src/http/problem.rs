//! Errors for clients.
//!
//! Owns the body, and the errors that every API has. Each API defines the statuses of its own
//! errors ([`Problem`]).

use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use bellhop_api::{ErrorBody, ErrorCode, FieldError};

use super::server::{BODY_MAX, BODY_TIME};

/// An error that is sent to a client.
pub trait Problem: std::error::Error {
    /// The status and the error code.
    fn kind(&self) -> (StatusCode, &'static str);

    /// The remedy, if the message does not contain it.
    fn hint(&self) -> Option<&'static str>;

    /// The invalid members of the body.
    fn fields(&self) -> Vec<FieldError> {
        Vec::new()
    }

    /// The body, without the ID of the request.
    fn to_body(&self) -> ErrorBody
    where
        Self: Sized,
    {
        let (status, code) = self.kind();
        let mut causes = Vec::new();
        let mut cause = self.source();
        while let Some(error) = cause {
            causes.push(error.to_string());
            cause = error.source();
        }
        let message = self.to_string();
        ErrorBody {
            kind: format!("urn:bellhop:error:{code}"),
            title: ErrorCode::of(code).title(),
            status: status.as_u16(),
            detail: message.clone(),
            code: code.to_owned(),
            message,
            causes,
            hint: self.hint().map(str::to_owned),
            errors: self.fields(),
            ..ErrorBody::default()
        }
    }

    /// The response. Its body travels as an extension until the request's ID is known: see
    /// [`super::request_id`].
    fn to_response(&self) -> Response
    where
        Self: Sized,
    {
        let mut response = self.kind().0.into_response();
        response.extensions_mut().insert(self.to_body());
        response
    }
}

/// Errors of a request that are independent of its endpoint.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// There is no such route.
    #[error("there is no {0} here")]
    NoSuchPath(String),
    /// The route does not have this method.
    #[error("{path} does not support the method {method}")]
    Method {
        /// The path.
        path: String,
        /// The method.
        method: String,
    },
    /// Not JSON, or not UTF-8.
    #[error("the body is not JSON")]
    Malformed(#[source] serde_json::Error),
    /// JSON with an invalid value.
    #[error("the body is invalid{}: {reason}", place(at))]
    Invalid {
        /// The position in the body as a JSON pointer: `/vdpa/0/mac`.
        at: String,
        /// The reason.
        reason: String,
    },
    /// An invalid part of the URL.
    #[error("{0}")]
    Parameter(String),
    /// A query parameter that the operation does not have.
    #[error("the query parameter {name:?} is unknown; {}", alternatives(.known))]
    UnknownParameter {
        /// The name of the parameter.
        name: String,
        /// The operation's parameters, separated by commas.
        known: String,
    },
    /// A body of another type, or of none.
    #[error("the body's content type is not JSON")]
    ContentType,
    /// A conditional header that the operation does not evaluate.
    #[error("this operation does not support the header {0}")]
    Condition(HeaderName),
    /// The request has an `Origin`, which only browsers send.
    #[error("requests from browsers are rejected: this one has the header origin")]
    Browser,
    /// A body that is too large.
    #[error("the body has more than {BODY_MAX} bytes")]
    TooLarge,
    /// A body that did not arrive in time.
    #[error("the body did not arrive within {} s", BODY_TIME.as_secs())]
    TooSlow,
    /// A body that ended early.
    #[error("the body could not be received")]
    Receive(#[source] axum::Error),
    /// A worker failed.
    #[error("the request was not finished")]
    Worker(#[source] tokio::task::JoinError),
}

fn alternatives(known: &str) -> String {
    if known.is_empty() {
        "the operation has none".to_owned()
    } else {
        format!("known: {known}")
    }
}

impl Problem for HttpError {
    fn kind(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NoSuchPath(_) => (StatusCode::NOT_FOUND, "no_such_path"),
            Self::Method { .. } => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::Malformed(_) => (StatusCode::BAD_REQUEST, "malformed_body"),
            Self::Receive(_) => (StatusCode::BAD_REQUEST, "incomplete_body"),
            Self::Parameter(_) => (StatusCode::BAD_REQUEST, "bad_parameter"),
            Self::UnknownParameter { .. } => (StatusCode::BAD_REQUEST, "unknown_parameter"),
            Self::ContentType => (
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "unsupported_content_type",
            ),
            Self::Condition(_) => (StatusCode::PRECONDITION_FAILED, "unsupported_condition"),
            Self::Browser => (StatusCode::FORBIDDEN, "browser_refused"),
            Self::Invalid { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            Self::TooSlow => (StatusCode::REQUEST_TIMEOUT, "body_too_slow"),
            Self::Worker(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        }
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoSuchPath(_) | Self::Method { .. } | Self::Invalid { .. } => {
                Some("GET /v1/openapi.json describes all paths")
            }
            Self::ContentType => Some(
                "send the header `content-type: application/json`; PATCH also takes \
                 `application/merge-patch+json`",
            ),
            Self::Condition(_) => Some("send the request without it; nothing has changed"),
            Self::Browser => Some("send the request without it, from a client outside a browser"),
            _ => None,
        }
    }

    fn fields(&self) -> Vec<FieldError> {
        match self {
            Self::Invalid { at, reason } => vec![FieldError {
                pointer: at.clone(),
                detail: reason.clone(),
            }],
            _ => Vec::new(),
        }
    }
}

/// A JSON pointer for people: ` at vdpa[0].mac`.
fn place(pointer: &str) -> String {
    let mut place = String::new();
    for name in pointer.split('/').skip(1) {
        if name.parse::<usize>().is_ok() {
            place.extend(["[", name, "]"]);
        } else {
            place.extend([if place.is_empty() { " at " } else { "." }, name]);
        }
    }
    place
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        self.to_response()
    }
}
