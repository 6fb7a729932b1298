//! Commands against fake daemons.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use bellhop_common::client::Address;
use bellhop_common::client::made_up::{self, MadeUp};
use clap::Parser;
use serde_json::json;
use vmm::console::{ConsoleInput, ConsoleRead};

use super::console::{End, connect};
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
    made_up::vm(&json!({
        "pid": pid, "version": "0.1.0", "api": 1, "adopted": true, "restarts": 2,
        "last_end": {"reason": "Crashed", "detail": "triple fault"},
        "nics": [{"id": "net0", "device": "web.net0", "path": "/dev/vhost-vdpa-3",
                  "mac": "52:54:00:12:34:56"}],
        "vcpus": 2, "memory": "1G", "uptime_s": 11_520, "of a later version": [1],
    }))
}

fn stopped() -> Value {
    made_up::vm(&json!({"phase": "Stopped", "state": "Stopped", "pid": null}))
}

fn body(words: &[&str], node: &str) -> Result<Value, Error> {
    let arguments = parse::<create::Arguments>(words).unwrap();
    create::body(&arguments.vm, &node.parse().unwrap())
}

const HERE: &str = "/run/bellhop/node.socket";
const ELSEWHERE: &str = "https://node1:7443";

#[test]
fn options_become_what_the_daemon_is_asked_for() {
    let options = [
        "web",
        "--kernel=/boot/vmlinuz",
        "--initramfs=/i",
        "--cpus=2",
        "--cpu=x86-64-v2",
        "--memory=size=1G,hugepages=2M",
        "--nic=from=pci/0000:01:00.0,bridge=br0,vlan=100,mac=52:54:00:12:34:56,kind=vf",
        "--nic=id=net0,path=/dev/vhost-vdpa-0,doorbell=off,failover=/dev/vhost-vdpa-1",
        "--nic=id=b,from=eth0,failover=eth1",
        "--disk=path=/d,readonly=on",
        "--restart=always",
        "--stopped",
    ];
    let wanted = json!({
        "kernel": "/boot/vmlinuz", "initramfs": "/i", "cmdline": "console=ttyS0", "cpus": 2, "cpu": "x86-64-v2",
        "memory": {"size": "1G", "hugepages": "2M"},
        "disks": [{"path": "/d", "readonly": true, "rescue": false}],
        "nics": [
            {"id": "net1", "from": "pci/0000:01:00.0", "bridge": "br0", "vlan": 100, "mac": "52:54:00:12:34:56", "kind": "vf"},
            {
                "id": "net0", "path": "/dev/vhost-vdpa-0", "doorbell": "off", "failover": {"path": "/dev/vhost-vdpa-1"},
            },
            {"id": "b", "from": "eth0", "failover": {"from": "eth1"}},
        ],
        "restart": "Always", "state": "Stopped",
    });
    assert_eq!(body(&options, HERE).unwrap(), wanted);
    assert_eq!(body(&options, ELSEWHERE).unwrap(), wanted);
}

#[test]
fn paths_are_those_of_this_command() {
    let here = std::env::current_dir().unwrap();
    let made = body(&["web", "--kernel", "vmlinuz", "--disk", "path=d"], HERE).unwrap();
    assert_eq!(made["kernel"], here.join("vmlinuz").to_str().unwrap());
    assert_eq!(made["disks"][0]["path"], here.join("d").to_str().unwrap());
    let error = body(&["web", "--kernel", "vmlinuz"], ELSEWHERE).unwrap_err();
    assert!(error.to_string().contains("say it from / on"), "{error}");
    assert_eq!(error.code(), Code::WrongCommandLine);
}

