//! The spec of a VM from options and files: creation, replacement and changes.

use super::*;

#[test]
fn options_become_the_request_to_the_daemon() {
    let options = [
        "web",
        "--kernel=/boot/vmlinuz",
        "--initramfs=/i",
        "--cpus=2",
        "--cpu=x86-64-v2",
        "--memory=size=1G,hugepages=2M",
        "--nic=from=pci/0000:01:00.0,bridge=br0,vlan=100,mac=52:54:00:12:34:56,kind=vf",
        "--nic=id=net0,path=/dev/vhost-vdpa-0,doorbell=off,backup=/dev/vhost-vdpa-1",
        "--nic=id=b,from=eth0,backup=eth1",
        "--nic=id=c,from=software,bridge=br0,poll=30,device_features=0x2f",
        "--disk=path=/d,readonly=on",
        "--restart=always",
        "--stopped",
    ];
    let wanted = json!({"spec": {
        "kernel": "/boot/vmlinuz", "initramfs": "/i", "cpus": 2, "cpu": "x86-64-v2",
        "memory": {"size": "1G", "hugepages": "2M"},
        "disks": [{"path": "/d", "readonly": true, "stall_kick": false}],
        "nics": [
            {"id": "net1", "from": "pci/0000:01:00.0", "bridge": "br0", "vlan": 100,
             "mac": "52:54:00:12:34:56", "kind": "vf"},
            {"id": "net0", "path": "/dev/vhost-vdpa-0", "doorbell": "off",
             "backup": {"path": "/dev/vhost-vdpa-1"}},
            {"id": "b", "from": "eth0", "backup": {"from": "eth1"}},
            {"id": "c", "from": "software", "bridge": "br0", "poll": 30,
             "device_features": 47},
        ],
        "restart": "Always", "state": "Stopped",
    }});
    assert_eq!(body(&options, HERE).unwrap(), wanted);
    assert_eq!(body(&options, ELSEWHERE).unwrap(), wanted);
}

#[test]
fn paths_are_those_of_this_command() {
    let here = std::env::current_dir().unwrap();
    let made = body(&["web", "--kernel", "vmlinuz", "--disk", "path=d"], HERE).unwrap();
    let made = &made["spec"];
    assert_eq!(made["kernel"], here.join("vmlinuz").to_str().unwrap());
    assert_eq!(made["disks"][0]["path"], here.join("d").to_str().unwrap());
    let error = body(&["web", "--kernel", "vmlinuz"], ELSEWHERE).unwrap_err();
    assert!(
        error.to_string().contains("use an absolute path"),
        "{error}"
    );
    assert_eq!(error.code(), Code::WrongCommandLine);
}

