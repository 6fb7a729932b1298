//! Disks that are plugged and unplugged through the machine's API while the guest runs.
//!
//! The guest reports its disks, the image shows its content, and the kernel reports the process's
//! resources.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod faulty_disk;

use faulty_disk::FaultyDisk;
use lab::api::Client;
use lab::endurance::{GROWTH, cycles};
use lab::guest::{BellhopArguments, Guest};
use lab::node::{Node, small, until};
use lab::sim::require_lab;
use lab::vmm_process::cost;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const SECTOR: u64 = 512;
const SECTORS: u64 = 16384;
const SILENCE: Duration = Duration::from_secs(120);

/// The end of a guest's answer whose disk failed.
const EIO: &str = "(os error 5)";

/// How long a guest may take to find or to release a disk; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(60);

/// A raw image in the host's /tmp; removed when dropped.
struct Image(PathBuf);

impl Image {
    fn new(name: &str) -> Self {
        let file = format!("lab-disks-{}-{name}", std::process::id());
        Self::at(std::env::temp_dir().join(file))
    }

    fn at(path: PathBuf) -> Self {
        let image = Self(path);
        let file = File::create(&image.0).unwrap();
        file.set_len(SECTORS * SECTOR).unwrap();
        image
    }

    fn wanted(&self) -> Value {
        json!({ "path": self.0 })
    }