#[test]
fn a_file_goes_as_it_is_with_paths_from_the_root_on() {
    let file = std::env::temp_dir().join(format!("bellhop-vm-{}.toml", std::process::id()));
    let text = "kernel = 'vmlinuz'\nunknown = 1\n[[nics]]\nid = 'a'\nfrom = 'eth0'\n[[nics]]\nid = 'b'\npath = 'dev'\n";
    std::fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap();
    let made = body(&["web", "--file", path, "--restart", "never"], HERE).unwrap();
    let here = std::env::current_dir().unwrap();
    assert_eq!(made["kernel"], here.join("vmlinuz").to_str().unwrap());
    assert_eq!(made["nics"][1]["path"], here.join("dev").to_str().unwrap());
    // The daemon rejects it with its own message.
    assert_eq!(made["unknown"], 1);
    assert_eq!(made["restart"], "Never");
    for restart in ["on-failure", "OnFailure", "ONFAILURE"] {
        let made = body(&["web", "--file", path, "--restart", restart], HERE).unwrap();
        assert_eq!(made["restart"], "OnFailure");
    }
    assert_eq!(made.get("state"), None);
    assert!(parse::<create::Arguments>(&["web", "--file", path, "--kernel", "k"]).is_err());
    std::fs::write(&file, "kernel = ").unwrap();
    let error = body(&["web", "--file", path], HERE).unwrap_err();
    assert_eq!(error.code(), Code::InvalidInput);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn two_nics_of_one_name_are_refused() {
    let nics = [
        "web",
        "--kernel=/k",
        "--nic=id=a,from=x",
        "--nic=id=a,from=y",
    ];
    let error = body(&nics, HERE).unwrap_err();
    assert_eq!(error.to_string(), "two NICs have the id a");
    assert_eq!(error.code(), Code::WrongCommandLine);
    assert!(parse::<create::Arguments>(&["web"]).is_err());
}

/// Runs `vm create` or `vm replace`: the outcome, and the requests.
fn put(made_up: MadeUp, words: &[&str], replace: bool) -> (Result<Code, Error>, Vec<String>) {
    let which = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let (node, format) = (made_up.node(), format(&["-o", "json"]));
    let done = if replace {
        let arguments = parse::<replace::Arguments>(words).unwrap();
        replace::execute(&arguments, &which, &node, format)
    } else {
        let arguments = parse::<create::Arguments>(words).unwrap();
        create::execute(&arguments, &which, &node, format)
    };
    (done, made_up.asked())
}

#[test]
fn a_vm_is_created_only_where_there_is_none() {
    let exists = json!({"code": "vm_exists", "message": "there is a virtual machine web already"});
    let words = ["web", "--kernel=/k"];
    let (done, asked) = put(MadeUp::default().answer(201, &running(7)), &words, false);
    assert_eq!(done.unwrap(), Code::Success);
    let start = "PUT /v1/vms/web if-none-match: * {";
    assert!(asked[0].starts_with(start), "{asked:?}");
    let (done, asked) = put(MadeUp::default().answer(412, &exists), &words, false);
    let error = done.unwrap_err();
    assert_eq!((error.code(), asked.len()), (Code::Conflict, 1));
    assert!(error.to_string().contains("web already"), "{error}");
    assert!(error.remedy().unwrap().contains("bellhop vm replace"));
    // Whatever its state.
    let there = MadeUp::default()
        .answer(412, &exists)
        .answer(200, &stopped());
    let (done, asked) = put(there, &["web", "--kernel=/k", "--if-not-exists"], false);
    assert_eq!(done.unwrap(), Code::Success);
    assert_eq!(asked[1], "GET /v1/vms/web");
    let refused = json!({"code": "unusable", "message": "no"});
    let refused = MadeUp::default().answer(422, &refused);
    let (done, _) = put(refused, &["web", "--kernel=/k", "--if-not-exists"], false);
    assert_eq!(done.unwrap_err().remedy(), None);
}

#[test]
fn a_vm_is_replaced_only_where_there_is_one() {
    let words = ["web", "--kernel=/k", "--stopped"];
    let (done, asked) = put(MadeUp::default().answer(200, &stopped()), &words, true);
    assert_eq!(done.unwrap(), Code::Success);
    let start = "PUT /v1/vms/web if-match: * {";
    assert!(asked[0].starts_with(start), "{asked:?}");
    let absent = json!({"code": "no_such_vm", "message": "there is no virtual machine web"});
    let (done, _) = put(MadeUp::default().answer(412, &absent), &words, true);
    assert_eq!(done.unwrap_err().code(), Code::NotThere);
    assert!(parse::<replace::Arguments>(&["web"]).is_err());
    assert!(parse::<replace::Arguments>(&["web", "--kernel=/k", "--if-not-exists"]).is_err());
}

/// The names of one VM.
fn web() -> Vec<String> {
    vec!["web".to_owned()]
}

/// A daemon that refuses its only request.
fn refuses(code: &str) -> MadeUp {
    let body = json!({"code": code, "message": "no", "causes": [], "request_id": "1",
        "hint": "a request"});
    MadeUp::default().answer(409, &body)
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
        let made_up = MadeUp::default().answer(200, &stopped());
        let code =
            stop::execute(&arguments, &web(), &made_up.node(), format(&["-o", "json"])).unwrap();
        assert_eq!(code, Code::Success);
        assert_eq!(made_up.asked(), [format!("PATCH /v1/vms/web {body}")]);
    }
    for wrong in ["--timeout=0", "--time-limit=86401"] {
        assert!(parse::<stop::Arguments>(&["web", wrong]).is_err());
    }
}

#[test]
fn a_guest_that_does_not_power_off_is_said_to_run_on() {
    let arguments = parse::<stop::Arguments>(&["web"]).unwrap();
    for (code, ends, words) in [
        ("still_runs", Code::TimedOut, "vm stop --force web"),
        ("paused", Code::Conflict, "vm resume web"),
        ("arriving", Code::Conflict, "a request"),
    ] {
        let made_up = refuses(code);
        let error = stop::execute(&arguments, &web(), &made_up.node(), format(&[])).unwrap_err();
        assert_eq!(error.code(), ends);
        let hint = error.refusal().unwrap().hint().unwrap();
        assert!(hint.contains(words), "{hint}");
    }
}

