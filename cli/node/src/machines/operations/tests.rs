#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use super::*;
use crate::machines::outgoing::migration_status;

const VM: &str = "web";

fn none() -> Operations {
    Operations {
        all: Mutex::default(),
        ended: Notify::new(),
        waiting: Budget::new(WAITING_MAX),
    }
}

fn begun(operations: &Operations, kind: OperationKind) -> String {
    let by = Requested {
        by: "u".repeat(10 * TEXT_MAX),
        request_id: "r1".to_owned(),
    };
    operations.begin(kind, &VM.parse().unwrap(), by).id
}

fn end(
    operations: &Operations,
    id: &str,
    end: Result<Option<OperationResult>, ErrorBody>,
) -> Option<(Operation, Vec<String>)> {
    let ended = operations.at_end(id, end)?;
    let dropped = operations.show_end(ended.clone());
    Some((ended, dropped))
}

fn failure(code: &'static str) -> ErrorBody {
    let long = "\u{e4}".repeat(10 * TEXT_MAX);
    kept(&Error::conflict(code, long.clone()).because(Error::failed(long)))
}

#[test]
fn the_last_of_those_that_have_ended_are_kept_and_all_that_run() {
    let operations = none();
    let runs = begun(&operations, OperationKind::Snapshot);
    let mut last = String::new();
    for number in 0..KEPT + 5 {
        let id = begun(&operations, OperationKind::Create);
        assert!(id > last, "{id} after {last}");
        let (ended, dropped) = end(&operations, &id, Ok(None)).unwrap();
        assert_eq!(ended.phase, OperationPhase::Done);
        assert_eq!(dropped.len(), usize::from(number >= KEPT));
        // An operation ends once.
        assert!(end(&operations, &id, Err(failure("ended"))).is_none());
        last = id;
    }
    let all = operations.list(&OperationQuery::default());
    assert_eq!(all.len(), KEPT + 1);
    assert_eq!((&all[0].id, &all[KEPT].id), (&runs, &last));
    let running = operations.list(&OperationQuery {
        phase: Some(OperationPhase::Running),
        ..OperationQuery::default()
    });
    assert_eq!(running.len(), 1);
    assert_eq!(running[0].kind, OperationKind::Snapshot);
    let others = operations.list(&OperationQuery {
        target: Some("db".to_owned()),
        ..OperationQuery::default()
    });
    assert!(others.is_empty());
    assert_eq!(
        operations.show("1").unwrap_err().answer().1,
        "no_such_operation"
    );
}

#[test]
fn more_requests_than_can_run_are_refused() {
    let operations = none();
    for _ in 0..RUNNING_MAX {
        operations.check_room().unwrap();
        begun(&operations, OperationKind::Create);
    }
    assert_eq!(operations.check_room().unwrap_err().answer().1, "busy");
}

#[test]
fn texts_are_bounded_and_an_error_has_its_request() {
    let operations = none();
    let id = begun(&operations, OperationKind::Create);
    let (ended, _) = end(&operations, &id, Err(failure("unusable"))).unwrap();
    let error = ended.error.unwrap();
    for text in [&ended.requested_by, &error.causes[0]] {
        assert_eq!(text.chars().count(), TEXT_MAX);
    }
    assert_eq!(error.message.chars().count(), MESSAGE_MAX);
    assert_eq!(
        (error.code.as_str(), error.request_id.as_str()),
        ("unusable", "r1")
    );
    assert_eq!(error.instance, "urn:bellhop:request:r1");
    assert!(ended.ended_ms >= Some(ended.created_ms));
}

#[test]
fn only_a_guest_that_stays_was_cancelled() {
    let operations = none();
    for (code, phase) in [
        ("not_moved", OperationPhase::Cancelled),
        ("migration_unknown", OperationPhase::Failed),
    ] {
        let id = begun(&operations, OperationKind::Migration);
        let vm = VM.parse().unwrap();
        assert_eq!(operations.migration_of(&vm).as_ref(), Some(&id));
        assert_eq!(operations.migration_of(&"db".parse().unwrap()), None);
        operations.update(&id, |entry| entry.cancelled = true);
        let (ended, _) = end(&operations, &id, Err(failure(code))).unwrap();
        assert_eq!(ended.phase, phase);
        assert_eq!(operations.migration_of(&vm), None);
    }
}

#[test]
fn a_report_has_progress_and_end() {
    let vm = VM.parse().unwrap();
    let code = |phase| match end_of(&vm, &migration_status("Send", phase, 1))? {
        Ok(()) => Some("moved"),
        Err(error) => Some(error.answer().1),
    };
    for (phase, expected) in [
        ("Copy", None),
        ("Done", None),
        ("Moved", Some("moved")),
        ("Stayed", Some("not_moved")),
        ("Indeterminate", Some("migration_unknown")),
    ] {
        assert_eq!(code(phase), expected, "{phase}");
    }
    let mut status = migration_status("Send", "Copy", 1);
    (status.ram_bytes, status.left_bytes) = (100, 30);
    assert_eq!((progress(&status).done, progress(&status).total), (70, 100));
    status.left_bytes = u64::MAX;
    assert_eq!(progress(&status).done, 0);
    (status.rounds, status.left_bytes) = (0, 0);
    assert_eq!(progress(&status).done, 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_waits_for_the_end_or_the_time() {
    let operations = Arc::new(none());
    let id = begun(&operations, OperationKind::Create);
    let second = Duration::from_secs(1);
    let seen = operations.wait(&id, Role::Read, second).await.unwrap();
    assert_eq!(seen.phase, OperationPhase::Running);
    let waits = tokio::spawn({
        let (operations, id) = (operations.clone(), id.clone());
        async move { operations.wait(&id, Role::Read, 60 * second).await.unwrap() }
    });
    tokio::task::yield_now().await;
    end(&operations, &id, Ok(None)).unwrap();
    assert_eq!(waits.await.unwrap().phase, OperationPhase::Done);
    let readers: Vec<_> = (0..WAITING_MAX)
        .map(|_| operations.waiting.try_take(Role::Read))
        .collect();
    let refused = operations.wait(&id, Role::Read, second).await.unwrap_err();
    assert_eq!(refused.answer().1, "too_many_watchers");
    operations.wait(&id, Role::Operate, second).await.unwrap();
    drop(readers);
}
