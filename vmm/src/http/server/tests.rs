//! Connections that expire, wait and end, with a paused clock that advances when all tasks wait.

use axum::Extension;
use axum::routing::{get, post};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::time::Instant;

use super::super::body::JsonBody;
use super::*;

const HOUR: Duration = Duration::from_secs(3600);
const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// A connection to `router`: the client's end, and the server's future.
fn connect(router: Router) -> (DuplexStream, watch::Sender<bool>, impl Future<Output = ()>) {
    let (end, ended) = watch::channel(false);
    let (client, server) = tokio::io::duplex(4096);
    (client, end, serve_connection(server, router, ended))
}

/// Sends this; returns all data until the connection ends.
async fn exchange(client: &mut DuplexStream, request: &str) -> String {
    client.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    answer
}

/// An endpoint that works for an hour.
async fn slow() -> &'static str {
    tokio::time::sleep(HOUR).await;
    "done"
}

#[tokio::test(start_paused = true)]
async fn an_endless_answer_learns_that_its_connection_expires() {
    let follow = |Extension(mut closing): Extension<Closing>| async move {
        closing.wait().await;
        "over"
    };
    let (mut client, _end, served) = connect(Router::new().route("/", get(follow)));
    let before = Instant::now();
    let (answer, ()) = tokio::join!(exchange(&mut client, GET), served);
    assert!(answer.ends_with("over"), "{answer}");
    assert_eq!(before.elapsed().as_secs(), CONNECTION_TIME.as_secs());
}

#[tokio::test(start_paused = true)]
async fn a_request_outlives_its_connections_time() {
    let (mut client, _end, served) = connect(Router::new().route("/", get(slow)));
    let (answer, ()) = tokio::join!(exchange(&mut client, GET), served);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.ends_with("done"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_goes_ends_the_wait() {
    let (mut client, _end, served) = connect(Router::new().route("/", get(slow)));
    let before = Instant::now();
    let leave = async {
        client.write_all(GET.as_bytes()).await.unwrap();
        tokio::time::sleep(CONNECTION_TIME * 2).await;
        drop(client);
    };
    tokio::join!(leave, served);
    assert!(before.elapsed() < HOUR);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_nothing_is_cut() {
    let large = || async { "x".repeat(1 << 20) };
    let (mut client, _end, served) = connect(Router::new().route("/", get(large)));
    client.write_all(GET.as_bytes()).await.unwrap();
    served.await;
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    assert!(answer.len() < 1 << 20, "{} bytes", answer.len());
}

#[tokio::test(start_paused = true)]
async fn idle_connections_and_slow_heads_expire() {
    for begun in ["", "GET / HT", GET] {
        let (mut client, _end, served) = connect(Router::new().route("/", get(|| async { "" })));
        let before = Instant::now();
        tokio::join!(exchange(&mut client, begun), served);
        assert!(before.elapsed() < CONNECTION_TIME, "{begun:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_times_out() {
    let take = |JsonBody(_): JsonBody<serde_json::Value>| async {};
    let (mut client, _end, served) = connect(Router::new().route("/", post(take)));
    let half = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{";
    let (answer, ()) = tokio::join!(exchange(&mut client, half), served);
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_waits_for_no_endpoint() {
    // Once within the connection's time, once after it.
    for begin in [Duration::from_secs(1), CONNECTION_TIME * 2] {
        let (mut client, end, served) = connect(Router::new().route("/", get(slow)));
        let before = Instant::now();
        let stop = async {
            tokio::time::sleep(begin).await;
            end.send_replace(true);
        };
        let (answer, (), ()) = tokio::join!(exchange(&mut client, GET), stop, served);
        assert_eq!(answer, "");
        assert!(before.elapsed() < HOUR);
    }
}
