//! A test's own daemon, and its clients.

#[path = "../program/mod.rs"]
pub(crate) mod program;

use std::fs;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto, version,
};

use self::program::program;
use super::certificates::{Identity, Validity};

const PATIENCE: Duration = Duration::from_secs(60);

/// A directory that is removed with the test.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("bellhop-serve-{}-{count}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file that only its owner can use.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.file(name);
        let mut options = fs::OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        options
            .open(&path)
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The line of the token file with the SHA-256 of a token.
pub(crate) fn token_line(role: &str, name: &str, token: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, token.as_bytes());
    let digits: String = digest
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{role} {name} {digits}\n")
}

/// The files of a daemon with TCP.
pub(crate) struct Files {
    pub(crate) directory: Directory,
    pub(crate) authority: Identity,
}

impl Files {
    pub(crate) fn new() -> Self {
        let directory = Directory::new();
        let authority = Identity::authority("the test's authority");
        let node = authority.signs("node", Validity::Now);
        directory.write("node.crt", &node.certificate_pem());
        directory.write("node.key", &node.key_pem());
        directory.write("clients.crt", &authority.certificate_pem());
        let files = Self {
            directory,
            authority,
        };
        files.tokens(&[
            ("read", "viewer", "token-of-viewer"),
            ("operate", "operator", "token-of-operator"),
            ("admin", "ops", "token-of-ops"),
        ]);
        files
    }

    pub(crate) fn tokens(&self, tokens: &[(&str, &str, &str)]) {
        let lines = tokens.iter();
        let lines: String = lines
            .map(|(role, name, token)| token_line(role, name, token))
            .collect();
        self.directory.write("tokens", &lines);
    }

    pub(crate) fn arguments(&self) -> Vec<String> {
        let file = |name: &str| self.directory.file(name).to_str().unwrap().to_owned();
        let mut arguments = vec!["--listen".to_owned(), "127.0.0.1:0".to_owned()];
        for (option, name) in [
            ("--tls-cert", "node.crt"),
            ("--tls-key", "node.key"),
            ("--tls-ca", "clients.crt"),
            ("--tokens", "tokens"),
        ] {
            arguments.extend([option.to_owned(), file(name)]);
        }
        arguments
    }

    pub(crate) fn client(&self, validity: Validity) -> Client {
        let identity = self.authority.signs("client", validity);
        Client::new(&self.authority, Some(&identity))
    }
}

/// `bellhop serve`, killed when it is dropped.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) directory: Directory,
    log: Arc<Mutex<Vec<Value>>>,
    reader: Option<JoinHandle<()>>,
}

pub(crate) fn command(directory: &Directory, arguments: &[String]) -> Command {
    let mut command = Command::new(program());
    command
        .args([
            "--log-level",
            "info",
            "--log-format",
            "json",
            "serve",
            "--state-dir",
        ])
        .arg(directory.file("state"))
        .arg("--runtime-dir")
        .arg(directory.file("run"))
        .args(arguments)
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// The output of a daemon that does not start.
pub(crate) fn refused(arguments: &[String]) -> Output {
    let directory = Directory::new();
    let mut child = command(&directory, arguments).spawn().unwrap();
    let end = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("the daemon serves with {arguments:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

impl Daemon {
    pub(crate) fn start(arguments: &[String]) -> Self {
        let directory = Directory::new();
        Self::of(command(&directory, arguments), directory)
    }

    pub(crate) fn of(mut command: Command, directory: Directory) -> Self {
        let mut child = command.spawn().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (lines, into) = (BufReader::new(child.stderr.take().unwrap()), log.clone());
        let reader = std::thread::spawn(move || {
            for line in lines.lines() {
                let line = line.unwrap();
                let line = serde_json::from_str(&line).unwrap_or(Value::String(line));
                into.lock().push(line);
            }
        });
        let daemon = Self {
            child,
            directory,
            log,
            reader: Some(reader),
        };
        daemon.logged(|line| line["subject"] == "/v1" && line["change"] == "served");
        daemon
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.file("run").join("node.socket")
    }

    /// The log so far.
    pub(crate) fn log(&self) -> Vec<Value> {
        self.log.lock().clone()
    }

    /// Waits for a line of the log.
    pub(crate) fn logged(&self, is_it: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if let Some(line) = log.iter().rev().find(|line| is_it(line)) {
                return line.clone();
            }
            assert!(Instant::now() < end, "not in the log: {log:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn port(&self) -> u16 {
        let line = self.logged(|line| line["message"] == "listening on TCP");
        let address = line["address"].as_str().unwrap();
        address.rsplit(':').next().unwrap().parse().unwrap()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for its exit.
    pub(crate) fn ended(mut self) -> i32 {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.reader.take().unwrap().join().unwrap();
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < end, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends a request on the Unix socket.
    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: &str,
    ) -> (u16, Value) {
        let stream = UnixStream::connect(self.socket()).unwrap();
        exchange(stream, method, path, headers, body).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client with TLS.
pub(crate) struct Client(Arc<ClientConfig>);

impl Client {
    /// A client that trusts `authority` and presents `identity`.
    pub(crate) fn new(authority: &Identity, identity: Option<&Identity>) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(authority.certificate.clone().into()).unwrap();
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&version::TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let config = match identity {
            Some(identity) => {
                let key = PrivatePkcs8KeyDer::from(identity.key.clone());
                let chain = vec![identity.certificate.clone().into()];
                config
                    .with_client_auth_cert(chain, PrivateKeyDer::Pkcs8(key))
                    .unwrap()
            }
            None => config.with_no_client_auth(),
        };
        Self(Arc::new(config))
    }

    pub(crate) fn connect(
        &self,
        port: u16,
    ) -> std::io::Result<StreamOwned<ClientConnection, TcpStream>> {
        let tcp = TcpStream::connect(("127.0.0.1", port))?;
        tcp.set_read_timeout(Some(PATIENCE))?;
        let connection = ClientConnection::new(self.0.clone(), "node".try_into().unwrap());
        Ok(StreamOwned::new(connection.unwrap(), tcp))
    }

    /// Sends a request with this header `Authorization`; returns the status and the answer.
    pub(crate) fn request(
        &self,
        port: u16,
        method: &str,
        path: &str,
        authorization: Option<&str>,
    ) -> std::io::Result<(u16, Value)> {
        let header = authorization.map(|value| format!("authorization: {value}\r\n"));
        exchange(
            self.connect(port)?,
            method,
            path,
            &header.unwrap_or_default(),
            "",
        )
    }
}

/// Sends one request on a connection.
pub(crate) fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> std::io::Result<(u16, Value)> {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n{headers}\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| std::io::Error::other(answer.clone()))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let mut value = serde_json::from_str(body).unwrap_or(Value::Null);
    if let Some(challenge) = head
        .lines()
        .find(|line| line.starts_with("www-authenticate:"))
        && let Value::Object(fields) = &mut value
    {
        fields.insert("challenge".to_owned(), challenge.into());
    }
    Ok((status, value))
}

pub(crate) fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(path).unwrap().mode() & 0o7777
}
