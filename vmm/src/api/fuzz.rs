//! Any requests to the API of a VM: for the fuzz target `vm-api`, and for the tests below, which
//! need no fuzzer.
//!
//! The first byte selects the phase: before boot, or a running fake VM. The requests follow as text
//! (`http/request_text.rs`), and go through the router as from a connection. For any requests each
//! gets an answer whose status is described, and no work panics.

use std::sync::LazyLock;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use bellhop_api::machine::UpgradeRequest;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use tokio::runtime::Runtime;

use super::controller::Controller;
use super::endpoints;
use crate::config::VmConfig;
use crate::http::description::testing::describes;
use crate::http::request_text::requests;
use crate::machine::fake_machine::{FakeMachine, nic_config};
use crate::machine::{Origin, StopHandle};

static DESCRIPTION: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(endpoints::DOCUMENT).unwrap());

/// The API without a socket.
struct Server {
    service: TowerToHyperService<Router>,
    runtime: Runtime,
    _machine: Option<FakeMachine>,
}

impl Server {
    fn new(is_running: bool) -> Self {
        let stop = StopHandle::new().unwrap();
        let origin = is_running.then(|| {
            let config = serde_json::json!({ "kernel": "/nonexistent", "memory": "64M" });
            let mut config: VmConfig = serde_json::from_value(config).unwrap();
            config.vdpa.push(nic_config());
            Origin::Boot(config)
        });
        let (controller, starts) = Controller::new(origin, &stop).unwrap();
        let machine = is_running.then(|| {
            let machine = FakeMachine::new();
            let request = starts.wait(&stop).unwrap().unwrap();
            let config = request.origin().config().unwrap().clone();
            request.started(config, machine.handle());
            machine
        });
        // Times of requests pass at once. Another start finds no thread that could build a VM.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build();
        Self {
            service: TowerToHyperService::new(endpoints::router(controller)),
            runtime: runtime.unwrap(),
            _machine: machine,
        }
    }

    fn ask(&self, request: Request<Body>) -> (u16, Value) {
        self.runtime.block_on(async {
            let answer = self.service.call(request).await.unwrap();
            let status = answer.status().as_u16();
            let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            (status, serde_json::from_slice(&body).unwrap_or_default())
        })
    }
}

/// Whether the request would reach out of this process: to a program or to another host.
fn reaches_out(path: &str, body: &[u8]) -> bool {
    let upgrade: Result<UpgradeRequest, _> = serde_json::from_slice(body);
    upgrade.is_ok_and(|wanted| wanted.program.exists())
        || path.contains("migration") && body.windows(3).any(|word| word == b"tcp")
}

/// Sends any requests; see the module.
pub fn request_anything(input: &[u8]) {
    let Some((&phase, rest)) = input.split_first() else {
        return;
    };
    let server = Server::new(phase & 1 == 1);
    for request in requests(rest) {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let (head, body) = request.into_parts();
        let body = server.runtime.block_on(to_bytes(body, usize::MAX)).unwrap();
        if reaches_out(&path, &body) {
            continue;
        }
        let (status, answer) = server.ask(Request::from_parts(head, Body::from(body)));
        let is_described = describes(&DESCRIPTION, method.as_str(), &path, status);
        assert!(is_described, "{method} {path}: {status} {answer}");
        assert_ne!(answer["code"], "internal", "{method} {path}: {answer}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Valid requests, in both phases. Files written by hand are beside them.
    fn valid() -> Vec<Vec<u8>> {
        let bodies = [
            (
                "PUT",
                "/v1/vm",
                r#"{"kernel": "/nonexistent", "memory": "64M"}"#,
            ),
            ("PATCH", "/v1/vm", r#"{"state": "Running"}"#),
            ("PATCH", "/v1/vm", r#"{"state": "Paused"}"#),
            ("GET", "/v1/vm", ""),
            ("GET", "/v1/vm/config", ""),
            ("GET", "/v1/vm/watch?since=0&timeout_s=1", ""),
            ("POST", "/v1/vm/power-button", ""),
            ("POST", "/v1/vm/nmi", ""),
            (
                "PUT",
                "/v1/vm/nics/a",
                r#"{"path": "/nonexistent", "mac": "52:54:00:00:00:01"}"#,
            ),
            ("PATCH", "/v1/vm/nics/nic", r#"{"backup": null}"#),
            ("DELETE", "/v1/vm/nics/nic", ""),
            (
                "PUT",
                "/v1/vm/disks/a",
                r#"{"path": "/nonexistent", "readonly": true}"#,
            ),
            ("POST", "/v1/vm/snapshot", r#"{"path": "/nonexistent/a"}"#),
            (
                "PUT",
                "/v1/vm/restore",
                r#"{"path": "/nonexistent/a", "vdpa": []}"#,
            ),
            (
                "POST",
                "/v1/vm/upgrade",
                r#"{"program": "/nonexistent/bellhop"}"#,
            ),
            (
                "POST",
                "/v1/vm/migration",
                r#"{"send": {"destination": "unix:/nonexistent/a"}}"#,
            ),
            ("GET", "/v1/vm/migration", ""),
            ("GET", "/v1/metrics", ""),
        ];
        let text = |(method, path, body): &(&str, &str, &str)| {
            format!("{method} {path}\ncontent-type: application/json\n\n{body}")
        };
        let mut seeds = Vec::new();
        for phase in ["0", "1"] {
            let each = bodies.iter().map(text);
            let all: Vec<String> = each.clone().collect();
            let all = all.chunks(8).map(|some| some.join("\n%%\n"));
            seeds.extend(
                each.chain(all)
                    .map(|text| (phase.to_owned() + &text).into_bytes()),
            );
        }
        seeds
    }

    #[test]
    fn the_corpus_of_the_vm_api_is_answered() {
        crate::corpus::replay("vm-api", valid, request_anything);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_changed_request_is_answered(
            seed in prop::sample::select(valid()),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut input = seed;
            let at = at.index(input.len());
            input[at] = byte;
            request_anything(&input);
        }
    }
}
