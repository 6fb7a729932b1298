use axum::http::StatusCode;
use bellhop_api::node::EventChange;

use super::*;

/// Events, and places for their readers.
#[derive(Default)]
struct Stage {
    events: Arc<Events>,
}

impl Stage {
    fn open(&self, last: Option<&str>) -> Result<Response, Error> {
        stream_of(self.events.clone(), None, &headers(last))
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
async fn a_reader_goes_on_after_its_last_event() {
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
async fn what_is_lost_is_said() {
    let node = Stage::default();
    node.events
        .publish(Event::new("/v1/vms/a", EventChange::Changed));
    let newest = *node.events.newest().borrow();
    let mut stream = reader(&node, Some("7"));
    next(&mut stream).await;
    let lost = format!("id: {newest}\nevent: lost\ndata: {{\"generation\":{newest}}}\n\n");
    assert_eq!(next(&mut stream).await, lost);
    // A slow one, while it reads.
    for _ in 0..2000 {
        node.events
            .publish(Event::new("/v1/vms/a", EventChange::Changed));
    }
    assert!(next(&mut stream).await.contains("event: lost"));
    node.events
        .publish(Event::new("/v1/vms/a", EventChange::Changed));
    assert!(
        next(&mut stream)
            .await
            .contains(&format!("id: {}\n", newest + 2001))
    );
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