#[test]
fn a_file_goes_as_it_is_with_paths_from_the_root_on() {
    let file = std::env::temp_dir().join(format!("bellhop-vm-{}.toml", std::process::id()));
    let text = "kernel = 'vmlinuz'\nunknown = 1\n[[nics]]\nid = 'a'\nfrom = 'eth0'\n\
                [[nics]]\nid = 'b'\npath = 'dev'\n";
    std::fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap();
    let made = body(&["web", "--file", path, "--restart", "never"], HERE).unwrap();
    let made = &made["spec"];
    let here = std::env::current_dir().unwrap();
    assert_eq!(made["kernel"], here.join("vmlinuz").to_str().unwrap());
    assert_eq!(made["nics"][1]["path"], here.join("dev").to_str().unwrap());
    // The daemon rejects it with its own message.
    assert_eq!(made["unknown"], 1);
    assert_eq!(made["restart"], "Never");
    for restart in ["on-failure", "OnFailure", "ONFAILURE"] {
        let made = body(&["web", "--file", path, "--restart", restart], HERE).unwrap();
        assert_eq!(made["spec"]["restart"], "OnFailure");
    }
    assert_eq!(made.get("state"), None);
    std::fs::write(&file, "kernel = ").unwrap();
    let error = body(&["web", "--file", path], HERE).unwrap_err();
    assert_eq!(error.code(), Code::InvalidInput);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn options_override_a_file_that_has_the_name() {
    let file = std::env::temp_dir().join(format!("bellhop-over-{}.yaml", std::process::id()));
    let text =
        "name: web\nkernel: /k\ncpus: 4\nnics:\n- {id: net0, from: eth0}\n- {id: b, from: eth1}\n";
    std::fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap();
    let words = [
        "-f",
        path,
        "--kernel=/j",
        "--set=cpus=2",
        "--nic=from=eth2",
        "--nic=id=b,device=spare",
        "--label=tier=web",
    ];
    let wanted = json!({
        "labels": {"tier": "web"}, "spec": {"kernel": "/j", "cpus": 2, "nics": [
            {"id": "net0", "from": "eth0"}, {"id": "b", "device": "spare"},
            {"id": "net1", "from": "eth2"},
        ]},
    });
    assert_eq!(body(&words, HERE).unwrap(), wanted);
    let error = body(&["db", "-f", path], HERE).unwrap_err();
    assert_eq!(error.code(), Code::InvalidInput);
    std::fs::write(&file, "kernel: /k").unwrap();
    let error = body(&["-f", path], HERE).unwrap_err();
    assert_eq!(error.code(), Code::WrongCommandLine);
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
fn put(fake: FakeDaemon, words: &[&str], replace: bool) -> (Result<Code, Error>, Vec<String>) {
    let which = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let (node, format) = (fake.node(), format(&["-o", "json"]));
    let done = if replace {
        let arguments = parse::<replace::Arguments>(words).unwrap();
        let wanted = arguments.wanted(which.address()).unwrap();
        replace::execute(&wanted, &which, &node, format)
    } else {
        let arguments = parse::<create::Arguments>(words).unwrap();
        create::execute(&arguments, &which, &node, format)
    };
    (done, fake.asked())
}

#[test]
fn a_vm_is_created_only_where_there_is_none() {
    let exists = json!({"code": "vm_exists", "message": "the virtual machine web exists already"});
    let words = ["web", "--kernel=/k"];
    let (done, asked) = put(
        FakeDaemon::default().answer(201, &running(7)),
        &words,
        false,
    );
    assert_eq!(done.unwrap(), Code::Success);
    let start = "PUT /v1/vms/web if-none-match: * {";
    assert!(asked[0].starts_with(start), "{asked:?}");
    let (done, asked) = put(FakeDaemon::default().answer(412, &exists), &words, false);
    let error = done.unwrap_err();
    assert_eq!((error.code(), asked.len()), (Code::Conflict, 1));
    assert!(error.to_string().contains("web exists already"), "{error}");
    assert!(error.remedy().unwrap().contains("bellhop vm replace"));
    // Whatever its state.
    let there = FakeDaemon::default()
        .answer(412, &exists)
        .answer(200, &stopped());
    let (done, asked) = put(there, &["web", "--kernel=/k", "--if-not-exists"], false);
    assert_eq!(done.unwrap(), Code::Success);
    assert_eq!(asked[1], "GET /v1/vms/web");
    let refused = json!({"code": "unusable", "message": "no"});
    let refused = FakeDaemon::default().answer(422, &refused);
    let (done, _) = put(refused, &["web", "--kernel=/k", "--if-not-exists"], false);
    assert_eq!(done.unwrap_err().remedy(), None);
}

#[test]
fn a_plan_is_printed_instead_of_a_creation() {
    let words = ["web", "--kernel=/k", "--dry-run"];
    let steps = json!({"steps": ["create the directories of web"]});
    let (done, asked) = put(FakeDaemon::default().answer(200, &steps), &words, false);
    assert_eq!(done.unwrap(), Code::Success);
    assert_eq!(asked, [r#"POST /v1/vms/web/plan {"spec":{"kernel":"/k"}}"#]);
    let exists = json!({"code": "vm_exists", "message": "the virtual machine web exists already"});
    let (done, _) = put(FakeDaemon::default().answer(412, &exists), &words, false);
    assert_eq!(done.unwrap_err().code(), Code::Conflict);
    assert!(parse::<replace::Arguments>(&words).is_err());
}

#[test]
fn a_vm_is_replaced_only_where_there_is_one() {
    let words = ["web", "--kernel=/k", "--stopped"];
    let (done, asked) = put(FakeDaemon::default().answer(200, &stopped()), &words, true);
    assert_eq!(done.unwrap(), Code::Success);
    let start = "PUT /v1/vms/web if-match: * {";
    assert!(asked[0].starts_with(start), "{asked:?}");
    let absent = json!({"code": "no_such_vm", "message": "the virtual machine web does not exist"});
    let (done, _) = put(FakeDaemon::default().answer(412, &absent), &words, true);
    assert_eq!(done.unwrap_err().code(), Code::NotThere);
    assert!(parse::<replace::Arguments>(&["web"]).is_err());
    assert!(parse::<replace::Arguments>(&["web", "--kernel=/k", "--if-not-exists"]).is_err());
}

#[test]
fn a_file_changes_the_vm_that_is_there_and_makes_one_that_is_not() {
    let which = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let file = std::env::temp_dir().join(format!("bellhop-apply-{}.toml", std::process::id()));
    let text = "name = 'web'\nkernel = '/k'\nstate = 'Stopped'\n[labels]\ntier = 'web'\n";
    std::fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap();
    let patch = r#"{"labels":{"tier":"web"},"spec":{"kernel":"/k"}}"#;
    let changes = json!({"vm": stopped(), "changes": [
        {"field": "/spec/kernel", "from": "/j", "to": "/k", "applied": "next_start"}]});
    let apply = |words: &[&str], fake: &FakeDaemon| {
        let arguments = parse::<apply::ApplyArguments>(words).unwrap();
        apply::apply(&arguments, &which, &fake.node(), format(&[]))
    };
    let there = FakeDaemon::default().answer(200, &changes);
    assert_eq!(apply(&["-f", path], &there).unwrap(), Code::Success);
    assert_eq!(there.asked(), [format!("PATCH /v1/vms/web {patch}")]);

    let none = json!({"code": "no_such_vm", "message": "no"});
    let absent = FakeDaemon::default()
        .answer(404, &none)
        .answer(201, &stopped());
    assert_eq!(apply(&["web", "-f", path], &absent).unwrap(), Code::Success);
    let made = r#"{"labels":{"tier":"web"},"spec":{"kernel":"/k","state":"Stopped"}}"#;
    let made = format!("PUT /v1/vms/web if-none-match: * {made}");
    assert_eq!(absent.asked()[1], made);

    let arguments = parse::<apply::DiffArguments>(&["-f", path, "--set=cpus=2"]).unwrap();
    let fake = FakeDaemon::default().answer(200, &changes);
    apply::diff(&arguments, &which, &fake.node(), format(&[])).unwrap();
    let patch = patch.replace(r#"{"kernel""#, r#"{"cpus":2,"kernel""#);
    let asked = format!("PATCH /v1/vms/web?dry_run=true {patch}");
    assert_eq!(fake.asked(), [asked]);

    let error = apply(&["db", "-f", path], &FakeDaemon::default()).unwrap_err();
    assert_eq!(error.code(), Code::InvalidInput);
    std::fs::write(&file, "kernel = '/k'").unwrap();
    let error = apply(&["-f", path], &FakeDaemon::default()).unwrap_err();
    assert_eq!(error.code(), Code::WrongCommandLine);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn devices_of_running_vms_have_their_own_commands() {
    let fake = refuses("vm_runs");
    let error = spec_patch::send(
        &fake.node(),
        "web",
        None,
        &json!({"spec": {"nics": []}}),
        false,
    );
    let error = error.unwrap_err();
    let hint = error.refusal().unwrap().hint().unwrap();
    assert!(hint.contains("bellhop vm nic"), "{hint}");
}
