//! A virtio-iommu whose guest asks for too much, or has no driver for it. A device reaches only
//! what is mapped, and the VM continues.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use std::thread::sleep;
use std::time::{Duration, Instant};

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::notice::{Kind, notice};
use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::temp_path::TempPath;
use lab::traffic::{Frames, Packets, check_traffic, exchange_counted, packets};
use lab::vmm_process::cost;
use serde_json::{Value, json};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:05";
const OTHER_MAC: &str = "52:54:5e:11:53:06";
/// How long a driver or an alarm may take to appear.
const NOTICE: Duration = Duration::from_secs(30);

const SOME: Frames = Frames {
    count: 100,
    size: 590,
    window: 16,
};

/// A VM with a NIC behind its IOMMU.
struct Vm {
    guest: Guest,
    api: Client,
    _socket: TempPath,
    /// The NIC's name in the guest.
    nic: String,
}

impl Vm {
    /// Boots the guest and waits for its NIC's driver.
    fn boot(arguments: BellhopArguments, net: &SimDevice) -> Self {
        let socket = TempPath::new("iommu-hostile");
        let nic = format!("id=nic,iommu=on,path={}", net.path().display());
        let arguments = arguments
            .argument("--vdpa", &nic)
            .argument("--api-socket", socket.text());
        let mut guest = Guest::start(&arguments).unwrap();
        let begin = Instant::now();
        let name = loop {
            let info = guest.command("info").unwrap();
            let nics = info["nics"].as_array().unwrap().iter();
            let mut own = nics.filter(|nic| nic["mac"] == MAC && nic["driver"] == "virtio_net");
            if let Some(nic) = own.next() {
                break nic["name"].as_str().unwrap().to_owned();
            }
            assert!(begin.elapsed() < NOTICE, "{info}");
            sleep(Duration::from_millis(200));
        };
        guest.command(&format!("up {name}")).unwrap();
        Self {
            guest,
            api: Client::new(socket.path()),
            _socket: socket,
            nic: name,
        }
    }

    fn iommu(&self) -> Value {
        self.api.get("/v1/vm/iommu").unwrap()
    }

    fn pinned_kib(&self) -> u64 {
        cost(self.guest.pid()).unwrap().pinned_kib
    }

    /// The guest and the API answer, and the VM can be paused and resumed.
    #[track_caller]
    fn lives(&mut self) {
        for state in ["Paused", "Running"] {
            let body = json!({ "state": state });
            self.api.done("PATCH", "/v1/vm", Some(&body)).unwrap();
            assert_eq!(self.api.get("/v1/vm").unwrap()["state"], state);
        }
        let checked = self.guest.command("memory-check 8").unwrap();
        assert_eq!(checked["wrong_mib"], 0, "{checked}");
    }

    /// An application maps one page at `asked` addresses. Returns the IOMMU before and after it.
    #[track_caller]
    fn fill(&mut self, asked: u64) -> (Value, Value) {
        let line = format!("vfio-on 2 {}", self.nic);
        self.guest.command(&line).unwrap();
        let before = self.iommu();
        assert_eq!(before["last_refusal"], Value::Null, "{before}");
        let begin = Instant::now();
        self.guest.command(&format!("vfio-fill {asked}")).unwrap();
        let figure = format!("{asked} MAPs of one page: {:?}", begin.elapsed());
        notice(Kind::Figure, figure);
        (before, self.iommu())
    }

    /// The application's earlier mappings work, and the next driver has new ones. Returns the IOMMU
    /// without the application.
    #[track_caller]
    fn recovers(&mut self, net: &SimDevice) -> Value {
        exchange_counted(&mut self.guest, "vfio", net, &[SOME]).unwrap();
        self.lives();
        self.guest.command("vfio-off").unwrap();
        let line = format!("up {}", self.nic);
        self.guest.command(&line).unwrap();
        check_traffic(&mut self.guest, net);
        self.iommu()
    }
}

