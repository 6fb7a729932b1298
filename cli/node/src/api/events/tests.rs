use axum::http::StatusCode;
use bellhop_api::node::EventChange;

use super::*;
use crate::events::READERS_MAX;

/// Events, and slots for their readers.
#[derive(Default)]
struct Stage {
    events: Arc<Events>,
}

impl Stage {
    fn open(&self, last: Option<&str>) -> Result<Response, Error> {
        self.ask(last, EventQuery::default())
    }

    fn ask(&self, last: Option<&str>, query: EventQuery) -> Result<Response, Error> {
        let events = self.events.clone();
        stream_of(events, Role::Admin, None, None, &headers(last), query)
    }

    /// The text of a stream that ends, without its greeting.
    async fn all(&self, query: EventQuery) -> String {
        let query = EventQuery {
            follow: Some(false),
            ..query
        };
        let body = self.ask(None, query).unwrap().into_body();
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        text.split_once("\n\n").unwrap().1.to_owned()
    }
}

fn headers(last: Option<&str>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(last) = last {
        headers.insert("last-event-id", last.parse().unwrap());
    }
    headers
}

fn reader(node: &Stage, last: Option<&str>) -> axum::body::BodyDataStream {
    let answer = node.open(last).unwrap();
    assert_eq!(answer.headers()[CONTENT_TYPE], "text/event-stream");
    answer.into_body().into_data_stream()
}

async fn next(stream: &mut axum::body::BodyDataStream) -> String {
    use futures_util::StreamExt as _;
    let bytes = stream.next().await.unwrap().unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test]
async fn new_events_come_as_they_happen() {
    let node = Stage::default();
    node.events
        .publish(Event::new("/v1/vms/a", EventChange::Created));
    let begin = *node.events.newest().borrow();
    let mut stream = reader(&node, None);
    assert_eq!(
        next(&mut stream).await,
        format!("retry: 1000\nid: {begin}\n\n")
    );
    let publish = async {
        tokio::task::yield_now().await;
        let created = Event::new("/v1/vms/b", EventChange::Created);
        node.events.publish(created.detail("two\nlines"));
    };
    let (text, ()) = tokio::join!(next(&mut stream), publish);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("id: {}", begin + 1));
    let data = lines[1].strip_prefix("data: ").unwrap();
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["generation"], begin + 1);
    assert_eq!(
        (&data["subject"], &data["change"]),
        (&"/v1/vms/b".into(), &"created".into())
    );
    assert_eq!(data["detail"], "two\nlines");
    assert_eq!(lines[2..], [""]);
}

#[tokio::test]
async fn a_reader_continues_after_its_last_event() {
    let node = Stage::default();
    let begin = *node.events.newest().borrow();
    for _ in 0..=CHUNK {
        node.events
            .publish(Event::new("/v1/vms/a", EventChange::Changed));
    }
    let mut stream = reader(&node, Some(&begin.to_string()));
    assert_eq!(next(&mut stream).await, "retry: 1000\n\n");
    let first = next(&mut stream).await;
    assert_eq!(first.matches("\n\n").count(), CHUNK);
    assert!(first.starts_with(&format!("id: {}\n", begin + 1)));
    assert_eq!(next(&mut stream).await.matches("\n\n").count(), 1);
}

#[tokio::test]
async fn lost_events_are_reported() {
    let node = Stage::default();
    node.events
        .publish(Event::new("/v1/vms/a", EventChange::Changed));
    let newest = *node.events.newest().borrow();
    let mut stream = reader(&node, Some("7"));
    next(&mut stream).await;
    let until = newest - 1;
    let lost = format!("id: {until}\nevent: lost\ndata: {{\"generation\":{until}}}\n\n");
    assert_eq!(next(&mut stream).await, lost);
    // The kept events follow.
    let kept = next(&mut stream).await;
    assert!(kept.starts_with(&format!("id: {newest}\ndata: ")), "{kept}");
    // A slow reader, during its reads.
    for _ in 0..2000 {
        node.events
            .publish(Event::new("/v1/vms/a", EventChange::Changed));
    }
    assert!(next(&mut stream).await.contains("event: lost"));
    let oldest = newest + 2000 - 1024 + 1;
    let kept = next(&mut stream).await;
    assert!(kept.starts_with(&format!("id: {oldest}\n")), "{kept}");
    for _ in 2..1024 / CHUNK {
        next(&mut stream).await;
    }
    let last = next(&mut stream).await;
    assert!(last.contains(&format!("id: {}\n", newest + 2000)), "{last}");
}

