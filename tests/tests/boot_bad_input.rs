//! User errors: each gives a sentence that names it, an exit code other than 0, and leaves nothing
//! behind.

use lab::sim::{Mapping, SimDevice, reload, require_lab};
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const MAC: &str = "02:00:5e:00:53:11";
/// Exit code of an error, of a wrong command line, and of a wrong value in a file.
const FAILED: i32 = 1;
const USAGE: i32 = 2;
const INVALID: i32 = 11;

fn variable(name: &str) -> PathBuf {
    require_lab().unwrap();
    PathBuf::from(std::env::var_os(name).unwrap())
}

/// `bellhop run` with these arguments and no input.
fn bellhop(arguments: &[&str]) -> Command {
    let mut command = Command::new(variable("BELLHOP"));
    command.arg("run").args(arguments).stdin(Stdio::null());
    command
}

/// `bellhop run` of the small kernel with more arguments.
fn with_kernel(arguments: &[&str]) -> Command {
    let mut command = bellhop(&["--kernel"]);
    command.arg(variable("GUEST_KERNEL")).args(arguments);
    command
}

/// Runs the command, and checks the exit code and that the message has each of `words`.
#[track_caller]
fn refused(mut command: Command, code: i32, words: &[&str]) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    let message = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(code), "{command:?}: {message}");
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
    assert!(!message.contains("panicked"), "{message}");
    assert_each_cause_once(&message);
    message
}

/// The chain of causes repeats nothing.
fn assert_each_cause_once(message: &str) {
    let mut seen = Vec::new();
    for line in message.lines().filter(|line| !line.trim().is_empty()) {
        let line = line.trim().trim_start_matches("caused by: ");
        assert!(
            !seen.contains(&line),
            "{line:?} is said twice in: {message}"
        );
        seen.push(line);
    }
}

/// A file for this test, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, content: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("lab-{}-{name}", std::process::id()));
        fs::write(&path, content).unwrap();
        Self(path)
    }

    fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}

#[test]
fn kernels_that_are_none() {
    refused(
        bellhop(&["--kernel", "/nowhere/vmlinux"]),
        FAILED,
        &["/nowhere/vmlinux", "No such file"],
    );
    refused(
        bellhop(&["--kernel", "/tmp"]),
        FAILED,
        &["/tmp", "directory"],
    );
    let empty = Scratch::new("empty", b"");
    refused(
        bellhop(&["--kernel", empty.text()]),
        FAILED,
        &[empty.text(), "empty"],
    );
    let prose = Scratch::new(
        "prose",
        "It was a dark and stormy night. ".repeat(4096).as_bytes(),
    );
    refused(
        bellhop(&["--kernel", prose.text()]),
        FAILED,
        &[prose.text(), "not a kernel", "bzImage"],
    );
    let mut gzip = vec![0x1f, 0x8b, 8, 0];
    gzip.resize(1 << 16, 7);
    let gzip = Scratch::new("gzip", &gzip);
    refused(
        bellhop(&["--kernel", gzip.text()]),
        FAILED,
        &[gzip.text(), "gzip"],
    );
    // This test is an ELF file, but not a kernel.
    let program = std::env::current_exe().unwrap();
    refused(
        bellhop(&["--kernel", program.to_str().unwrap()]),
        FAILED,
        &["PVH"],
    );
}

#[test]
fn truncated_kernels() {
    for name in ["GUEST_KERNEL", "GUEST_KERNEL_STOCK"] {
        let whole = fs::read(variable(name)).unwrap();
        for len in [64, 1000, whole.len() / 2] {
            let cut = Scratch::new("cut", &whole[..len]);
            refused(
                bellhop(&["--memory", "256M", "--kernel", cut.text()]),
                FAILED,
                &[cut.text()],
            );
        }
    }
}

#[test]
fn an_initramfs_that_does_not_fit() {
    let large = Scratch::new("initramfs", b"");
    File::options()
        .write(true)
        .open(&large.0)
        .unwrap()
        .set_len(1 << 30)
        .unwrap();
    refused(
        with_kernel(&["--memory", "128M", "--initramfs", large.text()]),
        FAILED,
        &[large.text(), "1 GiB", "128 MiB", "more memory"],
    );
    refused(
        with_kernel(&["--initramfs", "/nowhere/initrd"]),
        FAILED,
        &["/nowhere/initrd", "No such file"],
    );
}

#[test]
fn numbers_of_vcpus() {
    for (count, words) in [
        ("0", "0 vCPUs: a machine has 1 to 32"),
        ("33", "33 vCPUs: a machine has 1 to 32"),
        ("100000", "100000 vCPUs: a machine has 1 to 32"),
        ("many", "not a number"),
    ] {
        refused(with_kernel(&["--cpus", count]), USAGE, &["--cpus", words]);
    }
}

