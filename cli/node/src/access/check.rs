//! Checks the role for every request, and logs each change and each refusal.
//!
//! Owns the audit log: lines of the target `audit`, which are logged at every log level. Each
//! change has its line. `refusals.rs` limits the lines of requests that changed nothing.
//!
//! A client that disconnects does not stop its change. The line has the outcome in that case, too.
//! The changes that run have a limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::node::Role;
use vmm::http::ErrorBody;
use vmm::http::budget::BudgetPlace;
use vmm::http::request_id::{IsLogged, RequestId, shortened};
use vmm::http::server::Admission;

use super::caller::{Peer, refusal};
use super::role;
use super::{Access, Permit};
use crate::error::{Error, OfProcess};
use crate::machines::error::unfinished;

/// How long a connection or a change may wait for a place among those of its role.
const PATIENCE: Duration = Duration::from_secs(10);

/// Changes that run at a time: as many as the connections of both listeners.
pub(super) const CHANGES_MAX: usize = 128;

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
    let mut response = match allowed {
        Ok(caller) => {
            let extensions = request.extensions_mut();
            extensions.insert(RequestedBy(line.requested_by()));
            extensions.insert(caller.role);
            if caller.token.is_some() {
                extensions.insert(permit.until(caller.expires));
            }
            let admission = extensions.remove::<Admission>();
            let answer = pass(admission, caller.role, request, next);
            if !line.changes {
                answer.await
            } else {
                // No line for a client that disconnects before its change begins.
                let suppressed = line.suppressed.take();
                let place = place_for_change(&access, caller.role).await;
                line.suppressed = suppressed;
                match place {
                    Some(place) => return to_its_end(access, line, place, answer).await,
                    None => busy("changes", caller.role).into_response(),
                }
            }
        }
        Err(refused) => {
            line.refused = true;
            let mut response = refusal(refused);
            response.extensions_mut().insert(IsLogged);
            response
        }
    };
    line.end(&access, &mut response);
    response
}

/// Passes an allowed request to its endpoint, once its connection has a place.
async fn pass(admission: Option<Admission>, role: Role, request: Request, next: Next) -> Response {
    match admit(admission, role).await {
        Ok(()) => next.run(request).await,
        Err(busy) => {
            let mut response = busy.into_response();
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(CONNECTION, close);
            response
        }
    }
}

/// A place for a change. It limits the changes that clients begin and leave.
async fn place_for_change(access: &Access, role: Role) -> Option<BudgetPlace> {
    let place = tokio::time::timeout(PATIENCE, access.running.take(role));
    place.await.ok()
}

/// Waits for the answer to a change, even if the client disconnects meanwhile. Otherwise a client
/// could hide the outcome, or flood the log.
async fn to_its_end(
    access: Arc<Access>,
    mut line: Line,
    place: BudgetPlace,
    answer: impl Future<Output = Response> + Send + 'static,
) -> Response {
    let running = tokio::spawn(async move {
        let mut response = answer.await;
        drop(place);
        line.end(&access, &mut response);
        response
    });
    match running.await {
        Ok(response) => response,
        Err(error) => unfinished(error).into_response(),
    }
}

/// Admits the connection of a request, if it came over one.
async fn admit(admission: Option<Admission>, role: Role) -> Result<(), Error> {
    let Some(admission) = admission else {
        return Ok(());
    };
    let admitted = tokio::time::timeout(PATIENCE, admission.admit(role)).await;
    admitted.map_err(|_| busy("connections", role).hint("close idle ones, or try again later"))
}

fn busy(places: &str, role: Role) -> Error {
    let message = format!("all {places} for the role {role} are in use");
    Error::unavailable("busy", message)
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
    /// The status and the error code. None if the daemon ends before there is an answer.
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

    /// Sets the outcome, and applies the limit of lines to a request that changed nothing.
    fn end(&mut self, access: &Access, response: &mut Response) {
        let status = response.status();
        let code = response.extensions().get::<ErrorBody>();
        let code = code.map(|body| body.code.clone());
        let of_process = response.extensions().get::<OfProcess>().is_some();
        // The kernel may have carried out a request that it has not answered.
        let unclear = of_process || code.as_deref() == Some("no_answer");
        if self.is_of_interest() && changed_nothing(status) && !unclear {
            self.suppressed = access.refusals.admit(&self.peer, Instant::now());
            if self.suppressed.is_none() {
                // Nor is there the line about each request.
                response.extensions_mut().insert(IsLogged);
            }
        }
        self.outcome = Some((status, code));
    }

    /// Whether the request belongs in the audit log.
    fn is_of_interest(&self) -> bool {
        self.refused || self.changes
    }
}

/// Whether an answer means that its request changed nothing. After any other error it may have
/// changed a part.
fn changed_nothing(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_REQUEST
            | StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::PRECONDITION_FAILED
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNSUPPORTED_MEDIA_TYPE
            | StatusCode::PRECONDITION_REQUIRED
            | StatusCode::SERVICE_UNAVAILABLE
    )
}

impl Drop for Line {
    fn drop(&mut self) {
        let Some(suppressed) = self.suppressed.filter(|_| self.is_of_interest()) else {
            return;
        };
        let (status, error) = match &self.outcome {
            Some((status, error)) => (Some(status.as_u16()), error.as_deref()),
            None => (None, Some("the request did not end")),
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

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::middleware::from_fn_with_state;
    use axum::routing::put;
    use tokio::sync::mpsc;
    use tower::ServiceExt as _;

    use super::super::testing;
    use super::*;

    #[tokio::test]
    async fn a_client_that_disconnects_does_not_end_its_change() {
        let (reached, mut begun) = mpsc::channel(1);
        let (done, mut ended) = mpsc::channel(1);
        let endpoint = move || async move {
            reached.send(()).await.unwrap();
            tokio::task::yield_now().await;
            done.send(()).await.unwrap();
        };
        let check = from_fn_with_state(testing::access(), check);
        let router = Router::new()
            .route("/v1/cordon", put(endpoint))
            .layer(check);
        let request = testing::request(Method::PUT, "/v1/cordon", Role::Admin);
        let client = tokio::spawn(router.oneshot(request));
        begun.recv().await.unwrap();
        client.abort();
        // None if the endpoint was dropped.
        assert_eq!(ended.recv().await, Some(()));
    }

    #[tokio::test]
    async fn changes_that_clients_leave_have_a_limit() {
        let never = || std::future::pending::<()>();
        let access = testing::access();
        let router = Router::new()
            .route("/v1/cordon", put(never))
            .layer(from_fn_with_state(access.clone(), check));
        let is_full = || access.running.try_take(Role::Admin).is_none();
        for _ in 0..CHANGES_MAX {
            assert!(!is_full());
            let request = testing::request(Method::PUT, "/v1/cordon", Role::Admin);
            let client = tokio::spawn(router.clone().oneshot(request));
            tokio::task::yield_now().await;
            client.abort();
        }
        assert!(is_full());
    }

    #[test]
    fn only_lines_of_requests_without_an_effect_have_a_limit() {
        let changed = |status| !changed_nothing(StatusCode::from_u16(status).unwrap());
        for status in [101, 200, 202, 204, 409, 422, 500, 502, 504] {
            assert!(changed(status), "{status}");
        }
        for status in [400, 401, 403, 404, 405, 412, 413, 503] {
            assert!(!changed(status), "{status}");
        }
    }
}