#[test]
fn a_state_is_waited_for_from_before_the_first_look_on() {
    let starting = made_up::vm(&json!({"phase": "Starting", "pid": null}));
    let event = json!("id: 8\ndata: {\"generation\":8}\n\n");
    let arguments = parse::<wait::Arguments>(&["web", "--for", "running"]).unwrap();
    let made_up = MadeUp::default()
        .answer(200, &event)
        .answer(200, &starting)
        .answer(200, &running(7));
    let code = wait::execute(&arguments, &made_up.node(), format(&[])).unwrap();
    assert_eq!(code, Code::Success);
    let look = "GET /v1/vms/web";
    assert_eq!(made_up.asked(), ["GET /v1/events?vm=web", look, look]);

    // Deletes a VM that does not exist, and never any other.
    let gone = json!({"code": "no_such_vm", "message": "no"});
    for (condition, wanted) in [
        ("deleted", Ok(Code::Success)),
        ("stopped", Err(Code::NotThere)),
    ] {
        let arguments = parse::<wait::Arguments>(&["web", "--for", condition]).unwrap();
        let made_up = MadeUp::default().answer(200, &event).answer(404, &gone);
        let code = wait::execute(&arguments, &made_up.node(), format(&[]));
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
    let wait = |words: &[&str], made_up: &MadeUp| {
        let words = [&["web", "--for", "nic-ready"][..], words].concat();
        let arguments = parse::<wait::Arguments>(&words).unwrap();
        wait::execute(&arguments, &made_up.node(), format(&["-j"]))
    };
    let event = json!("id: 8\ndata: {\"generation\":8}\n\n");
    let made_up = MadeUp::default()
        .answer(200, &event)
        .answer(200, &running(7))
        .answer(200, &nic(false))
        .answer(200, &running(7))
        .answer(200, &nic(true));
    assert_eq!(wait(&[], &made_up).unwrap(), Code::Success);
    assert_eq!(made_up.asked()[2], "GET /v1/vms/web/nics/net0");
    // With a limit of zero there is one query.
    let made_up = MadeUp::default().answer(200, &stopped());
    let error = wait(&["--timeout=0"], &made_up).unwrap_err();
    assert!(error.to_string().contains("no NICs"), "{error}");
    let not_running = json!({"code": "not_running", "message": "no"});
    let made_up = MadeUp::default()
        .answer(200, &running(7))
        .answer(409, &not_running);
    let error = wait(&["--timeout=0"], &made_up).unwrap_err();
    assert_eq!(error.code(), Code::TimedOut);
}

#[test]
fn a_log_is_followed_from_position_to_position() {
    let at = |position| [("x-log-position", position)];
    let gone = json!({"code": "no_such_vm", "message": "no"});
    let made_up = MadeUp::default()
        .answer_with(200, &at("1-2-3"), &json!("a\n"))
        .answer_with(200, &at("1-2-5"), &json!("b\n"))
        .answer(404, &gone);
    let arguments = parse::<logs::Arguments>(&["web", "-f", "--console", "-n", "5"]).unwrap();
    let mut printed = Vec::new();
    let mut print = |bytes: &[u8]| {
        printed.extend_from_slice(bytes);
        Ok(())
    };
    let error = logs::show(&arguments, &made_up.node(), &mut print).unwrap_err();
    assert_eq!(error.code(), Code::NotThere);
    assert_eq!(printed, b"a\nb\n");
    let log = "GET /v1/vms/web/logs/console";
    let asked = ["tail=5", "after=1-2-3", "after=1-2-5"];
    assert_eq!(made_up.asked(), asked.map(|query| format!("{log}?{query}")));
    let arguments = parse::<logs::Arguments>(&["web"]).unwrap();
    let made_up = MadeUp::default().answer_with(200, &at("1-2-3"), &json!("a\n"));
    let mut print = |_: &[u8]| Ok(());
    let code = logs::show(&arguments, &made_up.node(), &mut print).unwrap();
    assert_eq!(code, Code::Success);
    assert_eq!(made_up.asked(), ["GET /v1/vms/web/logs/vmm?tail=1000"]);
}

#[test]
fn what_runs_is_deleted_with_force_only() {
    let arguments = parse::<delete::Arguments>(&["web"]).unwrap();
    let made_up = refuses("vm_runs");
    let error = delete::execute(&arguments, &web(), &made_up.node(), format(&[])).unwrap_err();
    let hint = error.refusal().unwrap().hint().unwrap();
    assert!(hint.contains("bellhop vm stop web"), "{hint}");
    assert_eq!(made_up.asked(), ["DELETE /v1/vms/web"]);
    let forced = parse::<delete::Arguments>(&["web", "--force"]).unwrap();
    let made_up = MadeUp::default().answer(204, &Value::Null);
    delete::execute(&forced, &web(), &made_up.node(), format(&[])).unwrap();
    assert_eq!(made_up.asked(), ["DELETE /v1/vms/web?force=true"]);
}

#[test]
fn several_machines_have_their_turns_also_if_one_fails() {
    let none = json!({"code": "no_such_vm", "message": "there is no virtual machine b"});
    let made_up = MadeUp::default()
        .answer(200, &stopped())
        .answer(404, &none)
        .answer(200, &stopped());
    let arguments = parse::<stop::Arguments>(&["--force", "a", "b", "c"]).unwrap();
    let names = arguments.selection.names(&made_up.node()).unwrap();
    let code = stop::execute(&arguments, &names, &made_up.node(), format(&[])).unwrap();
    assert_eq!(code, Code::NotThere);
    for (asked, vm) in made_up.asked().iter().zip(["a", "b", "c"]) {
        assert!(
            asked.starts_with(&format!("PATCH /v1/vms/{vm} ")),
            "{asked}"
        );
    }
    assert!(parse::<stop::Arguments>(&["--force"]).is_err());
}

#[test]
fn machines_are_selected_by_name_label_or_all() {
    let names = |words: &[&str], made_up: &MadeUp| {
        let selection = parse::<Selection>(words).unwrap();
        selection.names(&made_up.node())
    };
    let two = json!({"items": [running(7), made_up::vm(&json!({"name": "db"}))]});
    let none = MadeUp::default();
    assert_eq!(names(&["a", "b"], &none).unwrap(), ["a", "b"]);
    assert!(none.asked().is_empty());
    for (words, asked) in [
        (
            vec!["-l", "tier=web,env"],
            "GET /v1/vms?label=tier%3Dweb%2Cenv",
        ),
        (vec!["--all"], "GET /v1/vms"),
    ] {
        let made_up = MadeUp::default().answer(200, &two);
        assert_eq!(names(&words, &made_up).unwrap(), ["web", "db"]);
        assert_eq!(made_up.asked(), [asked]);
    }
    let empty = MadeUp::default()
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
    let made_up = MadeUp::default().answer(200, &json!({"items": []}));
    list::execute(&arguments, &made_up.node(), format(&["-j"])).unwrap();
    assert_eq!(made_up.asked(), ["GET /v1/vms?label=a%3Db&phase=Running"]);
    assert!(parse::<list::Arguments>(&["--phase", "runing"]).is_err());
}

#[test]
fn a_file_changes_the_vm_that_is_there_and_makes_one_that_is_not() {
    let which = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let file = std::env::temp_dir().join(format!("bellhop-apply-{}.toml", std::process::id()));
    let text = "name = 'web'\nkernel = '/k'\nstate = 'Stopped'\n[labels]\ntier = 'web'\n";
    std::fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap();
    let patch = r#"{"kernel":"/k","labels":{"tier":"web"}}"#;
    let changes = json!({"generation": 2, "changes": [
        {"field": "/kernel", "from": "/j", "to": "/k", "applied": "next_start"}]});
    let apply = |words: &[&str], made_up: &MadeUp| {
        let arguments = parse::<apply::ApplyArguments>(words).unwrap();
        apply::apply(&arguments, &which, &made_up.node(), format(&[]))
    };
    let there = MadeUp::default().answer(200, &changes);
    assert_eq!(apply(&["-f", path], &there).unwrap(), Code::Success);
    assert_eq!(there.asked(), [format!("PATCH /v1/vms/web/spec {patch}")]);

    let none = json!({"code": "no_such_vm", "message": "no"});
    let absent = MadeUp::default().answer(404, &none).answer(201, &stopped());
    assert_eq!(apply(&["web", "-f", path], &absent).unwrap(), Code::Success);
    let made = r#"{"kernel":"/k","labels":{"tier":"web"},"state":"Stopped"}"#;
    let made = format!("PUT /v1/vms/web if-none-match: * {made}");
    assert_eq!(absent.asked()[1], made);

    let arguments = parse::<apply::DiffArguments>(&["-f", path]).unwrap();
    let made_up = MadeUp::default().answer(200, &changes);
    apply::diff(&arguments, &which, &made_up.node(), format(&[])).unwrap();
    let asked = format!("PATCH /v1/vms/web/spec?dry_run=true {patch}");
    assert_eq!(made_up.asked(), [asked]);

    let error = apply(&["db", "-f", path], &MadeUp::default()).unwrap_err();
    assert_eq!(error.code(), Code::InvalidInput);
    std::fs::write(&file, "kernel = '/k'").unwrap();
    let error = apply(&["-f", path], &MadeUp::default()).unwrap_err();
    assert_eq!(error.code(), Code::WrongCommandLine);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn devices_of_what_runs_have_commands_of_their_own() {
    let made_up = refuses("vm_runs");
    let error = spec_patch::send(&made_up.node(), "web", None, &json!({"nics": []}), false);
    let error = error.unwrap_err();
    let hint = error.refusal().unwrap().hint().unwrap();
    assert!(hint.contains("bellhop vm nic"), "{hint}");
}

#[test]
fn a_missing_machine_is_deleted_if_that_is_said() {
    let none = json!({"code": "no_such_vm", "message": "there is no virtual machine web"});
    let made_up = MadeUp::default()
        .answer(404, &none)
        .answer(204, &Value::Null);
    let words = ["web", "db", "--force", "--if-exists"];
    let arguments = parse::<delete::Arguments>(&words).unwrap();
    let names = arguments.selection.names(&made_up.node()).unwrap();
    let code = delete::execute(&arguments, &names, &made_up.node(), format(&[])).unwrap();
    assert_eq!(code, Code::Success);
    assert!(made_up.asked()[1].starts_with("DELETE /v1/vms/db"));

    let arguments = parse::<delete::Arguments>(&["web", "--force"]).unwrap();
    let made_up = MadeUp::default().answer(404, &none);
    let error = delete::execute(&arguments, &web(), &made_up.node(), format(&[])).unwrap_err();
    assert_eq!(error.code(), Code::NotThere);
}

#[test]
fn what_is_stopped_is_not_resumed() {
    let made_up = MadeUp::default().answer(200, &stopped());
    let error = resume(&made_up.node(), "web", format(&[])).unwrap_err();
    assert!(error.to_string().contains("bellhop vm start web"));
    assert_eq!(error.code(), Code::Conflict);
}

/// An operation of the VM web.
fn operation(phase: &str, more: &Value) -> Value {
    let mut operation = json!({
        "id": "17", "kind": "upgrade", "target": "web", "phase": phase, "created_ms": 1,
        "requested_by": "uid 0", "request_id": "r",
    });
    let fields = operation.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    operation
}

#[test]
fn another_program_goes_on_with_a_machine() {
    let local = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let arguments = parse::<upgrade::Arguments>(&["web", "--program", "/new/bellhop"]).unwrap();
    let result = json!({"upgrade": {"before": "0.1.0", "after": "0.2.0", "downtime_ms": 93.5}});
    let made_up = MadeUp::default()
        .answer(202, &operation("running", &json!({})))
        .answer(200, &operation("running", &json!({})))
        .answer(200, &operation("done", &json!({ "result": result })));
    let code = upgrade::execute(&arguments, &local, &made_up.node(), format(&[])).unwrap();
    assert_eq!(code, Code::Success);
    let asked = made_up.asked();
    assert_eq!(
        asked[0],
        r#"POST /v1/vms/web/upgrade {"program":"/new/bellhop"}"#
    );
    assert_eq!(asked[1], "GET /v1/operations/17");

    // The next program rejects the VM, without a report.
    let error = json!({"code": "not_upgraded", "message": "no such device", "status": 502});
    let made_up = MadeUp::default()
        .answer(202, &operation("running", &json!({})))
        .answer(200, &operation("failed", &json!({ "error": error })));
    let error = upgrade::execute(&arguments, &local, &made_up.node(), format(&[])).unwrap_err();
    assert!(error.to_string().contains("no such device"), "{error}");
    assert_eq!(error.code(), Code::Failed);
    let hasty = parse::<upgrade::Arguments>(&["web", "--timeout=1s"]).unwrap();
    let mut made_up = MadeUp::default();
    for _ in 0..20 {
        made_up = made_up.answer(200, &operation("running", &json!({})));
    }
    let error = upgrade::execute(&hasty, &local, &made_up.node(), format(&[])).unwrap_err();
    assert_eq!(error.code(), Code::TimedOut);
    let own = std::env::current_exe().unwrap();
    assert!(made_up.asked()[0].contains(own.to_str().unwrap()));

    // On another host, this command's own program does not exist.
    let far = parse::<NodeArguments>(&["--node", ELSEWHERE]).unwrap();
    let made_up = MadeUp::default();
    let error = upgrade::execute(&hasty, &far, &made_up.node(), format(&[])).unwrap_err();
    assert_eq!(error.code(), Code::WrongCommandLine);
    assert!(made_up.asked().is_empty());
}

fn elsewhere() -> Value {
    made_up::vm(
        &json!({"phase": "MayBeElsewhere", "pid": null, "may_be_elsewhere":
        {"destination": "unix:/b", "reason": "its guest may run there", "remedy": "say `migration settle web there`"}}),
    )
}

#[test]
fn how_a_machine_moved_is_said_by_its_operation() {
    let local = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let arguments = parse::<migrate::Arguments>(&["web", "--to", "unix:/b"]).unwrap();
    let after = |phase: &str, more: &Value| {
        let made_up = MadeUp::default()
            .answer(202, &operation("running", &json!({})))
            .answer(200, &operation(phase, more));
        migrate::execute(&arguments, &local, &made_up.node(), format(&[]))
    };
    let lost = json!({"error": {"code": "may_be_elsewhere", "message": "say `migration settle web there`",
        "status": 409}});
    let error = after("failed", &lost).unwrap_err();
    assert!(
        error.to_string().contains("migration settle web there"),
        "{error}"
    );
    let stays = json!({"error": {"code": "not_moved", "message": "it stays", "status": 502}});
    assert_eq!(after("failed", &stays).unwrap_err().code(), Code::Failed);
    let error = after("cancelled", &json!({})).unwrap_err();
    assert!(error.to_string().contains("cancelled"), "{error}");
    // Its process ended without a report.
    assert_eq!(after("done", &json!({})).unwrap(), Code::Success);

    let made_up = MadeUp::default()
        .answer(200, &elsewhere())
        .answer(200, &json!({"kernel": "/k"}))
        .answer(200, &json!({"items": []}));
    let text = show::text(&made_up.node(), "web").unwrap();
    assert!(
        text.starts_with("web: MayBeElsewhere (to be Running)\n"),
        "{text}"
    );
    assert!(text.contains("its guest may run there\n"), "{text}");
    assert!(
        text.contains("└── say `migration settle web there`"),
        "{text}"
    );
}

/// Runs a subcommand of `vm migration`.
fn migration(words: &[&str], made_up: &MadeUp) -> Result<Code, Error> {
    let arguments = parse::<migration::Arguments>(words).unwrap();
    migration::execute(&arguments, &made_up.node(), format(&["-j"]))
}

#[test]
fn where_a_guest_is_is_said_to_the_daemon() {
    for (place, body) in [("here", "Here"), ("there", "There")] {
        let made_up = MadeUp::default().answer(204, &Value::Null);
        migration(&["settle", "web", place], &made_up).unwrap();
        let asked = format!(r#"PATCH /v1/vms/web/migration {{"settle":"{body}"}}"#);
        assert_eq!(made_up.asked(), [asked]);
    }
}

#[test]
fn a_migration_is_started_shown_followed_and_cancelled() {
    let local = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let status = |phase: &str| {
        json!({
            "direction": "Send", "peer": "unix:/b", "phase": phase, "rounds": 1, "elapsed_ms": 2,
            "ram_bytes": 4096, "sent_bytes": 1, "pages": 1, "zero_pages": 0, "left_bytes": 0,
            "bytes_per_second": 1, "dirty_bytes_per_second": 1, "throttle_percent": 0,
        })
    };
    let words = ["web", "--to", "unix:/b", "--detach"];
    let arguments = parse::<migrate::Arguments>(&words).unwrap();
    let made_up = MadeUp::default().answer(202, &status("Offer"));
    migrate::execute(&arguments, &local, &made_up.node(), format(&[])).unwrap();
    assert_eq!(made_up.asked().len(), 1);

    let made_up = MadeUp::default().answer(200, &status("Copy"));
    assert_eq!(
        migration(&["show", "web"], &made_up).unwrap(),
        Code::Success
    );
    let last = |phase: &str, state: &str| {
        let result = json!({ "result": { "migration": status(state) } });
        let running = json!({ "items": [operation("running", &json!({}))] });
        MadeUp::default()
            .answer(200, &running)
            .answer(200, &operation(phase, &result))
    };
    let made_up = last("done", "Moved");
    assert_eq!(
        migration(&["watch", "web"], &made_up).unwrap(),
        Code::Success
    );
    let list = "GET /v1/operations?kind=migration&target=web";
    assert_eq!(made_up.asked(), [list, "GET /v1/operations/17"]);
    migration(&["watch", "web"], &last("cancelled", "Stayed")).unwrap_err();
    let none = MadeUp::default().answer(200, &json!({ "items": [] }));
    let error = migration(&["watch", "web"], &none).unwrap_err();
    assert_eq!(error.code(), Code::NotThere);
    let made_up = MadeUp::default().answer(202, &Value::Null);
    migration(&["cancel", "web"], &made_up).unwrap();
    assert_eq!(made_up.asked(), ["DELETE /v1/vms/web/migration"]);
}

#[test]
fn buttons_of_several_machines_are_pressed() {
    let made_up = MadeUp::default()
        .answer(204, &Value::Null)
        .answer(204, &Value::Null)
        .answer(204, &Value::Null);
    let arguments = parse::<reset::Arguments>(&["a", "b"]).unwrap();
    reset::execute(&arguments, &made_up.node(), format(&[])).unwrap();
    reset::press(&["a".to_owned()], "nmi", &made_up.node(), format(&["-j"])).unwrap();
    let asked = [
        "POST /v1/vms/a/reset",
        "POST /v1/vms/b/reset",
        "POST /v1/vms/a/nmi",
    ];
    assert_eq!(made_up.asked(), asked);
}

#[test]
fn refusals_end_commands_with_their_codes() {
    let refuse = |status, code: &str| {
        let body = json!({"code": code, "message": "no", "causes": [], "request_id": "1"});
        let made_up = MadeUp::default().answer(status, &body);
        let refused = change_state(&made_up.node(), "web", WantedState::Running, format(&[]));
        refused.unwrap_err().code()
    };
    assert_eq!(refuse(404, "no_such_vm"), Code::NotThere);
    assert_eq!(refuse(409, "wrong_state"), Code::Conflict);
    assert_eq!(refuse(403, "role"), Code::NotAllowed);
    assert_eq!(refuse(422, "unusable"), Code::InvalidInput);
}

#[test]
fn machines_are_listed_as_far_as_they_are_known() {
    let vms = [running(7), stopped()].map(|vm| read(&vm).unwrap());
    let wanted = "\
NAME  STATE    PID  VCPUS  MEMORY  NICS  HEALTH  UPTIME  RESTARTS  RESTART    VERSION  MACS
web   Running  7    2      1G      1     ok      3h12m   2         OnFailure  0.1.0    52:54:00:12:34:56
web   Stopped  -    1      512M    0     -       -       0         OnFailure  -
";
    assert_eq!(list::table(&vms).draw(true), wanted);
    assert!(read::<VmInfo>(&json!({"name": "a"})).is_err());
    for (seconds, text) in [(59, "59s"), (60, "1m0s"), (3600, "1h0m"), (90_000, "1d1h")] {
        assert_eq!(time(Duration::from_secs(seconds)), text);
    }
}

#[test]
fn health_names_the_first_finding() {
    let of = |other: Value| view::health(&read(&made_up::vm(&other)).unwrap());
    let stuck = json!({"device": "net0", "queue": 1, "alarm": "Stuck"});
    let stalled = json!({"device": "net0", "queue": 0, "alarm": "DriverStalled"});
    let failed_over = json!([{"id": "net0", "failed_over": true}]);
    assert_eq!(of(json!({})).unwrap(), "ok");
    assert_eq!(of(json!({"alarms": [stuck]})).unwrap(), "net0 q1 STUCK");
    assert_eq!(
        of(json!({"nics": failed_over})).unwrap(),
        "net0 failed over"
    );
    let both = json!({"alarms": [stalled, stuck], "nics": failed_over, "phase": "Paused"});
    assert_eq!(of(both).unwrap(), "net0 q0 DRIVERSTALLED (+2)");
    assert_eq!(of(json!({"phase": "Stopped", "alarms": [stuck]})), None);
    assert_eq!(of(json!({"phase": "Unknown"})), None);
}

#[test]
fn a_machine_is_shown_as_a_tree() {
    let spec = json!({"kernel": "/boot/vmlinuz", "cpus": 2, "memory": {"size": "1G"},
        "nics": [{"id": "net0", "from": "pci/0000:01:00.0", "vlan": 100}]});
    let nic = json!({"id": "net0", "address": "00:03.0", "device": {"driver_ok": true, "queues": [
        {"index": 0, "size": 256, "enabled": true, "kick": "Doorbell",
         "watch": {"state": "Moving", "in_flight": 12, "posted_per_s": 5, "completed_per_s": 6, "stuck_for_s": 0, "rescues": 0}},
        {"index": 1, "size": 256, "enabled": true, "kick": "Eventfd",
         "watch": {"state": "Stuck", "in_flight": 3, "posted_per_s": 0, "completed_per_s": 0, "stuck_for_s": 5, "rescues": 1}},
        {"index": 2, "size": 64, "enabled": true, "kick": "Exit", "watch": null},
        {"index": 3, "size": 64, "enabled": false, "kick": "Exit", "watch": null},
    ]}});
    let disks = json!({"items": [{"id": "disk0", "path": "/d\u{1b}[2J", "state": "Plugged"}]});
    let made_up = MadeUp::default()
        .answer(200, &running(7))
        .answer(200, &spec)
        .answer(200, &nic)
        .answer(200, &disks);
    let text = show::text(&made_up.node(), "web").unwrap();
    let wanted = "\
web: Running
├── process 7, bellhop 0.1.0, up 3h12m, started by an earlier daemon
├── 2 vCPUs, 1G, /boot/vmlinuz
├── restart OnFailure, started again 2 times, last end Crashed: triple fault
├── nic net0: /dev/vhost-vdpa-3 vDPA device web.net0 at 00:03.0 in the guest
│   ├── from=pci/0000:01:00.0,vlan=100
│   ├── queue 0: 256 entries, kick doorbell, Moving, 12 in flight, 5 posted/s, 6 completed/s
│   ├── queue 1: 256 entries, kick eventfd, STUCK, 3 in flight, 0 posted/s, 0 completed/s, 5 s without progress, 1 rescues
│   └── queue 2: 64 entries, kick exit
├── disk disk0: /d?[2J Plugged
├── console: socket /run/c.socket, log /var/c.log
└── messages: log /var/vmm.log
";
    assert_eq!(text, wanted);
    assert_eq!(made_up.asked()[2], "GET /v1/vms/web/nics/net0");

    // Labels, and changes that take effect at the next start.
    let changed = made_up::vm(&json!({"labels": {"a": "", "tier": "web"},
        "annotations": {"note": "x"}, "pending": ["/memory/size", "/cpus"]}));
    let made_up = MadeUp::default()
        .answer(200, &changed)
        .answer(200, &spec)
        .answer(200, &json!({"items": []}));
    let text = show::text(&made_up.node(), "web").unwrap();
    for line in [
        "├── labels a=, tier=web\n",
        "├── annotations note=x\n",
        "├── changed at the next start: memory.size, cpus\n",
    ] {
        assert!(text.contains(line), "{text}");
    }

    // For a stopped VM, only the daemon's own data is known.
    let disks = json!({"items": [{"id": "disk0", "path": "/d", "state": "Configured"}]});
    let made_up = MadeUp::default()
        .answer(200, &stopped())
        .answer(200, &spec)
        .answer(200, &disks);
    let text = show::text(&made_up.node(), "web").unwrap();
    assert!(text.starts_with("web: Stopped\n├── no process\n"), "{text}");
    assert!(text.contains("├── disk disk0: /d Configured\n"), "{text}");
}

/// Fake standard input: a socket, whose bytes are forwarded unchanged except `X`, which is the
/// escape.
struct Typed(UnixStream);

impl AsFd for Typed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ConsoleInput for Typed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead> {
        let count = (&self.0).read(buffer)?;
        Ok(if buffer[..count].contains(&b'X') {
            ConsoleRead::Leave
        } else if count == 0 {
            ConsoleRead::Closed
        } else {
            ConsoleRead::Bytes(count)
        })
    }
}

#[test]
fn a_console_passes_bytes_on_until_one_end_leaves() {
    let (mut keyboard, typed) = UnixStream::pair().unwrap();
    let (mut guest, stream) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut output = Vec::new();
        let end = connect(Some(Typed(typed)), &stream, &mut output).unwrap();
        (end, output)
    });
    keyboard.write_all(b"ls\r").unwrap();
    let mut got = [0; 3];
    guest.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"ls\r");
    guest.write_all(b"file\r\n").unwrap();
    // The output arrives before the user's escape.
    std::thread::sleep(Duration::from_millis(200));
    keyboard.write_all(b"X").unwrap();
    let (end, output) = thread.join().unwrap();
    assert_eq!((end, output.as_slice()), (End::Left, &b"file\r\n"[..]));
    assert_eq!(guest.read(&mut got).unwrap(), 0);
}