/// The most that the VMM pins for its own rings of the control queue.
const OWN_KIB: u64 = 64;

/// The small kernel has no driver of the IOMMU, so its NIC's driver uses guest-physical addresses.
/// Debian's kernel gives such a NIC no driver before the IOMMU's driver is loaded.
#[test]
fn a_guest_without_a_driver_reaches_nothing() {
    require_lab().unwrap();
    let _mapping = OtherMapping::load(Mapping::PINNED_ONE_BY_ONE).unwrap();
    let net = SimDevice::net("net", MAC, 1500).unwrap();
    let boot = |bypass: &str| {
        let small = BellhopArguments::small().unwrap();
        let word = format!("boot_bypass={bypass}");
        Vm::boot(small.argument("--iommu", &word), &net)
    };

    // What blocks the device is the option.
    let mut vm = boot("on");
    exchange_counted(&mut vm.guest, &vm.nic, &net, &[SOME]).unwrap();
    assert!(vm.pinned_kib() > 100 << 10, "{}", vm.pinned_kib());
    assert!(vm.guest.power_off().unwrap().success());

    let mut vm = boot("off");
    let before = packets(&net).unwrap();
    let line = format!("pace 20 64 1000 {}", vm.nic);
    let sent = vm.guest.command(&line).unwrap();
    assert_eq!((&sent["tx"], &sent["rx"]), (&json!(20), &json!(0)));
    assert_eq!(packets(&net).unwrap(), before);
    assert!(vm.pinned_kib() <= OWN_KIB, "{}", vm.pinned_kib());
    assert_eq!(vm.iommu()["mappings"], 0, "{}", vm.iommu());
    vm.lives();
    assert!(vm.guest.power_off().unwrap().success());
}

/// An application maps one page at `asked` addresses, more than the `limit` of a domain.
fn too_many_mappings(limit: u64, asked: u64) {
    require_lab().unwrap();
    let _mapping = OtherMapping::load(Mapping::PINNED_ONE_BY_ONE).unwrap();
    let net = SimDevice::net("net", MAC, 1500).unwrap();
    let arguments = BellhopArguments::stock()
        .unwrap()
        .cmdline("iommu.passthrough=0")
        .argument("--iommu", &format!("boot_bypass=on,mappings={limit}"));
    let mut vm = Vm::boot(arguments, &net);
    let (before, full) = vm.fill(asked);
    let refused = before["mappings"].as_u64().unwrap() + asked - limit;
    assert_eq!(full["mappings"], limit, "{full}");
    assert_eq!(full["refused"], refused, "{full}");
    let refusal = &full["last_refusal"];
    assert_eq!(refusal["device"], "nic", "{refusal}");
    assert_eq!(refusal["size"], 4096, "{refusal}");
    assert!(
        refusal["cause"]
            .as_str()
            .unwrap()
            .contains("all its mappings"),
        "{refusal}"
    );
    // The vmm thread samples once a second.
    let begin = Instant::now();
    let record = loop {
        let record = vm.api.get("/v1/vm").unwrap();
        if !record["alarms"].as_array().unwrap().is_empty() {
            break record;
        }
        assert!(begin.elapsed() < NOTICE, "{record}");
        sleep(Duration::from_millis(100));
    };
    let alarm = &record["alarms"][0];
    assert_eq!(alarm["device"], "iommu", "{alarm}");
    assert_eq!(alarm["alarm"], "Refused", "{alarm}");

    let off = vm.recovers(&net);
    assert!(off["mappings"].as_u64() < Some(limit), "{off}");
    assert!(vm.guest.power_off().unwrap().success());
}

/// The kernel's driver needs some hundred mappings.
#[test]
fn more_mappings_than_are_configured_are_refused_with_an_alarm() {
    too_many_mappings(1024, 2000);
}

#[test]
fn more_mappings_than_a_domain_may_have_are_refused_with_an_alarm() {
    too_many_mappings(65_536, 70_000);
}

