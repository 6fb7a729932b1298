//! A queue of a network port, which a software NIC can have instead of a tap.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
use crate::link::is_interface_name;

/// A queue of a port. Written as `port=eth1,queue=3`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortQueue {
    /// The network interface.
    pub interface: String,
    /// Its queue, from 0.
    pub queue: u16,
}

impl PortQueue {
    /// This queue of the interface.
    ///
    /// # Errors
    /// [`ErrorKind::BadName`]: no interface can have this name.
    pub fn new(interface: &str, queue: u16) -> Result<Self, Error> {
        if !is_interface_name(interface) {
            let message = format!("{interface:?} is not a name for an interface");
            return Err(Error::new(ErrorKind::BadName, message));
        }
        Ok(Self {
            interface: interface.to_owned(),
            queue,
        })
    }
}

impl fmt::Display for PortQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port={},queue={}", self.interface, self.queue)
    }
}

impl FromStr for PortQueue {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || {
            let message = format!("cannot parse {text:?}: write `port=INTERFACE,queue=N`");
            Error::new(ErrorKind::BadName, message)
        };
        let (port, queue) = text.split_once(',').ok_or_else(bad)?;
        let (port, queue) = if port.starts_with("queue=") {
            (queue, port)
        } else {
            (port, queue)
        };
        let interface = port.strip_prefix("port=");
        let queue = queue
            .strip_prefix("queue=")
            .and_then(|queue| queue.parse().ok());
        match (interface, queue) {
            (Some(interface), Some(queue)) => Self::new(interface, queue),
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_of_a_port_is_read_as_it_is_written() {
        let port: PortQueue = "port=eth1,queue=3".parse().unwrap();
        assert_eq!(port.to_string(), "port=eth1,queue=3");
        assert_eq!("queue=3,port=eth1".parse::<PortQueue>().unwrap(), port);
        for text in [
            "",
            "port=eth1",
            "queue=3",
            "port=eth1,queue=",
            "port=eth1,queue=-1",
            "port=eth1,queue=65536",
            "port=,queue=0",
            "port=../x,queue=0",
            "port=eth1,queue=1,queue=2",
            "port=eth1,port=eth2",
        ] {
            text.parse::<PortQueue>().unwrap_err();
        }
    }
}
