//! `kill -9` of the daemon and of VMs at random moments, while guests exchange checked frames and a
//! client creates and deletes a VM. Afterwards the VMs run again, and nothing else is left.
//!
//! ```text
//!   killer    kills the daemon, a VM or both, again and again after a random time
//!   talkers   exchange frames, which return once and whole, until the VM of their guest is killed
//!   changer   creates and deletes a third VM; the daemon keeps each confirmed state
//! ```
//! About 10 s, and 10 minutes in `cargo lab soak`.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod node;

use lab::api::Client;
use lab::endurance::soak;
use lab::notice::{Kind, notice};
use lab::openapi::random::Random;
use lab::sim::require_lab;
use lab::threads::StopOnDrop;
use lab::traffic::{Frames, all_returned, exchange};
use node::{Daemon, NOTICE, Traces, attach, nic, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The VMs with guests that exchange frames. No zero bytes: the simulator compares addresses as if
/// they were strings.
const VMS: [(&str, &str); 2] = [
    ("web-1", "52:54:5e:11:5b:01"),
    ("web-2", "52:54:5e:11:5b:02"),
];
const THIRD: &str = "/v1/vms/third";
const THIRD_MAC: &str = "52:54:5e:11:5b:03";
/// The longest delay of a restart by policy, and a boot.
const RECOVERY: Duration = Duration::from_secs(120);
const FRAMES: Frames = Frames {
    count: 200,
    size: 590,
    window: 16,
};

fn pause_below(random: &mut Random, limit: u64) -> Duration {
    Duration::from_millis(random.number() % limit)
}

/// The state of the third VM, as far as the daemon has confirmed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Third {
    Present,
    Absent,
    Unknown,
}

/// Creates and deletes the third VM until `stop`. Returns its state, and the number of confirmed
/// requests.
fn change(api: &Client, spec: &Value, stop: &AtomicBool) -> (Third, u32) {
    let mut state = Third::Absent;
    let mut confirmed = 0;
    while !stop.load(Ordering::Relaxed) {
        let (method, path, body, next) = match state {
            Third::Present => ("DELETE", format!("{THIRD}?force=true"), None, Third::Absent),
            _ => ("PUT", THIRD.to_owned(), Some(spec), Third::Present),
        };
        // The daemon may be killed before it answers, or still work on the request before.
        state = match api.ask(method, &path, body) {
            Ok(answer) if answer.status < 300 => {
                let returned = state == Third::Absent && answer.status != 201;
                assert!(!returned, "a deleted VM has returned: {}", answer.body);
                confirmed += 1;
                next
            }
            Ok(answer) if answer.status == 404 && state == Third::Present => {
                panic!("a confirmed VM is lost: {}", answer.body)
            }
            Ok(_) | Err(_) => Third::Unknown,
        };
        std::thread::sleep(Duration::from_millis(50));
    }
    (state, confirmed)
}

/// Whether a process has no memory any more. A zombie has none.
fn has_ended(pid: u64) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ"));
    environment.unwrap_or_default().is_empty()
}

