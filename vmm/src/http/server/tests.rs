//! Connections that expire, wait and end, with a paused clock that advances when all tasks wait.

use axum::Extension;
use axum::http::HeaderMap;
use axum::routing::{get, post};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::admission::{ADMITTED_MAX, PENDING_MAX};
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

/// A connection from an address. Without a stream it says nothing in its handshake.
struct Visitor {
    source: IpAddr,
    stream: Option<DuplexStream>,
}

/// Connections from other hosts.
struct Remote(tokio::sync::Mutex<mpsc::UnboundedReceiver<Visitor>>);

impl Transport for Remote {
    type Incoming = Visitor;
    type Stream = DuplexStream;
    type Peer = ();

    async fn accept(&self) -> io::Result<Visitor> {
        match self.0.lock().await.recv().await {
            Some(visitor) => Ok(visitor),
            None => std::future::pending().await,
        }
    }

    fn source(visitor: &Visitor) -> Option<IpAddr> {
        Some(visitor.source)
    }

    async fn establish(&self, visitor: Visitor) -> io::Result<(DuplexStream, ())> {
        match visitor.stream {
            Some(stream) => Ok((stream, ())),
            None => std::future::pending().await,
        }
    }
}

/// A server whose clients send their role.
struct Site {
    visitors: mpsc::UnboundedSender<Visitor>,
    _end: watch::Sender<bool>,
}

impl Site {
    fn new() -> Self {
        let (visitors, accepted) = mpsc::unbounded_channel();
        let (end, ended) = watch::channel(false);
        let work = |headers: HeaderMap, Extension(admission): Extension<Admission>| async move {
            let role = headers["role"].to_str().unwrap().parse().unwrap();
            admission.admit(role).await;
            if headers.contains_key("slow") {
                tokio::time::sleep(HOUR).await;
            }
            "served"
        };
        let router = Router::new().route("/", get(work));
        tokio::spawn(serve(Remote(accepted.into()), router, ended));
        Self {
            visitors,
            _end: end,
        }
    }

    fn visit(&self, source: IpAddr, stream: Option<DuplexStream>) {
        let visitor = Visitor { source, stream };
        assert!(self.visitors.send(visitor).is_ok());
    }

    /// Connects, and sends a request with these headers.
    async fn request(&self, source: IpAddr, headers: &str) -> DuplexStream {
        let (mut client, server) = tokio::io::duplex(4096);
        self.visit(source, Some(server));
        let request = format!("GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{headers}\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        client
    }
}

/// The whole answer.
async fn answer(client: &mut DuplexStream) -> String {
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    answer
}

fn address(number: usize) -> IpAddr {
    let [.., high, low] = number.to_be_bytes();
    IpAddr::from([10, 0, high, low])
}

#[tokio::test(start_paused = true)]
async fn strangers_that_say_nothing_delay_no_client() {
    for sources in [1, 7, 640] {
        let site = Site::new();
        for number in 0..640 {
            site.visit(address(number % sources), None);
        }
        // Also one that shares its address with them.
        for source in [address(0), address(999)] {
            let before = Instant::now();
            let mut client = site.request(source, "role: read\r\n").await;
            let answer = answer(&mut client).await;
            assert!(answer.ends_with("served"), "{answer}");
            assert_eq!(before.elapsed(), Duration::ZERO, "{sources} addresses");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_flood_replaces_no_client_that_works() {
    let site = Site::new();
    let mut working = site.request(address(1), "role: read\r\nslow: 1\r\n").await;
    // The server must see its request before the flood.
    tokio::time::sleep(Duration::from_millis(1)).await;
    for number in 0..2 * PENDING_MAX {
        site.visit(address(number), None);
    }
    let before = Instant::now();
    assert!(answer(&mut working).await.ends_with("served"));
    assert!(before.elapsed() >= HOUR - Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn readers_leave_connections_for_admins() {
    let site = Site::new();
    let mut readers = Vec::new();
    for number in 0..2 * ADMITTED_MAX {
        readers.push(
            site.request(address(number), "role: read\r\nslow: 1\r\n")
                .await,
        );
    }
    for role in ["admin", "operate"] {
        let before = Instant::now();
        let mut client = site.request(address(0), &format!("role: {role}\r\n")).await;
        assert!(answer(&mut client).await.ends_with("served"), "{role}");
        assert_eq!(before.elapsed(), Duration::ZERO, "{role}");
    }
    // Other readers wait, until these leave.
    let mut late = site.request(address(0), "role: read\r\n").await;
    let early = tokio::time::timeout(Duration::from_secs(60), answer(&mut late));
    assert!(early.await.is_err());
    drop(readers);
    assert!(answer(&mut late).await.ends_with("served"));
}