#[test]
fn a_console_goes_on_after_the_end_of_input_and_ends_with_the_machine() {
    let (mut keyboard, typed) = UnixStream::pair().unwrap();
    let (mut guest, stream) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut output = Vec::new();
        let end = connect(Some(Typed(typed)), &stream, &mut output).unwrap();
        (end, output)
    });
    // More than the socket's buffer, to a guest that does not read yet.
    let script = vec![b'a'; 1 << 20];
    let writer = std::thread::spawn(move || keyboard.write_all(&script).map(|()| drop(keyboard)));
    std::thread::sleep(Duration::from_millis(200));
    let mut got = vec![0; 1 << 20];
    guest.read_exact(&mut got).unwrap();
    assert!(got.iter().all(|byte| *byte == b'a'));
    writer.join().unwrap().unwrap();
    guest.write_all(b"bye").unwrap();
    drop(guest);
    let (end, output) = thread.join().unwrap();
    assert_eq!((end, output.as_slice()), (End::Closed, &b"bye"[..]));
}

#[test]
fn a_console_needs_a_machine_that_runs_on_this_host() {
    let arguments = parse::<console::Arguments>(&["web"]).unwrap();
    let which = |node: &str| parse::<NodeArguments>(&["--node", node]).unwrap();
    let made_up = MadeUp::default().answer(200, &stopped());
    let error = console::execute(&arguments, &which(HERE), &made_up.node()).unwrap_err();
    assert!(error.to_string().contains("does not run"));
    let error = console::execute(&arguments, &which(ELSEWHERE), &made_up.node()).unwrap_err();
    assert!(error.to_string().contains("ssh -t"));
    assert_eq!(*which(HERE).address(), Address::Socket(HERE.into()));
}
