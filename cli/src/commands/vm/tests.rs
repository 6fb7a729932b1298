//! Commands against fake daemons.

mod creation;
mod operations;
mod terminal;

use std::time::Duration;

use bellhop_api::node::Vm;
use bellhop_common::client::fake::{self, FakeDaemon};
use clap::Parser;
use serde_json::{Value, json};

use super::view::time;
use super::*;

pub(super) fn format(words: &[&str]) -> Format {
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        format: Format,
    }
    let line = std::iter::once(&"x").chain(words);
    Line::try_parse_from(line).unwrap().format
}

fn parse<T: clap::Args>(words: &[&str]) -> Result<T, clap::Error> {
    let command = T::augment_args(clap::Command::new("x"));
    let line = std::iter::once(&"x").chain(words);
    T::from_arg_matches(&command.try_get_matches_from(line)?)
}

fn running(pid: u32) -> Value {
    fake::vm(&json!({
        "spec": {
            "cpus": 2, "memory": {"size": "1G"},
            "nics": [{"id": "net0", "from": "pci/0000:01:00.0", "mac": "52:54:00:12:34:56"}],
        },
        "status": {
            "pid": pid, "version": "0.1.0", "api": 1, "adopted": true, "restarts": 2,
            "last_end": {"reason": "Crashed", "detail": "triple fault"},
            "nic_devices": [{"id": "net0", "vdpa_device": "web.net0",
                "character_device": "/dev/vhost-vdpa-3"}],
            "uptime_s": 11_520, "of a later version": [1],
        },
    }))
}

fn stopped() -> Value {
    fake::vm(&json!({
        "spec": {"state": "Stopped"}, "status": {"phase": "Stopped", "pid": null},
    }))
}

fn body(words: &[&str], node: &str) -> Result<Value, Error> {
    let arguments = parse::<create::Arguments>(words).unwrap();
    let wanted = arguments.vm.wanted(&node.parse().unwrap())?;
    assert_eq!(wanted.name, "web");
    Ok(wanted.body)
}

const HERE: &str = "/run/bellhop/node.socket";
const ELSEWHERE: &str = "https://node1:7443";

/// The names of one VM.
fn web() -> Vec<String> {
    vec!["web".to_owned()]
}

/// A daemon that refuses its only request.
fn refuses(code: &str) -> FakeDaemon {
    let body = json!({"code": code, "message": "no", "causes": [], "request_id": "1",
        "hint": "a request"});
    FakeDaemon::default().answer(409, &body)
}

#[test]
fn a_stop_is_one_request_which_waits_for_the_guest() {
    for (words, body) in [
        (
            vec!["web", "--time-limit=5"],
            r#"{"state":"Stopped","mode":"graceful","grace_period_s":5}"#,
        ),
        (
            vec!["web"],
            r#"{"state":"Stopped","mode":"graceful","grace_period_s":60}"#,
        ),
        (
            vec!["web", "--force"],
            r#"{"state":"Stopped","mode":"hard"}"#,
        ),
    ] {
        let arguments = parse::<stop::Arguments>(&words).unwrap();
        let fake = FakeDaemon::default().answer(200, &stopped());
        let code =
            stop::execute(&arguments, &web(), &fake.node(), format(&["-o", "json"])).unwrap();
        assert_eq!(code, Code::Success);
        assert_eq!(fake.asked(), [format!("PUT /v1/vms/web/state {body}")]);
    }
    for wrong in ["--timeout=0", "--time-limit=86401"] {
        assert!(parse::<stop::Arguments>(&["web", wrong]).is_err());
    }
}

#[test]
fn a_guest_that_does_not_power_off_is_reported_as_running() {
    let arguments = parse::<stop::Arguments>(&["web"]).unwrap();
    for (code, ends, words) in [
        ("still_runs", Code::TimedOut, "vm stop --force web"),
        ("paused", Code::Conflict, "vm resume web"),
        ("arriving", Code::Conflict, "a request"),
    ] {
        let fake = refuses(code);
        let error = stop::execute(&arguments, &web(), &fake.node(), format(&[])).unwrap_err();
        assert_eq!(error.code(), ends);
        let hint = error.refusal().unwrap().hint().unwrap();
        assert!(hint.contains(words), "{hint}");
    }
}

