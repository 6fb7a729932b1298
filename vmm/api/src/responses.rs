//! Error responses that many endpoints share, for their descriptions.
//!
//! An endpoint names two groups: one for its request, one for its work. A response that follows a
//! group replaces the group's text for the same status.

use std::collections::BTreeMap;

use utoipa::IntoResponses;
use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};

use crate::PROBLEM_JSON;

/// A response with an [`ErrorBody`](crate::ErrorBody).
#[must_use]
pub fn error(description: &str) -> RefOr<Response> {
    let body = Content::new(Some(Ref::from_schema_name("ErrorBody")));
    let response = ResponseBuilder::new().description(description);
    response.content(PROBLEM_JSON, body).build().into()
}

/// Defines groups: the groups that each includes, and its own statuses.
macro_rules! groups {
    ($(
        $(#[$doc:meta])*
        $group:ident $(: $($part:ident),+)? { $($status:literal => $description:literal,)* }
    )+) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $group;

        impl IntoResponses for $group {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                let mut responses = BTreeMap::new();
                $($(responses.extend($part::responses());)+)?
                responses.extend([
                    $((stringify!($status).to_owned(), error($description)),)*
                ]);
                responses
            }
        }
    )+};
}

groups! {
    /// Of a request with a body.
    BodyErrors {
        400 => "The body is not JSON",
        408 => "The body did not arrive in time",
        413 => "The body is too large",
        422 => "Invalid body: an unknown member or invalid value, or a named object is unusable",
    }

    /// Of a request with a name in its path.
    NameErrors {
        400 => "Invalid name",
        404 => "Not found",
    }

    /// Of a request with a body, which creates the object that the path names.
    NamedBodyErrors: BodyErrors {
        400 => "Invalid name, or the body is not JSON",
    }

    /// Of a request with a body, for an object or parts of it that exist.
    NamedChangeErrors: NamedBodyErrors {
        404 => "Not found: the object, or one that the body names",
    }

    /// Of a request that waits for changes.
    WatchErrors {
        400 => "Invalid or unknown parameter",
        503 => "Too many clients wait",
    }

    /// Of a request to a machine.
    StateErrors {
        409 => "The state of the machine, or of one of its devices, does not allow it",
    }

    /// Of a request that a machine answers.
    BusyErrors: StateErrors {
        503 => "Too many requests wait, or this process is about to exit",
    }

    /// Of a request that a machine and its host execute.
    HostErrors: BusyErrors {
        500 => "Internal error: the host failed",
    }

    /// Of a request about a machine's last migration.
    MigrationErrors {
        404 => "Not found: there was no migration",
        409 => "The state of the migration, or of the machine, does not allow it",
    }

    /// Of a request to the node daemon that the kernel answers.
    KernelErrors {
        409 => "Conflict: in use, a driver or right is missing, or the kernel refused the request",
        500 => "Internal error: the kernel sent an invalid response, or a file of it is invalid",
        503 => "The kernel does not respond, or too many requests wait",
    }

    /// Of a request to the node daemon that a machine's process answers.
    ProxyErrors {
        409 => "The state of the machine, or of one of its devices, does not allow it",
        502 => "The process of the machine does not respond",
        503 => "Too many requests wait, or a process is about to exit",
        504 => "The process of the machine does not respond in time",
    }

    /// Of a request to the node daemon that a machine's process and the host carry out.
    ProcessErrors: ProxyErrors {
        500 => "Internal error: the host failed",
    }
}
