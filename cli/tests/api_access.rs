//! `bellhop serve` as a process, with real sockets and real TLS: access control, and notifications
//! to systemd.
//!
//! The lab tests its work on devices (`tests/tests/api_node_*.rs`).

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "api_access/certificates.rs"]
mod certificates;
#[path = "api_access/daemon.rs"]
mod daemon;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use certificates::{Identity, Validity};
use daemon::program::program;
use daemon::{Client, Daemon, Directory, Files, command, exchange, mode, refused};

fn said(arguments: &[String]) -> (Option<i32>, String) {
    let output = refused(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), text)
}

#[test]
fn tcp_is_never_without_certificates_and_tokens() {
    let files = Files::new();
    let all = files.arguments();
    for option in ["--tls-cert", "--tls-key", "--tls-ca", "--tokens"] {
        let at = all.iter().position(|argument| argument == option).unwrap();
        let mut arguments = all.clone();
        arguments.drain(at..at + 2);
        let (code, text) = said(&arguments);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(option), "{option}: {text}");
    }
    // Nor are they interpreted as anything but TCP.
    let (code, text) = said(&all[2..]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("--listen"), "{text}");
}

#[test]
fn files_that_others_may_use_or_that_make_no_sense_are_refused() {
    let files = Files::new();
    let file = |name: &str| files.directory.file(name);
    let chmod = |name: &str, mode| {
        fs::set_permissions(file(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    for (name, wrong, remedy) in [
        ("tokens", 0o640, "chmod go-rwx"),
        ("tokens", 0o604, "chmod go-rwx"),
        ("node.key", 0o644, "chmod go-rwx"),
        ("clients.crt", 0o666, "chmod go-w"),
    ] {
        chmod(name, wrong);
        let (code, text) = said(&files.arguments());
        assert_eq!(code, Some(1), "{text}");
        assert!(
            text.contains(remedy) && text.contains(name),
            "{name}: {text}"
        );
        chmod(name, 0o600);
    }
    let other = files.authority.signs("other", Validity::Now);
    for (name, wrong, says) in [
        ("tokens", "", "printf %s TOKEN | sha256sum"),
        ("tokens", "admin ops secret\n", "line 1"),
        ("node.crt", "no certificate\n", "no certificate in PEM"),
        (
            "node.key",
            &other.certificate_pem(),
            "no private key in PEM",
        ),
        (
            "node.key",
            &other.key_pem(),
            "does not match the certificate",
        ),
        ("clients.crt", "", "no certificate in PEM"),
    ] {
        let right = fs::read_to_string(file(name)).unwrap();
        files.directory.write(name, wrong);
        let (code, text) = said(&files.arguments());
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(says) && text.contains(name), "{name}: {text}");
        files.directory.write(name, &right);
    }
    fs::remove_file(file("tokens")).unwrap();
    let (code, text) = said(&files.arguments());
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("cannot read"), "{text}");
}

#[test]
fn each_request_by_tcp_needs_a_token_with_a_sufficient_role() {
    let files = Files::new();
    let daemon = Daemon::start(&files.arguments());
    let (port, client) = (daemon.port(), files.client(Validity::Now));
    let status = |method: &str, path: &str, authorization: Option<&str>| {
        let (status, body) = client.request(port, method, path, authorization).unwrap();
        (status, body["code"].as_str().unwrap_or_default().to_owned())
    };
    let is = |found: (u16, String), status: u16, code: &str| {
        assert_eq!((found.0, found.1.as_str()), (status, code));
    };
    let (viewer, operator, ops) = (
        Some("Bearer token-of-viewer"),
        Some("bearer token-of-operator"),
        Some("Bearer  token-of-ops"),
    );
    for who in [viewer, operator, ops] {
        is(status("GET", "/v1/version", who), 200, "");
    }
    // An insufficient role is reported before any other check.
    is(
        status("DELETE", "/v1/vdpa-devices/none", viewer),
        403,
        "role_too_low",
    );
    is(
        status("DELETE", "/v1/vdpa-devices/none", operator),
        403,
        "role_too_low",
    );
    is(
        status("PUT", "/v1/vdpa-devices/none", operator),
        403,
        "role_too_low",
    );
    is(status("PATCH", "/v1/vms/none", viewer), 403, "role_too_low");
    is(
        status("PATCH", "/v1/vms/other", operator),
        403,
        "role_too_low",
    );
    is(
        status("PUT", "/v1/vms/none/state", viewer),
        403,
        "role_too_low",
    );
    let console = "/v1/vms/none/console";
    is(status("GET", console, viewer), 403, "role_too_low");
    is(status("GET", console, operator), 404, "no_such_vm");
    let read = format!("{console}?read_only=true");
    is(status("GET", &read, viewer), 404, "no_such_vm");
    // Only one value of a parameter counts.
    let both = format!("{read}&read_only=false");
    is(status("GET", &both, viewer), 400, "bad_parameter");
    is(
        status("GET", "/v1/not-there", operator),
        403,
        "role_too_low",
    );
    is(
        status("PUT", "/v1/vdpa-devices/none", ops),
        400,
        "malformed_body",
    );
    is(status("GET", "/v1/not-there", ops), 404, "no_such_path");
    is(
        status("POST", "/v1/version", ops),
        405,
        "method_not_allowed",
    );
    // Without a token every path gets the same answer, even one that does not exist.
    for path in ["/v1/version", "/v1/openapi.json", "/v1/not-there", "/"] {
        is(status("GET", path, None), 401, "no_token");
    }
    is(
        status("GET", "/v1/version", Some("Bearer wrong")),
        401,
        "unknown_token",
    );
    is(
        status("GET", "/v1/version", Some("Bearer ")),
        401,
        "no_token",
    );
    is(
        status("GET", "/v1/version", Some("Basic token-of-ops")),
        401,
        "wrong_scheme",
    );
    is(
        status("GET", "/v1/version", Some("token-of-ops")),
        401,
        "wrong_scheme",
    );
    let two = Some("Bearer token-of-ops\r\nauthorization: Bearer wrong");
    is(status("GET", "/v1/version", two), 401, "no_token");
    let (_, body) = client
        .request(port, "GET", "/v1/version", Some("Bearer wrong"))
        .unwrap();
    let challenge = body["challenge"].as_str().unwrap();
    assert!(
        challenge.contains("Bearer") && challenge.contains("invalid_token"),
        "{challenge}"
    );

    let line = daemon.logged(|line| line["target"] == "audit" && line["path"] == "/v1/vms/none");
    let who = line["who"].as_str().unwrap();
    assert!(
        who.starts_with("CN=client (") && who.contains("from 127.0.0.1:"),
        "{line}"
    );
    assert_eq!(
        (&line["token"], &line["role"]),
        (&"viewer".into(), &"read".into())
    );
    assert_eq!(
        (&line["method"], &line["status"]),
        (&"PATCH".into(), &403.into())
    );
    assert_eq!(
        (&line["message"], &line["error"]),
        (&"not allowed".into(), &"role_too_low".into())
    );
    assert!(!line["request_id"].as_str().unwrap().is_empty());
}

/// Sends requests with this status as their answer, on one connection.
fn flood(client: &Client, port: u16, (first, token): (&str, &str), status: u16, times: usize) {
    const AT_ONCE: usize = 50;
    let request = format!(
        "{first} HTTP/1.1\r\nhost: node\r\ncontent-length: 0\r\n\
         authorization: Bearer {token}\r\n\r\n"
    );
    let answer = format!("HTTP/1.1 {status} ");
    let mut stream = client.connect(port).unwrap();
    let mut buffer = [0; 1 << 14];
    for _ in 0..times / AT_ONCE {
        stream
            .write_all(request.repeat(AT_ONCE).as_bytes())
            .unwrap();
        let mut text = String::new();
        // The last member of the answer's body, so it is complete.
        while text.matches("\"request_id\":").count() < AT_ONCE || !text.ends_with('}') {
            let length = stream.read(&mut buffer).unwrap();
            assert!(length > 0, "{text}");
            text.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        assert_eq!(text.matches(&answer).count(), AT_ONCE, "{text}");
    }
}

#[test]
fn a_flood_of_refused_requests_neither_fills_the_log_nor_hides_other_lines() {
    const FLOOD: usize = 2000;
    let files = Files::new();
    let daemon = Daemon::start(&files.arguments());
    let (port, client) = (daemon.port(), files.client(Validity::Now));
    let path = format!("/v1/vms/{}", "x".repeat(1000));
    let length = daemon.log().len();
    let begin = Instant::now();
    let patch = format!("PATCH {path}");
    let send_refused = || flood(&client, port, (&patch, "token-of-viewer"), 403, FLOOD / 2);
    send_refused();
    // The client's certificate does not matter for a change.
    let ops = Some("Bearer token-of-ops");
    let done = client.request(port, "PUT", "/v1/cordon", ops).unwrap();
    assert!((200..300).contains(&done.0), "{done:?}");
    send_refused();
    let bob = Client::new(&files.authority, Some(&files.authority.signs_client("bob")));
    let viewer = Some("Bearer token-of-viewer");
    let refused = |client: &Client, path| {
        let answer = client.request(port, "DELETE", path, viewer).unwrap();
        assert_eq!(answer.0, 403, "{answer:?}");
    };
    refused(&bob, "/v1/vms/of-bob");
    let of_bob = daemon.logged(|line| line["path"] == "/v1/vms/of-bob");
    assert!(
        of_bob["who"].as_str().unwrap().starts_with("CN=bob ("),
        "{of_bob}"
    );
    let of_ops = daemon.logged(|line| line["target"] == "audit" && line["path"] == "/v1/cordon");
    assert_eq!(
        (&of_ops["token"], &of_ops["message"]),
        (&"ops".into(), &"done".into())
    );

    // The next line that the limit admits has the number of the others.
    std::thread::sleep(Duration::from_secs(6));
    refused(&client, "/v1/vms/last");
    daemon.logged(|line| line["path"] == "/v1/vms/last");
    let log = daemon.log().split_off(length);
    let most = 60 + usize::try_from(begin.elapsed().as_secs() / 5).unwrap();
    assert!(log.len() < most, "{} lines: {log:#?}", log.len());
    let lines = log.iter().filter(|line| {
        let who = line["who"].as_str().unwrap_or_default();
        line["message"] == "not allowed" && who.starts_with("CN=client (")
    });
    let shown = lines.clone().count();
    assert!(shown >= 30, "{log:#?}");
    let suppressed: u64 = lines.filter_map(|line| line["suppressed"].as_u64()).sum();
    assert_eq!(
        shown + usize::try_from(suppressed).unwrap(),
        FLOOD + 1,
        "{log:#?}"
    );
    let cut = format!("{}…", &path[..256]);
    assert!(log.iter().any(|line| line["path"] == cut.as_str()));
    assert!(!log.iter().any(|line| line.to_string().contains(&path)));
}

#[test]
fn a_flood_of_failed_requests_hides_no_change() {
    const FLOOD: usize = 1000;
    let files = Files::new();
    let daemon = Daemon::start(&files.arguments());
    let (port, client) = (daemon.port(), files.client(Validity::Now));
    let length = daemon.log().len();
    let begin = Instant::now();
    let delete = ("DELETE /v1/vms/none", "token-of-ops");
    flood(&client, port, delete, 404, FLOOD);
    let ops = Some("Bearer token-of-ops");
    let done = client.request(port, "PUT", "/v1/cordon", ops).unwrap();
    assert!((200..300).contains(&done.0), "{done:?}");
    let line = daemon.logged(|line| line["target"] == "audit" && line["path"] == "/v1/cordon");
    assert_eq!(line["message"], "done", "{line}");
    assert!(line["suppressed"].as_u64().is_none(), "{line}");
    let log = daemon.log().split_off(length);
    let most = 31 + usize::try_from(begin.elapsed().as_secs() / 5).unwrap();
    for message in ["not done", "refused"] {
        let lines = log.iter().filter(|line| line["message"] == message);
        assert!((30..=most).contains(&lines.count()), "{log:#?}");
    }
}

#[test]
fn a_connection_by_tcp_needs_a_certificate_of_the_authority() {
    let files = Files::new();
    let daemon = Daemon::start(&files.arguments());
    let port = daemon.port();
    let token = Some("Bearer token-of-ops");
    let ask = |client: &Client| client.request(port, "GET", "/v1/version", token);
    let stranger = Identity::authority("the test's authority");
    let forged = stranger.signs("client", Validity::Now);
    let own = Identity::authority("client");
    for (what, client) in [
        ("no certificate", Client::new(&files.authority, None)),
        ("expired", files.client(Validity::Past)),
        ("not yet", files.client(Validity::Future)),
        (
            "of an authority of that name",
            Client::new(&files.authority, Some(&forged)),
        ),
        (
            "signed by itself",
            Client::new(&files.authority, Some(&own)),
        ),
    ] {
        let answer = ask(&client);
        assert!(answer.is_err(), "{what}: {answer:?}");
        daemon.logged(|line| line["message"] == "a connection to the API is refused");
    }
    // The daemon's certificate is verified, too: a client that trusts another authority does not
    // connect.
    assert!(ask(&Client::new(&stranger, Some(&forged))).is_err());
    // Without TLS there is no answer.
    let plain = TcpStream::connect(("127.0.0.1", port)).unwrap();
    plain
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let answer = exchange(
        plain,
        "GET",
        "/v1/version",
        "authorization: Bearer token-of-ops\r\n",
        "",
    );
    assert!(answer.is_err(), "{answer:?}");
    assert_eq!(ask(&files.client(Validity::Now)).unwrap().0, 200);
    let alice = files.authority.signs_client("alice");
    let alice = Client::new(&files.authority, Some(&alice));
    assert_eq!(ask(&alice).unwrap().0, 200);

    // A client's certificate does not serve as the node's, whatever its name.
    let node = files.authority.signs_client("node");
    files.directory.write("node.crt", &node.certificate_pem());
    files.directory.write("node.key", &node.key_pem());
    let posing = Daemon::start(&files.arguments());
    let refused = alice.request(posing.port(), "GET", "/v1/version", token);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("certificate"), "{refused}");
}

#[test]
fn strangers_and_readers_leave_connections_for_admins() {
    let files = Files::new();
    let daemon = Daemon::start(&files.arguments());
    let (port, client) = (daemon.port(), files.client(Validity::Now));
    let admin_is_served_at_once = || {
        let begin = Instant::now();
        let token = Some("Bearer token-of-ops");
        let (status, body) = client.request(port, "GET", "/v1/version", token).unwrap();
        assert_eq!(status, 200, "{body}");
        // Behind all strangers it would wait for five handshakes of 3 s each. Behind the readers it
        // would wait for 10 s.
        assert!(
            begin.elapsed() < Duration::from_secs(8),
            "{:?}",
            begin.elapsed()
        );
    };
    let connect = |_| TcpStream::connect(("127.0.0.1", port)).unwrap();
    let strangers: Vec<TcpStream> = (0..300).map(connect).collect();
    admin_is_served_at_once();
    let read = "GET /v1/events HTTP/1.1\r\nhost: node\r\n\
                authorization: Bearer token-of-viewer\r\n\r\n";
    // More than there are places for all roles.
    let readers: Vec<_> = (0..80)
        .map(|_| {
            let mut stream = client.connect(port).unwrap();
            // The daemon may replace one that waits for a place.
            let _ = stream.write_all(read.as_bytes());
            stream
        })
        .collect();
    admin_is_served_at_once();
    drop((strangers, readers));
}

#[test]
fn strangers_do_not_fill_the_log() {
    let daemon = Daemon::start(&Files::new().arguments());
    let is_refused = || {
        let mut stream = TcpStream::connect(("127.0.0.1", daemon.port())).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // A TLS alert, or a reset by the peer.
        let _ = stream.read_to_end(&mut Vec::new());
    };
    for _ in 0..300 {
        is_refused();
    }
    std::thread::sleep(Duration::from_secs(2));
    is_refused();
    let line = daemon.logged(|line| line["target"] == "suppressed");
    assert!(
        line["source"].as_str().unwrap().contains("server.rs"),
        "{line}"
    );
}

#[test]
fn a_token_with_an_expiry_counts_until_then() {
    let files = Files::new();
    let daemon = Daemon::start(&files.arguments());
    let (port, client) = (daemon.port(), files.client(Validity::Now));
    let token = |words: &[&str]| {
        let mut command = Command::new(program());
        command.arg("token").args(words).arg("--file");
        let output = command
            .arg(files.directory.file("tokens"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let create = |name: &str, lifetime: &str| {
        let words = [
            "create",
            "--role",
            "read",
            "--name",
            name,
            "--expires",
            lifetime,
        ];
        token(&words).trim().to_owned()
    };
    let (long, short) = (create("long", "1d"), create("short", "6s"));
    daemon.signal(Signal::HUP);
    daemon.logged(|line| line["message"] == "reloaded certificates and tokens");
    let ask = |token: &str| {
        let token = format!("Bearer {token}");
        client
            .request(port, "GET", "/v1/version", Some(&token))
            .unwrap()
    };
    assert_eq!(ask(&long).0, 200);
    let [of_long, of_short] = [&long, &short].map(|token| {
        let stream = files.client(Validity::Now).connect(port).unwrap();
        let header = format!("authorization: Bearer {token}\r\n");
        std::thread::spawn(move || {
            exchange(stream, "GET", "/v1/events", &header, "")
                .unwrap()
                .0
        })
    });
    // The stream ends with its token.
    assert_eq!(of_short.join().unwrap(), 200);
    assert!(!of_long.is_finished());
    let (status, body) = ask(&short);
    assert_eq!(status, 401);
    assert_eq!(body["code"], "expired_token", "{body}");
    let detail = body["message"].as_str().unwrap();
    assert!(detail.starts_with("the token short expired at 2"), "{body}");

    token(&["revoke", "long"]);
    daemon.signal(Signal::HUP);
    let end = Instant::now() + Duration::from_secs(20);
    while ask(&long).0 != 401 {
        assert!(Instant::now() < end, "the token is not revoked");
    }
    assert_eq!(of_long.join().unwrap(), 200);
}

#[test]
fn a_site_is_set_up_by_bellhop_alone() {
    let site = Directory::new();
    let run = |line: &str| {
        let mut command = Command::new(program());
        command.args(line.split(' ')).current_dir(&site.0);
        let output = command.env("XDG_CONFIG_HOME", &site.0).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    run("pki init .");
    run("pki issue . node1 --san 127.0.0.1");
    run("pki issue --client . alice");
    site.write("token", &run("token create --role read --file tokens"));
    let options: String = [
        ("listen", "127.0.0.1:0".into()),
        ("tls_cert", site.file("node1.crt")),
        ("tls_key", site.file("node1.key")),
        ("tls_ca", site.file("ca.crt")),
        ("tokens", site.file("tokens")),
    ]
    .iter()
    .map(|(key, value): &(&str, PathBuf)| format!("{key} = {value:?}\n"))
    .collect();
    let options = site.write("node1.toml", &options);
    let daemon = Daemon::start(&["--config".to_owned(), options.to_str().unwrap().to_owned()]);
    let address = format!("https://127.0.0.1:{}", daemon.port());
    let files = "--ca ca.crt --cert alice.crt --key alice.key --token-file token";
    run(&format!("remote add node1 {address} {files}"));
    let version = run("version -j --remote node1");
    let version: Value = serde_json::from_str(&version).unwrap();
    assert_eq!(version["daemon"]["pid"], daemon.child.id());
    run("remote use node1");
    assert_eq!(run("vm list --no-headers"), "");
    let line = daemon.logged(|line| line["message"] == "read options from a file");
    assert!(line["file"].as_str().unwrap().ends_with("node1.toml"));
}

#[test]
fn a_revoked_client_is_refused() {
    let site = Directory::new();
    let bellhop = |line: &str| {
        let mut command = Command::new(program());
        command.args(line.split(' ')).current_dir(&site.0);
        command.env("XDG_CONFIG_HOME", &site.0).output().unwrap()
    };
    let run = |line: &str| {
        let output = bellhop(line);
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    run("pki init .");
    run("pki issue . node1 --san 127.0.0.1");
    run("pki issue --client . alice");
    run("pki issue --client . bob");
    run("pki revoke .");
    site.write("token", &run("token create --role read --file tokens"));
    let mut arguments = vec!["--listen".to_owned(), "127.0.0.1:0".to_owned()];
    for (option, file) in [
        ("--tls-cert", "node1.crt"),
        ("--tls-key", "node1.key"),
        ("--tls-ca", "ca.crt"),
        ("--tls-crl", "ca.crl"),
        ("--tokens", "tokens"),
    ] {
        arguments.extend([option, site.file(file).to_str().unwrap()].map(str::to_owned));
    }
    let daemon = Daemon::start(&arguments);
    let address = format!("https://127.0.0.1:{}", daemon.port());
    for client in ["alice", "bob"] {
        let files = format!("--ca ca.crt --cert {client}.crt --key {client}.key");
        run(&format!(
            "remote add {client} {address} {files} --token-file token"
        ));
        run(&format!("vm list --remote {client}"));
    }
    run("pki revoke . alice");
    daemon.signal(Signal::HUP);
    daemon.logged(|line| line["message"] == "reloaded certificates and tokens");
    let refused = bellhop("vm list --remote alice");
    assert!(!refused.status.success(), "{refused:?}");
    daemon.logged(|line| {
        let is_refusal = line["message"] == "a connection to the API is refused";
        is_refusal
            && line["error"]
                .as_str()
                .is_some_and(|error| error.contains("Revoked"))
    });
    run("vm list --remote bob");
    // A damaged list is not used, and the earlier one stays.
    site.write("ca.crl", "damaged");
    daemon.signal(Signal::HUP);
    daemon.logged(|line| {
        line["message"] == "cannot reload certificates and tokens; keeping the current ones"
    });
    assert!(!bellhop("vm list --remote alice").status.success());
    run("vm list --remote bob");
}

#[test]
fn certificates_and_tokens_are_read_again_together() {
    let files = Files::new();
    let daemon = Daemon::start(&files.arguments());
    let (port, client) = (daemon.port(), files.client(Validity::Now));
    let status = |client: &Client, token: &str| {
        let token = format!("Bearer {token}");
        let answer = client.request(port, "GET", "/v1/version", Some(&token));
        answer.map(|answer| answer.0)
    };
    assert_eq!(status(&client, "token-of-viewer").unwrap(), 200);

    files.tokens(&[
        ("read", "viewer", "another"),
        ("admin", "ops", "token-of-ops"),
    ]);
    assert_eq!(status(&client, "token-of-viewer").unwrap(), 200);
    daemon.signal(Signal::HUP);
    daemon.logged(|line| line["message"] == "reloaded certificates and tokens");
    assert_eq!(status(&client, "token-of-viewer").unwrap(), 401);
    assert_eq!(status(&client, "another").unwrap(), 200);

    // If one file is invalid, all stay as they were.
    files.tokens(&[("read", "viewer", "third")]);
    files.directory.write("clients.crt", "nonsense");
    daemon.signal(Signal::HUP);
    daemon.logged(|line| {
        line["message"] == "cannot reload certificates and tokens; keeping the current ones"
    });
    assert_eq!(status(&client, "another").unwrap(), 200);
    assert_eq!(status(&client, "third").unwrap(), 401);

    let next = Identity::authority("the next authority");
    files
        .directory
        .write("clients.crt", &next.certificate_pem());
    daemon.signal(Signal::HUP);
    let client_of_next = Client::new(&files.authority, Some(&next.signs("new", Validity::Now)));
    let end = Instant::now() + Duration::from_secs(20);
    while status(&client_of_next, "third").is_err() {
        assert!(Instant::now() < end, "the new authority does not count");
    }
    assert!(status(&client, "third").is_err());
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended(), 0);
}

#[test]
fn the_unix_socket_is_for_its_user_and_group() {
    let daemon = Daemon::start(&[]);
    assert_eq!(mode(&daemon.socket()), 0o600);
    assert_eq!(daemon.request("GET", "/v1/version", "", "").0, 200);
    let header = "x-request-id: mine\r\n";
    assert_eq!(daemon.request("DELETE", "/v1/not-there", header, "").0, 404);
    let line = daemon.logged(|line| line["target"] == "audit" && line["request_id"] == "mine");
    let who = format!(
        "uid {} pid {}",
        rustix::process::geteuid().as_raw(),
        std::process::id()
    );
    assert_eq!(line["who"], who.as_str());
    assert_eq!(
        (&line["role"], &line["status"]),
        (&"admin".into(), &404.into())
    );
    assert_eq!(line["message"], "not done");
    daemon.signal(Signal::INT);
    let socket = daemon.socket();
    assert_eq!(daemon.ended(), 0);
    assert!(!socket.exists());

    let own = rustix::process::getegid().as_raw().to_string();
    let daemon = Daemon::start(&["--group".to_owned(), own]);
    assert_eq!(mode(&daemon.socket()), 0o660);
    let (code, text) = said(&["--group".to_owned(), "no-such-group".to_owned()]);
    assert_eq!(code, Some(1));
    assert!(text.contains("no-such-group"), "{text}");
}

#[test]
fn systemd_receives_the_state() {
    let directory = Directory::new();
    let path = directory.file("notify");
    let systemd = UnixDatagram::bind(&path).unwrap();
    systemd
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let next = |wanted: &str| {
        let mut buffer = [0; 512];
        loop {
            let length = systemd.recv(&mut buffer).unwrap();
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if text.lines().any(|line| line == wanted) {
                return text;
            }
            assert_eq!(text, "WATCHDOG=1", "while {wanted} was to come");
        }
    };
    let mut command = command(&directory, &[]);
    command
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "400000");
    let daemon = Daemon::of(command, directory);
    next("READY=1");
    // Ready means that it serves requests.
    assert_eq!(daemon.request("GET", "/v1/version", "", "").0, 200);
    next("WATCHDOG=1");
    next("WATCHDOG=1");
    daemon.signal(Signal::HUP);
    let text = next("RELOADING=1");
    assert!(text.contains("MONOTONIC_USEC="), "{text}");
    next("READY=1");
    daemon.signal(Signal::TERM);
    next("STOPPING=1");
    assert_eq!(daemon.ended(), 0);
}

#[test]
fn events_are_streamed_and_end_with_the_daemon() {
    let daemon = Daemon::start(&[]);
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    // A position from before its start: lost, and then new events.
    stream
        .write_all(b"GET /v1/events HTTP/1.1\r\nhost: node\r\nlast-event-id: 1\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    let mut buffer = [0; 4096];
    while !text.contains("event: lost") {
        let length = stream.read(&mut buffer).unwrap();
        assert!(length > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    assert!(
        text.contains("text/event-stream") && text.contains("retry: 1000"),
        "{text}"
    );
    daemon.signal(Signal::TERM);
    // The stream ends properly with the last chunk.
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("0\r\n\r\n"), "{rest:?}");
    assert_eq!(daemon.ended(), 0);
}
