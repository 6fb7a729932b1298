//! A PCI function that vhost-vdpa cannot isolate, on either rig.

use lab::guest::BellhopArguments;
use lab::rig::PLAIN_SLOT;
use lab::sim::{device_file, vdpa};
use std::fs;

const NAME: &str = "lab-unfit";

/// A function of the plain slot with vp_vdpa, and its vDPA device. Dropping it undoes both.
struct Unfit {
    address: String,
}

impl Unfit {
    fn bind(function: u8) -> Self {
        let unfit = Self {
            address: format!("0000:00:{PLAIN_SLOT:02x}.{function}"),
        };
        unfit.give_to("vp-vdpa");
        let mgmtdev = format!("pci/{}", unfit.address);
        vdpa(&["dev", "add", "name", NAME, "mgmtdev", &mgmtdev]).unwrap();
        unfit
    }

    fn give_to(&self, driver: &str) {
        let directory = format!("/sys/bus/pci/devices/{}", self.address);
        // Without a driver there is nothing to unbind.
        let _ = fs::write(format!("{directory}/driver/unbind"), &self.address);
        fs::write(
            format!("{directory}/driver_override"),
            format!("{driver}\n"),
        )
        .unwrap();
        fs::write("/sys/bus/pci/drivers_probe", &self.address).unwrap();
    }
}

impl Drop for Unfit {
    fn drop(&mut self) {
        let _ = vdpa(&["dev", "del", NAME]);
        self.give_to("");
    }
}

/// `bellhop run` rejects the function with one sentence that has these words.
pub(crate) fn refused(function: u8, words: &[&str]) {
    let _unfit = Unfit::bind(function);
    let path = device_file(NAME).unwrap();
    let arguments = BellhopArguments::small().unwrap();
    let message = arguments.vdpa(&path).refused().unwrap();
    for word in words {
        assert!(message.contains(word), "{message}");
    }
}
