//! Queue reset (RING_RESET) on the kernel's simulator: guests that resize their rings.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod ring_sizes;

use lab::guest::{BellhopArguments, Guest};
use lab::sim::SimDevice;
use lab::traffic::{Frames, exchange};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:01";

#[test]
fn a_guest_resizes_its_rings_under_traffic() {
    let net = SimDevice::net("rings", MAC, 1500).unwrap();
    for processors in [1, 2] {
        let arguments = BellhopArguments::small().unwrap().processors(processors);
        let mut guest = Guest::start(&arguments.vdpa(net.path())).unwrap();
        // The simulator sends each frame back, and drops it if the receive ring is empty. The guest
        // refills a ring of 32 at the end of a poll, once 17 buffers are used. Only a single frame
        // at a time never finds the ring empty.
        ring_sizes::resize_under_traffic(
            &mut guest,
            "eth0",
            "rebind 1 eth0",
            |_| (),
            |guest, size| {
                let frames = Frames {
                    count: 100,
                    size,
                    window: 1,
                };
                exchange(guest, "eth0", frames).unwrap();
            },
        );
        assert!(guest.power_off().unwrap().success());
    }
}
