//! A guest on the lab NIC rebinds, loses its link and reboots repeatedly.

mod cycles;

use cycles::End;
use lab::labnic::{Labnic, set_link, trouble};

const MACS: [&str; 2] = ["02:4c:61:62:53:61", "02:4c:61:62:53:62"];

#[test]
fn rebinds_link_changes_and_reboots_under_traffic_leak_nothing() {
    let labnic = Labnic::load(&[]).unwrap();
    let devices = [0, 1].map(|index| {
        let name = format!("cycles{index}");
        labnic
            .add(&name, &["mac", MACS[index], "max_vqp", "2"])
            .unwrap()
    });
    let ends = [0, 1].map(|index| End {
        path: devices[index].path(),
        mac: MACS[index],
    });
    cycles::leak_nothing(ends, |up| set_link(&devices[0], up).unwrap());
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}
