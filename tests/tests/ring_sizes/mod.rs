//! Checks for every device whose queues can be reset one by one.

use lab::guest::Guest;
use std::time::Duration;

/// Changes the sizes of the guest's rings while frames flow in both directions, and checks that no
/// ring stops and no frame is corrupted. `nic` is the guest's name of the NIC, `rebind` the command
/// that restarts its driver. `flood` makes the other side send by itself; `exchange` sends checked
/// frames of one size there and back.
#[track_caller]
pub(crate) fn resize_under_traffic(
    guest: &mut Guest,
    nic: &str,
    rebind: &str,
    flood: impl Fn(bool),
    exchange: impl Fn(&mut Guest, u64),
) {
    exchange(guest, 60);
    guest.command(&format!("flood-on 128 {nic}")).unwrap();
    flood(true);
    for (rx, tx) in [(64, 256), (64, 64), (256, 32), (128, 256), (256, 256)] {
        let now = guest
            .command_within(&format!("rings {rx} {tx} {nic}"), Duration::from_secs(60))
            .unwrap();
        assert_eq!((&now["rx"], &now["tx"]), (&rx.into(), &tx.into()), "{now}");
    }
    let flooded = guest.command("flood-off").unwrap();
    flood(false);
    assert!(flooded["tx"].as_u64() > Some(0), "{flooded}");
    assert_eq!(flooded["corrupt"], 0, "{flooded}");
    for (rx, tx) in [(32, 32), (256, 64)] {
        guest.command(&format!("rings {rx} {tx} {nic}")).unwrap();
        for size in [60, 1514] {
            exchange(guest, size);
        }
    }
    // Unsupported sizes are refused and change nothing.
    guest.command(&format!("rings 512 64 {nic}")).unwrap_err();
    exchange(guest, 590);
    // A driver that restarts gets rings of the full size.
    guest.command(rebind).unwrap();
    let now = guest.command(&format!("rings 256 256 {nic}")).unwrap();
    assert_eq!(now["rx"], 256, "{now}");
    exchange(guest, 590);
    let log = guest.command("dmesg").unwrap();
    assert_eq!(log["errors"], 0, "{log}");
}
