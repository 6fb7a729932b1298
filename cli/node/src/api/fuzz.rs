//! Any requests of any caller to the daemon's API: for the fuzz target `node-api`, and for the
//! tests below, which need no fuzzer.
//!
//! The first byte selects the connection: TLS, the Unix socket, or neither. The requests follow as
//! text (`vmm::http::request_text`); tokens are in their headers. They go through access control to
//! two routers:
//!
//! * **Stubs of all endpoints**, which only record that they were reached. The caller must have the
//!   role that the served description requires.
//! * **The endpoints themselves**, over a node without VMs, for requests that cannot change this
//!   host. Each gets an answer, and no work panics.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use axum::body::{Body, to_bytes};
use axum::http::header::AUTHORIZATION;
use axum::http::{Method, Request, Uri};
use axum::routing::{self, MethodFilter, on};
use axum::{Extension, Router};
use bellhop_api::node::Role;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::runtime::Runtime;
use vmm::http;
use vmm::http::description::operations;
use vmm::http::description::testing::operation;
use vmm::http::request_text::requests;
use vmm::http::server::UnixPeer;

use super::{DOCUMENT, FORWARDED, registered, router};
use crate::access::{Access, TlsPeer, check};
use crate::context::Node;

static DESCRIPTION: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(DOCUMENT).unwrap());

/// The tokens of callers, with their roles. The last one has expired.
const TOKENS: [(&str, Role, &str); 4] = [
    ("token-of-read", Role::Read, ""),
    ("token-of-operate", Role::Operate, ""),
    ("token-of-admin", Role::Admin, ""),
    ("token-of-the-past", Role::Admin, "2026-01-01T00:00:00Z"),
];
/// Paths of the endpoints that neither ask the host's kernel nor answer without end.
const WITHOUT_HOST: [&str; 4] = ["/v1/vms", "/v1/operations", "/v1/snapshots", "/v1/version"];

/// The first byte of an input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Connection {
    Tls,
    Unix,
    Unknown,
}

/// Both routers.
struct Daemon {
    stubs: Router,
    /// The paths of the stubs that were reached.
    reached: Arc<Mutex<Vec<String>>>,
    real: Router,
    runtime: Runtime,
    directory: PathBuf,
}

impl Daemon {
    fn new(name: &str) -> Self {
        let access = Arc::new(Access::with_tokens(&TOKENS));
        let reached = Arc::default();
        let checked = axum::middleware::from_fn_with_state(access.clone(), check);
        let stubs = http::named(http::complete(stubs(&reached)).layer(checked));
        let name = format!("bellhop-fuzz-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let node = {
            let _entered = runtime.enter();
            Node::below(&directory)
        };
        Self {
            stubs,
            reached,
            real: router(node, access),
            runtime,
            directory,
        }
    }

    fn ask(&self, router: &Router, from: Connection, request: Request<Body>) -> (u16, Value) {
        let router = router.clone();
        let router = match from {
            Connection::Tls => router.layer(Extension(TlsPeer::example())),
            Connection::Unix => router.layer(Extension(UnixPeer { uid: 0, pid: None })),
            Connection::Unknown => router,
        };
        self.runtime.block_on(async {
            let service = TowerToHyperService::new(router);
            let answer = service.call(request).await.unwrap();
            let status = answer.status().as_u16();
            let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            (status, serde_json::from_slice(&body).unwrap_or_default())
        })
    }

