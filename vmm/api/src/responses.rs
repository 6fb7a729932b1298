//! Refusals that many endpoints have in common, for their descriptions.
//!
//! A group stands among an endpoint's responses; one that is written behind it says more of the same
//! status.

use utoipa::IntoResponses;

use crate::ErrorBody;

/// Of a request with a body.
#[derive(Debug, IntoResponses)]
pub enum BodyErrors {
    /// The body is not JSON
    #[response(status = 400)]
    Malformed(ErrorBody),
    /// The body did not come in time
    #[response(status = 408)]
    TooSlow(ErrorBody),
    /// The body is too large
    #[response(status = 413)]
    TooLarge(ErrorBody),
    /// An unknown field or a wrong value, named
    #[response(status = 422)]
    Invalid(ErrorBody),
}

/// Of a request with a name in its path and a body.
#[derive(Debug, IntoResponses)]
pub enum NamedBodyErrors {
    /// Not a name, or the body is not JSON
    #[response(status = 400)]
    Malformed(ErrorBody),
    /// The body did not come in time
    #[response(status = 408)]
    TooSlow(ErrorBody),
    /// The body is too large
    #[response(status = 413)]
    TooLarge(ErrorBody),
    /// An unknown field or a wrong value, named
    #[response(status = 422)]
    Invalid(ErrorBody),
}

/// Of a request with a name in its path.
#[derive(Debug, IntoResponses)]
pub enum NameErrors {
    /// Not a name
    #[response(status = 400)]
    NotAName(ErrorBody),
    /// There is none of this name
    #[response(status = 404)]
    NotThere(ErrorBody),
}

/// Of a request to a machine that its host has to carry out.
#[derive(Debug, IntoResponses)]
pub enum HostErrors {
    /// The host cannot do it
    #[response(status = 500)]
    Failed(ErrorBody),
    /// Too many requests wait
    #[response(status = 503)]
    Busy(ErrorBody),
}

/// Of a request to the node daemon that the kernel answers.
#[derive(Debug, IntoResponses)]
pub enum KernelErrors {
    /// The kernel's answer makes no sense
    #[response(status = 500)]
    Malformed(ErrorBody),
    /// The kernel does not answer, or too many requests wait
    #[response(status = 503)]
    Busy(ErrorBody),
}

/// Of a request to the node daemon that a machine's process carries out.
#[derive(Debug, IntoResponses)]
pub enum ProcessErrors {
    /// The host failed at it
    #[response(status = 500)]
    Failed(ErrorBody),
    /// The machine's process does not answer
    #[response(status = 502)]
    NoAnswer(ErrorBody),
    /// This daemon ends, or the machine's process does
    #[response(status = 503)]
    Ending(ErrorBody),
    /// The machine's process does not answer in time
    #[response(status = 504)]
    NotInTime(ErrorBody),
}