#[test]
fn amounts_of_memory() {
    for (size, code, words) in [
        ("512", USAGE, "give a number and a unit"),
        ("17592186044416M", USAGE, "more than any machine"),
        ("size=1G,hugepages=3M", USAGE, "hugepages"),
        ("0M", FAILED, "memory"),
        ("1M", FAILED, "16"),
        ("511G", FAILED, "host"),
        ("900T", FAILED, "900"),
        ("size=65M,hugepages=2M", FAILED, "2 MiB"),
    ] {
        // The lab host has a few GiB; odd sizes matter with huge pages.
        let size = if size == "20000001K" {
            "size=256001K,hugepages=2M"
        } else {
            size
        };
        refused(with_kernel(&["--memory", size]), code, &[words]);
    }
}

#[test]
fn options_that_are_wrong() {
    for (arguments, words) in [
        (
            ["--vdpa", "path=/dev/x,colour=red"],
            "unknown field `colour`",
        ),
        (["--vdpa", "path=/dev/x,path=/dev/y"], "path is given twice"),
        (["--vdpa", "mac=02:00:00:00:00:01"], "missing field `path`"),
        (["--vdpa", "/dev/x,mac"], "not of the form key=value"),
        (
            ["--vdpa", "path=/dev/x,mac=01:00:5e:00:00:01"],
            "not a unicast address",
        ),
        (["--vdpa", "path=/dev/x,num_queues=3x"], "num_queues=\"3x\""),
        (["--disk", "path=a,readonly=perhaps"], "expected on or off"),
        (["--colour", "red"], "--colour"),
    ] {
        refused(with_kernel(&arguments), USAGE, &[words]);
    }
    refused(bellhop(&[]), USAGE, &["--kernel"]);
}

#[test]
fn the_command_alone_shows_the_commands_to_start_with() {
    let alone = Command::new(variable("BELLHOP"));
    let message = refused(alone, USAGE, &["  bellhop doctor ", "`bellhop --help`"]);
    assert!(message.lines().count() < 15, "{message}");
}

#[test]
fn configuration_files_that_are_wrong() {
    for (name, content, words) in [
        (
            "a.toml",
            "kernel = \"k\"\ncolour = 1\n",
            &["unknown field `colour`"][..],
        ),
        (
            "a.json",
            "{\"kernel\": \"k\", \"cpus\": 0}",
            &["cpus", "0 vCPUs"],
        ),
        ("b.toml", "kernel = ", &["line 1"]),
        ("a.yaml", "kernel: [k", &["is wrong"]),
        (
            "b.json",
            r#"{"kernel": "k", "nics": [{"id": "n", "from": "eth0"}]}"#,
            &["bellhop vm create --file"],
        ),
    ] {
        let file = Scratch::new(name, content.as_bytes());
        let words = [words, &[file.text()]].concat();
        refused(bellhop(&["--file", file.text()]), INVALID, &words);
    }
    refused(
        bellhop(&["--file", "/dev/zero"]),
        INVALID,
        &["/dev/zero", "1 MiB"],
    );
    refused(
        bellhop(&["--file", "/nowhere.toml"]),
        FAILED,
        &["No such file"],
    );
    refused(
        bellhop(&["--file", "a.toml", "--restore", "s"]),
        USAGE,
        &["--file", "cannot be used with"],
    );
}

/// The same machine from a file as from flags: both get as far as the device.
#[test]
fn a_configuration_file_equals_flags() {
    let kernel = variable("GUEST_KERNEL");
    let kernel = kernel.to_str().unwrap();
    let toml = Scratch::new(
        "machine.toml",
        format!(
            "kernel = {kernel:?}\ncpus = 2\nmemory = \"64M\"\n\
             [[vdpa]]\npath = \"/dev/nowhere\"\nid = \"nic\"\n"
        )
        .as_bytes(),
    );
    // The file that `vm create` reads, with an option that overrides it.
    let nics = "nics:\n- {id: nic, path: /dev/nowhere}\n";
    let yaml = format!("name: web\nkernel: {kernel:?}\ncpus: 1\nmemory: 64M\n{nics}");
    let yaml = Scratch::new("machine.yaml", yaml.as_bytes());
    let by_file = refused(
        bellhop(&["--config", toml.text()]),
        FAILED,
        &["/dev/nowhere"],
    );
    let by_yaml = refused(
        bellhop(&["--file", yaml.text(), "--cpus", "2"]),
        FAILED,
        &["/dev/nowhere"],
    );
    assert_eq!(by_yaml, by_file);
    let flags = [
        "--kernel",
        kernel,
        "--cpus",
        "2",
        "--memory",
        "64M",
        "--vdpa",
        "path=/dev/nowhere,id=nic",
    ];
    let by_flags = refused(bellhop(&flags), FAILED, &["/dev/nowhere"]);
    assert_eq!(by_file, by_flags);
}

