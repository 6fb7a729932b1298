//! Fifty clients at once, for a minute in `soak`: they read, create, change and delete machines.
//! Afterwards each machine exists once or not at all, as the last answer about it said. Nothing
//! else exists, and no answer had a status of 500 or more.
//!
//! Each client has machines that only it changes, so it knows their state. All clients also change
//! some shared machines. Of those the test checks only that they are complete.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::endurance::soak;
use lab::node::{Node, until};
use lab::notice::{Kind, notice};
use lab::openapi::exchange::{Request, ask};
use lab::openapi::random::Random;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const CLIENTS: usize = 50;
const TIME: Duration = Duration::from_secs(60);
/// In the gate.
const GATE_TIME: Duration = Duration::from_secs(20);
/// Machines that all clients change.
const SHARED: usize = 6;
/// One client in so many has a machine that runs; each has its RAM mapped for its device.
const RUNNING_EACH: usize = 4;
const SEED: u64 = 0x5eed_0050;

/// What the last answer about a machine said.
type Last = BTreeMap<String, bool>;

/// What one client has seen.
#[derive(Default)]
struct Seen {
    last: Last,
    latencies: BTreeMap<&'static str, Vec<Duration>>,
    statuses: BTreeMap<(&'static str, u16), u32>,
    wrong: Vec<String>,
}

struct Client<'a> {
    socket: &'a Path,
    number: usize,
    random: Random,
    tiny: &'a Value,
    seen: Seen,
}

impl Client<'_> {
    fn ask(&mut self, what: &'static str, request: &Request) -> u16 {
        let start = Instant::now();
        let answer = ask(self.socket, request);
        let took = start.elapsed();
        self.seen.latencies.entry(what).or_default().push(took);
        let (status, body) = match answer {
            Ok(Some(answer)) => (answer.status, answer.body),
            Ok(None) => (0, b"no answer".to_vec()),
            Err(error) => (0, lab::error::report(&error).into_bytes()),
        };
        *self.seen.statuses.entry((what, status)).or_default() += 1;
        if status == 0 || status >= 500 {
            let body = String::from_utf8_lossy(&body).into_owned();
            self.seen.wrong.push(format!(
                "client {}: {} {}: {status} {body}",
                self.number,
                request.method,
                request.path()
            ));
        }
        status
    }

    /// A machine's specification: with a NIC of its own, running or not.
    fn spec(&self, name: &str, number: usize, runs: bool) -> Value {
        let mut spec = self.tiny.clone();
        let [high, low] = u16::try_from(number + 1).unwrap().to_be_bytes();
        // No zero bytes: the simulator compares addresses as if they were strings.
        let mac = format!(
            "52:54:5e:{:02x}:{:02x}:{:02x}",
            name.len() + 1,
            high + 1,
            low.max(1)
        );
        spec["spec"]["nics"] = json!([{ "id": "n", "from": "vdpasim_net", "mac": mac }]);
        spec["spec"]["state"] = json!(if runs { "Running" } else { "Stopped" });
        spec
    }

    /// Something at random.
    fn act(&mut self) {
        let own = format!("own-{}-{}", self.number, self.random.below(2));
        let shared = self.random.below(SHARED);
        let name = format!("shared-{shared}");
        let runs = self.number.is_multiple_of(RUNNING_EACH) && own.ends_with('0');
        match self.random.below(10) {
            0..3 => self.put(&own, self.number, runs),
            3 => self.delete(&own),
            4 => self.put(&name, CLIENTS + shared, false),
            5 => self.delete(&name),
            6 => {
                let request = Request::new("GET", "/v1/vms");
                self.ask("list", &request);
            }
            7 | 8 => {
                let request = Request::new("GET", format!("/v1/vms/{own}"));
                let status = self.ask("show", &request);
                let known = self.seen.last.get(&own).copied().unwrap_or(false);
                // No other client changes it.
                if status != if known { 200 } else { 404 } {
                    self.seen
                        .wrong
                        .push(format!("{own}: {status}, and it is there: {known}"));
                }
            }
            _ => {
                let changes = [
                    json!({ "state": "Running" }),
                    json!({ "state": "Stopped", "mode": "hard" }),
                ];
                let body = changes[self.random.below(2)].to_string();
                if runs {
                    let request = Request::new("PUT", format!("/v1/vms/{own}/state"));
                    let request = request.with_body(body);
                    self.ask("change", &request);
                }
            }
        }
    }

    fn put(&mut self, name: &str, number: usize, runs: bool) {
        let spec = self.spec(name, number, runs).to_string();
        let request = Request::new("PUT", format!("/v1/vms/{name}")).with_body(spec);
        match self.ask("put", &request) {
            200 | 201 => {
                self.seen.last.insert(name.to_owned(), true);
            }
            // There was none before, then: it was undone. Otherwise the old one is still there.
            _ if name.starts_with("own") && self.seen.last.get(name) != Some(&true) => {
                self.seen.last.insert(name.to_owned(), false);
            }
            _ => {}
        }
    }

    fn delete(&mut self, name: &str) {
        let request = Request::new("DELETE", format!("/v1/vms/{name}?force=true"));
        let status = self.ask("delete", &request);
        if matches!(status, 204 | 404) {
            self.seen.last.insert(name.to_owned(), false);
        }
    }
}

