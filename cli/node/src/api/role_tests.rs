//! Clients of a low role, against the budgets that they share with others.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::response::Response;
use bellhop_api::node::Role;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tower::ServiceExt as _;
use vmm::api::{Server, Starts};
use vmm::http::client::Client;
use vmm::machine::StopHandle;

use crate::access::testing::{access, request};
use crate::context::Node;
use crate::machines::process::Identity;
use crate::machines::record::{Phase, Record, Step};
use crate::machines::spec::VmName;
use crate::paths::Paths;
use crate::store::{Store, VMS};

const WATCH: &str = "/v1/vms/web/watch";

/// A node with one VM, whose process is this test: with the real API, and no guest.
struct Site {
    directory: PathBuf,
    node: Arc<Node>,
    router: Router,
    vm: VmName,
    socket: PathBuf,
    _process: (Server, Starts),
}

impl Site {
    fn new(test: &str) -> Self {
        let name = format!("node-roles-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let paths = Paths::new(&directory.join("state"), &directory.join("run"));
        paths.make().unwrap();
        let spec = serde_json::from_value(json!({ "kernel": "/nonexistent" })).unwrap();
        let mut record = Record::new(spec);
        record.phase = Phase::Present;
        record.steps_mut().push(Step::Process {
            identity: Some(Identity::own()),
            boot: "boot".to_owned(),
        });
        let store = Store::open(&paths.store()).unwrap();
        store.put(VMS, "web", &record).unwrap();
        drop(store);
        let vm: VmName = "web".parse().unwrap();
        let socket = paths.api_socket(&vm);
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let process = Server::start(&socket, None, &StopHandle::new().unwrap()).unwrap();
        let node = Node::below(&directory);
        node.machines.know_process(&vm);
        Self {
            directory,
            router: super::router(node.clone(), access()),
            node,
            vm,
            socket,
            _process: process,
        }
    }

    async fn ask(&self, path: &str, role: Role) -> Response {
        let request = request(Method::GET, path, role);
        self.router.clone().oneshot(request).await.unwrap()
    }

    /// Configures the VM, which changes its generation. Returns the new one.
    async fn change(&self, kernel: &str) -> u64 {
        let client = Client::new(&self.socket);
        let config = json!({ "kernel": kernel }).to_string();
        let configure = Request::put("/v1/vm").body(Bytes::from(config));
        let done = client.send(configure.unwrap(), &[]).await.unwrap();
        assert_eq!(done.status(), StatusCode::NO_CONTENT);
        let status = Request::get("/v1/vm").body(Bytes::new()).unwrap();
        let status = client.send(status, &[]).await.unwrap();
        let status: Value = serde_json::from_slice(status.body()).unwrap();
        status["generation"].as_u64().unwrap()
    }

    /// The generation that the supervisor knows.
    fn known(&self) -> Option<u64> {
        let live = self.node.machines.show(&self.vm).unwrap().live?;
        Some(live.said?.generation)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

async fn error_of(response: Response) -> (u16, String) {
    let status = response.status().as_u16();
    let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    (status, body["code"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn readers_that_hold_all_their_watches_blind_neither_supervisor_nor_admins() {
    let site = Site::new("watches");
    let served = Arc::new(AtomicUsize::new(0));
    let refused = Arc::new(AtomicUsize::new(0));
    // More than the VM's process serves.
    let readers: Vec<_> = (0..48)
        .map(|_| {
            let (router, served, refused) = (site.router.clone(), served.clone(), refused.clone());
            tokio::spawn(async move {
                let mut since = 1;
                loop {
                    let path = format!("{WATCH}?since={since}&timeout_s=60");
                    let watch = request(Method::GET, &path, Role::Read);
                    let answer = router.clone().oneshot(watch).await.unwrap();
                    if answer.status() == StatusCode::OK {
                        served.fetch_add(1, Ordering::Relaxed);
                        let body = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
                        let body: Value = serde_json::from_slice(&body).unwrap();
                        since = body["generation"].as_u64().unwrap();
                    } else {
                        let error = error_of(answer).await;
                        assert_eq!(error, (503, "too_many_watchers".to_owned()));
                        refused.fetch_add(1, Ordering::Relaxed);
                        sleep(Duration::from_millis(50)).await;
                    }
                }
            })
        })
        .collect();
    let all_held = async {
        while refused.load(Ordering::Relaxed) < readers.len() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(20), all_held).await.unwrap();
    assert_eq!(served.load(Ordering::Relaxed), 0);
    site.node.machines.supervise_process(&site.vm);
    // Each change also wakes the readers, which watch again at once.
    for kernel in ["/a", "/b", "/c"] {
        let generation = site.change(kernel).await;
        let learns = async {
            while site.known() != Some(generation) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let learned = timeout(Duration::from_secs(10), learns).await;
        assert!(
            learned.is_ok(),
            "{:?} instead of {generation}",
            site.known()
        );
        for role in [Role::Operate, Role::Admin] {
            let path = format!("{WATCH}?since={generation}&timeout_s=0");
            assert_eq!(
                site.ask(&path, role).await.status(),
                StatusCode::OK,
                "{role}"
            );
        }
    }
    // Requests that do not wait are not affected either, whatever the role.
    let metrics = site.ask("/v1/vms/web/metrics", Role::Read).await;
    assert_eq!(metrics.status(), StatusCode::OK);
    assert!(readers.iter().all(|reader| !reader.is_finished()));
    readers.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn an_answer_that_is_not_read_holds_its_place() {
    let site = Site::new("unread");
    let path = "/v1/vms/web/metrics";
    let mut unread = Vec::new();
    let refused = loop {
        let answer = site.ask(path, Role::Read).await;
        if answer.status() != StatusCode::OK {
            break answer;
        }
        unread.push(answer);
        assert!(unread.len() < 64, "readers can use all connections");
    };
    assert_eq!(error_of(refused).await, (503, "busy".to_owned()));
    assert_eq!(site.ask(path, Role::Operate).await.status(), StatusCode::OK);
    drop(unread);
    assert_eq!(site.ask(path, Role::Read).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn readers_of_events_leave_places_for_other_roles() {
    let site = Site::new("events");
    let mut streams: Vec<Body> = Vec::new();
    let refused = loop {
        let answer = site.ask("/v1/events", Role::Read).await;
        if answer.status() != StatusCode::OK {
            break answer;
        }
        streams.push(answer.into_body());
        assert!(streams.len() < 64, "readers can use all places");
    };
    assert_eq!(
        error_of(refused).await,
        (503, "too_many_readers".to_owned())
    );
    for role in [Role::Operate, Role::Admin] {
        let answer = site.ask("/v1/events", role).await;
        assert_eq!(answer.status(), StatusCode::OK, "{role}");
    }
}