#[test]
fn a_state_is_waited_for_from_before_the_first_look_on() {
    let starting = fake::vm(&json!({"status": {"phase": "Starting", "pid": null}}));
    let event = json!("id: 8\ndata: {\"generation\":8}\n\n");
    let arguments = parse::<wait::Arguments>(&["web", "--for", "running"]).unwrap();
    let fake = FakeDaemon::default()
        .answer(200, &event)
        .answer(200, &starting)
        .answer(200, &running(7));
    let code = wait::execute(&arguments, &fake.node(), format(&[])).unwrap();
    assert_eq!(code, Code::Success);
    let look = "GET /v1/vms/web";
    assert_eq!(fake.asked(), ["GET /v1/events?vm=web", look, look]);

    // Deletes a VM that does not exist, and never any other.
    let gone = json!({"code": "no_such_vm", "message": "no"});
    for (condition, wanted) in [
        ("deleted", Ok(Code::Success)),
        ("stopped", Err(Code::NotThere)),
    ] {
        let arguments = parse::<wait::Arguments>(&["web", "--for", condition]).unwrap();
        let fake = FakeDaemon::default().answer(200, &event).answer(404, &gone);
        let code = wait::execute(&arguments, &fake.node(), format(&[]));
        assert_eq!(code.map_err(|error| error.code()), wanted);
    }
    assert!(parse::<wait::Arguments>(&["web"]).is_err());
}

#[test]
fn nics_are_ready_when_their_drivers_run() {
    let nic = |driver_ok: bool| {
        json!({"id": "net0", "state": "Plugged", "path": "/d", "doorbell": "auto", "device": {
            "status": 15, "driver_ok": driver_ok, "broken": false, "features_offered": [],
            "queues": []}})
    };
    let wait = |words: &[&str], fake: &FakeDaemon| {
        let words = [&["web", "--for", "nic-ready"][..], words].concat();
        let arguments = parse::<wait::Arguments>(&words).unwrap();
        wait::execute(&arguments, &fake.node(), format(&["-j"]))
    };
    let event = json!("id: 8\ndata: {\"generation\":8}\n\n");
    let fake = FakeDaemon::default()
        .answer(200, &event)
        .answer(200, &running(7))
        .answer(200, &nic(false))
        .answer(200, &running(7))
        .answer(200, &nic(true));
    assert_eq!(wait(&[], &fake).unwrap(), Code::Success);
    assert_eq!(fake.asked()[2], "GET /v1/vms/web/nics/net0");
    // With a limit of zero there is one query.
    let fake = FakeDaemon::default().answer(200, &stopped());
    let error = wait(&["--timeout=0"], &fake).unwrap_err();
    assert!(error.to_string().contains("no NICs"), "{error}");
    let not_running = json!({"code": "not_running", "message": "no"});
    let fake = FakeDaemon::default()
        .answer(200, &running(7))
        .answer(409, &not_running);
    let error = wait(&["--timeout=0"], &fake).unwrap_err();
    assert_eq!(error.code(), Code::TimedOut);
}

#[test]
fn a_log_is_followed_from_position_to_position() {
    let at = |position| [("x-log-position", position)];
    let gone = json!({"code": "no_such_vm", "message": "no"});
    let fake = FakeDaemon::default()
        .answer_with(200, &at("1-2-3"), &json!("a\n"))
        .answer_with(200, &at("1-2-5"), &json!("b\n"))
        .answer(404, &gone);
    let arguments = parse::<logs::Arguments>(&["web", "-f", "--console", "-n", "5"]).unwrap();
    let mut printed = Vec::new();
    let mut print = |bytes: &[u8]| {
        printed.extend_from_slice(bytes);
        Ok(())
    };
    let error = logs::show(&arguments, &fake.node(), &mut print).unwrap_err();
    assert_eq!(error.code(), Code::NotThere);
    assert_eq!(printed, b"a\nb\n");
    let log = "GET /v1/vms/web/logs/console";
    let asked = ["tail=5", "after=1-2-3", "after=1-2-5"];
    assert_eq!(fake.asked(), asked.map(|query| format!("{log}?{query}")));
    let arguments = parse::<logs::Arguments>(&["web"]).unwrap();
    let fake = FakeDaemon::default().answer_with(200, &at("1-2-3"), &json!("a\n"));
    let mut print = |_: &[u8]| Ok(());
    let code = logs::show(&arguments, &fake.node(), &mut print).unwrap();
    assert_eq!(code, Code::Success);
    assert_eq!(fake.asked(), ["GET /v1/vms/web/logs/vmm?tail=1000"]);
}