#[test]
fn fifty_clients_lose_nothing_and_double_nothing() {
    let node = Node::start("clients").unwrap();
    let tiny = node.tiny(&json!([])).unwrap();
    // What the daemon makes once for all.
    let warm = Request::new("PUT", "/v1/vms/warm").with_body(tiny.to_string());
    assert_eq!(ask(node.api.socket(), &warm).unwrap().unwrap().status, 201);
    node.api
        .done("DELETE", "/v1/vms/warm?force=true", None)
        .unwrap();
    let before = node.traces().unwrap();

    let time = if soak() { TIME } else { GATE_TIME };
    if time < TIME {
        let what = format!("{CLIENTS} clients for {time:?} of {TIME:?}");
        notice(Kind::Thinned, what);
    }
    let mut random = Random::announced(SEED);
    let start = Instant::now();
    let seen = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let mut client = Client {
                socket: node.api.socket(),
                number,
                random: Random::new(random.number()),
                tiny: &tiny,
                seen: Seen::default(),
            };
            let seen = &seen;
            scope.spawn(move || {
                while start.elapsed() < time {
                    client.act();
                }
                seen.lock().unwrap().push(client.seen);
            });
        }
    });
    let seen = seen.into_inner().unwrap();
    report(&seen);
    let wrong: Vec<&String> = seen.iter().flat_map(|one| &one.wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", node.said());

    let listed = node.api.get("/v1/vms").unwrap();
    let listed = listed["items"].as_array().unwrap();
    let names: Vec<String> = listed
        .iter()
        .map(|vm| vm["name"].as_str().unwrap().to_owned())
        .collect();
    let unique: BTreeSet<&String> = names.iter().collect();
    assert_eq!(unique.len(), names.len(), "doubled: {names:?}");
    for (name, there) in seen.iter().flat_map(|one| &one.last) {
        if name.starts_with("own") {
            assert_eq!(unique.contains(name), *there, "{name}");
        }
    }
    // Each has one device, and those that run one process; and there is nothing else.
    let now = node.traces().unwrap();
    let devices: BTreeSet<_> = now.devices.difference(&before.devices).collect();
    assert_eq!(devices.len(), names.len(), "{devices:?}\n{names:?}");
    for vm in listed {
        let device = vm["status"]["nic_devices"][0]["vdpa_device"]
            .as_str()
            .unwrap();
        assert!(
            Path::new("/sys/bus/vdpa/devices").join(device).exists(),
            "{vm}"
        );
    }
    let mut running: BTreeSet<String> = BTreeSet::new();
    for (name, pid) in &now.processes {
        assert!(
            running.insert(name.clone()),
            "{name} runs twice, also as {pid}"
        );
    }
    let shown = listed.iter().filter(|vm| !vm["status"]["pid"].is_null());
    assert_eq!(shown.count(), running.len(), "{running:?}\n{listed:#?}");
    println!(
        "{} machines at the end, {} of them running",
        names.len(),
        running.len()
    );

    for name in &names {
        node.api
            .done("DELETE", &format!("/v1/vms/{name}?force=true"), None)
            .unwrap();
    }
    until("all is as before", || {
        let now = node.traces().unwrap();
        // What the daemon keeps for connections may have grown with their number once.
        now.devices == before.devices
            && now.files == before.files
            && now.processes == before.processes
    })
    .unwrap();
    node.same(&before, "the end").unwrap();
}

/// Prints what was answered how fast.
fn report(seen: &[Seen]) {
    let mut statuses: BTreeMap<(&str, u16), u32> = BTreeMap::new();
    let mut latencies: BTreeMap<&str, Vec<Duration>> = BTreeMap::new();
    for one in seen {
        for (&what, count) in &one.statuses {
            *statuses.entry(what).or_default() += count;
        }
        for (what, times) in &one.latencies {
            latencies.entry(what).or_default().extend(times);
        }
    }
    println!("{statuses:?}");
    for (what, mut times) in latencies {
        times.sort();
        let at = |part: usize| times[(times.len() - 1) * part / 100];
        println!(
            "{what}: {} answers, median {:?}, 99 % {:?}, slowest {:?}",
            times.len(),
            at(50),
            at(99),
            at(100)
        );
    }
}
