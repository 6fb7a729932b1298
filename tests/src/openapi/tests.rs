//! Tests with the repository's descriptions, and with a server that behaves or misbehaves.

use super::cases::{Expect, cases, sample};
use super::conforming::{Extent, Maker};
use super::exchange::{Answer, Request, receive};
use super::judge::wrong;
use super::known::Known;
use super::random::Random;
use super::schema::conforms;
use super::*;
use serde_json::json;

fn in_repository() -> Vec<Description> {
    let repository = launcher::setup::repository().unwrap();
    ["vmm/openapi.json", "cli/node/openapi.json"]
        .map(|file| {
            let text = std::fs::read_to_string(repository.join(file)).unwrap();
            Description::new(serde_json::from_str(&text).unwrap()).unwrap()
        })
        .into()
}

#[test]
fn right_values_conform() {
    let mut random = Random::new(1);
    for description in in_repository() {
        let whole = description.whole();
        for operation in description.operations() {
            for schema in operation.body.iter() {
                for extent in [Extent::Least, Extent::All, Extent::Any, Extent::Any] {
                    let known = Known::default();
                    let mut maker = Maker {
                        whole,
                        known: &known,
                        random: &mut random,
                    };
                    let value = maker.value(schema, extent);
                    let fits = conforms(whole, schema, &value);
                    assert_eq!(fits, Ok(()), "{} {value}", operation.template);
                }
            }
        }
    }
}

#[test]
fn cases_are_many_and_always_the_same() {
    for description in in_repository() {
        let made = || cases(&description, &Known::default(), &mut Random::new(7));
        let all = made();
        assert_eq!(all, made());
        for operation in description.operations() {
            let of = |expect| {
                let one = all.iter().filter(|case| {
                    case.expect == expect
                        && description
                            .operation(&case.request.method, &case.request.path())
                            .is_some_and(|is| is == operation)
                });
                one.count()
            };
            let place = format!("{} {}", operation.method, operation.template);
            assert!(of(Expect::Understood) >= 2, "{place}");
            if operation.body.is_some() {
                assert!(
                    of(Expect::Refused) >= 40,
                    "{place}: {}",
                    of(Expect::Refused)
                );
            }
        }
    }
}

#[test]
fn a_sample_keeps_each_family_and_all_that_is_right() {
    for description in in_repository() {
        let all = cases(&description, &Known::default(), &mut Random::new(7));
        let some = sample(all.clone(), 10);
        let share = some.len() * 100 / all.len();
        println!("{} of {} cases, {share} %", some.len(), all.len());
        assert!(share < 60, "{share} %");
        for case in &all {
            match &case.family {
                None => assert!(some.contains(case), "{}", case.what),
                family => assert!(some.iter().any(|one| one.family == *family)),
            }
        }
        let may_be_granted = |case: &&super::cases::Case| {
            case.family.is_none() && matches!(case.expect, Expect::Understood | Expect::Described)
        };
        assert!(all.iter().filter(may_be_granted).count() > 100);
    }
}

const SMALL: &str = r##"{"paths": {"/a/{id}": {"put": {
    "parameters": [{"name": "id", "in": "path", "schema": {"type": "string"}}],
    "requestBody": {"content": {"application/json": {"schema": {
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 0}},
        "required": ["n"], "additionalProperties": false}}}},
    "responses": {"204": {"description": "done"},
        "400": {"description": "no", "content": {"application/json": {"schema":
        {"$ref": "#/components/schemas/ErrorBody"}}}}}}}},
    "components": {"schemas": {"ErrorBody": {
        "type": "object", "required": ["code", "message", "causes", "request_id"]}}}}"##;

#[test]
fn wrong_answers_are_found() {
    let description = Description::new(serde_json::from_str(SMALL).unwrap()).unwrap();
    let case = |expect| super::cases::Case {
        what: String::new(),
        request: Request::new("PUT", "/a/b").with_header("x-request-id", "me"),
        expect,
        family: None,
    };
    let answer = |status: u16, id: &str, body: &Value| Answer {
        status,
        headers: vec![
            ("x-request-id".into(), id.into()),
            ("content-type".into(), "application/problem+json".into()),
        ],
        body: match body {
            Value::Null => Vec::new(),
            body => body.to_string().into(),
        },
    };
    let judge = |expect, answer: Answer| wrong(&description, &case(expect), Some(&answer));
    let body = |id: &str| json!({"code": "c", "message": "m", "causes": [], "request_id": id});
    let none = Vec::<String>::new();
    assert_eq!(
        judge(Expect::Described, answer(204, "me", &json!(null))),
        none
    );
    assert_eq!(judge(Expect::Refused, answer(400, "me", &body("me"))), none);
    for (expect, bad) in [
        (Expect::Refused, answer(204, "me", &json!(null))),
        (Expect::Described, answer(204, "other", &json!(null))),
        (Expect::Described, answer(200, "me", &json!(null))),
        (Expect::Described, answer(204, "me", &json!(1))),
        (Expect::Refused, answer(400, "me", &json!({}))),
        (Expect::Refused, answer(400, "me", &body("other"))),
        (Expect::Described, answer(500, "me", &body("me"))),
        (
            Expect::Understood,
            answer(400, "me", &{
                let mut body = body("me");
                body["code"] = json!("invalid_body");
                body
            }),
        ),
    ] {
        assert_ne!(judge(expect, bad.clone()), none, "{bad:?}");
    }
    assert_ne!(wrong(&description, &case(Expect::Described), None), none);
    let no_http = wrong(&description, &case(Expect::NoHttp), None);
    assert_eq!(no_http, none);
}

#[test]
fn faults_are_distinct_from_unusual_values() {
    let description = Description::new(serde_json::from_str(SMALL).unwrap()).unwrap();
    let all = cases(&description, &Known::default(), &mut Random::new(1));
    let expects = |body: &str| {
        let found = all.iter().find(|case| {
            case.request.method == "PUT" && case.request.body.as_deref() == Some(body.as_bytes())
        });
        found.map(|case| case.expect)
    };
    assert_eq!(expects(r#"{"n":-1}"#), Some(Expect::Refused));
    assert_eq!(expects(r#"{"n":null}"#), Some(Expect::Refused));
    assert_eq!(expects("{}"), Some(Expect::Refused));
    assert_eq!(expects(r#"{"n":0,"surplus":1}"#), Some(Expect::Refused));
    assert_eq!(expects(r#"{"n":65536}"#), Some(Expect::Described));
}

#[test]
fn unknown_keywords_are_errors() {
    let with = |schema: &str| {
        let whole = format!(r#"{{"paths": {{}}, "components": {{"schemas": {{"A": {schema}}}}}}}"#);
        Description::new(serde_json::from_str(&whole).unwrap())
    };
    assert!(with(r#"{"type": "string"}"#).is_ok());
    assert!(with(r#"{"not": {}}"#).is_err());
    assert!(with(r#"{"properties": {"a": {"pattern": "(?=a)"}}}"#).is_err());
}

#[test]
fn answers_are_taken_apart() {
    let take = |bytes: &[u8]| receive(bytes, "GET");
    let answer = take(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        .unwrap()
        .unwrap();
    assert_eq!(
        (answer.status, answer.body.as_slice()),
        (200, b"{}".as_slice())
    );
    let chunked =
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1;x\r\n}\r\n0\r\n\r\n";
    assert_eq!(take(chunked).unwrap().unwrap().body, b"{}");
    assert_eq!(take(b"").unwrap(), None);
    assert!(take(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}").is_err());
    assert!(take(b"nonsense").is_err());
    let events = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    assert!(take(events).unwrap().is_some());
}
