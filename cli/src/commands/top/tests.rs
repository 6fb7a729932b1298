//! Pictures of fake nodes.

use bellhop_common::client::fake::{self, FakeDaemon};
use serde_json::{Value, json};

use super::picture::{fitted, lines, text};
use super::screen::{Key, Line, Style};
use super::*;

const METRICS: &str = "\
bellhop_nic_driver_ok{vm=\"web\",nic=\"net0\"} 1
bellhop_nic_broken{vm=\"web\",nic=\"net0\"} 0
bellhop_nic_queues{vm=\"web\",nic=\"net0\",kick=\"doorbell\"} 2
";

fn vms() -> Value {
    let nic = json!({"id": "net0", "from": "eth0", "mac": "52:54:00:12:34:56"});
    let devices = json!({"id": "net0", "vdpa_device": "web.net0",
        "character_device": "/dev/vhost-vdpa-0"});
    let alarm = json!({"device": "net0", "queue": 1, "alarm": "Stuck"});
    json!({"items": [
        fake::vm(&json!({"name": "db", "spec": {"state": "Stopped"},
            "status": {"phase": "Stopped", "pid": null}})),
        fake::vm(&json!({
            "spec": {"nics": [nic], "cpus": 2, "memory": {"size": "1G"}},
            "status": {"nic_devices": [devices], "alarms": [alarm], "uptime_s": 65},
        })),
    ]})
}

fn operations() -> Value {
    let operation = |phase: &str| {
        json!({"id": "7", "kind": "migration", "target": "web", "phase": phase,
            "progress": {"done": 1, "total": 4, "unit": "bytes", "forecast_downtime_ms": null},
            "error": null, "result": null, "created_ms": 1_795_297_500_000_u64, "ended_ms": null,
            "requested_by": "uid 0", "request_id": "1"})
    };
    json!({"items": [operation("done"), operation("running")]})
}

const EVENT: &str = "id: 1\ndata: {\"generation\":1,\"time_ms\":1795297500000,\
                     \"subject\":\"/v1/vms/web\",\"change\":\"created\",\
                     \"detail\":\"a\\u001bb\"}\n\n";

const PICTURE: &str = "\
VMs: 2, running: 1

NAME  STATE    PID  VCPUS  MEMORY  NICS  HEALTH         UPTIME  RESTARTS
db    Stopped  -    1      512M    0     -              -       0
web   Running  7    2      1G      1     net0 q1 STUCK  1m5s    0

VM   NIC   MAC                DEVICE    DRIVER  QUEUES  COMPLETED/S  FINDINGS
web  net0  52:54:00:12:34:56  web.net0  ok      2       -            q1 STUCK

ID  KIND       VM   PHASE    PROGRESS  BEGAN
7   migration  web  running  25 %      2026-11-21T21:45:00Z

EVENTS
2026-11-21T21:45:00Z  /v1/vms/web  created  a?b
";

fn fake() -> FakeDaemon {
    FakeDaemon::default()
        .answer(200, &vms())
        .answer(200, &operations())
        .answer(200, &json!(METRICS))
}

fn snapshot() -> Snapshot {
    Source::new(&fake().node()).snapshot(None).unwrap()
}

#[test]
fn the_whole_picture_is_text_without_a_terminal() {
    let fake = fake().answer(200, &json!(EVENT));
    assert_eq!(once(&fake.node()).unwrap(), PICTURE);
    let asked = [
        "GET /v1/vms",
        "GET /v1/operations",
        "GET /v1/metrics",
        "GET /v1/events?since=0&follow=false",
    ];
    assert_eq!(fake.asked(), asked);
    // An empty node.
    let fake = FakeDaemon::default()
        .answer(200, &json!({"items": []}))
        .answer(200, &json!({"items": []}))
        .answer(200, &json!(""))
        .answer(200, &json!("retry: 1000\n\n"));
    assert_eq!(once(&fake.node()).unwrap(), "VMs: 0, running: 0\n");
}

fn style_of(lines: &[Line], begin: &str) -> Style {
    let line = lines.iter().find(|line| line.text.starts_with(begin));
    line.unwrap().style
}

#[test]
fn keys_select_and_open_machines() {
    let snapshot = snapshot();
    let mut view = View::default();
    let shown = lines(&snapshot, &view);
    assert_eq!(style_of(&shown, "NAME"), Style::Heading);
    assert_eq!(style_of(&shown, "db"), Style::Plain);
    assert_eq!(style_of(&shown, "web   Running"), Style::Alarm);
    assert_eq!(style_of(&shown, "web  net0"), Style::Alarm);
    // Without a selection Enter does nothing.
    assert_eq!(view.press(Key::Enter, &snapshot), Done::No);
    assert_eq!(view.open, None);
    for (key, selected) in [
        (Key::Down, "db"),
        (Key::Up, "db"),
        (Key::Down, "web"),
        (Key::Down, "web"),
    ] {
        assert_eq!(view.press(key, &snapshot), Done::No);
        assert_eq!(
            style_of(&lines(&snapshot, &view), selected),
            Style::Selected
        );
    }
    assert_eq!(view.press(Key::Enter, &snapshot), Done::No);
    assert_eq!(view.open.as_deref(), Some("web"));
    let shown = text(&lines(&snapshot, &view));
    let wanted = "web: Running, pid 7\nnet0 q1 STUCK\nno data about queues\n";
    assert_eq!(shown, wanted);
    // It is deleted meanwhile.
    let shown = text(&lines(&Snapshot::default(), &view));
    assert!(shown.starts_with("web no longer exists\n"), "{shown}");
    assert_eq!(view.press(Key::Back, &snapshot), Done::No);
    assert_eq!(view.open, None);
    assert_eq!(view.press(Key::Down, &Snapshot::default()), Done::No);
    assert_eq!(view.press(Key::Quit, &snapshot), Done::Yes);
}

#[test]
fn details_have_the_queues_of_a_machine() {
    let nic = json!({"id": "net0", "state": "Plugged", "path": "/dev/vhost-vdpa-0",
    "doorbell": "auto", "device": {
        "status": 15, "driver_ok": true, "broken": false, "features_offered": [],
        "queues": [{"index": 1, "size": 256, "max_size": 256, "enabled": true,
            "kick": "Doorbell"}],
    }});
    let vm = vms()["items"][1].clone();
    let fake = fake().answer(200, &vm).answer(200, &nic);
    let snapshot = Source::new(&fake.node()).snapshot(Some("web")).unwrap();
    let view = View {
        open: Some("web".to_owned()),
        ..View::default()
    };
    let shown = text(&lines(&snapshot, &view));
    assert!(shown.contains("\nNIC   QUEUE  KICK"), "{shown}");
    assert!(shown.contains("\nnet0  1      doorbell"), "{shown}");
}

#[test]
fn a_picture_fits_the_terminal_and_shows_the_selected_line() {
    let line = |number: usize| Line {
        text: format!("{number}: \u{e4}bcdef"),
        style: if number == 7 {
            Style::Selected
        } else {
            Style::Plain
        },
    };
    let all: Vec<Line> = (0..10).map(line).collect();
    let shown = text(&fitted(all.clone(), (4, 3)));
    assert_eq!(shown, "6: \u{e4}\n7: \u{e4}\n8: \u{e4}\n");
    assert_eq!(fitted(all.clone(), (80, 24)), all);
    assert_eq!(fitted(all, (0, 0)).len(), 0);
    assert!(fitted(Vec::new(), (4, 3)).is_empty());
}