#[test]
fn vdpa_paths_that_are_no_devices() {
    let vdpa = |path: &str| with_kernel(&["--vdpa", &format!("path={path}")]);
    refused(
        vdpa("/dev/vhost-vdpa-77"),
        FAILED,
        &["/dev/vhost-vdpa-77 does not exist", "bellhop dev add"],
    );
    let file = Scratch::new("file", b"x");
    refused(vdpa(file.text()), FAILED, &["not a character device"]);
    for device in ["/dev/null", "/dev/kvm", "/dev/zero"] {
        refused(vdpa(device), FAILED, &[device, "not a vhost-vdpa device"]);
    }
}

/// Gives others access to a file until dropped.
struct Open(PathBuf, u32);

impl Open {
    fn to_all(path: &Path) -> Self {
        let mode = fs::metadata(path).unwrap().mode();
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
        Self(path.to_owned(), mode)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        fs::set_permissions(&self.0, fs::Permissions::from_mode(self.1)).unwrap();
    }
}

#[test]
fn no_permission() {
    let net = SimDevice::net("bad", MAC, 1500).unwrap();
    let unprivileged = |path: &Path| {
        let mut command = with_kernel(&["--memory", "64M", "--vdpa"]);
        command
            .arg(format!("path={}", path.display()))
            .uid(65534)
            .gid(65534);
        command
    };
    fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o600)).unwrap();
    refused(unprivileged(net.path()), FAILED, &["/dev/kvm", "group kvm"]);
    let _kvm = Open::to_all(Path::new("/dev/kvm"));
    fs::set_permissions(net.path(), fs::Permissions::from_mode(0o600)).unwrap();
    refused(
        unprivileged(net.path()),
        FAILED,
        &["no permission", net.path().to_str().unwrap(), "udev"],
    );
}

#[test]
fn a_device_that_is_in_use() {
    let net = SimDevice::net("bad", MAC, 1500).unwrap();
    let holder = File::options()
        .read(true)
        .write(true)
        .open(net.path())
        .unwrap();
    let mut command = with_kernel(&["--memory", "64M", "--vdpa"]);
    command.arg(format!("path={}", net.path().display()));
    // A sandbox and its Landlock hide the files of other processes.
    command.env("BELLHOP_SANDBOX", "off");
    command.env("BELLHOP_SECCOMP", "off");
    let process = format!("{}", std::process::id());
    refused(
        command,
        FAILED,
        &["in use by", &process, net.path().to_str().unwrap()],
    );
    drop(holder);
}

#[test]
fn too_many_queues_asked_for() {
    let net = SimDevice::net("bad", MAC, 1500).unwrap();
    let mut command = with_kernel(&["--memory", "64M", "--vdpa"]);
    command.arg(format!("path={},num_queues=2", net.path().display()));
    refused(command, FAILED, &["has 3 queues", "num_queues is 2"]);
}

/// A device that pins guest memory, and a limit that is too low for it.
#[test]
fn a_short_limit_on_locked_memory() {
    let pinning = Mapping::ALL
        .into_iter()
        .find(|mapping| !mapping.use_va)
        .unwrap();
    reload(pinning).unwrap();
    {
        let net = SimDevice::net("bad", MAC, 1500).unwrap();
        let program = variable("BELLHOP");
        let kernel = variable("GUEST_KERNEL");
        let mut command = Command::new("prlimit");
        command
            .arg("--memlock=8388608:8388608")
            .arg(program)
            .args(["run", "--memory", "128M", "--kernel"])
            .arg(kernel)
            .args(["--vdpa", &format!("path={}", net.path().display())])
            .stdin(Stdio::null());
        refused(
            command,
            FAILED,
            &[
                "RLIMIT_MEMLOCK",
                "is 8192 KiB",
                "131072 KiB are needed",
                "ulimit -l 131072",
            ],
        );
        // Nothing stays pinned or held: the device opens at once.
        File::options()
            .read(true)
            .write(true)
            .open(net.path())
            .unwrap();
    }
    reload(Mapping::DEFAULT).unwrap();
}

#[test]
fn disks_that_are_none() {
    let disk = |options: &str| with_kernel(&["--memory", "64M", "--disk", options]);
    refused(
        disk("path=/nowhere.img"),
        FAILED,
        &["/nowhere.img", "no such file"],
    );
    refused(disk("path=/tmp"), FAILED, &["/tmp", "directory"]);
    refused(disk("path=/dev/null"), FAILED, &["/dev/null"]);
}

#[test]
fn help_teaches() {
    let output = Command::new(variable("BELLHOP"))
        .args(["run", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    for word in [
        "--vdpa",
        "num_queues",
        "Ctrl-A X",
        "Examples",
        "--file",
        "hugepages",
    ] {
        assert!(help.contains(word), "no {word:?} in {help}");
    }
    let output = Command::new(variable("BELLHOP"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(help.contains("Exit codes"), "{help}");
}
