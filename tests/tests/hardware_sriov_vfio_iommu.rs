//! A function of the rig's igb NIC by VFIO behind the guest's virtio-iommu. Debian's kernel drives
//! it in its modes, through iommufd and through a container. The peer is a guest on a vDPA device
//! of the same switch.

use std::process::Command;
use std::time::Duration;

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::igb::IgbNic;
use lab::process::output;
use lab::sriov::{SriovNic, VfDevice};
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange_between};
use lab::vmm_process::cost;
use serde_json::json;

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(240);
const MEMORY_MIB: u64 = 192;

/// The guest drives its function at first and after a reboot, and loses it by request. `words`
/// choose the mode of its kernel, and `kind` is the mode's name in sysfs.
#[track_caller]
fn drives_its_function(options: &str, words: &str, kind: &str) {
    let nic = SriovNic::enable(1).unwrap();
    let igb = IgbNic::plug(1).unwrap();
    let function = igb.vf(0).unwrap();
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    function.bind("vfio-pci").unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let (mac, other) = (function.mac(), device.function().mac());
    let small = BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&small.vdpa(device.path())).unwrap();
    let socket = TempPath::new("vfio-iommu.api");
    let vfio = format!("host={},id=vf,iommu=on{options}", function.address());
    let stock = BellhopArguments::stock().unwrap();
    let stock = stock.memory(&format!("{MEMORY_MIB}M")).cmdline(words);
    let stock = stock.argument("--vfio", &vfio);
    let mut guest = Guest::start(&stock.argument("--api-socket", socket.text())).unwrap();
    let mut ready = guest.ready().clone();
    let talk = |guest: &mut Guest, peer: &mut Guest| {
        let frames = Frames {
            count: 50,
            size: 1514,
            window: 8,
        };
        exchange_between(guest, peer, &other, frames).unwrap();
        exchange_between(peer, guest, &mac, frames).unwrap();
    };
    for ending in [Some("reboot"), None] {
        assert_eq!(ready["problems"], json!([]));
        assert_eq!(ready["nics"][0]["driver"], "igbvf", "{ready}");
        assert_eq!(ready["nics"][0]["iommu"], kind, "{ready}");
        guest.command("up eth0").unwrap();
        talk(&mut guest, &mut peer);
        // The guest maps the buffers of its driver, and nothing else is pinned.
        let pinned = cost(guest.pid()).unwrap().pinned_kib;
        assert!(pinned > 0 && pinned < MEMORY_MIB << 10, "{pinned}");
        if let Some(ending) = ending {
            guest.command(ending).unwrap();
            ready = guest.wait_ready(LIMIT).unwrap();
        }
    }
    let api = Client::new(socket.path());
    let counted = api.get("/v1/vm/iommu").unwrap();
    assert!(counted["mappings"].as_u64() > Some(0), "{counted}");
    assert_eq!(counted["refused"], 0, "{counted}");
    for (path, body) in [
        ("/v1/vm/snapshot", json!({ "path": "/tmp/vfio-iommu" })),
        (
            "/v1/vm/migration",
            json!({ "send": { "destination": "unix:/tmp/vfio-iommu" } }),
        ),
    ] {
        let answer = api.ask("POST", path, Some(&body)).unwrap();
        let text = format!("{path}: {} {}", answer.status, answer.body);
        assert!(answer.status == 409 && text.contains("vf"), "{text}");
    }

    let answer = api.ask("DELETE", "/v1/vm/vfio/vf", None).unwrap();
    assert!([202, 204].contains(&answer.status), "{}", answer.body);
    let begin = std::time::Instant::now();
    while cost(guest.pid()).unwrap().pinned_kib > 0 {
        assert!(begin.elapsed() < LIMIT, "{}", guest.console());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(guest.command("link").unwrap()["nics"], json!([]));
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
}

#[test]
fn a_guest_that_unmaps_lazily_drives_a_function_through_iommufd() {
    let words = "iommu.passthrough=0 iommu.strict=0";
    drives_its_function("", words, "DMA-FQ");
}

#[test]
fn a_guest_that_unmaps_at_once_drives_a_function_in_a_container() {
    let words = "iommu.passthrough=0 iommu.strict=1";
    drives_its_function(",iommufd=off", words, "DMA");
}
