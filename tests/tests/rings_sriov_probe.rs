//! `bellhop probe` on virtual functions under vp_vdpa, split and packed.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings_netdev/command.rs"]
mod command;

use command::{json, outcome, rules};
use lab::rig::FIRST_PACKED_FUNCTION;
use lab::sriov::{SriovNic, VfDevice};

#[test]
fn vp_vdpa_is_as_it_is() {
    let nic = SriovNic::enable(4).unwrap();
    for index in [0, FIRST_PACKED_FUNCTION] {
        let device = VfDevice::add(nic.vf(index).unwrap()).unwrap();
        let report = json(device.path(), &[], 0);
        let place = &report["identity"]["place"];
        assert_eq!(place["driver"], "vp-vdpa");
        assert_eq!(place["parent"], device.function().address());
        assert_eq!(report["identity"]["network"]["max_virtqueue_pairs"], 4);
        for (check, wanted) in [
            ("start", "ok"),
            ("traffic", "inconclusive"),
            ("doorbell", "ok"),
            ("interrupt", "ok"),
            ("suspend", "not_offered"),
        ] {
            assert_eq!(outcome(&report, check), wanted, "{check}: {report:#}");
        }
        let report = json(device.path(), &["--conformance"], 0);
        assert_eq!(rules(&report, "fail"), Vec::<String>::new(), "{report:#}");
        let skipped = rules(&report, "skipped");
        assert!(skipped.iter().any(|id| id == "suspend.base"), "{report:#}");
    }
}
