//! Checks the role for every request, and logs each change and each refusal.
//!
//! Owns the audit log: lines of the target `audit`, which are logged at every log level. Each
//! change has its line. `refusals.rs` limits the lines of refused requests.
//!
//! A client that disconnects does not stop its request (`vmm::http::on_worker`), so the line is
//! written in that case, too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::node::Role;
use vmm::http::ErrorBody;
use vmm::http::request_id::{IsLogged, RequestId, shortened};
use vmm::http::server::Admission;

use super::caller::{Peer, refusal};
use super::role;
use super::{Access, Permit};
use crate::error::Error;

/// How long a connection may wait for a place among those of its role.
const PATIENCE: Duration = Duration::from_secs(10);

/// The sender of a request, as in the audit log: an extension of the request.
#[derive(Debug, Clone)]
pub(crate) struct RequestedBy(pub(crate) String);

/// Passes a request to its endpoint, or refuses it.
pub(crate) async fn check(
    State(access): State<Arc<Access>>,
    mut request: Request,
    next: Next,
) -> Response {
    let mut line = Line::about(&request);
    let needed = role::needed_for(request.method(), request.uri());
    line.changes |= needed == Role::Operate;
    let permit = Permit::new(&access.changes);
    let allowed = access
        .caller(&line.peer, request.headers())
        .and_then(|caller| {
            line.role = Some(caller.role);
            line.token.clone_from(&caller.token);
            caller.may(needed)?;
            Ok(caller)
        });
    let response = match allowed {
        Ok(caller) => {
            let extensions = request.extensions_mut();
            extensions.insert(RequestedBy(line.requested_by()));
            extensions.insert(caller.role);
            if caller.token.is_some() {
                extensions.insert(permit.until(caller.expires));
            }
            let admission = extensions.remove::<Admission>();
            match admit(admission, caller.role).await {
                Ok(()) => next.run(request).await,
                Err(busy) => {
                    let mut response = busy.into_response();
                    let close = HeaderValue::from_static("close");
                    response.headers_mut().insert(CONNECTION, close);
                    response
                }
            }
        }
        Err(refused) => {
            line.refused = true;
            line.suppressed = access.refusals.admit(&line.peer, Instant::now());
            let mut response = refusal(refused);
            response.extensions_mut().insert(IsLogged);
            response
        }
    };
    let error = response.extensions().get::<ErrorBody>();
    line.outcome = Some((response.status(), error.map(|body| body.code.clone())));
    response
}

/// Admits the connection of a request, if it came over one.
async fn admit(admission: Option<Admission>, role: Role) -> Result<(), Error> {
    let Some(admission) = admission else {
        return Ok(());
    };
    let admitted = tokio::time::timeout(PATIENCE, admission.admit(role)).await;
    admitted.map_err(|_| {
        let message = format!("all connections for the role {role} are in use");
        Error::unavailable("busy", message).hint("close idle connections, or try again later")
    })
}

/// A line of the audit log; written on drop.
struct Line {
    peer: Peer,
    role: Option<Role>,
    token: Option<String>,
    method: String,
    path: String,
    request_id: String,
    refused: bool,
    /// The number of lines suppressed before this one. None if this one is suppressed, too.
    suppressed: Option<u64>,
    /// Whether the request may change something.
    changes: bool,
    /// The status and the error code. None until there is an answer.
    outcome: Option<(StatusCode, Option<String>)>,
}

impl Line {
    fn about(request: &Request) -> Self {
        let id = request.extensions().get::<RequestId>();
        Self {
            peer: Peer::of(request),
            role: None,
            token: None,
            changes: ![Method::GET, Method::HEAD].contains(request.method()),
            method: shortened(request.method().as_str()),
            path: shortened(request.uri().path()),
            request_id: id.map(|id| id.0.clone()).unwrap_or_default(),
            refused: false,
            suppressed: Some(0),
            outcome: None,
        }
    }

    fn requested_by(&self) -> String {
        match &self.token {
            Some(token) => format!("token {token}, {}", self.peer),
            None => self.peer.to_string(),
        }
    }

    /// Whether the request belongs in the audit log.
    fn is_of_interest(&self) -> bool {
        self.refused || self.changes
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let Some(suppressed) = self.suppressed.filter(|_| self.is_of_interest()) else {
            return;
        };
        let (status, error) = match &self.outcome {
            Some((status, error)) => (Some(status.as_u16()), error.as_deref()),
            None => (None, Some("the client disconnected before the answer")),
        };
        let who = self.peer.to_string();
        let role = self.role.map(|role| role.to_string());
        let done = status.is_some_and(|status| (101..300).contains(&status));
        tracing::info!(
            target: "audit",
            who,
            role,
            token = self.token,
            method = self.method,
            path = self.path,
            status,
            error,
            request_id = self.request_id,
            suppressed = (suppressed > 0).then_some(suppressed),
            "{}",
            if self.refused { "not allowed" } else if done { "done" } else { "not done" }
        );
    }
}
