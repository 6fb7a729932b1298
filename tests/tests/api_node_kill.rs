//! `kill -9` of the daemon, a machine's process, or both, at each log line while a machine with a
//! NIC is created and deleted. For a NIC without hardware the process that serves it is killed
//! instead of the machine's. Afterwards the machine exists and works, or is gone, and nothing
//! else is left. The same request again then succeeds.
//!
//! ```text
//!   request ──> daemon logs line 1, 2, … ── held before line n ──> kill ──> daemon again
//!                                                   whole or gone? <──────────┤
//!                                    success <── the same request <───────────┘
//! ```
//! How the daemon is held: see `lab::node`.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;

use bridge::Bridge;
use lab::endurance::{DEFAULT_CYCLES, cycles, soak};
use lab::node::{Node, PATIENCE, Traces, until};
use lab::notice::{Kind, notice};
use lab::openapi::exchange::{Answer, Request, ask};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::path::Path;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use vdpa_mgmt::nic::server;

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:58:01";
const NAME: &str = "web";
const PATH: &str = "/v1/vms/web";
/// More lines than a request has: a request that never ends is a failure of its own.
const LINES_MAX: usize = 200;

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Daemon,
    Machine,
    MachineThenDaemon,
    /// The process that serves the NIC.
    Server,
    ServerThenDaemon,
}

/// The source of a machine's NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Simulator,
    /// On this bridge.
    Software(&'static str),
}

impl Source {
    fn victims(self) -> [Victim; 3] {
        match self {
            Self::Simulator => [Victim::Daemon, Victim::Machine, Victim::MachineThenDaemon],
            Self::Software(_) => [Victim::Daemon, Victim::Server, Victim::ServerThenDaemon],
        }
    }

    fn put(self, node: &Node) -> Request {
        let mut nic = json!({ "id": "net0", "from": "vdpasim_net", "mac": MAC, "mtu": 1500 });
        if let Self::Software(bridge) = self {
            nic["from"] = "software".into();
            nic["bridge"] = bridge.into();
        }
        let spec = node.tiny(&json!([nic])).unwrap();
        Request::new("PUT", PATH).with_body(spec.to_string())
    }
}

/// The device of the machine's NIC.
const DEVICE: &str = "web.net0";

/// What the NIC has on the host beside its device: a tap, and the process that serves it.
fn parts() -> Vec<String> {
    let paths = [
        format!("/sys/class/net/{DEVICE}"),
        format!("/dev/vduse/{DEVICE}"),
        format!("{}/{DEVICE}.lock", server::DIRECTORY),
        format!("{}/{DEVICE}.log", server::DIRECTORY),
    ];
    let mut all: Vec<String> = paths.into();
    all.retain(|path| Path::new(path).exists());
    all.extend(
        server::holder(DEVICE)
            .unwrap()
            .map(|pid| format!("{pid:?}")),
    );
    all
}

/// The host is as before.
#[track_caller]
fn assert_same(node: &Node, before: &Traces, when: &str) {
    node.same_but_descriptors(before, when).unwrap();
    assert_eq!(parts(), Vec::<String>::new(), "{when}\n{}", node.said());
}

fn delete() -> Request {
    Request::new("DELETE", format!("{PATH}?force=true"))
}

fn status(node: &Node, request: &Request) -> (u16, String) {
    let answer = ask(node.api.socket(), request).unwrap().unwrap();
    (
        answer.status,
        String::from_utf8_lossy(&answer.body).into_owned(),
    )
}

fn kill_machine(node: &Node) -> usize {
    let all = node.processes();
    for (_, pid) in &all {
        let pid = Pid::from_raw(i32::try_from(*pid).unwrap()).unwrap();
        // It may have ended meanwhile.
        let _ = kill_process(pid, Signal::KILL);
    }
    all.len()
}