/// The host's kernel takes fewer mappings than the guest's IOMMU.
fn the_host_refuses(batch_mapping: bool) {
    require_lab().unwrap();
    // Pinned memory has an entry for each contiguous piece, so RAM alone may have too many.
    let shared = Mapping {
        use_va: true,
        batch_mapping,
    };
    let entries = 1500;
    let _mapping = OtherMapping::with_entries(shared, entries).unwrap();
    let net = SimDevice::net("net", MAC, 1500).unwrap();
    let arguments = BellhopArguments::stock()
        .unwrap()
        .cmdline("iommu.passthrough=0")
        .argument("--iommu", "boot_bypass=on,mappings=65536");
    let mut vm = Vm::boot(arguments, &net);
    let asked = 2000;
    let (before, full) = vm.fill(asked);
    let number = |iommu: &Value, name: &str| iommu[name].as_u64().unwrap();
    let refused = number(&full, "refused");
    assert!(refused > 0, "{full}");
    let accepted = number(&full, "mappings") - number(&before, "mappings");
    assert_eq!(accepted + refused, asked, "{before} {full}");
    assert!(number(&full, "mappings") <= entries.into(), "{full}");
    let refusal = &full["last_refusal"];
    assert_eq!(refusal["device"], "nic", "{refusal}");
    let cause = refusal["cause"].as_str().unwrap();
    assert!(cause.contains("the kernel refused"), "{refusal}");
    let off = vm.recovers(&net);
    assert_eq!(number(&off, "refused"), refused, "{off}");
    assert!(vm.guest.power_off().unwrap().success());
}

#[test]
fn more_mappings_than_the_host_takes_are_refused_and_the_nic_works() {
    the_host_refuses(false);
}

#[test]
fn more_mappings_than_the_host_takes_in_batches_are_refused_and_the_nic_works() {
    the_host_refuses(true);
}

#[test]
fn registers_cannot_be_mapped_and_a_driver_must_accept_the_iommu() {
    require_lab().unwrap();
    let net = SimDevice::net("net", MAC, 1500).unwrap();
    let other = SimDevice::net("other", OTHER_MAC, 1500).unwrap();
    // A kernel with strict checks maps no registers that a driver has.
    let words = "iommu.passthrough=0 iomem=relaxed";
    let arguments = BellhopArguments::stock().unwrap().cmdline(words);
    let mut vm = Vm::boot(arguments.vdpa(other.path()), &net);
    let info = vm.guest.command("info").unwrap();
    let nics = info["nics"].as_array().unwrap();
    let plain = nics.iter().find(|nic| nic["mac"] == OTHER_MAC).unwrap();
    let plain = plain["name"].as_str().unwrap().to_owned();

    vm.guest.command(&format!("vfio-on 2 {}", vm.nic)).unwrap();
    let before = vm.iommu();
    vm.guest.command(&format!("vfio-map-bar {plain}")).unwrap();
    let after = vm.iommu();
    // The guest's kernel asked, and ignores the answer.
    assert!(
        after["kicks"].as_u64() > before["kicks"].as_u64(),
        "{after}"
    );
    for same in ["maps", "mappings"] {
        assert_eq!(after[same], before[same], "{same}: {before} {after}");
    }
    exchange_counted(&mut vm.guest, "vfio", &net, &[SOME]).unwrap();
    vm.guest.command("vfio-off").unwrap();

    let refused = vm
        .guest
        .command(&format!("vfio-refused {}", vm.nic))
        .unwrap();
    assert_eq!(refused["refused"], true, "{refused}");
    let Packets { transmitted, .. } = packets(&net).unwrap();
    vm.guest.command(&format!("up {}", vm.nic)).unwrap();
    exchange_counted(&mut vm.guest, &vm.nic, &net, &[SOME]).unwrap();
    assert_eq!(packets(&net).unwrap().transmitted, transmitted + SOME.count);
    vm.lives();
    assert!(vm.guest.power_off().unwrap().success());
}