    fn check(&self, from: Connection, request: Request<Body>) {
        let (method, uri) = (request.method().clone(), request.uri().clone());
        let held = highest(from, &request);
        let (head, body) = request.into_parts();
        let body = self.runtime.block_on(to_bytes(body, usize::MAX)).unwrap();
        let again = || Request::from_parts(head.clone(), Body::from(body.clone()));

        let (status, _) = self.ask(&self.stubs, from, again());
        let reached = std::mem::take(&mut *self.reached.lock());
        assert!(
            reached.len() <= 1 && status < 500,
            "{method} {uri}: {status}"
        );
        if let Some(template) = reached.first() {
            let needed = required(template, &method, &uri);
            assert!(held >= Some(needed), "{held:?} reached {method} {uri}");
        } else {
            assert!(status >= 400, "{method} {uri}: {status}");
        }

        let reads = [Method::GET, Method::HEAD].contains(&method);
        let is_plan = method == Method::POST && uri.path().ends_with("/plan");
        let mut paths = WITHOUT_HOST.iter();
        let is_local = paths.any(|path| uri.path().starts_with(path));
        if is_local && (held < Some(Role::Admin) || reads || is_plan) {
            let (_, answer) = self.ask(&self.real, from, again());
            assert_ne!(answer["code"], "internal", "{method} {uri}: {answer}");
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A router with the paths and methods of all endpoints, which record their path.
fn stubs(reached: &Arc<Mutex<Vec<String>>>) -> Router {
    let record = |path: &str| {
        let (reached, path) = (reached.clone(), path.to_owned());
        move || {
            reached.lock().push(path.clone());
            std::future::ready(())
        }
    };
    let (_, mut described) = registered().split_for_parts();
    let mut router = Router::new().route(FORWARDED, routing::any(record(FORWARDED)));
    for (path, item) in &mut described.paths.paths {
        for (method, _) in operations(item) {
            let filter = MethodFilter::try_from(method).unwrap();
            router = router.route(path, on(filter, record(path)));
        }
    }
    router
}

/// The most that the caller may have: the highest role of a token that occurs in the request.
fn highest(from: Connection, request: &Request<Body>) -> Option<Role> {
    match from {
        Connection::Unix => return Some(Role::Admin),
        Connection::Unknown => return None,
        Connection::Tls => {}
    }
    let headers = request.headers().get_all(AUTHORIZATION);
    let texts: Vec<_> = headers
        .iter()
        .map(|value| String::from_utf8_lossy(value.as_bytes()))
        .collect();
    let valid = TOKENS.iter().filter(|(_, _, expiry)| expiry.is_empty());
    let sent = valid.filter(|(token, ..)| texts.iter().any(|text| text.contains(token)));
    sent.map(|(_, role, _)| *role).max()
}

/// The role that the description requires of a request that reached the endpoint `template`.
fn required(template: &str, method: &Method, uri: &Uri) -> Role {
    let method = match *method {
        Method::HEAD => Method::GET.as_str(),
        _ => method.as_str(),
    };
    let path = if template == FORWARDED {
        uri.path()
    } else {
        template
    };
    let described = operation(&DESCRIPTION, method, path);
    let role = described.and_then(|described| described["security"][0]["token"][0].as_str());
    let mut pairs = uri.query().unwrap_or_default().split('&');
    match role {
        // The endpoint refuses a parameter that occurs twice.
        Some(_) if template.ends_with("/console") && pairs.any(|one| one == "read_only=true") => {
            Role::Read
        }
        Some(role) => role.parse().unwrap(),
        // A path of the VM's own API that this version does not know.
        None if method == Method::GET => Role::Read,
        None => Role::Admin,
    }
}

/// Sends any requests; see the module.
pub fn request_anything(input: &[u8]) {
    static DAEMON: LazyLock<Mutex<Daemon>> = LazyLock::new(|| Mutex::new(Daemon::new("target")));
    let Some((&from, rest)) = input.split_first() else {
        return;
    };
    let from = match from % 4 {
        0 | 3 => Connection::Tls,
        1 => Connection::Unix,
        _ => Connection::Unknown,
    };
    let daemon = DAEMON.lock();
    for request in requests(rest) {
        daemon.check(from, request);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Each operation of the description, by each caller.
    fn valid() -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        for (path, item) in DESCRIPTION["paths"].as_object().unwrap() {
            for method in item.as_object().unwrap().keys() {
                let path = path.replace("{name}", "web").replace("{id}", "a");
                let path = path.replace(['{', '}'], "");
                lines.push(format!("{} {path}", method.to_ascii_uppercase()));
            }
        }
        lines.extend(
            [
                "GET /v1/vms/web/console?read_only=true",
                "GET /v1/vms?limit=2&continue=x&label=a%3Db",
                "HEAD /v1/vms/web/metrics",
                "POST /v1/vms/web/a/b",
                "DELETE /v1/vms/web/",
                "PUT /v1//vms/web",
                "OPTIONS /v1/vms",
                "GET /v1/vms/%2e%2e/console",
            ]
            .map(str::to_owned),
        );
        let mut seeds = Vec::new();
        for token in ["read", "operate", "admin", "the-past", ""] {
            let header = match token {
                "" => String::new(),
                _ => format!("authorization: Bearer token-of-{token}\n"),
            };
            for lines in lines.chunks(12) {
                let body = r#"{"state": "Paused"}"#;
                let requests = lines.iter().map(|line| {
                    format!("{line}\n{header}content-type: application/json\n\n{body}")
                });
                let requests: Vec<String> = requests.collect();
                // Clients of the Unix socket have no token.
                let from = if token.is_empty() { '1' } else { '0' };
                seeds.push(format!("{from}{}", requests.join("\n%%\n")).into_bytes());
            }
        }
        seeds
    }

    #[test]
    fn the_corpus_of_the_node_api_stays_within_each_role() {
        crate::corpus::replay("node-api", valid, request_anything);
    }

    /// The oracle and the stubs: what the roles allow is reached.
    #[test]
    fn each_role_reaches_its_endpoints() {
        let daemon = Daemon::new("roles");
        for (token, role, expiry) in TOKENS {
            for (method, path, needed) in [
                ("GET", "/v1/vms/web", Role::Read),
                ("HEAD", "/v1/vms/web", Role::Read),
                ("PUT", "/v1/vms/web/state", Role::Operate),
                ("POST", "/v1/vms/web/reset", Role::Operate),
                ("DELETE", "/v1/vms/web", Role::Admin),
                ("POST", "/v1/vms/web/unknown", Role::Admin),
            ] {
                let request = Request::builder()
                    .method(method)
                    .uri(path)
                    .header(AUTHORIZATION, format!("Bearer {token}"));
                let request = request.body(Body::empty()).unwrap();
                daemon.ask(&daemon.stubs, Connection::Tls, request);
                let reached = std::mem::take(&mut *daemon.reached.lock());
                let expected = role >= needed && expiry.is_empty();
                assert_eq!(!reached.is_empty(), expected, "{token} {method} {path}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn any_changed_request_stays_within_its_role(
            seed in prop::sample::select(valid()),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut input = seed;
            for (at, byte) in changes {
                let at = at.index(input.len());
                input[at] = byte;
            }
            request_anything(&input);
        }
    }
}