/// Kills the process that serves the NIC, if there is one.
fn kill_server() {
    if let Some(pid) = server::holder(DEVICE).unwrap() {
        // It may have ended meanwhile.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Waits until the daemon is held, or has answered.
fn held<T>(node: &Node, client: &ScopedJoinHandle<'_, T>) -> bool {
    let start = Instant::now();
    while !client.is_finished() {
        if node.is_held() {
            return true;
        }
        assert!(
            start.elapsed() < PATIENCE,
            "neither held nor answered\n{}",
            node.said()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    false
}

/// A request that is killed before the line behind these: whether it came so far, and its answer.
fn killed(
    node: &mut Node,
    request: &Request,
    lines: usize,
    victim: Victim,
) -> (bool, Option<Answer>) {
    let socket = node.api.socket().to_path_buf();
    node.hold_after(lines);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| ask(&socket, request).ok().flatten());
        let came = held(node, &client);
        if came {
            match victim {
                Victim::Daemon => node.kill(),
                Victim::Machine => {
                    kill_machine(node);
                }
                Victim::MachineThenDaemon => {
                    kill_machine(node);
                    node.kill();
                }
                Victim::Server => kill_server(),
                Victim::ServerThenDaemon => {
                    kill_server();
                    node.kill();
                }
            }
        }
        node.resume();
        (came, client.join().unwrap())
    })
}

/// The machine runs with its NIC, or there is nothing at all.
#[track_caller]
fn whole_or_gone(node: &Node, before: &Traces, when: &str) -> bool {
    // A machine that was killed is started again: by its policy.
    let start = Instant::now();
    let vm = loop {
        match node.vm(NAME).unwrap() {
            None => break None,
            Some(vm) if vm["status"]["phase"] == "Running" && lives(&vm) => break Some(vm),
            Some(vm) => assert!(
                start.elapsed() < PATIENCE,
                "{when}: {vm:#}\n{}",
                node.said()
            ),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let Some(vm) = vm else {
        assert_same(node, before, when);
        return false;
    };
    let processes: Vec<(String, u32)> = node.processes().into_iter().collect();
    let pid = u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    assert_eq!(processes, [(NAME.to_owned(), pid)], "{when}");
    let device = Path::new("/sys/bus/vdpa/devices").join(
        vm["status"]["nic_devices"][0]["vdpa_device"]
            .as_str()
            .unwrap(),
    );
    assert!(device.exists(), "{when}: {vm:#}");
    true
}

fn lives(vm: &Value) -> bool {
    vm["status"]["pid"].as_u64().is_some_and(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ")
            .next()
            .is_some_and(|rest| !rest.starts_with('Z') && !rest.is_empty())
    })
}

/// Whether each line has all victims: in `soak` and with more cycles.
fn has_all_victims() -> bool {
    soak() || cycles().unwrap() > DEFAULT_CYCLES
}

/// Which victims a line has: one in turn, or all.
fn victims(source: Source, line: usize) -> Vec<Victim> {
    let all = source.victims();
    if has_all_victims() {
        all.to_vec()
    } else if line.is_multiple_of(2) {
        // The daemon is what this is about: every second time.
        vec![Victim::Daemon]
    } else {
        vec![all[1 + line / 2 % 2]]
    }
}

/// Reports when lines had one victim each.
fn report_victims(what: &str, lines: usize) {
    if !has_all_victims() {
        notice(
            Kind::Thinned,
            format!("{what}: 1 of 3 victims killed at each of {lines} lines"),
        );
    }
}

fn again(node: &mut Node) {
    if !node.lives() {
        node.start_again().unwrap();
    }
}

/// A daemon that has made and taken away one machine, and what there is then.
fn start(test: &str, source: Source) -> (Node, Traces) {
    let node = Node::start(test).unwrap();
    let (made, body) = status(&node, &source.put(&node));
    assert_eq!(made, 201, "{body}");
    node.await_phase(NAME, "Running").unwrap();
    assert_eq!(status(&node, &delete()).0, 204);
    let mut before = node.traces().unwrap();
    until("it is quiet", || {
        let now = node.traces().unwrap();
        std::mem::replace(&mut before, now.clone()) == now
    })
    .unwrap();
    (node, before)
}

fn making(test: &str, source: Source) {
    let (mut node, before) = start(test, source);
    let mut whole = 0;
    let mut line = 0;
    let began = Instant::now();
    loop {
        assert!(
            line < LINES_MAX,
            "a request without an end\n{}",
            node.said()
        );
        let mut all_came = true;
        for victim in victims(source, line) {
            let when = format!("{victim:?} killed behind line {line} of making");
            let request = source.put(&node);
            let (came, answer) = killed(&mut node, &request, line, victim);
            all_came &= came;
            again(&mut node);
            let is_there = whole_or_gone(&node, &before, &when);
            whole += u32::from(is_there);
            if let Some(answer) = &answer {
                let made = (200..300).contains(&answer.status);
                assert!(!made || is_there, "{when}: it was said to be there");
            }
            // The same again.
            let (made, body) = status(&node, &source.put(&node));
            assert!(
                made == 200 || made == 201,
                "{when}: {made} {body}\n{}",
                node.said()
            );
            node.await_phase(NAME, "Running").unwrap();
            assert!(whole_or_gone(&node, &before, &when), "{when}");
            let (gone, body) = status(&node, &delete());
            assert_eq!(gone, 204, "{when}: {body}");
            assert_same(&node, &before, &when);
        }
        if !all_came {
            break;
        }
        line += 1;
    }
    println!("{line} lines, {whole} times whole, {:?}", began.elapsed());
    report_victims("a VM is created", line);
    assert!(
        line >= 8,
        "the daemon says too little to be held at: {line}\n{}",
        node.said()
    );
}

#[test]
fn at_each_line_of_making() {
    making("kill-making", Source::Simulator);
}

#[test]
fn at_each_line_of_making_a_software_nic() {
    let bridge = Bridge::add("lab-swbr");
    making("kill-making-sw", Source::Software(bridge.0));
}

fn taking_away(test: &str, source: Source) {
    let (mut node, before) = start(test, source);
    let mut stayed = 0;
    let mut line = 0;
    let began = Instant::now();
    loop {
        assert!(
            line < LINES_MAX,
            "a request without an end\n{}",
            node.said()
        );
        let mut all_came = true;
        for victim in victims(source, line) {
            let when = format!("{victim:?} killed behind line {line} of taking away");
            let (made, body) = status(&node, &source.put(&node));
            assert_eq!(made, 201, "{when}: {body}");
            let vm = node.await_phase(NAME, "Running").unwrap();
            let (came, answer) = killed(&mut node, &delete(), line, victim);
            all_came &= came;
            again(&mut node);
            let is_there = whole_or_gone(&node, &before, &when);
            stayed += u32::from(is_there);
            if let Some(answer) = &answer {
                assert!(
                    answer.status != 204 || !is_there,
                    "{when}: it was said to be gone"
                );
            }
            if is_there && victim == Victim::Daemon {
                // The killed daemon did not touch it.
                let now = node.vm(NAME).unwrap().unwrap();
                assert_eq!(
                    (&now["status"]["pid"], &now["status"]["adopted"]),
                    (&vm["status"]["pid"], &json!(true)),
                    "{when}"
                );
            }
            // The same again.
            let (gone, body) = status(&node, &delete());
            assert!(
                gone == 204 || (gone == 404 && !is_there),
                "{when}: {gone} {body}"
            );
            assert_same(&node, &before, &when);
        }
        if !all_came {
            break;
        }
        line += 1;
    }
    println!(
        "{line} lines, {stayed} times it stayed, {:?}",
        began.elapsed()
    );
    report_victims("a VM is deleted", line);
    assert!(
        line >= 5,
        "the daemon says too little to be held at: {line}\n{}",
        node.said()
    );
}

#[test]
fn at_each_line_of_taking_away() {
    taking_away("kill-taking", Source::Simulator);
}

#[test]
fn at_each_line_of_taking_away_a_software_nic() {
    let bridge = Bridge::add("lab-swbr");
    taking_away("kill-taking-sw", Source::Software(bridge.0));
}

/// A daemon is killed while it starts, and the next one finishes its work. One machine runs, one
/// has died, and one is half created.
#[test]
fn at_each_line_of_a_daemons_start() {
    let source = Source::Simulator;
    let (mut node, before) = start("kill-start", source);
    let mut line = 0;
    let mut came = true;
    while came {
        assert!(line < LINES_MAX, "a start without an end\n{}", node.said());
        let when = format!("killed behind line {line} of its start");
        let (made, body) = status(&node, &source.put(&node));
        assert_eq!(made, 201, "{when}: {body}");
        let vm = node.await_phase(NAME, "Running").unwrap();
        let dies = line % 3 == 1;
        node.kill();
        if dies {
            assert_eq!(kill_machine(&node), 1);
        }
        came = node.die_while_starting(line).unwrap();
        node.start_again().unwrap();
        assert!(whole_or_gone(&node, &before, &when), "{when}: it is gone");
        let now = node.vm(NAME).unwrap().unwrap();
        assert_eq!(
            now["status"]["pid"] != vm["status"]["pid"],
            dies,
            "{when}: {now:#}"
        );
        // Half of a taking away, and half of its end.
        if line % 3 == 2 {
            killed(&mut node, &delete(), line, Victim::Daemon);
            node.die_while_starting(line).unwrap();
            again(&mut node);
            whole_or_gone(&node, &before, &when);
        }
        let (gone, body) = status(&node, &delete());
        assert!(gone == 204 || gone == 404, "{when}: {gone} {body}");
        assert_same(&node, &before, &when);
        line += 1;
    }
    println!("{line} lines");
}