#[test]
fn a_running_vm_is_deleted_only_with_force() {
    let arguments = parse::<delete::Arguments>(&["web"]).unwrap();
    let fake = refuses("vm_runs");
    let error = delete::execute(&arguments, &web(), &fake.node(), format(&[])).unwrap_err();
    let hint = error.refusal().unwrap().hint().unwrap();
    assert!(hint.contains("bellhop vm stop web"), "{hint}");
    assert_eq!(fake.asked(), ["DELETE /v1/vms/web"]);
    let forced = parse::<delete::Arguments>(&["web", "--force"]).unwrap();
    let fake = FakeDaemon::default().answer(204, &Value::Null);
    delete::execute(&forced, &web(), &fake.node(), format(&[])).unwrap();
    assert_eq!(fake.asked(), ["DELETE /v1/vms/web?force=true"]);
}

#[test]
fn several_machines_have_their_turns_also_if_one_fails() {
    let none = json!({"code": "no_such_vm", "message": "the virtual machine b does not exist"});
    let fake = FakeDaemon::default()
        .answer(200, &stopped())
        .answer(404, &none)
        .answer(200, &stopped());
    let arguments = parse::<stop::Arguments>(&["--force", "a", "b", "c"]).unwrap();
    let names = arguments.selection.names(&fake.node()).unwrap();
    let code = stop::execute(&arguments, &names, &fake.node(), format(&[])).unwrap();
    assert_eq!(code, Code::NotThere);
    for (asked, vm) in fake.asked().iter().zip(["a", "b", "c"]) {
        assert!(
            asked.starts_with(&format!("PUT /v1/vms/{vm}/state ")),
            "{asked}"
        );
    }
    assert!(parse::<stop::Arguments>(&["--force"]).is_err());
}

#[test]
fn machines_are_selected_by_name_label_or_all() {
    let names = |words: &[&str], fake: &FakeDaemon| {
        let selection = parse::<Selection>(words).unwrap();
        selection.names(&fake.node())
    };
    let two = json!({"items": [running(7), fake::vm(&json!({"name": "db"}))]});
    let none = FakeDaemon::default();
    assert_eq!(names(&["a", "b"], &none).unwrap(), ["a", "b"]);
    assert!(none.asked().is_empty());
    for (words, asked) in [
        (
            vec!["-l", "tier=web,env"],
            "GET /v1/vms?label=tier%3Dweb%2Cenv",
        ),
        (vec!["--all"], "GET /v1/vms"),
    ] {
        let fake = FakeDaemon::default().answer(200, &two);
        assert_eq!(names(&words, &fake).unwrap(), ["web", "db"]);
        assert_eq!(fake.asked(), [asked]);
    }
    let empty = FakeDaemon::default()
        .answer(200, &json!({"items": []}))
        .answer(200, &json!({"items": []}));
    let error = names(&["-l", "tire=web"], &empty).unwrap_err();
    assert_eq!(error.code(), Code::NotThere);
    assert_eq!(names(&["--all"], &empty).unwrap(), Vec::<String>::new());
    for wrong in [
        &[][..],
        &["a", "--all"],
        &["a", "-l", "b"],
        &["-l", "b", "--all"],
        &["-l", "b c"],
    ] {
        assert!(parse::<Selection>(wrong).is_err(), "{wrong:?}");
    }
    let arguments = parse::<list::Arguments>(&["-l", "a=b", "--phase", "running"]).unwrap();
    let fake = FakeDaemon::default().answer(200, &json!({"items": []}));
    list::execute(&arguments, &fake.node(), format(&["-j"])).unwrap();
    assert_eq!(fake.asked(), ["GET /v1/vms?label=a%3Db&phase=Running"]);
    assert!(parse::<list::Arguments>(&["--phase", "runing"]).is_err());
}

#[test]
fn a_missing_machine_is_deleted_if_permitted() {
    let none = json!({"code": "no_such_vm", "message": "the virtual machine web does not exist"});
    let fake = FakeDaemon::default()
        .answer(404, &none)
        .answer(204, &Value::Null);
    let words = ["web", "db", "--force", "--if-exists"];
    let arguments = parse::<delete::Arguments>(&words).unwrap();
    let names = arguments.selection.names(&fake.node()).unwrap();
    let code = delete::execute(&arguments, &names, &fake.node(), format(&[])).unwrap();
    assert_eq!(code, Code::Success);
    assert!(fake.asked()[1].starts_with("DELETE /v1/vms/db"));

    let arguments = parse::<delete::Arguments>(&["web", "--force"]).unwrap();
    let fake = FakeDaemon::default().answer(404, &none);
    let error = delete::execute(&arguments, &web(), &fake.node(), format(&[])).unwrap_err();
    assert_eq!(error.code(), Code::NotThere);
}