/// Exchanges frames in each guest of a VM, one after the other, until `stop`. A guest may fail only
/// if its VM ends. Returns how many frames returned.
fn talk(api: &Client, vm: &str, stop: &AtomicBool) -> u64 {
    let mut received = 0;
    let line = format!("frames {} {} {}", FRAMES.count, FRAMES.size, FRAMES.window);
    while !stop.load(Ordering::Relaxed) {
        // The daemon may be killed before it answers.
        let info = api.get(&format!("/v1/vms/{vm}")).unwrap_or_default();
        let pid = info["status"]["pid"].as_u64();
        let Some(pid) = pid.filter(|_| info["status"]["phase"] == "Running") else {
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        let mut guest = None;
        until("a guest answers, or its VM ends", || {
            guest = attach(&info).ok();
            guest.is_some() || has_ended(pid)
        });
        let Some(mut guest) = guest else { continue };
        while !stop.load(Ordering::Relaxed) {
            match guest.command_within(&line, NOTICE) {
                Ok(said) => all_returned(&said, FRAMES.count).unwrap(),
                Err(error) => {
                    until(&format!("the VM has ended: {error}"), || has_ended(pid));
                    break;
                }
            }
            received += FRAMES.count;
        }
    }
    received
}

/// Kills the process of a VM at random, if there is one. Returns how many it killed.
fn kill_one(daemon: &Daemon, random: &mut Random) -> u32 {
    let all: Vec<u32> = daemon.processes().into_iter().collect();
    let Some(pid) = random.one_of(&all) else {
        return 0;
    };
    let pid = Pid::from_raw(i32::try_from(*pid).unwrap()).unwrap();
    // It may have ended meanwhile.
    u32::from(kill_process(pid, Signal::KILL).is_ok())
}

/// Kills for some time. The daemon serves at the end. Returns how often it killed the daemon, and
/// VMs.
fn kill_at_random(daemon: &mut Daemon, random: &mut Random, length: Duration) -> [u32; 2] {
    let mut kills = [0; 2];
    let begin = Instant::now();
    while begin.elapsed() < length {
        std::thread::sleep(pause_below(random, 1500));
        // 0: the daemon; 1: a VM; 2: both.
        let victim = random.below(3);
        if victim > 0 {
            kills[1] += kill_one(daemon, random);
        }
        if victim != 1 {
            daemon.kill();
            kills[0] += 1;
            // Killed again while it starts.
            if random.below(2) == 0 {
                daemon.spawn(None);
                std::thread::sleep(pause_below(random, 300));
                daemon.kill();
            }
            daemon.start_again();
        }
    }
    // A new daemon starts VMs at once, without the delay of the restart policy.
    daemon.restart(true);
    kills
}

#[test]
fn all_vms_run_again_after_kills_at_random() {
    require_lab().unwrap();
    let length = if soak() {
        Duration::from_secs(600)
    } else {
        notice(Kind::Thinned, "kills at random: 10 s of 10 minutes");
        Duration::from_secs(10)
    };
    let mut random = Random::announced(std::process::id().into());
    let mut daemon = Daemon::start("kills");
    let before = Traces::now(&daemon);
    for (vm, mac) in VMS {
        let mut spec = daemon.small(&json!([nic("net0", mac)]));
        spec["spec"]["restart"] = json!("Always");
        let path = format!("/v1/vms/{vm}");
        daemon.api.done("PUT", &path, Some(&spec)).unwrap();
    }
    for (vm, _) in VMS {
        exchange(&mut daemon.guest(vm), "eth0", FRAMES).unwrap();
    }

    let third = daemon.tiny(&json!([nic("net0", THIRD_MAC)]));
    let stop = AtomicBool::new(false);
    let api = daemon.api.clone();
    let (state, confirmed, received, kills) = std::thread::scope(|scope| {
        let changer = scope.spawn(|| change(&api, &third, &stop));
        let talkers = VMS.map(|(vm, _)| {
            let (api, stop) = (&api, &stop);
            scope.spawn(move || talk(api, vm, stop))
        });
        let end = StopOnDrop(&stop);
        let kills = kill_at_random(&mut daemon, &mut random, length);
        drop(end);
        let (state, confirmed) = changer.join().unwrap();
        let received = talkers.map(|talker| talker.join().unwrap());
        (state, confirmed, received, kills)
    });
    println!(
        "killed: {} daemons, {} VMs; {received:?} frames; {confirmed} requests confirmed",
        kills[0], kills[1]
    );
    assert!(confirmed > 0, "the daemon confirmed no request");
    assert!(received.iter().sum::<u64>() > 0, "no frame returned");

    let begin = Instant::now();
    for (vm, _) in VMS {
        let mut guest = loop {
            let info = daemon.api.get(&format!("/v1/vms/{vm}")).unwrap();
            if info["status"]["phase"] == "Running" {
                break attach(&info).unwrap();
            }
            assert!(begin.elapsed() < RECOVERY, "{info:#}");
            std::thread::sleep(Duration::from_millis(50));
        };
        exchange(&mut guest, "eth0", FRAMES).unwrap();
    }
    let answer = daemon.api.ask("GET", THIRD, None).unwrap();
    match state {
        Third::Present => assert_eq!(answer.status, 200, "{}", answer.body),
        Third::Absent => assert_eq!(answer.status, 404, "{}", answer.body),
        Third::Unknown => {}
    }
    for (vm, _) in VMS {
        daemon.delete(vm);
    }
    if answer.status == 200 {
        daemon.delete("third");
    }
    before.same(&daemon);
}
