//! The NICs that a guest reports.

use lab::guest::Guest;
use std::time::{Duration, Instant};

/// How long a guest may take to find or to release a NIC; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

/// Waits until the guest has NICs with exactly these addresses and drivers for them; the first of
/// them is then up.
#[track_caller]
pub(crate) fn wait_nics(guest: &mut Guest, macs: &[&str]) {
    let start = Instant::now();
    loop {
        let nics = guest.command("info").unwrap()["nics"].clone();
        let mut seen: Vec<&str> = nics
            .as_array()
            .unwrap()
            .iter()
            .filter(|nic| nic["driver"].is_string())
            // A NIC that is being removed no longer has an address.
            .filter_map(|nic| nic["mac"].as_str())
            .collect();
        seen.sort_unstable();
        if seen == macs {
            if !macs.is_empty() {
                guest.command("up eth0").unwrap();
            }
            return;
        }
        assert!(
            start.elapsed() < NOTICE,
            "{nics} instead of {macs:?}\n{}",
            guest.command("dmesg").unwrap()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}
