//! Certificates, keys and tokens of daemons on this host, which listen on TCP ports.

// The same test certificate authority as in the tests of the daemon's access control.
#[allow(dead_code, reason = "other tests use more of it")]
#[path = "../../../cli/tests/api_access/certificates.rs"]
mod certificates;

use certificates::{Identity, Validity};
use lab::node::Node;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

/// The address of all nodes, which their certificates name.
pub(crate) const ADDRESS: &str = "127.0.0.1";

/// Certificates and tokens of all nodes of a test.
pub(crate) struct Files(PathBuf);

impl Files {
    pub(crate) fn new() -> Self {
        let name = format!("lab-node-tls-{}", std::process::id());
        let files = Self(std::env::temp_dir().join(name));
        fs::create_dir(&files.0).unwrap();
        let authority = Identity::authority("the lab");
        let node = authority.signs(ADDRESS, Validity::Now);
        files.write("ca.crt", &authority.certificate_pem());
        files.write("node.crt", &node.certificate_pem());
        files.write("node.key", &node.key_pem());
        let tokens = [("operate", "of-an-operator"), ("admin", "of-an-admin")];
        files.write("tokens", &tokens.map(line_of).concat());
        files.write("token", "of-an-admin");
        files
    }

    /// Readable only by the owner: the daemon refuses keys and tokens that others may read.
    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A node that others reach at the port, and that reaches them.
    pub(crate) fn node(&self, name: &str, port: u16) -> Node {
        let listen = format!("{ADDRESS}:{port}");
        let mut arguments = vec!["--listen", &listen, "--migration-host", ADDRESS];
        let files = [
            ("--tls-cert", "node.crt"),
            ("--tls-key", "node.key"),
            ("--tls-ca", "ca.crt"),
            ("--tokens", "tokens"),
            ("--node-ca", "ca.crt"),
            ("--node-cert", "node.crt"),
            ("--node-key", "node.key"),
            ("--node-token-file", "token"),
        ]
        .map(|(option, file)| (option, self.path(file).display().to_string()));
        for (option, path) in &files {
            arguments.extend([option, path.as_str()]);
        }
        Node::start_with(name, &arguments).unwrap()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A line of the token file: role, a name for the log, SHA-256.
fn line_of((role, token): (&str, &str)) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, token.as_bytes());
    let digits: String = digest
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{role} {token} {digits}\n")
}

/// A port that no process uses.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind((ADDRESS, 0)).unwrap();
    listener.local_addr().unwrap().port()
}