#[test]
fn a_stopped_vm_is_not_resumed() {
    let fake = FakeDaemon::default().answer(200, &stopped());
    let error = resume(&fake.node(), "web", format(&[])).unwrap_err();
    assert!(error.to_string().contains("bellhop vm start web"));
    assert_eq!(error.code(), Code::Conflict);
}

#[test]
fn buttons_of_several_machines_are_pressed() {
    let fake = FakeDaemon::default()
        .answer(204, &Value::Null)
        .answer(204, &Value::Null)
        .answer(204, &Value::Null);
    let arguments = parse::<reset::Arguments>(&["a", "b"]).unwrap();
    reset::execute(&arguments, &fake.node(), format(&[])).unwrap();
    reset::press(&["a".to_owned()], "nmi", &fake.node(), format(&["-j"])).unwrap();
    let asked = [
        "POST /v1/vms/a/reset",
        "POST /v1/vms/b/reset",
        "POST /v1/vms/a/nmi",
    ];
    assert_eq!(fake.asked(), asked);
}

#[test]
fn refusals_end_commands_with_their_codes() {
    let refuse = |status, code: &str| {
        let body = json!({"code": code, "message": "no", "causes": [], "request_id": "1"});
        let fake = FakeDaemon::default().answer(status, &body);
        let refused = change_state(&fake.node(), "web", WantedState::Running, format(&[]));
        refused.unwrap_err().code()
    };
    assert_eq!(refuse(404, "no_such_vm"), Code::NotThere);
    assert_eq!(refuse(409, "wrong_state"), Code::Conflict);
    assert_eq!(refuse(403, "role"), Code::NotAllowed);
    assert_eq!(refuse(422, "unusable"), Code::InvalidInput);
}

#[test]
fn a_list_has_the_known_values_of_each_vm() {
    let vms = [running(7), stopped()].map(|vm| read(&vm).unwrap());
    let wanted = "\
NAME  STATE    PID  VCPUS  MEMORY  NICS  HEALTH  UPTIME  RESTARTS  RESTART    VERSION  MACS
web   Running  7    2      1G      1     ok      3h12m   2         OnFailure  0.1.0    \
52:54:00:12:34:56
web   Stopped  -    1      512M    0     -       -       0         OnFailure  -
";
    assert_eq!(list::table(&vms).draw(true), wanted);
    assert!(read::<Vm>(&json!({"name": "a"})).is_err());
    for (seconds, text) in [(59, "59s"), (60, "1m0s"), (3600, "1h0m"), (90_000, "1d1h")] {
        assert_eq!(time(Duration::from_secs(seconds)), text);
    }
}

#[test]
fn health_names_the_first_finding() {
    let of = |status: Value| {
        let vm = fake::vm(&json!({ "status": status }));
        view::health(&read(&vm).unwrap())
    };
    let stuck = json!({"device": "net0", "queue": 1, "alarm": "Stuck"});
    let stalled = json!({"device": "net0", "queue": 0, "alarm": "DriverStalled"});
    let failed_over = json!([{"id": "net0", "failed_over": true}]);
    assert_eq!(of(json!({})).unwrap(), "ok");
    assert_eq!(of(json!({"alarms": [stuck]})).unwrap(), "net0 q1 STUCK");
    assert_eq!(
        of(json!({"nic_devices": failed_over})).unwrap(),
        "net0 failed over"
    );
    let refused = json!({"device": "iommu", "queue": 0, "alarm": "Refused", "detail": "full"});
    assert_eq!(of(json!({"alarms": [refused]})).unwrap(), "iommu REFUSED");
    let both = json!({"alarms": [stalled, stuck], "nic_devices": failed_over, "phase": "Paused"});
    assert_eq!(of(both).unwrap(), "net0 q0 DRIVERSTALLED (+2)");
    assert_eq!(of(json!({"phase": "Stopped", "alarms": [stuck]})), None);
    assert_eq!(of(json!({"phase": "Unknown"})), None);
}

