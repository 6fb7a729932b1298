//! The error type of the node daemon: a kind for code, a message with the remedy for the user, and
//! the answer to clients.

use std::error::Error as StdError;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bellhop_api::FieldError;
use vmm::http::{HttpError, Problem};

/// The cases that code distinguishes. The error's text has the rest.
#[derive(Debug)]
pub(crate) enum ErrorKind {
    /// The answer to the client: the status, and the error code.
    Answer(StatusCode, &'static str),
    /// A VM's process does not listen on its socket.
    NotListening,
    /// A VM's process refused the request: the status, and the error code.
    Refused(StatusCode, &'static str),
    /// Another node's daemon refused the VM: its reason and its remedy.
    RefusedThere(String, Option<String>),
    /// Another node's daemon may have carried out the request: the error code.
    UnclearThere(&'static str),
    /// The VM arrived, or may have.
    HasCome,
}

/// A failure of the host: the client cannot change it.
pub(crate) const HOST_FAILED: ErrorKind =
    ErrorKind::Answer(StatusCode::INTERNAL_SERVER_ERROR, "host_failed");
/// An object that the client named cannot be used.
pub(crate) const UNUSABLE: ErrorKind =
    ErrorKind::Answer(StatusCode::UNPROCESSABLE_ENTITY, "unusable");

/// A conflict with the current state of the host or the VM.
pub(crate) const fn conflict(code: &'static str) -> ErrorKind {
    ErrorKind::Answer(StatusCode::CONFLICT, code)
}

vdpa::opaque_error! {
    /// A failed request or step. The text is a sentence that names the remedy.
    pub(crate)
}

impl Error {
    /// The kind, for decisions in code.
    pub(crate) fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// A failure of the host.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(HOST_FAILED, message)
    }

    /// For `map_err`: a failure of the host with its source.
    pub(crate) fn context<E>(message: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        move |source| Self::failed(message).because(source)
    }

    /// An error with this answer.
    pub(crate) fn answered(
        status: StatusCode,
        code: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self::new(ErrorKind::Answer(status, code), message)
    }

    /// A conflict with the current state of the host or the VM.
    pub(crate) fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(conflict(code), message)
    }

    /// The request cannot be served now.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self::answered(StatusCode::SERVICE_UNAVAILABLE, code, message)
    }

    /// A value that the client gave is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::answered(StatusCode::UNPROCESSABLE_ENTITY, "invalid_body", message)
    }

    /// For `map_err`: the failure of a larger operation, with the answer of its source.
    pub(crate) fn wrap(message: impl Into<String>) -> impl FnOnce(Self) -> Self {
        move |source| {
            let (status, code) = source.answer();
            let kind = if matches!(source.kind(), ErrorKind::Refused(..)) {
                ErrorKind::Refused(status, code)
            } else {
                ErrorKind::Answer(status, code)
            };
            Self::new(kind, message).because(source)
        }
    }

    /// Whether a VM's process does not listen on its socket.
    pub(crate) fn is_not_listening(&self) -> bool {
        matches!(self.kind(), ErrorKind::NotListening)
    }

    /// Whether a VM's process refused the request with this status.
    pub(crate) fn is_refused(&self, with: StatusCode) -> bool {
        matches!(self.kind(), ErrorKind::Refused(status, _) if *status == with)
    }

    /// The status and the error code.
    pub(crate) fn answer(&self) -> (StatusCode, &'static str) {
        match *self.kind() {
            ErrorKind::Answer(status, code) | ErrorKind::Refused(status, code) => (status, code),
            ErrorKind::NotListening => (StatusCode::BAD_GATEWAY, "no_answer"),
            ErrorKind::RefusedThere(..) => (StatusCode::CONFLICT, "refused_there"),
            ErrorKind::UnclearThere(code) => (StatusCode::BAD_GATEWAY, code),
            ErrorKind::HasCome => (StatusCode::CONFLICT, "has_come"),
        }
    }
}

impl Problem for Error {
    fn kind(&self) -> (StatusCode, &'static str) {
        self.answer()
    }

    fn hint(&self) -> Option<&'static str> {
        self.remedy()
    }

    fn fields(&self) -> Vec<FieldError> {
        let source = self.0.source.as_deref();
        let source = source.and_then(|source| source.downcast_ref::<HttpError>());
        source.map(HttpError::fields).unwrap_or_default()
    }
}

/// Marks an answer whose status a VM's process has chosen. It says nothing about what the daemon
/// has changed before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OfProcess;

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let mut response = self.to_response();
        if matches!(self.kind(), ErrorKind::Refused(..)) {
            response.extensions_mut().insert(OfProcess);
        }
        response
    }
}

vdpa::error_from!(vmm::Error as error => HOST_FAILED);

impl From<HttpError> for Error {
    fn from(error: HttpError) -> Self {
        let ((status, code), hint) = (error.kind(), error.hint());
        let error = Self::transparent(ErrorKind::Answer(status, code), error);
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}
