//! Arbitrary requests in both phases: no panic, no undescribed status, and no server error.

use proptest::prelude::*;

use super::{CONFIG, Inside};

fn path() -> impl Strategy<Value = String> {
    let fixed = prop::sample::select(vec![
        "/v1/vm",
        "/v1/vm/config",
        "/v1/vm/power-button",
        "/v1/vm/reset",
        "/v1/vm/snapshot",
        "/v1/vm/restore",
        "/v1/vm/upgrade",
        "/v1/vm/nics",
        "/v1/vm/disks",
        "/v1/vm/vfio",
        "/v1/vm/watch",
        "/v1/metrics",
        "/v1/openapi.json",
        "/v1/nothing",
    ])
    .prop_map(str::to_owned);
    let name = prop::sample::select(vec![
        "nic", "rng", "none", "%2e%2e", "%ff", "a%2fb", "%00", "é",
    ]);
    let nic = (name, prop::bool::ANY).prop_map(|(name, announce)| {
        let name: String = name
            .chars()
            .map(|c| if c.is_ascii() { c } else { 'x' })
            .collect();
        format!(
            "/v1/vm/nics/{name}{}",
            if announce { "/announce" } else { "" }
        )
    });
    let query = prop::option::of(prop::sample::select(vec![
        "since=1&timeout_s=0",
        "since=-1",
        "timeout_s=61&since=0",
        "since=18446744073709551616",
        "x=y",
        "since=1&since=2",
    ]));
    (prop_oneof![fixed, nic], query).prop_map(|(path, query)| match query {
        Some(query) => format!("{path}?{query}"),
        None => path,
    })
}

fn body() -> impl Strategy<Value = String> {
    let whole = prop::sample::select(vec![
        "",
        "{}",
        "null",
        CONFIG,
        r#"{"state": "Running"}"#,
        r#"{"state": "Paused"}"#,
        r#"{"path": "/nonexistent/vhost-vdpa-0"}"#,
        r#"{"path": "/dev/null", "id": "nic"}"#,
        r#"{"mac": "52:54:00:00:00:01", "num_queues": 65536}"#,
        r#"{"doorbell": "on"}"#,
        r#"{"path": "relative"}"#,
        r#"{"path": "/nonexistent/snapshot", "vdpa": [], "paused": true}"#,
        r#"{"program": "/nonexistent/bellhop"}"#,
    ])
    .prop_map(str::to_owned);
    let changed = (whole.clone(), any::<prop::sample::Index>(), any::<char>()).prop_map(
        |(text, index, new)| {
            let mut letters: Vec<char> = text.chars().collect();
            if letters.is_empty() {
                letters.push(new);
            } else {
                let at = index.index(letters.len());
                letters[at] = new;
            }
            letters.into_iter().collect()
        },
    );
    prop_oneof![whole, changed, ".{0,40}"]
}

fn request() -> impl Strategy<Value = (&'static str, String, String)> {
    let method = prop::sample::select(vec!["GET", "PUT", "PATCH", "POST", "DELETE", "HEAD"]);
    (method, path(), body())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_requests_are_answered(requests in prop::collection::vec(request(), 1..12)) {
        for mut inside in [Inside::new(None), Inside::running()] {
            // A start would wait for a VM.
            inside.starts = None;
            for (method, path, body) in &requests {
                let (status, answer) = inside.ask(method, path, body);
                let ending = status == 503 && answer["code"] == "ending";
                prop_assert!(
                    status < 500 || ending,
                    "{} {} {}: {} {}",
                    method,
                    path,
                    body,
                    status,
                    answer
                );
            }
        }
    }
}