#[test]
fn a_machine_is_shown_as_a_tree() {
    let nic = json!({"id": "net0", "address": "00:03.0", "device": {"driver_ok": true, "queues": [
        {"index": 0, "size": 256, "enabled": true, "kick": "Doorbell",
         "watch": {"state": "Moving", "in_flight": 12, "posted_per_s": 5, "completed_per_s": 6,
                   "stuck_for_s": 0, "stall_kicks": 0}},
        {"index": 1, "size": 256, "enabled": true, "kick": "Eventfd",
         "watch": {"state": "Stuck", "in_flight": 3, "posted_per_s": 0, "completed_per_s": 0,
                   "stuck_for_s": 5, "stall_kicks": 1}},
        {"index": 2, "size": 64, "enabled": true, "kick": "Exit", "watch": null},
        {"index": 3, "size": 64, "enabled": false, "kick": "Exit", "watch": null},
    ]}});
    let disks = json!({"items": [{"id": "disk0", "path": "/d\u{1b}[2J", "state": "Plugged"}]});
    let fake = FakeDaemon::default()
        .answer(200, &running(7))
        .answer(200, &nic)
        .answer(200, &disks);
    let text = show::text(&fake.node(), "web").unwrap();
    let wanted = "\
web: Running
├── process 7, bellhop 0.1.0, up 3h12m, started by an earlier daemon
├── 2 vCPUs, 1G, /boot/vmlinuz
├── restart OnFailure, started again 2 times, last end Crashed: triple fault
├── nic net0: /dev/vhost-vdpa-3 vDPA device web.net0 at 00:03.0 in the guest
│   ├── from=pci/0000:01:00.0,mac=52:54:00:12:34:56
│   ├── queue 0: 256 entries, kick doorbell, Moving, 12 in flight, 5 posted/s, 6 completed/s
│   ├── queue 1: 256 entries, kick eventfd, STUCK, 3 in flight, 0 posted/s, 0 completed/s, \
5 s without progress, 1 stall kicks
│   └── queue 2: 64 entries, kick exit
├── disk disk0: /d?[2J Plugged
├── console: socket /run/c.socket, log /var/c.log
└── messages: log /var/vmm.log
";
    assert_eq!(text, wanted);
    assert_eq!(fake.asked()[1], "GET /v1/vms/web/nics/net0");

    // The guest's IOMMU, which its process describes.
    let iommu = json!({"mappings": 5, "kicks": 8, "change_sets": 7, "maps": 9, "unmaps": 4,
        "refused": 1, "last_refusal": {"device": "net0", "iova": 16384, "size": 4096,
            "cause": "full"}});
    for spec in [
        json!({"nics": [{"id": "net0", "iommu": true}]}),
        json!({"disks": [{"id": "disk0", "path": "/d", "iommu": true}]}),
    ] {
        let behind = fake::vm(&json!({"spec": spec, "status": {"nic_devices": []}}));
        let fake = FakeDaemon::default()
            .answer(200, &behind)
            .answer(200, &json!({"items": []}))
            .answer(200, &iommu);
        let text = show::text(&fake.node(), "web").unwrap();
        let line = "├── iommu: 5 mappings, 9 maps, 4 unmaps, 8 kicks, 7 change sets, 1 refused; \
                    last net0: cannot change 4096 bytes at 0x4000: full\n";
        assert!(text.contains(line), "{text}");
        assert_eq!(fake.asked()[2], "GET /v1/vms/web/iommu");
    }

    // Labels, and changes that take effect at the next start.
    let changed = fake::vm(&json!({"labels": {"a": "", "tier": "web"},
        "annotations": {"note": "x"},
        "spec": {"vfio": [{"host": "0000:03:10.1"}]},
        "status": {"pending": ["/spec/memory/size", "/spec/cpus"]}}));
    let fake = FakeDaemon::default()
        .answer(200, &changed)
        .answer(200, &json!({"items": []}));
    let text = show::text(&fake.node(), "web").unwrap();
    for line in [
        "├── labels a=, tier=web\n",
        "├── annotations note=x\n",
        "├── changed at the next start: memory.size, cpus\n",
        "├── vfio 0000:03:10.1: host=0000:03:10.1\n",
    ] {
        assert!(text.contains(line), "{text}");
    }

    // For a stopped VM, only the daemon's own data is known.
    let disks = json!({"items": [{"id": "disk0", "path": "/d", "state": "Configured"}]});
    let fake = FakeDaemon::default()
        .answer(200, &stopped())
        .answer(200, &disks);
    let text = show::text(&fake.node(), "web").unwrap();
    assert!(text.starts_with("web: Stopped\n├── no process\n"), "{text}");
    assert!(text.contains("├── disk disk0: /d Configured\n"), "{text}");
}
