//! A guest's disks and its random number generator behind a virtio-iommu: Debian's kernel maps each
//! buffer, and a kernel without the driver bypasses the IOMMU. The data is intact after a hot-plug,
//! a live upgrade, a restore and a reboot.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod live;

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::sim::require_lab;
use lab::temp_path::TempPath;
use live::{ask_upgrade, wait_upgrade};
use serde_json::{Value, json};

const SECTORS: u64 = 16_384;
/// How long the guest may take to find a disk, or the VMM to continue.
const NOTICE: Duration = Duration::from_secs(60);

struct Image(TempPath);

impl Image {
    fn new(name: &str) -> Self {
        let image = Self(TempPath::new(name));
        let file = File::create(image.0.path()).unwrap();
        file.set_len(SECTORS * 512).unwrap();
        image
    }
}

/// A guest with a disk and the random number generator behind the IOMMU, and its API's socket.
struct Scene {
    arguments: BellhopArguments,
    socket: TempPath,
    guest: Guest,
}

impl Scene {
    fn start(arguments: BellhopArguments, name: &str, disk: &Image) -> Self {
        let socket = TempPath::new(name);
        let disk = format!("path={},iommu=on", disk.0.text());
        let arguments = arguments
            .argument("--disk", &disk)
            .argument("--iommu", "rng=on")
            .argument("--api-socket", socket.text());
        Self {
            guest: Guest::start(&arguments).unwrap(),
            socket,
            arguments,
        }
    }

    fn client(&self) -> Client {
        Client::new(self.socket.path())
    }

    /// Waits until the guest has so many disks, all in IOMMU groups of this type.
    #[track_caller]
    fn wait_disks(&mut self, count: usize, kind: Option<&str>) {
        let begin = Instant::now();
        loop {
            let info = self.guest.command("info").unwrap();
            let disks = info["disks"].as_array().unwrap();
            if disks.len() == count {
                for disk in disks {
                    assert_eq!(disk["iommu"].as_str(), kind, "{info}");
                    // Bit 33: ACCESS_PLATFORM.
                    let features = disk["features"].as_str().unwrap();
                    assert_eq!(features.as_bytes().get(33), Some(&b'1'), "{features}");
                }
                return;
            }
            assert!(begin.elapsed() < NOTICE, "{info}");
            sleep(Duration::from_millis(200));
        }
    }

    /// Plugs in a disk behind the IOMMU, and returns its PCI address.
    #[track_caller]
    fn plug(&self, id: &str, image: &Image) -> Value {
        let body = json!({ "path": image.0.text(), "iommu": true });
        let path = format!("/v1/vm/disks/{id}");
        let plugged = self.client().ask("PUT", &path, Some(&body)).unwrap();
        assert_eq!(plugged.status, 201, "{}", plugged.body);
        assert_eq!(plugged.body["iommu"], true, "{}", plugged.body);
        plugged.body["address"].clone()
    }

    /// Unplugs a disk, and waits until the VMM has closed it.
    #[track_caller]
    fn unplug(&self, id: &str) {
        let path = format!("/v1/vm/disks/{id}");
        let asked = self.client().ask("DELETE", &path, None).unwrap();
        assert_eq!(asked.status, 202, "{}", asked.body);
        let begin = Instant::now();
        while self.client().ask("GET", &path, None).unwrap().status != 404 {
            assert!(begin.elapsed() < NOTICE);
            sleep(Duration::from_millis(200));
        }
    }

    #[track_caller]
    fn check(&mut self, command: &str) {
        let checked = self.guest.command(command).unwrap();
        assert_eq!(checked["wrong"], 0, "{checked}");
    }

    /// Reads random numbers, and returns how many mappings the guest has made so far.
    #[track_caller]
    fn maps(&mut self) -> u64 {
        let random = self.guest.command("rng 4096").unwrap();
        assert!(random["distinct"].as_u64() > Some(200), "{random}");
        let iommu = self.client().get("/v1/vm/iommu").unwrap();
        assert_eq!(iommu["refused"], 0, "{iommu}");
        iommu["maps"].as_u64().unwrap()
    }

