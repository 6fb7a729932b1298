//! Requests as text, for the fuzz targets and corpora of the APIs.
//!
//! ```text
//! PUT /v1/vm?x=y
//! content-type: application/json
//!
//! {"kernel": "/boot/vmlinuz"}
//! %%
//! GET /v1/vm
//! ```
//! Each request is a line with method and target, lines with headers, an empty line and the body.

use axum::body::Body;
use axum::http::Request;

/// The most requests of one input.
const REQUESTS_MAX: usize = 16;
const SEPARATOR: &[u8] = b"\n%%\n";

/// The requests in `input`. Those that a server would reject before its router are left out.
pub fn requests(mut input: &[u8]) -> Vec<Request<Body>> {
    let mut all = Vec::new();
    while !input.is_empty() && all.len() < REQUESTS_MAX {
        let (text, rest) = split(input, SEPARATOR);
        input = rest;
        all.extend(request(text));
    }
    all
}

/// The parts before and after the first `separator`; the second is empty without one.
fn split<'a>(text: &'a [u8], separator: &[u8]) -> (&'a [u8], &'a [u8]) {
    let mut windows = text.windows(separator.len());
    match windows.position(|window| window == separator) {
        Some(at) => {
            let (before, after) = text.split_at(at);
            (before, after.get(separator.len()..).unwrap_or_default())
        }
        None => (text, &[]),
    }
}

fn request(text: &[u8]) -> Option<Request<Body>> {
    let (head, body) = split(text, b"\n\n");
    let (line, mut headers) = split(head, b"\n");
    let (method, target) = split(line, b" ");
    let mut request = Request::builder().method(method).uri(target);
    while !headers.is_empty() {
        let (header, rest) = split(headers, b"\n");
        headers = rest;
        let (name, value) = split(header, b": ");
        request = request.header(name, value);
    }
    request.body(Body::from(body.to_vec())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_split_into_their_parts() {
        let text = b"PUT /a?b=c\nx-a: 1\nx-b: 2\n\n{\n\n}\n%%\nGET /d\n%%\n\n%%\nHEAD /e";
        let all = requests(text);
        let lines = all
            .iter()
            .map(|one| format!("{} {}", one.method(), one.uri()));
        let lines: Vec<_> = lines.collect();
        assert_eq!(lines, ["PUT /a?b=c", "GET /d", "HEAD /e"]);
        assert_eq!(all[0].headers()["x-b"], "2");
    }
}