#[tokio::test(start_paused = true)]
async fn something_comes_when_nothing_happens() {
    let node = Stage::default();
    let mut stream = reader(&node, None);
    next(&mut stream).await;
    let before = tokio::time::Instant::now();
    assert_eq!(next(&mut stream).await, ":\n\n");
    assert_eq!(before.elapsed().as_secs(), KEEP_ALIVE.as_secs());
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_with_the_right_of_its_reader() {
    use futures_util::StreamExt as _;
    let node = Stage::default();
    let loads = watch::Sender::new(0_u64);
    let stream = |expires: &str| {
        let permit = Some(Permit::new(&loads).until(Some(expires.to_owned())));
        let query = EventQuery::default();
        let answer = stream_of(
            node.events.clone(),
            Role::Read,
            None,
            permit,
            &headers(None),
            query,
        );
        answer.unwrap().into_body().into_data_stream()
    };
    let mut expired = stream("2026-01-01T00:00:00Z");
    assert!(expired.next().await.is_none());
    let mut valid = stream("9999-01-01T00:00:00Z");
    next(&mut valid).await;
    assert_eq!(next(&mut valid).await, ":\n\n");
    loads.send_modify(|loads| *loads += 1);
    assert!(valid.next().await.is_none());
}

#[tokio::test]
async fn history_begins_with_the_oldest_event_and_ends() {
    let node = Stage::default();
    let none = EventQuery {
        since: Some(0),
        ..EventQuery::default()
    };
    assert_eq!(node.all(none.clone()).await, "");
    for number in 0..2000 {
        let vm = format!("/v1/vms/{number}");
        node.events.publish(Event::new(vm, EventChange::Created));
    }
    let text = node.all(none).await;
    assert_eq!(text.matches("data: ").count(), 1024);
    assert!(!text.contains("lost") && text.contains("/v1/vms/1999"));
    // Only new events: there are none yet.
    assert_eq!(node.all(EventQuery::default()).await, "");
}

#[tokio::test(start_paused = true)]
async fn a_filter_skips_others_and_reports_the_readers_position() {
    let node = Stage::default();
    let begin = *node.events.newest().borrow();
    for (subject, change) in [
        ("/v1/vms/web", EventChange::Created),
        ("/v1/vms/web2", EventChange::Created),
        ("/v1/vdpa-devices/web", EventChange::Created),
        ("/v1/vms/web", EventChange::Started),
        ("/v1/vms/web/nics/net0", EventChange::Created),
        ("/v1/vms/other", EventChange::Deleted),
    ] {
        node.events.publish(Event::new(subject, change));
    }
    let query = |vm: Option<&str>, kind: Option<&str>| EventQuery {
        vm: vm.map(str::to_owned),
        kind: kind.map(str::to_owned),
        since: Some(begin),
        follow: None,
    };
    let text = node.all(query(Some("web"), None)).await;
    assert_eq!(text.matches("data: ").count(), 3, "{text}");
    assert!(
        text.ends_with(&format!("\n\nid: {}\n\n", begin + 6)),
        "{text}"
    );
    let text = node.all(query(Some("web"), Some("created"))).await;
    assert_eq!(text.matches("data: ").count(), 2, "{text}");
    let text = node.all(query(None, Some("deleted"))).await;
    assert_eq!(text.matches("data: ").count(), 1, "{text}");
    for wrong in [
        query(Some("a/b"), None),
        query(None, Some("1.5")),
        query(None, Some("unknown")),
    ] {
        let refused = node.ask(None, wrong).unwrap_err();
        assert_eq!(refused.answer().0, StatusCode::BAD_REQUEST);
    }
    // The header has precedence. Events that the filter skips appear as a new position.
    let last = (begin + 5).to_string();
    let answer = node.ask(Some(&last), query(Some("web"), None)).unwrap();
    let mut stream = answer.into_body().into_data_stream();
    next(&mut stream).await;
    assert_eq!(next(&mut stream).await, format!("id: {}\n\n", begin + 6));
    assert_eq!(next(&mut stream).await, ":\n\n");
}

#[tokio::test]
async fn readers_are_limited_and_give_their_places_back() {
    let node = Stage::default();
    let mut readers = Vec::new();
    for _ in 0..READERS_MAX {
        readers.push(reader(&node, None));
    }
    let refused = node.open(None).unwrap_err();
    assert_eq!(refused.answer().0, StatusCode::SERVICE_UNAVAILABLE);
    readers.pop();
    drop(reader(&node, None));
    for bad in ["", "x", "-1", "1.5", "99999999999999999999"] {
        let refused = node.open(Some(bad)).unwrap_err();
        assert_eq!(refused.answer().0, StatusCode::BAD_REQUEST, "{bad:?}");
    }
}
