//! The address of a server of one of these APIs.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::host_port;

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
}

/// Why a text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadAddress {
    /// The text is empty.
    #[error("nothing is given; say the path of the daemon's socket, or https://HOST:PORT")]
    Empty,
    /// It is HTTP over a network.
    #[error("the daemon is not asked over the network without TLS; say https://HOST:PORT")]
    NoTls,
    /// It has a host and a port without a scheme.
    #[error("{0:?} has no scheme; did you mean https://{0}? A file of that name is ./{0}")]
    NoScheme(String),
    /// It has another scheme.
    #[error("{0:?} is not known; say the path of the daemon's socket, or https://HOST:PORT")]
    Scheme(String),
    /// It has no port, or no host.
    #[error("{0:?} is not HOST:PORT")]
    HostAndPort(String),
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
    fn sockets_and_hosts_are_told_apart() {
        let socket: Address = "/run/bellhop/node.socket".parse().unwrap();
        assert_eq!(socket, Address::Socket("/run/bellhop/node.socket".into()));
        for text in [
            "https://node1:7443",
            "https://10.0.0.1:1",
            "https://[::1]:7443",
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
            "ssh://node1",
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
