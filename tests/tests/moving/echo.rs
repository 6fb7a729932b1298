//! A guest as the peer of the guest that migrates.

use std::path::Path;
use std::time::Duration;

use lab::guest::{BellhopArguments, Guest};

use super::NOTICE;
use super::soak::TrafficPeer;

/// How long the peer floods, in seconds.
const FLOOD: u64 = 3;

/// A guest that sends back the frames that it receives.
pub(crate) struct Echo {
    guest: Guest,
    mac: String,
    flood: Option<String>,
}

impl Echo {
    /// Its NIC is the device at this path, which has this address.
    pub(crate) fn start(device: &Path, mac: &str) -> Self {
        let arguments = BellhopArguments::small().unwrap().memory("128M");
        let mut guest = Guest::start(&arguments.vdpa(device)).unwrap();
        guest.command("echo-on").unwrap();
        // The switch may know its address at a port that another test has moved it to.
        guest.command("pace 1 64 0").unwrap();
        Self {
            guest,
            mac: mac.to_owned(),
            flood: None,
        }
    }
}

impl TrafficPeer for Echo {
    fn mac(&self) -> String {
        self.mac.clone()
    }

    fn flood(&mut self, guest: &str) {
        let line = format!("flood {FLOOD} 256 to {guest}");
        self.guest.listen(&line).unwrap();
        self.flood = Some(line);
    }

    fn calm(&mut self) {
        let line = self.flood.take().unwrap();
        let flooded = self.guest.answer(&line, Duration::from_secs(60)).unwrap();
        assert_eq!(flooded["corrupt"], 0, "{flooded}");
    }

    fn account(&mut self) -> String {
        format!("{:?}", self.guest.command_within("echo-off", NOTICE))
    }
}
