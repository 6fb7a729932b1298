//! Arbitrary requests against the rules of a small API.

use axum::body::Body;
use axum::routing::get;
use proptest::prelude::*;
use tower::ServiceExt as _;

use super::*;
use crate::http::complete;

/// A router with one path and two operations; requests that pass the rules succeed.
fn router() -> Router {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let operation = |method, parameters: &[&str], headers: &[&str]| Operation {
        method,
        path: "/v1/vms/{name}".to_owned(),
        parameters: owned(parameters),
        headers: owned(headers),
    };
    let rules = RequestRules {
        operations: vec![
            operation(Method::GET, &["label", "phase"], &[]),
            operation(Method::PATCH, &[], &["if-match"]),
        ],
    };
    let endpoints = get(|| async {}).patch(|| async {}).put(|| async {});
    complete(rules.around(Router::new().route("/v1/vms/{name}", endpoints)))
}

/// The status of a request to that path, with these headers.
fn ask(method: &str, query: &str, headers: &[(&str, &str)], body: &'static str) -> u16 {
    let mut request = Request::builder().method(method);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request
        .uri(format!("/v1/vms/a{query}"))
        .body(Body::from(body));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let answer = runtime.block_on(router().oneshot(request.unwrap()));
    answer.unwrap().status().as_u16()
}

#[test]
fn known_parameters_pass_and_unknown_ones_do_not() {
    for query in [
        "",
        "?",
        "?&&",
        "?label=a",
        "?label=a&phase=b",
        "?l%61bel=a",
        "?phase",
    ] {
        assert_eq!(ask("GET", query, &[], ""), 200, "{query}");
        assert_eq!(ask("HEAD", query, &[], ""), 200, "{query}");
    }
    let long = format!("?{}", "x=1&".repeat(3000));
    for query in [
        "?lable=a",
        "?label=a&x=b",
        "?Label=a",
        "?label%00=a",
        "?label[]=a",
        "?=a",
        "?%",
        "?%ff",
        "?;label=a",
        "?+label=a",
        "??",
        &long,
    ] {
        assert_eq!(ask("GET", query, &[], ""), 400, "{query}");
        assert_eq!(ask("HEAD", query, &[], ""), 400, "{query}");
    }
    assert_eq!(ask("PATCH", "?label=a", &[], ""), 400);
    // Without a description another server checks it.
    assert_eq!(ask("PUT", "?label=a", &[], ""), 200);
}

#[test]
fn an_unknown_parameter_is_named_with_those_that_are_known() {
    let known = "label, phase".to_owned();
    let unknown = |name: &str, known| HttpError::UnknownParameter {
        name: name.to_owned(),
        known,
    };
    assert_eq!(
        unknown("lable", known).to_string(),
        "the query parameter \"lable\" is unknown; known: label, phase"
    );
    assert_eq!(
        unknown("a\u{1b}[2J", String::new()).to_string(),
        "the query parameter \"a\\u{1b}[2J\" is unknown; the operation has none"
    );
}

#[test]
fn a_body_is_json() {
    let typed = |method, kind: &str, body| ask(method, "", &[("content-type", kind)], body);
    for kind in [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        " application/json ;",
    ] {
        assert_eq!(typed("PUT", kind, "{}"), 200, "{kind}");
        assert_eq!(typed("PATCH", kind, "{}"), 200, "{kind}");
    }
    assert_eq!(typed("PATCH", "application/merge-patch+json", "{}"), 200);
    assert_eq!(typed("PUT", "application/merge-patch+json", "{}"), 415);
    for kind in [
        "",
        ";",
        "json",
        "text/plain",
        "text/plain; application/json",
        "application/jsonp",
        "application/json-patch+json",
        "application/json, text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ] {
        assert_eq!(typed("PUT", kind, "{}"), 415, "{kind}");
        assert_eq!(typed("PATCH", kind, "{}"), 415, "{kind}");
        // An empty body cannot be misread.
        assert_eq!(typed("PUT", kind, ""), 200, "{kind}");
    }
    let twice = [
        ("content-type", "application/json"),
        ("content-type", "text/plain"),
    ];
    assert_eq!(ask("PUT", "", &twice, "{}"), 415);
    assert_eq!(ask("PUT", "", &[], "{}"), 415);
}

#[test]
fn conditions_are_refused_unless_they_are_evaluated() {
    for method in ["GET", "HEAD", "PUT", "PATCH"] {
        for condition in CONDITIONS {
            let status = ask(method, "", &[(condition.as_str(), "*")], "");
            let is_evaluated = method == "PATCH" && condition == IF_MATCH;
            let expected = if is_evaluated { 200 } else { 412 };
            assert_eq!(status, expected, "{method} {condition}");
        }
        assert_eq!(
            ask(method, "", &[("if-match", "*"), ("if-none-match", "")], ""),
            412
        );
    }
}

#[test]
fn browsers_are_refused() {
    for origin in ["https://example.org", "null", ""] {
        assert_eq!(ask("GET", "", &[("origin", origin)], ""), 403, "{origin}");
    }
}

#[test]
fn a_path_or_method_that_there_is_not_is_answered_first() {
    assert_eq!(ask("DELETE", "?x=1", &[("origin", "null")], ""), 405);
}

proptest! {
    #[test]
    fn any_query_is_granted_or_refused(query in "[!-~]{0,40}") {
        let uri = format!("/v1/vms/a?{query}").parse::<http::Uri>();
        if uri.is_ok() {
            let status = ask("GET", &format!("?{query}"), &[], "");
            prop_assert!([200, 400].contains(&status), "{}", status);
        }
    }

    #[test]
    fn any_content_type_is_granted_or_refused(kind in "[ -~]{0,40}") {
        let status = ask("PATCH", "", &[("content-type", kind.as_str())], "{}");
        prop_assert!([200, 415].contains(&status), "{}", status);
    }
}
