//! A running guest migrates from one process to another and back, on vdpa_sim: its memory, its
//! clock and its traffic are unchanged.
//!
//! A writer in the guest checks every page of its own before it writes the page again. The tests
//! compare frames with the devices' counts.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod moving;

use lab::endurance::cycles;
use lab::guest::{BellhopArguments, Guest};
use lab::kvm_statistics;
use lab::messages::messages;
use lab::notice::{self, notice};
use lab::sim::{SimDevice, require_lab};
use lab::soak_run::Run;
use lab::traffic::{assert_flood_returned, check_traffic, flood_on};
use moving::faults::{Fault, FaultyLink, Kind};
use moving::soak::{Scene, TrafficPeer, run_soak};
use moving::{Host, NOTICE, move_guest, move_to_waiting};
use serde_json::{Value, json};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:59:01";

/// Less than the guest was told.
const SMALL_MTU: u16 = 1000;

/// A frame that takes a page, each half millisecond, for longer than a migration takes.
const KEPT: &str = "kept-on 4000 1400 500";

/// Migrations of one guest, there and back.
const MOVES: u64 = 4;

/// The forecast and the measured downtime differ by less than this factor. Only the best migration
/// counts: an emulated host may stop one of them for longer.
const MAGNITUDE: f64 = 10.0;

/// How far the forecast was from the measured downtime: a factor of 1 or more.
#[track_caller]
fn forecast_error(status: &Value) -> f64 {
    let milliseconds = |name: &str| {
        let value = status[name].as_f64();
        value.unwrap_or_else(|| panic!("{name}: {status}")).max(1.0)
    };
    let forecast = milliseconds("forecast_downtime_ms");
    let measured = milliseconds("downtime_ms");
    notice(
        notice::Kind::Figure,
        format!("standstill of a move on vdpa_sim: forecast {forecast} ms, measured {measured} ms"),
    );
    (forecast / measured).max(measured / forecast)
}

fn small() -> BellhopArguments {
    BellhopArguments::small().unwrap().memory("128M")
}

fn uptime(guest: &mut Guest) -> u64 {
    guest.command("info").unwrap()["uptime_ms"]
        .as_u64()
        .unwrap()
}

#[test]
fn a_guest_moves_there_and_back_with_its_memory_its_clock_and_its_traffic() {
    require_lab().unwrap();
    let devices = [
        SimDevice::net("move1", MAC, 1500).unwrap(),
        SimDevice::net("move2", MAC, 1500).unwrap(),
    ];
    let hosts = [
        Host::new("move1", devices[0].path()),
        Host::new("move2", devices[1].path()),
    ];
    let mut guest = hosts[0].boot(small());
    check_traffic(&mut guest, &devices[0]);
    let said = messages(&mut guest).unwrap();
    guest.command("write-on 24 50").unwrap();
    let mut best = f64::INFINITY;
    for number in 0..usize::try_from(MOVES).unwrap() {
        let (from, to) = (number % 2, (number + 1) % 2);
        // In turn: traffic that is verified as it arrives, and frames that the device writes while
        // memory is copied. The guest looks at the latter only after its arrival.
        let kept = number % 2 == 1;
        if kept {
            guest.command(KEPT).unwrap();
        } else {
            flood_on(&mut guest, "eth0", MAC);
        }
        let before = uptime(&mut guest);
        let (moved, status) = move_guest(guest, &hosts[from], &hosts[to]);
        println!("{status}");
        best = best.min(forecast_error(&status));
        guest = moved;
        assert!(uptime(&mut guest) >= before);
        let off = if kept { "kept-off" } else { "flood-off" };
        let came = guest.command(off).unwrap();
        assert_flood_returned(&came);
        check_traffic(&mut guest, &devices[to]);
    }
    assert!(best < MAGNITUDE, "no forecast came near: {best}");
    let found = guest.command("write-off").unwrap();
    println!("{found}");
    assert_eq!(found["wrong"], 0, "{found}");
    assert_eq!(messages(&mut guest).unwrap(), said);
    assert!(guest.power_off().unwrap().success());
}

/// Pages that a test's writer rewrites continuously.
const WRITTEN_PAGES: u64 = 24 << 8;

