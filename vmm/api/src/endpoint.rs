//! The address of a migration's source or destination, as text.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::host_port;

/// An address.
///
/// As text: `unix:PATH`, `tcp:HOST:PORT`; an IPv6 address is in brackets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Endpoint {
    /// The socket with this absolute path.
    Unix(PathBuf),
    /// A TCP port of a host.
    Tcp {
        /// A name or an IP address without brackets.
        host: String,
        /// The port, not 0.
        port: u16,
    },
}

/// A text that is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address of a migration; use unix:/PATH or tcp:HOST:PORT")]
pub struct BadEndpoint(String);

impl FromStr for Endpoint {
    type Err = BadEndpoint;

    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        let bad = || BadEndpoint(text.to_owned());
        let (scheme, rest) = text.split_once(':').ok_or_else(bad)?;
        match scheme {
            "unix" => {
                // Also accepts `unix:///path`, which other programs write.
                let path = match rest.strip_prefix("//") {
                    Some(path) if path.starts_with('/') => path,
                    _ => rest,
                };
                let fits = path.starts_with('/') && !path.contains('\0');
                fits.then(|| Self::Unix(path.into())).ok_or_else(bad)
            }
            "tcp" => {
                let rest = rest.strip_prefix("//").unwrap_or(rest);
                let (host, port) = host_port::parse(rest).ok_or_else(bad)?;
                Ok(Self::Tcp { host, port })
            }
            _ => Err(bad()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

vdpa::text_form!(Endpoint, BadEndpoint);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["unix:/run/m.socket", "tcp:node2:7444", "tcp:[::1]:7444"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for (text, plain) in [
            ("unix:///run/m.socket", "unix:/run/m.socket"),
            ("tcp://10.0.0.2:1", "tcp:10.0.0.2:1"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), plain);
        }
        for bad in [
            "",
            "node2:7444",
            "unix:",
            "unix:relative",
            "tcp:node2",
            "tcp::7444",
            "tcp:node2:0",
            "tcp:node2:+1",
            "tcp:node2:65536",
            "tcp:::1:1",
            "tcp:a b:1",
            "http://node2:1",
        ] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }
}
