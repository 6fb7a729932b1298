//! Disks: a vDPA block device of the kernel's simulator, and raw files.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::guest::{BellhopArguments, Guest};
use lab::sim::{SimDevice, require_lab};
use std::path::{Path, PathBuf};
use std::time::Duration;

const SECTOR: u64 = 512;

/// A raw image in the host's /tmp; removed when dropped.
struct Image(PathBuf);

impl Image {
    fn new(name: &str, sectors: u64) -> Self {
        let path = std::env::temp_dir().join(format!("lab-{}-{name}", std::process::id()));
        let image = Self(path);
        let file = std::fs::File::create(&image.0).unwrap();
        file.set_len(sectors * SECTOR).unwrap();
        image
    }

    fn path(&self) -> &Path {
        &self.0
    }

    fn sha256(&self) -> String {
        let output = lab::process::output(std::process::Command::new("sha256sum").arg(&self.0));
        let output = String::from_utf8(output.unwrap()).unwrap();
        output.split_whitespace().next().unwrap().to_owned()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_vdpa_block_device_keeps_its_writes() {
    let block = SimDevice::block("blk").unwrap();
    let arguments = BellhopArguments::small().unwrap().processors(2);
    let mut guest = Guest::start(&arguments.vdpa(block.path())).unwrap();
    let disk = guest.ready()["disks"][0].clone();
    assert_eq!(disk["name"], "vda");
    // The simulator's capacity.
    assert_eq!(disk["sectors"], 0x40000);
    let checked = guest.command("disk-check vda 7 4096").unwrap();
    assert_eq!(checked["wrong"], 0, "{checked}");

    // The device keeps its content over a reboot, and works after it.
    guest.command("reboot").unwrap();
    guest.wait_ready(Duration::from_secs(60)).unwrap();
    let verified = guest.command("disk-verify vda 7 4096").unwrap();
    assert_eq!(verified["wrong"], 0, "{verified}");
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

#[test]
fn a_limited_disk_keeps_to_its_limit() {
    require_lab().unwrap();
    let image = Image::new("limited", 16384);
    let disk = format!("path={},bps=1M", image.path().display());
    let arguments = BellhopArguments::small().unwrap();
    let mut guest = Guest::start(&arguments.argument("--disk", &disk)).unwrap();
    // 2 MiB are written and read back. One of these four is saved up.
    let checked = guest.command("disk-check vda 11 4096").unwrap();
    assert_eq!(checked["wrong"], 0, "{checked}");
    let elapsed = checked["elapsed_us"].as_u64();
    assert!(elapsed > Some(2_500_000), "{checked}");
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

#[test]
fn a_raw_file_has_the_guests_writes_and_readonly_is_kept() {
    const SECTORS: u64 = 16384;
    require_lab().unwrap();
    let image = Image::new("raw", SECTORS);
    let read_only = Image::new("read-only", 64);
    let arguments = BellhopArguments::small()
        .unwrap()
        .disk(image.path())
        .argument(
            "--disk",
            &format!("path={},id=keep,readonly=on", read_only.path().display()),
        );
    let mut guest = Guest::start(&arguments).unwrap();
    let disks = guest.ready()["disks"].clone();
    assert_eq!(disks[0]["sectors"], SECTORS);
    assert_eq!(disks[0]["read_only"], false);
    assert_eq!(disks[1]["sectors"], 64);
    assert_eq!(disks[1]["read_only"], true);
    assert_eq!(disks[1]["serial"], "keep");

    let checked = guest.command("disk-check vda 11 4096").unwrap();
    assert_eq!(checked["wrong"], 0, "{checked}");
    let refused = guest.command("disk-check vdb 11 8").unwrap_err();
    assert!(refused.to_string().contains("refused"), "{refused}");

    // Another machine must not get the image meanwhile.
    let other = BellhopArguments::small().unwrap().disk(image.path());
    let (status, said) = Guest::run_to_end(&other, Duration::from_secs(60)).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("is in use by another process"), "{said}");

    // Data that the guest flushed is in the file while the guest still runs.
    let seen = guest.command("disk-read vda").unwrap();
    assert_eq!(seen["sha256"], image.sha256());
    assert_ne!(image.sha256(), Image::new("blank", SECTORS).sha256());
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
    assert_eq!(seen["sha256"], image.sha256());
    assert_eq!(read_only.sha256(), Image::new("blank", 64).sha256());

    // The image is free again, and has all data for the next machine.
    let arguments = BellhopArguments::small().unwrap().disk(image.path());
    let mut guest = Guest::start(&arguments.processors(2)).unwrap();
    assert_eq!(
        guest.command("disk-read vda").unwrap()["sha256"],
        seen["sha256"]
    );
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}
