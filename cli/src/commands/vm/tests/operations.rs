//! Long work that a command follows: upgrades and migrations.

use super::*;

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
fn an_upgrade_replaces_the_program_of_a_vm() {
    let local = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let arguments = parse::<upgrade::Arguments>(&["web", "--program", "/new/bellhop"]).unwrap();
    let result = json!({"upgrade": {"before": "0.1.0", "after": "0.2.0", "downtime_ms": 93.5}});
    let fake = FakeDaemon::default()
        .answer(202, &operation("running", &json!({})))
        .answer(200, &operation("running", &json!({})))
        .answer(200, &operation("done", &json!({ "result": result })));
    let code = upgrade::execute(&arguments, &local, &fake.node(), format(&[])).unwrap();
    assert_eq!(code, Code::Success);
    let asked = fake.asked();
    assert_eq!(
        asked[0],
        r#"POST /v1/vms/web/upgrade {"program":"/new/bellhop"}"#
    );
    assert_eq!(asked[1], "GET /v1/operations/17");

    // The next program rejects the VM, without a report.
    let error = json!({"code": "not_upgraded", "message": "no such device", "status": 502});
    let fake = FakeDaemon::default()
        .answer(202, &operation("running", &json!({})))
        .answer(200, &operation("failed", &json!({ "error": error })));
    let error = upgrade::execute(&arguments, &local, &fake.node(), format(&[])).unwrap_err();
    assert!(error.to_string().contains("no such device"), "{error}");
    assert_eq!(error.code(), Code::Failed);
    let hasty = parse::<upgrade::Arguments>(&["web", "--timeout=1s"]).unwrap();
    let mut fake = FakeDaemon::default();
    for _ in 0..20 {
        fake = fake.answer(200, &operation("running", &json!({})));
    }
    let error = upgrade::execute(&hasty, &local, &fake.node(), format(&[])).unwrap_err();
    assert_eq!(error.code(), Code::TimedOut);
    let own = std::env::current_exe().unwrap();
    assert!(fake.asked()[0].contains(own.to_str().unwrap()));

    // On another host, this command's own program does not exist.
    let far = parse::<NodeArguments>(&["--node", ELSEWHERE]).unwrap();
    let fake = FakeDaemon::default();
    let error = upgrade::execute(&hasty, &far, &fake.node(), format(&[])).unwrap_err();
    assert_eq!(error.code(), Code::WrongCommandLine);
    assert!(fake.asked().is_empty());
}

fn elsewhere() -> Value {
    fake::vm(
        &json!({"status": {"phase": "MigrationUnknown", "pid": null, "migration_unknown":
        {"destination": "unix:/b", "reason": "its guest may run there",
         "remedy": "run `migration resolve web there`"}}}),
    )
}

#[test]
fn a_migration_reports_the_result_of_its_operation() {
    let local = parse::<NodeArguments>(&["--node", HERE]).unwrap();
    let arguments = parse::<migrate::Arguments>(&["web", "--to", "unix:/b"]).unwrap();
    let after = |phase: &str, more: &Value| {
        let fake = FakeDaemon::default()
            .answer(202, &operation("running", &json!({})))
            .answer(200, &operation(phase, more));
        migrate::execute(&arguments, &local, &fake.node(), format(&[]))
    };
    let lost = json!({"error": {"code": "migration_unknown", "status": 409,
        "message": "run `migration resolve web there`"}});
    let error = after("failed", &lost).unwrap_err();
    assert!(
        error.to_string().contains("migration resolve web there"),
        "{error}"
    );
    let stays = json!({"error": {"code": "not_moved", "message": "it stays", "status": 502}});
    assert_eq!(after("failed", &stays).unwrap_err().code(), Code::Failed);
    let error = after("cancelled", &json!({})).unwrap_err();
    assert!(error.to_string().contains("cancelled"), "{error}");
    // Its process ended without a report.
    assert_eq!(after("done", &json!({})).unwrap(), Code::Success);

    let fake = FakeDaemon::default()
        .answer(200, &elsewhere())
        .answer(200, &json!({"items": []}));
    let text = show::text(&fake.node(), "web").unwrap();
    assert!(
        text.starts_with("web: MigrationUnknown (to be Running)\n"),
        "{text}"
    );
    assert!(text.contains("its guest may run there\n"), "{text}");
    assert!(
        text.contains("└── run `migration resolve web there`"),
        "{text}"
    );
}

