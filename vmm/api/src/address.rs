//! The address of a server of one of these APIs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::host_port;

/// The socket of this host's node daemon.
pub const SOCKET: &str = "/run/bellhop/node.socket";

/// A server's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Its Unix socket, on this host.
    Socket(PathBuf),
    /// A host, as a name or an IP address without brackets, and a port, over TLS.
    Https {
        /// The host.
        host: String,
        /// The port, not 0.
        port: u16,
    },
    /// A socket on another host that `ssh` reaches.
    Ssh {
        /// `[USER@]HOST[:PORT]`, without characters that a shell interprets.
        host: String,
        /// The socket, if it is not the default one; without such characters, too.
        socket: Option<PathBuf>,
    },
}

/// Why a text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadAddress {
    /// The text is empty.
    #[error(
        "the address is empty; use the path of the daemon's socket, https://HOST:PORT or \
         ssh://HOST"
    )]
    Empty,
    /// HTTP over a network.
    #[error("HTTP over a network needs TLS; use https://HOST:PORT")]
    NoTls,
    /// A host and a port without a scheme.
    #[error("{0:?} has no scheme; did you mean https://{0}? A file of that name is ./{0}")]
    NoScheme(String),
    /// Another scheme.
    #[error(
        "{0:?} has an unknown scheme; use the path of the daemon's socket, https://HOST:PORT or \
         ssh://HOST"
    )]
    Scheme(String),
    /// No port, or no host.
    #[error("{0:?} is not HOST:PORT")]
    HostAndPort(String),
    /// An invalid host or socket for `ssh`.
    #[error("{0:?} is not [USER@]HOST[:PORT][/SOCKET]")]
    Ssh(String),
}

/// The address after `ssh://`.
fn ssh(text: &str) -> Option<Address> {
    let (host, socket) = match text.find('/') {
        Some(at) => text.split_at_checked(at)?,
        None => (text, ""),
    };
    let only = |text: &str, more: &[u8]| {
        let mut bytes = text.bytes();
        bytes.all(|byte| byte.is_ascii_alphanumeric() || more.contains(&byte))
    };
    let parts: Vec<&str> = host.split('@').collect();
    let begins = |part: &&str| part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '[');
    if !(parts.len() <= 2 && parts.iter().all(begins) && only(host, b"@.-_:[]")) {
        return None;
    }
    let socket = match socket {
        "" | "/" => None,
        path if only(path, b"/.-_") => Some(path.into()),
        _ => return None,
    };
    Some(Address::Ssh {
        host: host.to_owned(),
        socket,
    })
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        match text.split_once("://") {
            None if text.is_empty() => Err(BadAddress::Empty),
            None if !text.contains('/') && host_port::parse(text).is_some() => {
                Err(BadAddress::NoScheme(text.to_owned()))
            }
            None => Ok(Self::Socket(text.into())),
            Some(("https", untouched)) => {
                let rest = untouched.strip_suffix('/').unwrap_or(untouched);
                let parsed = host_port::parse(rest);
                let (host, port) =
                    parsed.ok_or_else(|| BadAddress::HostAndPort(untouched.to_owned()))?;
                Ok(Self::Https { host, port })
            }
            Some(("ssh", rest)) => ssh(rest).ok_or_else(|| BadAddress::Ssh(rest.to_owned())),
            Some(("http", _)) => Err(BadAddress::NoTls),
            Some((scheme, _)) => Err(BadAddress::Scheme(scheme.to_owned())),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => write!(f, "{}", path.display()),
            Self::Https { host, port } if host.contains(':') => {
                write!(f, "https://[{host}]:{port}")
            }
            Self::Https { host, port } => write!(f, "https://{host}:{port}"),
            Self::Ssh { host, socket } => {
                let socket = socket.as_deref().unwrap_or(Path::new(""));
                write!(f, "ssh://{host}{}", socket.display())
            }
        }
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_and_hosts_are_distinguished() {
        let socket: Address = "/run/bellhop/node.socket".parse().unwrap();
        assert_eq!(socket, Address::Socket("/run/bellhop/node.socket".into()));
        for text in [
            "https://node1:7443",
            "https://10.0.0.1:1",
            "https://[::1]:7443",
            "ssh://node1",
            "ssh://me@node1.example.com:2222",
            "ssh://[::1]/run/b/node.socket",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("http://node1:80".parse::<Address>(), Err(BadAddress::NoTls));
        for host in ["localhost:8443", "10.0.0.1:8443", "[::1]:8443"] {
            let error = host.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(&format!("https://{host}?")), "{error}");
        }
        for file in ["./localhost:8443", "node.socket", "a:b"] {
            let socket = file.parse::<Address>().unwrap();
            assert_eq!(socket, Address::Socket(file.into()));
        }
        for bad in [
            "",
            "ssh://",
            "ssh:///run/node.socket",
            "ssh://-oProxyCommand=x",
            "ssh://me@-oProxyCommand",
            "ssh://a@b@c",
            "ssh://node1;reboot",
            "ssh://node1/run/$(reboot)",
            "ssh://node1/run/a b",
            "ftp://node1",
            "https://",
            "https://node1",
            "https://:1",
            "https://node1:0",
            "https://node1:+1",
            "https://node1:65536",
            "https://a b:1",
            "https://::1:1",
            "https://[::1:1",
            "https://user@node1:1",
            "https://node1:1/v1",
        ] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