/// After the migration the writer checks each of its pages. If they had to be mapped then, each
/// would cause a fault.
#[test]
fn a_guest_that_arrives_finds_its_memory_mapped() {
    require_lab().unwrap();
    let devices = ["move1", "move2"].map(|name| SimDevice::net(name, MAC, 1500).unwrap());
    let [from, to] = [0, 1].map(|at| Host::new(&format!("move{}", at + 1), devices[at].path()));
    let mut guest = from.boot(small());
    guest.command("write-on 24 50").unwrap();
    let waiting = to.wait_as(|command| {
        command.env("BELLHOP_LOG", "info");
        // The kernel sometimes unmaps memory that may lie on any node, to see which CPU uses it
        // (NUMA balancing).
        command.args(["--host-numa-node", "0"]);
    });
    let (mut guest, _) = move_to_waiting(guest, waiting, &from, &to);
    let found = guest.command("write-off").unwrap();
    assert_eq!(
        (&found["pages"], &found["wrong"]),
        (&json!(WRITTEN_PAGES), &json!(0)),
        "{found}"
    );
    let counted = kvm_statistics::read(&guest).unwrap();
    println!("{} faults of memory", counted["pf_taken"]);
    assert!(counted["pf_taken"] < WRITTEN_PAGES / 2, "{counted:?}");
    assert!(guest.power_off().unwrap().success());
}

/// The simulator sends the guest's frames back to it, and has no cable.
struct Loop;

impl TrafficPeer for Loop {
    fn mac(&self) -> String {
        MAC.to_owned()
    }

    fn flood(&mut self, _guest: &str) {}

    fn calm(&mut self) {}
}

#[test]
fn a_guest_on_vdpa_sim_moves_to_and_fro_at_any_moment() {
    require_lab().unwrap();
    let devices = ["move1", "move2"].map(|name| SimDevice::net(name, MAC, 1500).unwrap());
    run_soak(
        Scene {
            hosts: [
                Host::new("move1", devices[0].path()),
                Host::new("move2", devices[1].path()),
            ],
            traffic_peer: Loop,
            set_link: None,
            // The device is suspended: it finishes what it has begun.
            may_lose: 0,
            resets: 0,
            moves_idle: true,
            packed: false,
        },
        BellhopArguments::small().unwrap(),
        Run {
            first: 0,
            moves: cycles().unwrap(),
        },
    );
}

/// Migrations that fail: the guest stays, with its network.
#[track_caller]
fn moves_fail(guest: &mut Guest, from: &Host, to: &Host, device: &SimDevice) {
    // No destination listens.
    from.send(to, json!({}));
    let status = from.ended(guest);
    assert_eq!(status["phase"], "Stayed", "{status}");
    assert!(
        status["error"].as_str().unwrap().contains("cannot connect"),
        "{status}"
    );
    check_traffic(guest, device);

    // The destination's device is busy: it is the source's.
    let busy = Host::new("move3", device.path());
    let mut waiting = busy.wait();
    from.send(&busy, json!({}));
    let status = from.ended(guest);
    assert_eq!(status["phase"], "Stayed", "{status}");
    assert!(
        status["error"].as_str().unwrap().contains("busy"),
        "{status}"
    );
    assert!(!waiting.wait_exit(NOTICE).unwrap().success());
    check_traffic(guest, device);

    // Cancelled during the memory transfer.
    let mut waiting = to.wait();
    from.send(to, json!({ "downtime_ms": 0, "timeout_s": 600 }));
    let client = from.client();
    while client.get("/v1/vm/migration").unwrap()["rounds"] == 0 {}
    let again = json!({ "send": { "destination": to.endpoint() } });
    let refused = client
        .ask("POST", "/v1/vm/migration", Some(&again))
        .unwrap();
    assert_eq!(refused.status, 409, "{}", refused.body);
    client.done("DELETE", "/v1/vm/migration", None).unwrap();
    let status = from.ended(guest);
    assert_eq!(status["phase"], "Stayed", "{status}");
    assert!(!waiting.wait_exit(NOTICE).unwrap().success());
    check_traffic(guest, device);

    // The destination is killed during the transfer.
    let waiting = to.wait();
    from.send(to, json!({ "downtime_ms": 0 }));
    while client.get("/v1/vm/migration").unwrap()["rounds"] == 0 {}
    drop(waiting);
    let status = from.ended(guest);
    assert_eq!(status["phase"], "Stayed", "{status}");
    check_traffic(guest, device);
}

/// The obstacles to a migration, in one text.
#[track_caller]
fn obstacles(trial: &Value) -> String {
    assert_eq!(trial["movable"], false, "{trial}");
    let obstacles = trial["obstacles"].as_array().unwrap();
    assert!(!obstacles.is_empty(), "{trial}");
    trial["obstacles"].to_string()
}