/// Runs a subcommand of `vm migration`.
fn migration(words: &[&str], fake: &FakeDaemon) -> Result<Code, Error> {
    let arguments = parse::<migration::Arguments>(words).unwrap();
    migration::execute(&arguments, &fake.node(), format(&["-j"]))
}

#[test]
fn a_client_resolves_a_migration() {
    for (place, body) in [("here", "Here"), ("there", "There")] {
        let fake = FakeDaemon::default().answer(204, &Value::Null);
        migration(&["resolve", "web", place], &fake).unwrap();
        let asked = format!(r#"PATCH /v1/vms/web/migration {{"resolve":"{body}"}}"#);
        assert_eq!(fake.asked(), [asked]);
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
    let fake = FakeDaemon::default().answer(202, &status("Offer"));
    migrate::execute(&arguments, &local, &fake.node(), format(&[])).unwrap();
    assert_eq!(fake.asked().len(), 1);

    let fake = FakeDaemon::default().answer(200, &status("Copy"));
    assert_eq!(migration(&["show", "web"], &fake).unwrap(), Code::Success);
    let last = |phase: &str, state: &str| {
        let result = json!({ "result": { "migration": status(state) } });
        let running = json!({ "items": [operation("running", &json!({}))] });
        FakeDaemon::default()
            .answer(200, &running)
            .answer(200, &operation(phase, &result))
    };
    let fake = last("done", "Moved");
    assert_eq!(migration(&["watch", "web"], &fake).unwrap(), Code::Success);
    let list = "GET /v1/operations?kind=migration&target=web";
    assert_eq!(fake.asked(), [list, "GET /v1/operations/17"]);
    migration(&["watch", "web"], &last("cancelled", "Stayed")).unwrap_err();
    let none = FakeDaemon::default().answer(200, &json!({ "items": [] }));
    let error = migration(&["watch", "web"], &none).unwrap_err();
    assert_eq!(error.code(), Code::NotThere);
    let fake = FakeDaemon::default().answer(202, &Value::Null);
    migration(&["cancel", "web"], &fake).unwrap();
    assert_eq!(fake.asked(), ["DELETE /v1/vms/web/migration"]);
}

#[test]
fn a_snapshot_has_a_name_or_a_path() {
    for (place, body) in [
        ("before", r#"{"name":"before"}"#),
        ("/srv/a", r#"{"path":"/srv/a"}"#),
    ] {
        let arguments = parse::<snapshot::Arguments>(&["web", place]).unwrap();
        let written = json!({"path": "/s/machine", "memory_bytes": 7, "paused_ms": 9});
        let result = json!({"result": {"snapshot": written}});
        let fake = FakeDaemon::default()
            .answer(202, &operation("running", &json!({})))
            .answer(200, &operation("done", &result));
        snapshot::execute(&arguments, &fake.node(), format(&[])).unwrap();
        let asked = format!("POST /v1/vms/web/snapshot?wait=false {body}");
        assert_eq!(fake.asked()[0], asked);
    }
    for bad in ["", "..", "a b", "-a"] {
        assert!(parse::<snapshot::Arguments>(&["web", "--", bad]).is_err());
    }
}

#[test]
fn a_vm_is_restored_with_the_spec_of_its_snapshot() {
    let spec = json!({"spec": {"kernel": "/k"}});
    for (more, condition) in [(None, "if-none-match: * "), (Some("--replace"), "")] {
        let words: Vec<&str> = ["web", "before"].into_iter().chain(more).collect();
        let arguments = parse::<restore::Arguments>(&words).unwrap();
        let fake = FakeDaemon::default()
            .answer(200, &spec)
            .answer(201, &running(7));
        restore::execute(&arguments, &fake.node(), format(&[])).unwrap();
        let put = format!("PUT /v1/vms/web?restore_from=before {condition}{spec}");
        let asked = ["GET /v1/snapshots/before/spec".to_owned(), put];
        assert_eq!(fake.asked(), asked);
    }
}
