//! The ID of each request: the client's (`x-request-id`), or a new one.
//!
//! Owns the header, the log line of a change, and the moment when an error becomes a body, because
//! the body contains the ID.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::Json;
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::{ErrorBody, PROBLEM_JSON};

/// The header with the ID.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The longest ID of a client that is used.
const LENGTH_MAX: usize = 64;

/// The ID, as an extension of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestId(
    /// 1 to 64 printable ASCII characters without spaces.
    pub String,
);

/// The most bytes of a request's method or path in a log line.
const SHOWN_MAX: usize = 256;

/// An extension of a response whose request is logged elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct IsLogged;

/// A method or path for a log line: its beginning if it is long.
pub fn shortened(text: &str) -> String {
    match text.split_at(text.floor_char_boundary(SHOWN_MAX)) {
        (whole, "") => whole.to_owned(),
        (begin, _) => format!("{begin}…"),
    }
}

/// The client's ID of the request, if it is safe in a log.
fn given(request: &Request) -> Option<String> {
    let text = request.headers().get(&REQUEST_ID)?.to_str().ok()?;
    let fits = (1..=LENGTH_MAX).contains(&text.len());
    (fits && text.bytes().all(|byte| byte.is_ascii_graphic())).then(|| text.to_owned())
}

fn made() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{}-{count}", std::process::id())
}

/// Middleware for every request.
pub(super) async fn name(mut request: Request, next: Next) -> Response {
    let id = given(&request).unwrap_or_else(made);
    let has_effect = ![Method::GET, Method::HEAD].contains(request.method());
    let method = shortened(request.method().as_str());
    let path = shortened(request.uri().path());
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    let status = response.status();
    let is_logged = response.extensions_mut().remove::<IsLogged>().is_some();
    if let Some(mut body) = response.extensions_mut().remove::<ErrorBody>() {
        if !is_logged {
            let error = &body.message;
            tracing::info!(request_id = %id, %method, path, %status, error, "refused");
        }
        body.set_request_id(&id);
        // Headers besides those of the body, such as `allow`, stay.
        let headers = std::mem::take(response.headers_mut());
        let problem = [(CONTENT_TYPE, PROBLEM_JSON)];
        response = (status, problem, Json(body)).into_response();
        for (name, value) in headers {
            if let Some(name) = name
                && !response.headers().contains_key(&name)
            {
                response.headers_mut().insert(name, value);
            }
        }
    } else if has_effect {
        tracing::info!(request_id = %id, %method, path, %status, "done");
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_beginning_of_a_long_path_is_logged() {
        let whole = "/".repeat(SHOWN_MAX);
        assert_eq!(shortened(&whole), whole);
        assert_eq!(shortened(&format!("{whole}/")), format!("{whole}…"));
        // Between characters.
        assert_eq!(shortened(&"é".repeat(200)), format!("{}…", "é".repeat(128)));
        assert_eq!(
            shortened(&format!("/{}", "é".repeat(200))).chars().count(),
            129
        );
    }
}