/// Dry runs report whether the guest could migrate, and change nothing. Returns the process that
/// waited for the guest meanwhile.
#[track_caller]
fn dry_runs(guest: &mut Guest, hosts: &[Host; 2], devices: &[SimDevice; 3]) -> Guest {
    // No destination listens.
    let trial = hosts[0].try_out(&hosts[1], json!({}));
    let text = obstacles(&trial);
    assert!(
        text.contains("cannot connect") && text.contains("bellhop run --receive"),
        "{text}"
    );

    // The device that waits there is the source's own, or takes smaller frames. Those processes
    // keep waiting.
    for (name, device, reason) in [("busy", &devices[0], "busy"), ("small", &devices[2], "MTU")] {
        let wrong = Host::new(name, device.path());
        let waiting = wrong.wait();
        for _ in 0..2 {
            let trial = hosts[0].try_out(&wrong, json!({}));
            println!("{trial}");
            let text = obstacles(&trial);
            assert!(text.contains(reason), "{text}");
        }
        let there = wrong.client().get("/v1/vm/migration").unwrap();
        assert_eq!(there["phase"], "Offer", "{there}");
        drop(waiting);
    }

    // Each dry run reports that it could migrate, if the allowed downtime is long enough.
    let waiting = hosts[1].wait();
    for _ in 0..3 {
        let trial = hosts[0].try_out(&hosts[1], json!({}));
        println!("{trial}");
        assert_eq!(trial["movable"], true, "{trial}");
        let (ram, data) = (
            trial["ram_bytes"].as_u64().unwrap(),
            trial["data_bytes"].as_u64().unwrap(),
        );
        assert!(data > 24 << 20 && data <= ram, "{trial}");
        assert!(trial["bytes_per_second"].is_null(), "{trial}");
        assert!(trial["prepare_ms"].as_u64() > Some(0), "{trial}");
        check_traffic(guest, &devices[0]);
    }
    let text = obstacles(&hosts[0].try_out(&hosts[1], json!({ "downtime_ms": 1 })));
    assert!(text.contains("--downtime"), "{text}");

    // Nothing has changed: there was no migration.
    let none = hosts[0]
        .client()
        .ask("GET", "/v1/vm/migration", None)
        .unwrap();
    assert_eq!(none.status, 404, "{}", none.body);
    assert_eq!(hosts[0].client().get("/v1/vm").unwrap()["state"], "Running");
    waiting
}

/// A destination that falls silent at the end does not stop the guest.
#[track_caller]
fn falls_silent(guest: &mut Guest, from: &Host, to: &Host, device: &SimDevice) {
    let mut waiting = to.wait();
    let link = FaultyLink::to(to, Kind::StateEnd, Fault::Silent);
    from.send_to(&link.endpoint(), json!({ "connections": 1 }));
    let status = from.ended(guest);
    println!("{status}");
    assert_eq!(status["phase"], "Stayed", "{status}");
    let error = status["error"].as_str().unwrap();
    assert!(
        error.contains("the guest was stopped") && error.contains("2.0 s"),
        "{error}"
    );
    assert!(status["downtime_ms"].as_f64() >= Some(2000.0), "{status}");
    check_traffic(guest, device);
    link.end();
    assert!(!waiting.wait_exit(NOTICE).unwrap().success());
}

#[test]
fn an_unmovable_machine_keeps_its_network_and_a_dry_run_predicts_it() {
    require_lab().unwrap();
    let devices = [
        SimDevice::net("move1", MAC, 1500).unwrap(),
        SimDevice::net("move2", MAC, 1500).unwrap(),
        SimDevice::net("move3", MAC, SMALL_MTU).unwrap(),
    ];
    let hosts = [
        Host::new("move1", devices[0].path()),
        Host::new("move2", devices[1].path()),
    ];
    let mut guest = hosts[0].boot(small());
    let said = messages(&mut guest).unwrap();
    guest.command("write-on 24 50").unwrap();
    // The process that waited during all dry runs takes the guest.
    let waiting = dry_runs(&mut guest, &hosts, &devices);
    let (mut guest, _) = move_to_waiting(guest, waiting, &hosts[0], &hosts[1]);
    check_traffic(&mut guest, &devices[1]);

    let [there, here] = &hosts;
    moves_fail(&mut guest, here, there, &devices[1]);
    falls_silent(&mut guest, here, there, &devices[1]);
    // After all that, the guest can still migrate.
    let (mut guest, _) = move_guest(guest, here, there);
    check_traffic(&mut guest, &devices[0]);
    let found = guest.command("write-off").unwrap();
    assert_eq!(found["wrong"], 0, "{found}");
    assert_eq!(messages(&mut guest).unwrap(), said);
    assert!(guest.power_off().unwrap().success());
}