    fn content(&self) -> Vec<u8> {
        let mut content = Vec::new();
        File::open(&self.0)
            .unwrap()
            .read_to_end(&mut content)
            .unwrap();
        content
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A file system on a loop device, whose writes hang while it is frozen.
struct Storage(PathBuf);

impl Storage {
    fn mount() -> Self {
        let name = format!("lab-disks-{}-storage", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let image = directory.with_extension("ext4");
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        std::fs::create_dir(&directory).unwrap();
        let (from, to) = (image.to_str().unwrap(), directory.to_str().unwrap());
        for words in [
            ["modprobe", "-a", "loop", "ext4"].as_slice(),
            &["mkfs.ext4", "-q", "-F", from],
            &["mount", "-t", "ext4", "-o", "loop", from, to],
        ] {
            let done = Command::new(words[0]).args(&words[1..]).status().unwrap();
            assert!(done.success(), "{words:?}");
        }
        Self(directory)
    }

    fn freeze(&self) -> Frozen {
        let frozen = Frozen(File::open(&self.0).unwrap());
        // `_IOWR('X', 119, int)`, FIFREEZE.
        assert_eq!(frozen.request(0xc004_5877), 0);
        frozen
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
        let _ = std::fs::remove_file(self.0.with_extension("ext4"));
    }
}

/// Dropping it lets the file system answer again.
struct Frozen(File);

impl Frozen {
    fn request(&self, number: libc::Ioctl) -> i32 {
        // SAFETY: there is no safe interface to this ioctl. The file is open, and the kernel
        // ignores the argument.
        unsafe { libc::ioctl(self.0.as_raw_fd(), number, 0) }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // `_IOWR('X', 120, int)`, FITHAW.
        self.request(0xc004_5878);
    }
}

/// A guest and the API of its machine.
struct Scene {
    client: Client,
    guest: Guest,
}

impl Scene {
    fn start(name: &str, words: &str, disks: &[&Image]) -> Self {
        let file = format!("lab-disks-{name}-{}.socket", std::process::id());
        let socket = std::env::temp_dir().join(file);
        let mut arguments = BellhopArguments::small()
            .unwrap()
            .silence(SILENCE)
            .cmdline(words)
            .argument("--api-socket", &socket.display().to_string());
        for disk in disks {
            arguments = arguments.disk(&disk.0);
        }
        Self {
            guest: Guest::start(&arguments).unwrap(),
            client: Client::new(&socket),
        }
    }

    #[track_caller]
    fn put(&self, id: &str, body: &Value, status: u16) -> Value {
        let path = format!("/v1/vm/disks/{id}");
        let answer = self.client.ask("PUT", &path, Some(body)).unwrap();
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        answer.body
    }

    /// Requests the guest to release a disk.
    #[track_caller]
    fn delete(&self, id: &str) {
        let path = format!("/v1/vm/disks/{id}");
        let answer = self.client.ask("DELETE", &path, None).unwrap();
        assert_eq!(answer.status, 202, "{}", answer.body);
        assert_eq!(answer.body["state"], "UnplugRequested");
    }

    /// Waits until the machine has released a disk.
    #[track_caller]
    fn wait_gone(&self, id: &str) {
        let start = Instant::now();
        let mut seen = json!(0);
        loop {
            let path = format!("/v1/vm/watch?since={seen}&timeout_s=5");
            let vm = self.client.get(&path).unwrap();
            let disks = vm["disks"].as_array().unwrap();
            if disks.iter().all(|disk| disk["id"] != id) {
                return;
            }
            assert!(start.elapsed() < NOTICE, "{vm}");
            seen = vm["generation"].clone();
        }
    }

    /// Waits until the guest has disks with exactly these serial numbers.
    #[track_caller]
    fn wait_disks(&mut self, serials: &[&str]) {
        let start = Instant::now();
        loop {
            let disks = self.guest.command("info").unwrap()["disks"].clone();
            let mut seen: Vec<&str> = disks
                .as_array()
                .unwrap()
                .iter()
                .map(|disk| disk["serial"].as_str().unwrap_or_default())
                .collect();
            seen.sort_unstable();
            if seen == serials {
                return;
            }
            assert!(start.elapsed() < NOTICE, "{disks} instead of {serials:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The process's open descriptors, once it has closed our last connection.
    fn descriptors(&self) -> u64 {
        std::thread::sleep(Duration::from_millis(500));
        cost(self.guest.pid()).unwrap().descriptors
    }

    #[track_caller]
    fn check(&mut self, command: &str) {
        let checked = self.guest.command(command).unwrap();
        assert_eq!(checked["wrong"], 0, "{checked}");
    }

    #[track_caller]
    fn power_off(self) {
        assert!(self.guest.power_off().unwrap().success());
    }
}

/// Checks that no process has locked the image or writes to it.
#[track_caller]
fn is_free(image: &Image) {
    let text = std::fs::read_to_string("/proc/locks").unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&image.0).unwrap());
    assert!(!text.contains(&format!(":{inode} ")), "{text}");
    let before = std::fs::metadata(&image.0).unwrap().modified().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let after = std::fs::metadata(&image.0).unwrap().modified().unwrap();
    assert_eq!(before, after, "it was written to after it was closed");
}

#[test]
fn a_disk_is_plugged_used_and_unplugged_under_load() {
    require_lab().unwrap();
    let (first, second) = (Image::new("first"), Image::new("second"));
    let mut scene = Scene::start("comes", "", &[&first]);
    scene.wait_disks(&["disk0"]);
    let before = scene.descriptors();
    let disk = scene.put("second", &second.wanted(), 201);
    assert_eq!(disk["state"], "Plugged", "{disk}");
    scene.wait_disks(&["disk0", "second"]);
    scene.check(&format!("disk-check vdb 7 {SECTORS}"));
    let disk = scene.client.get("/v1/vm/disks/second").unwrap();
    assert_eq!(disk["device"]["driver_ok"], true, "{disk}");
    let config = scene.client.get("/v1/vm/config").unwrap();
    assert_eq!(config["disks"][1]["id"], "second", "{config}");

    // The same request again changes nothing; a different disk of this name is refused.
    scene.put("second", &second.wanted(), 200);
    scene.put("second", &first.wanted(), 409);

    // The same pattern again, so that each sector is right whenever it was last written.
    let content = second.content();
    assert!(content.iter().any(|byte| *byte != 0));
    let line = format!("disk-check vdb 7 {SECTORS}");
    scene.guest.send(&line).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    scene.delete("second");
    scene.wait_gone("second");
    // The command may have finished, or failed without its disk.
    println!("{:?}", scene.guest.answer(&line, NOTICE));
    scene.wait_disks(&["disk0"]);
    is_free(&second);
    assert!(second.content() == content, "the image is not intact");
    assert_eq!(scene.descriptors(), before);

    // The disk from the start is unplugged, too, and plugged again with another name.
    scene.check("disk-check vda 3 64");
    scene.delete("disk0");
    scene.wait_gone("disk0");
    scene.wait_disks(&[]);
    is_free(&first);
    scene.put("root", &first.wanted(), 201);
    scene.wait_disks(&["root"]);
    scene.check("disk-verify vda 3 64");
    scene.guest.command("reboot").unwrap();
    scene.guest.wait_ready(SILENCE).unwrap();
    scene.check("disk-verify vda 3 64");
    scene.power_off();
}

#[test]
fn a_guest_that_does_not_listen_loses_its_disk_at_the_reset() {
    require_lab().unwrap();
    let image = Image::new("deaf");
    let mut scene = Scene::start("deaf", "acpiphp.disable=1", &[&image]);
    scene.check(&format!("disk-check vda 7 {SECTORS}"));
    let content = image.content();
    let before = scene.descriptors();
    scene.delete("disk0");
    // The guest still has the disk.
    scene.check("disk-verify vda 7 64");
    let line = format!("disk-check vda 7 {SECTORS}");
    scene.guest.send(&line).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let reset = scene.client.ask("POST", "/v1/vm/reset", None).unwrap();
    assert_eq!(reset.status, 204, "{}", reset.body);
    scene.wait_gone("disk0");
    is_free(&image);
    assert!(image.content() == content, "the image is not intact");
    scene.guest.wait_ready(SILENCE).unwrap();
    scene.wait_disks(&[]);
    // The image, the engine's descriptor of its io_uring and the queue's eventfds are closed.
    assert!(scene.descriptors() < before);
    scene.power_off();
}

/// Storage that does not answer: its VM serves requests and stops. The kernel keeps the process
/// until the storage answers.
#[test]
fn a_hung_disk_delays_neither_requests_nor_the_stop() {
    require_lab().unwrap();
    let storage = Storage::mount();
    let image = Image::at(storage.0.join("image"));
    let mut scene = Scene::start("hung", "", &[&image]);
    scene.check("disk-check vda 5 64");
    let frozen = storage.freeze();
    let line = format!("disk-check vda 6 {SECTORS}");
    scene.guest.send(&line).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let begin = Instant::now();
    // The reset has to wait: the former guest's reads could reach the memory of the next one.
    let reset = scene.client.ask("POST", "/v1/vm/reset", None).unwrap();
    assert_eq!(reset.status, 204, "{}", reset.body);
    std::thread::sleep(Duration::from_secs(1));
    let vm = scene.client.get("/v1/vm").unwrap();
    assert_eq!((&vm["state"], &vm["boots"]), (&json!("Running"), &json!(1)));
    let stopped = json!({ "state": "Stopped" });
    scene
        .client
        .done("PATCH", "/v1/vm", Some(&stopped))
        .unwrap();
    assert!(begin.elapsed() < Duration::from_secs(20));
    drop(frozen);
    assert!(scene.guest.wait_exit(NOTICE).unwrap().success());
    is_free(&image);
}

/// The same for a VM of the daemon: the daemon ends at once, and the next one adopts the VM. A stop
/// of the VM fails after the limits of SIGTERM and SIGKILL, and so does its deletion. Both are
/// completed without another request once the storage answers, also by the next daemon.
#[test]
fn a_hung_disk_of_a_vm_does_not_hold_its_daemon() {
    require_lab().unwrap();
    /// Much less than systemd allows (`TimeoutStopSec=`).
    const AT_ONCE: Duration = Duration::from_secs(20);
    /// 10 s after SIGTERM and 30 s after SIGKILL.
    const STOP_FAILS: Duration = Duration::from_secs(60);
    let storage = Storage::mount();
    let image = Image::at(storage.0.join("image"));
    let mut node = Node::start("hung").unwrap();
    let before = node.traces().unwrap();
    let nic = json!([{ "id": "net0", "from": "vdpasim_net", "mac": "52:54:00:00:00:01" }]);
    let mut body = small(&nic).unwrap();
    body["spec"]["disks"] = json!([image.wanted()]);
    body["spec"]["restart"] = json!("Always");
    node.api.done("PUT", "/v1/vms/hung", Some(&body)).unwrap();
    let pid = |vm: &Value| u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    // Returns the process of the VM, whose guest writes to the storage.
    let hang = |node: &Node| {
        let vm = node.await_phase("hung", "Running").unwrap();
        let console = vm["status"]["console"]["socket"].as_str().unwrap();
        let mut guest = Guest::attach(Path::new(console), pid(&vm), SILENCE).unwrap();
        let checked = guest.command("disk-check vda 5 64").unwrap();
        assert_eq!(checked["wrong"], 0, "{checked}");
        let frozen = storage.freeze();
        guest.send(&format!("disk-check vda 6 {SECTORS}")).unwrap();
        until("a write waits in the kernel", || waits_in_kernel(pid(&vm))).unwrap();
        (pid(&vm), frozen)
    };
    let fails = |node: &Node, method, path, body: Option<&Value>| {
        let begin = Instant::now();
        let answer = node.api.ask(method, path, body).unwrap();
        assert_eq!(answer.status, 500, "{}", answer.body);
        let text = answer.body.to_string();
        for part in ["it waits in the kernel", "repair the storage"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(begin.elapsed() < STOP_FAILS, "{:?}", begin.elapsed());
    };
    let waits = |node: &Node, phase: &str, process: u32| {
        let vm = node.await_phase("hung", phase).unwrap();
        assert_eq!(vm["status"]["pid"], process, "{vm}");
        let why = vm["status"]["not_ended"].as_str().unwrap();
        assert!(why.contains("it waits in the kernel"), "{why}");
        let mut list = Command::new(std::env::var_os("BELLHOP").unwrap());
        let list = list
            .args(["vm", "list", "--node"])
            .arg(node.directory().join("run/node.socket"));
        let list = String::from_utf8(list.output().unwrap().stdout).unwrap();
        assert!(list.contains(phase) && list.contains(why), "{list}");
    };
    let restart = |node: &mut Node, limit: Duration| {
        let begin = Instant::now();
        assert!(node.terminate());
        let ended = begin.elapsed();
        assert!(ended < AT_ONCE, "the daemon ended after {ended:?}");
        node.start_again().unwrap();
        let served = begin.elapsed();
        assert!(served < limit, "the next daemon served after {served:?}");
    };
    let stopped = |node: &Node| {
        node.await_phase("hung", "Stopped").unwrap();
        let shown = || node.vm("hung").unwrap().unwrap();
        // The daemon records it after it has removed the process from the record.
        until("the end has its reason", || {
            shown()["status"]["last_end"]["reason"] == "Stopped"
        })
        .unwrap();
        let vm = shown();
        let status = &vm["status"];
        assert_eq!(vm["spec"]["state"], "Stopped", "{vm}");
        assert_eq!(
            [&status["pid"], &status["not_ended"]],
            [&Value::Null; 2],
            "{vm}"
        );
        is_free(&image);
        assert!(!group(node).exists());
    };
    let hard = json!({ "state": "Stopped", "mode": "hard" });
    let start = json!({ "state": "Running" });
    let state = "/v1/vms/hung/state";

    let (process, frozen) = hang(&node);
    assert!(group(&node).exists());
    restart(&mut node, AT_ONCE);
    let adopted = node.await_phase("hung", "Running").unwrap();
    assert_eq!(adopted["status"]["pid"], process, "{adopted}");
    fails(&node, "PUT", state, Some(&hard));
    waits(&node, "Stopping", process);
    // The next daemon tries to end it, too.
    restart(&mut node, STOP_FAILS);
    assert!(Path::new(&format!("/proc/{process}")).exists());
    waits(&node, "Stopping", process);
    drop(frozen);
    stopped(&node);

    // The same without a restart of the daemon, whose child the process is.
    node.api.done("PUT", state, Some(&start)).unwrap();
    let (process, frozen) = hang(&node);
    fails(&node, "PUT", state, Some(&hard));
    waits(&node, "Stopping", process);
    drop(frozen);
    stopped(&node);

    node.api.done("PUT", state, Some(&start)).unwrap();
    let (process, frozen) = hang(&node);
    fails(&node, "DELETE", "/v1/vms/hung?force=true", None);
    waits(&node, "Deleting", process);
    drop(frozen);
    until("the VM is deleted", || node.vm("hung").unwrap().is_none()).unwrap();
    node.same_but_descriptors(&before, "after the deletion")
        .unwrap();
    assert!(!group(&node).exists());
    is_free(&image);
}

/// Whether a thread of the process cannot be interrupted.
fn waits_in_kernel(process: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads.map_while(Result::ok).any(|thread| {
        let status = std::fs::read_to_string(thread.path().join("status"));
        status.is_ok_and(|status| status.contains("State:\tD"))
    })
}

/// The control group of the VM `hung`.
fn group(node: &Node) -> PathBuf {
    let runtime = node.directory().join("run").display().to_string();
    let name = runtime.trim_matches('/').replace('/', "-");
    PathBuf::from(format!("/sys/fs/cgroup/bellhop:{name}/hung"))
}

/// A disk whose sectors fail (EIO): the guest sees I/O errors, the others still work.
#[test]
fn a_disk_that_fails_costs_the_guest_its_requests_only() {
    require_lab().unwrap();
    const GOOD: u64 = 1024;
    let (failing, whole) = (FaultyDisk::new(SECTORS), Image::new("whole"));
    let mut scene = Scene::start("failing", "", &[&whole]);
    let wanted = json!({ "path": failing.path() });
    scene.put("failing", &wanted, 201);
    scene.wait_disks(&["disk0", "failing"]);
    scene.check(&format!("disk-check vdb 5 {SECTORS}"));
    let errors = |scene: &Scene| {
        let metrics = scene.client.get("/v1/metrics").unwrap();
        let name = "bellhop_device_io_errors_total{device=\"failing\"}";
        let mut lines = metrics.as_str().unwrap().lines();
        let line = lines.find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name}: {metrics}"))
            .trim()
            .parse::<u64>()
            .unwrap()
    };
    assert_eq!(errors(&scene), 0);

    failing.good_below(GOOD);
    let mut counted = 0;
    for line in ["disk-read vdb", &format!("disk-check vdb 6 {SECTORS}")] {
        let failed = scene.guest.command(line).unwrap_err().to_string();
        assert!(failed.contains(EIO), "{line}: {failed}");
        let now = errors(&scene);
        assert!(now > counted, "{line}: {now} errors");
        counted = now;
    }
    // The VMM, its other disk and the other sectors work.
    assert_eq!(scene.client.get("/v1/vm").unwrap()["state"], "Running");
    scene.check(&format!("disk-check vda 7 {SECTORS}"));
    // The host may report an error of a former write with the next flush.
    let line = format!("disk-check vdb 8 {GOOD}");
    let _ = scene.guest.command(&line);
    scene.check(&line);
    let said = scene.guest.console();
    let lines = said.lines().filter(|line| line.contains("image fails"));
    assert_eq!(lines.count(), 1, "{said}");

    failing.good_below(SECTORS);
    let line = format!("disk-check vdb 9 {SECTORS}");
    let _ = scene.guest.command(&line);
    scene.check(&line);
    scene.power_off();
}

#[test]
fn an_image_has_one_writer_and_other_files_are_refused() {
    require_lab().unwrap();
    let (image, shared) = (Image::new("locked"), Image::new("shared"));
    let mut scene = Scene::start("hostile", "", &[&image]);
    let other = Scene::start("other", "", &[]);
    let before = (scene.descriptors(), other.descriptors());
    let directory = std::env::temp_dir();
    let fifo = directory.join(format!("lab-disks-{}-fifo", std::process::id()));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let empty = directory.join(format!("lab-disks-{}-empty", std::process::id()));
    File::create(&empty).unwrap();
    let path = |path: &Path| json!({ "path": path });
    for (body, words) in [
        (image.wanted(), "this process, as another disk".to_owned()),
        (path(&directory), "a directory".to_owned()),
        (path(&fifo), "a pipe".to_owned()),
        (path(&empty), "at least one sector".to_owned()),
        (json!({ "path": "/dev/null" }), "a character device".into()),
        (json!({ "path": "/dev/kvm" }), "a character device".into()),
        (
            json!({ "path": "/nonexistent/x.img" }),
            "no such file".into(),
        ),
        (json!({ "path": "" }), "no such file".into()),
        (
            json!({ "path": "/proc/self/mem" }),
            "disk image /proc/self/mem".into(),
        ),
        (json!({ "path": "x".repeat(5000) }), "cannot open it".into()),
    ] {
        let refused = scene.put("bad", &body, 422);
        assert!(refused.to_string().contains(&words), "{words}: {refused}");
    }
    // Landlock hides the files of other processes, so the error names none.
    let in_use = "in use by another process";
    let refused = other.put("bad", &image.wanted(), 422).to_string();
    assert!(refused.contains(in_use), "{refused}");
    // A serial number has at most 20 characters.
    let refused = scene.put(&"x".repeat(21), &shared.wanted(), 422);
    assert!(refused.to_string().contains("1 to 20"), "{refused}");
    scene.put("rng", &shared.wanted(), 409);
    assert_eq!((scene.descriptors(), other.descriptors()), before);

    // Any number of machines may read it.
    let readonly = json!({ "path": shared.0, "readonly": true });
    for machine in [&scene, &other] {
        machine.put("reader", &readonly, 201);
    }
    // Each of them has a reader. Its error names only its own.
    let refused = other.put("writer", &shared.wanted(), 422).to_string();
    assert!(
        refused.contains("in use by this process, as another disk"),
        "{refused}"
    );
    scene.wait_disks(&["disk0", "reader"]);
    let failed = scene.guest.command("disk-check vdb 1 8").unwrap_err();
    // The guest's kernel knows that the disk is read-only: EPERM.
    let denied = "cannot write /dev/vdb: Operation not permitted (os error 1)";
    assert!(failed.to_string().contains(denied), "{failed}");

    // A truncated image is only an I/O error for the guest.
    let file = File::options().write(true).open(&image.0).unwrap();
    file.set_len(SECTOR).unwrap();
    let failed = scene.guest.command("disk-read vda").unwrap_err();
    assert!(failed.to_string().contains(EIO), "{failed}");
    file.set_len(SECTORS * SECTOR).unwrap();
    file.write_all_at(&[0; 8], 0).unwrap();
    scene.check("disk-check vda 5 64");
    for machine in [scene, other] {
        machine.power_off();
    }
    for path in [fifo, empty] {
        std::fs::remove_file(path).unwrap();
    }
    is_free(&image);
    is_free(&shared);
}

#[test]
fn a_disk_is_plugged_and_unplugged_many_times() {
    require_lab().unwrap();
    let image = Image::new("cycles");
    let mut scene = Scene::start("cycles", "", &[]);
    let cycle = |scene: &mut Scene, seed: u32| {
        scene.put("disk", &image.wanted(), 201);
        scene.wait_disks(&["disk"]);
        scene.check(&format!("disk-check vda {seed} 64"));
        scene.delete("disk");
        scene.wait_gone("disk");
        scene.wait_disks(&[]);
    };
    // Resources that are allocated at first use exist then.
    cycle(&mut scene, 0);
    let before = (scene.descriptors(), cost(scene.guest.pid()).unwrap());
    let held = |scene: &Scene| {
        let metrics = scene.client.get("/v1/metrics").unwrap();
        let metrics = metrics.as_str().unwrap();
        let held = metrics
            .lines()
            .filter(|line| line.contains("bellhop_kvm_held{"));
        held.map(str::to_owned).collect::<Vec<_>>()
    };
    let kvm = held(&scene);
    let mut own = vec![before.1.own_kib];
    for seed in 1..=cycles().unwrap() {
        cycle(&mut scene, seed);
        own.push(cost(scene.guest.pid()).unwrap().own_kib);
    }
    assert_eq!(held(&scene), kvm);
    let after = (scene.descriptors(), cost(scene.guest.pid()).unwrap());
    println!("{before:?}\n{after:?}");
    assert_eq!(after.0, before.0);
    // Workers of the API come and go; 100 leaked disks would be far above this limit.
    assert!(after.1.mappings <= before.1.mappings + 8, "{after:?}");
    // Once, in any cycle, the allocator keeps 1.6 MiB for a thread. A leak grows in each cycle.
    let mut growth: Vec<u64> = own
        .windows(2)
        .map(|two| two[1].saturating_sub(two[0]))
        .collect();
    growth.sort_unstable();
    growth.pop();
    assert!(growth.iter().sum::<u64>() <= GROWTH, "{own:?}");
    scene.power_off();
    is_free(&image);
}

#[test]
fn a_vm_without_free_descriptors_refuses_a_disk_and_continues() {
    require_lab().unwrap();
    let image = Image::new("emfile");
    let mut scene = Scene::start("emfile", "", &[]);
    let before = scene.descriptors();
    let number = scene.guest.pid();
    let pid = Pid::from_raw(number.try_into().unwrap()).unwrap();
    let open = |fd: &u64| Path::new(&format!("/proc/{number}/fd/{fd}")).exists();
    // The first free one is for the request's connection.
    let mut limit = (0..).find(|fd| !open(fd)).unwrap() + 1;
    let set = |limit| {
        let limits = Rlimit {
            current: Some(limit),
            maximum: Some(4096),
        };
        prlimit(Some(pid), Resource::Nofile, limits).unwrap()
    };
    let former = set(limit);
    let mut refusals = 0;
    loop {
        let path = "/v1/vm/disks/more";
        let answer = scene.client.ask("PUT", path, Some(&image.wanted()));
        let answer = answer.unwrap();
        if answer.status == 201 {
            break;
        }
        let text = answer.body.to_string();
        assert!(text.contains("Too many open files"), "{text}");
        refusals += 1;
        limit += 1;
        set(limit);
    }
    println!("{refusals} refusals");
    assert!(refusals > 0);
    prlimit(Some(pid), Resource::Nofile, former).unwrap();
    scene.wait_disks(&["more"]);
    scene.delete("more");
    scene.wait_gone("more");
    assert_eq!(scene.descriptors(), before);
    scene.power_off();
}