    #[track_caller]
    fn power_off(self) {
        assert_eq!(self.guest.power_off().unwrap().code(), Some(0));
    }
}

#[test]
fn a_guest_that_unmaps_at_once_keeps_its_data() {
    require_lab().unwrap();
    let (first, second) = (Image::new("iommu-first"), Image::new("iommu-second"));
    let words = "iommu.passthrough=0 iommu.strict=1";
    let arguments = BellhopArguments::stock().unwrap().cmdline(words);
    let mut scene = Scene::start(arguments, "iommu-disk", &first);
    scene.wait_disks(1, Some("DMA"));
    scene.check("disk-check vda 7 4096");
    let before = scene.maps();
    let after = scene.maps();
    assert!(after > before, "the generator is not behind the IOMMU");
    // The driver leaves the disk, and maps the rings of the next one.
    scene.unplug("disk0");
    assert_eq!(scene.plug("disk0", &first), "0000:00:10.0");
    scene.wait_disks(1, Some("DMA"));
    scene.check("disk-verify vda 7 4096");

    // The generator has the slot between them.
    assert_eq!(scene.plug("second", &second), "0000:00:12.0");
    scene.wait_disks(2, Some("DMA"));
    scene.check("disk-check vdb 9 4096");
    scene.check("disk-verify vda 7 4096");
    scene.maps();
    scene.power_off();
}

#[test]
fn a_guest_that_unmaps_lazily_is_upgraded_and_restored() {
    require_lab().unwrap();
    let image = Image::new("iommu-lazy");
    let words = "iommu.passthrough=0 iommu.strict=0";
    let arguments = BellhopArguments::stock().unwrap().cmdline(words);
    let mut scene = Scene::start(arguments, "iommu-upgrade", &image);
    scene.wait_disks(1, Some("DMA-FQ"));
    scene.check("disk-check vda 7 4096");

    let client = scene.client();
    ask_upgrade(&client, Path::new(&std::env::var_os("BELLHOP").unwrap()));
    let vm = wait_upgrade(&scene.guest, &client, |vm| vm["upgrades"] == 1);
    assert_eq!(vm["upgrade_error"], Value::Null, "{vm}");
    scene.check("disk-verify vda 7 4096");
    scene.check("disk-check vda 8 4096");
    scene.maps();

    let saved = TempPath::new("iommu-disk-snapshot");
    let body = json!({ "path": saved.text() });
    let answer = client.ask("POST", "/v1/vm/snapshot", Some(&body)).unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    let stop = json!({ "state": "Stopped" });
    client.done("PATCH", "/v1/vm", Some(&stop)).unwrap();
    assert!(scene.guest.wait_exit(NOTICE).unwrap().success());
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command
        .args(["run", "--restore", saved.text()])
        .args(["--allow-path", image.0.text()])
        .args(["--api-socket", scene.socket.text()])
        .args(scene.arguments.allow_boot_files());
    scene.guest = Guest::start_restored(command, NOTICE).unwrap();
    scene.wait_disks(1, Some("DMA-FQ"));
    scene.check("disk-verify vda 8 4096");
    scene.check("disk-check vda 9 4096");
    scene.maps();
    scene.power_off();
}

#[test]
fn a_guest_without_a_driver_keeps_its_data_over_a_reboot() {
    require_lab().unwrap();
    let image = Image::new("iommu-bypass");
    let arguments = BellhopArguments::small().unwrap();
    let mut scene = Scene::start(arguments, "iommu-reboot", &image);
    scene.wait_disks(1, None);
    scene.check("disk-check vda 7 4096");
    scene.guest.command("reboot").unwrap();
    scene.guest.wait_ready(NOTICE).unwrap();
    scene.wait_disks(1, None);
    scene.check("disk-verify vda 7 4096");
    assert_eq!(scene.maps(), 0);
    scene.power_off();
}
