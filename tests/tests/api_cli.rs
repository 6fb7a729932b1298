//! The command line and the node daemon: the whole life of a VM by `bellhop vm`, and a report of
//! it. Without a daemon the commands fail with a hint.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use bellhop_common::client::{Address, Credentials, Http, Node as Client, WebSocket};
use lab::guest::BellhopArguments;
use lab::sim::{SimDevice, require_lab};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:58:01";
const OTHER_MAC: &str = "52:54:5e:11:58:02";
/// How long something may take; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(90);

/// A daemon with directories of its own, or only the directories.
struct Node {
    directory: PathBuf,
    daemon: Option<Child>,
}

impl Node {
    fn without_daemon(test: &str) -> Self {
        require_lab().unwrap();
        let name = format!("lab-cli-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        Self {
            directory,
            daemon: None,
        }
    }

    fn start(test: &str) -> Self {
        let mut node = Self::without_daemon(test);
        let daemon = bellhop()
            .args(["--log-level", "info", "serve"])
            .arg("--state-dir")
            .arg(node.state())
            .arg("--runtime-dir")
            .arg(node.directory.join("run"))
            .spawn();
        node.daemon = Some(daemon.unwrap());
        until("the daemon serves", || node.socket().exists());
        node
    }

    fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("run/node.socket")
    }

    /// `bellhop` with these words, which asks this daemon.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = bellhop();
        command.args(words).env("BELLHOP_NODE", self.socket());
        command
    }

    /// What it says, if it ends with this code.
    #[track_caller]
    fn says(&self, words: &[&str], code: i32) -> (String, String) {
        let Output {
            status,
            stdout,
            stderr,
        } = self.command(words).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (out, errors) = (text(stdout), text(stderr));
        assert_eq!(status.code(), Some(code), "{words:?}: {out}{errors}");
        (out, errors)
    }

    #[track_caller]
    fn done(&self, words: &[&str]) -> String {
        self.says(words, 0).0
    }

    /// What bash is offered for the last of these words.
    #[track_caller]
    fn completions(&self, words: &[&str]) -> String {
        let mut command = self.command(&["--", "bellhop"]);
        command.args(words).env("BELLHOP_COMPLETE", "bash");
        command.env("_CLAP_COMPLETE_INDEX", words.len().to_string());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{words:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            let _ = Command::new(std::env::var_os("BELLHOP").unwrap())
                .args(["vm", "delete", "--force", "web", "--node"])
                .arg(self.directory.join("run/node.socket"))
                .stderr(Stdio::null())
                .status();
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn bellhop() -> Command {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command.stdin(Stdio::null());
    command
}

#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < NOTICE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The files in a report, without the directory that they are in.
fn unpack(report: &Path, into: &Path) -> PathBuf {
    fs::create_dir(into).unwrap();
    let tar = Command::new("tar")
        .arg("-xzf")
        .arg(report)
        .arg("-C")
        .arg(into)
        .status();
    assert!(tar.unwrap().success());
    let mut entries = fs::read_dir(into).unwrap();
    entries.next().unwrap().unwrap().path()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_remote_is_asked_by_its_name() {
    let node = Node::start("remote");
    let socket = node.socket();
    let run = |words: &[&str]| {
        let mut command = bellhop();
        command.args(words).env("XDG_CONFIG_HOME", &node.directory);
        // The name precedes this variable.
        command.env("BELLHOP_NODE", "/nonexistent/socket");
        let output = command.output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), errors)
    };
    let add = ["remote", "add", "here", socket.to_str().unwrap()];
    assert_eq!(run(&add), (Some(0), String::new()));
    assert_eq!(run(&add).0, Some(10));
    assert_eq!(run(&["vm", "list"]).0, Some(4));
    assert_eq!(run(&["vm", "list", "--remote", "here"]).0, Some(0));
    assert_eq!(run(&["vm", "list", "--remote", "there"]).0, Some(5));
    let words = ["vm", "list", "--remote", "here", "--node", "/nonexistent/b"];
    assert_eq!(run(&words).0, Some(4));
    // A program in place of ssh, which starts the rest of its words on this host.
    let ssh = node.directory.join("ssh");
    let script = "#!/bin/sh\nshift 3\nexec \"$BELLHOP\" \"$@\"\n";
    fs::write(&ssh, script).unwrap();
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o700)).unwrap();
    let by_ssh = |address: &str| {
        let mut command = bellhop();
        command.args(["version", "--node", address, "-j"]);
        command.env("BELLHOP_SSH", &ssh).output().unwrap()
    };
    let output = by_ssh(&format!("ssh://root@node{}", socket.display()));
    let versions: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(versions["daemon"]["pid"].is_number(), "{versions}");
    let output = by_ssh("ssh://node/nonexistent/socket");
    let versions: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(versions["daemon"].is_null(), "{versions}");
    assert_eq!(run(&["remote", "use", "here"]).0, Some(0));
    let mut command = bellhop();
    command
        .args(["vm", "list"])
        .env("XDG_CONFIG_HOME", &node.directory);
    assert!(command.output().unwrap().status.success());
}

#[test]
fn without_a_daemon_commands_fail_and_a_report_succeeds() {
    let node = Node::without_daemon("absent");
    let (_, errors) = node.says(&["vm", "list"], 4);
    assert!(
        errors.contains("cannot reach") && errors.contains("hint: start it"),
        "{errors}"
    );
    node.says(&["vm", "create", "web"], 2);
    node.says(&["vm", "show", "web", "--node", "http://node1:80"], 2);
    let (_, errors) = node.says(&["vm", "list", "--node", "https://node1:7443"], 2);
    assert!(errors.contains("--node-ca"), "{errors}");

    let file = node.directory.join("report.tar.gz");
    let file_name = file.to_str().unwrap();
    let words = [
        "report",
        "--state-dir",
        node.directory.to_str().unwrap(),
        "--file",
        file_name,
    ];
    let (said, errors) = node.says(&words, 0);
    assert_eq!(said.trim(), file_name);
    assert!(errors.contains("missing"), "{errors}");
    let report = unpack(&file, &node.directory.join("unpacked"));
    assert!(read(&report.join("errors.txt")).contains("node: cannot reach the node daemon"));
    assert!(read(&report.join("vdpa/mgmtdev.json")).contains("vdpasim_net"));
    assert!(read(&report.join("host/proc_modules")).contains("vhost_vdpa"));
    let topology: Value = serde_json::from_str(&read(&report.join("topology.json"))).unwrap();
    assert!(
        topology["mgmtdevs"].to_string().contains("vdpasim_net"),
        "{topology}"
    );
    // A file that is there is not replaced.
    node.says(&words, 1);

    let pages = node.directory.join("man");
    fs::create_dir(&pages).unwrap();
    node.done(&["man", pages.to_str().unwrap()]);
    assert!(read(&pages.join("bellhop-vm-create.1")).contains("EXAMPLES"));
    assert!(
        node.done(&["completions", "bash"])
            .contains("BELLHOP_COMPLETE")
    );
    assert!(node.completions(&["vm", "sh"]).contains("show"));
    // Without a daemon there are no names, and no error.
    node.completions(&["vm", "show", ""]);
}

/// The words that make `web`, with a NIC `net0` on the simulator.
fn create(guest: &BellhopArguments, nic: &str) -> Vec<String> {
    let (kernel, ramdisk) = (guest.kernel_image(), guest.ramdisk());
    let words = [
        "vm",
        "create",
        "web",
        "--kernel",
        kernel.to_str().unwrap(),
        "--initramfs",
        ramdisk.to_str().unwrap(),
        "--cmdline",
        guest.kernel_words(),
        "--memory",
        "128M",
        "--nic",
        nic,
    ];
    words.map(str::to_owned).to_vec()
}

#[test]
fn a_nic_moves_to_another_device_in_the_words_of_the_command_line() {
    require_lab().unwrap();
    // Before the daemon: a device in use cannot be deleted, also if a test fails.
    let small = SimDevice::net("small", OTHER_MAC, 1400).unwrap();
    let spare = SimDevice::net("spare", OTHER_MAC, 1500).unwrap();
    let node = Node::start("swap");
    let guest = BellhopArguments::small().unwrap();
    let words = create(&guest, &format!("from=vdpasim_net,mac={MAC},mtu=1500"));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    node.done(&words);
    until("its driver has the NIC", || {
        node.done(&["vm", "show", "web"]).contains("queue 0: ")
    });
    let words = ["vm", "stats", "web", "-o", "csv", "--columns", "nic,queue"];
    let queues = node.done(&words);
    assert!(queues.starts_with("NIC,QUEUE\nnet0,0\n"), "{queues}");
    let paths = || {
        let shown = node.done(&["vm", "show", "web", "-o", "json"]);
        let vm: Value = serde_json::from_str(&shown).unwrap();
        vm["nics"][0]["path"].as_str().map(PathBuf::from)
    };
    let before = paths();
    let swap = |to: &[&str], code| {
        let words = [&["vm", "nic", "swap", "web", "net0"], to].concat();
        node.says(&words, code)
    };
    // What the machine refuses comes as the machine says it, and nothing has changed.
    for (to, words) in [
        (["--path", small.path().to_str().unwrap()], "mtu 1500"),
        (["--path", "/dev/vhost-vdpa-99"], "/dev/vhost-vdpa-99"),
        (["--device", "nowhere"], "nowhere"),
    ] {
        let (_, errors) = swap(&to, 11);
        assert!(errors.contains(words), "{errors}");
        assert_eq!(paths(), before);
    }
    swap(&[], 2);
    let (said, errors) = swap(&["--path", spare.path().to_str().unwrap()], 0);
    assert_eq!((said, errors), (String::new(), String::new()));
    assert_eq!(paths().as_deref(), Some(spare.path()));
    // What was made for it is gone.
    assert!(!Path::new("/sys/bus/vdpa/devices/web.net0").exists());
    // The same again changes nothing.
    swap(&["--path", spare.path().to_str().unwrap()], 0);
    let shown = node.done(&["vm", "show", "web"]);
    assert!(shown.contains("queue 0: "), "{shown}");
    node.done(&["vm", "delete", "web", "--force"]);
}

/// A guest of a few instructions on two daemons of this host. The command line saves it, upgrades
/// it, checks whether it can migrate, and migrates it.
#[test]
fn a_machine_is_saved_upgraded_and_moved_in_the_words_of_the_command_line() {
    let here = lab::node::Node::start("cli-a").unwrap();
    let there = lab::node::Node::start("cli-b").unwrap();
    let nics = serde_json::json!([{ "id": "net0", "from": "vdpasim_net", "mac": MAC }]);
    let spec = here.tiny(&nics).unwrap();
    here.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = here.await_phase("web", "Running").unwrap();
    let vm_command = |words: &[&str]| {
        let mut command = bellhop();
        command.arg("vm").args(words);
        let output = command.env("BELLHOP_NODE", here.api.socket()).output();
        let Output {
            status,
            stdout,
            stderr,
        } = output.unwrap();
        let said = [stdout, stderr].map(|text| String::from_utf8(text).unwrap());
        (status.code(), said.concat())
    };
    let done = |words: &[&str]| {
        let (code, said) = vm_command(words);
        assert_eq!(code, Some(0), "{words:?}: {said}\n{}", here.said());
        said
    };

    let saved = here.directory().join("saved");
    let said = done(&["snapshot", "web", saved.to_str().unwrap()]);
    assert!(said.contains(" MiB of memory"), "{said}");
    assert!(fs::read_dir(&saved).unwrap().count() > 0);
    let (code, said) = vm_command(&["snapshot", "web", saved.to_str().unwrap()]);
    assert_ne!(code, Some(0), "{said}");

    let said = done(&["upgrade", "web"]);
    assert!(said.contains("runs it now"), "{said}");
    let now = here.await_phase("web", "Running").unwrap();
    assert_eq!(now["status"]["pid"], vm["status"]["pid"], "{now:#}");

    // No destination waits there: the VM stays.
    let (code, said) = vm_command(&["migrate", "web", "--to", "unix:/nonexistent/socket"]);
    assert_ne!(code, Some(0), "{said}");
    assert_eq!(
        here.await_phase("web", "Running").unwrap()["status"]["pid"],
        vm["status"]["pid"]
    );
    // With another name there: both daemons would call the device the same.
    let to = format!("node:{}", there.api.socket().display());
    let said = done(&["compat", "web", "--to", &to, "--as", "web2"]);
    assert!(said.contains(": yes"), "{said}");
    assert_eq!(there.vm("web2").unwrap(), None);
    done(&["migrate", "web", "--to", &to, "--as", "web2"]);
    there.await_phase("web2", "Running").unwrap();
    lab::node::until("nothing is left of it here", || {
        here.vm("web").unwrap().is_none() && here.processes().is_empty()
    })
    .unwrap();
    there
        .api
        .done("DELETE", "/v1/vms/web2?force=true", None)
        .unwrap();
}

/// A client of the console of `web`.
fn console(node: &Node, query: &str) -> WebSocket {
    let address = Address::Socket(node.socket());
    let client = Client::new(Http::new(&address, &Credentials::default()).unwrap());
    let path = format!("/v1/vms/web/console?history=true{query}");
    let console = client.web_socket(&path).unwrap();
    let stream = console.stream();
    stream.set_read_timeout(Some(NOTICE)).unwrap();
    console
}

/// Reads output until it has these words.
#[track_caller]
fn read_until(console: &WebSocket, words: &str) {
    let mut output = Vec::new();
    while !String::from_utf8_lossy(&output).contains(words) {
        let mut buffer = [0; 4096];
        let count = console.stream().read(&mut buffer);
        let text = String::from_utf8_lossy(&output);
        assert!(count.as_ref().is_ok_and(|count| *count > 0), "{text}");
        output.extend_from_slice(&buffer[..count.unwrap()]);
    }
}

#[test]
fn a_console_has_many_readers_and_one_writer() {
    let node = Node::start("console");
    let guest = BellhopArguments::small().unwrap();
    let create = create(&guest, &format!("from=vdpasim_net,mac={MAC}"));
    let create: Vec<&str> = create.iter().map(String::as_str).collect();
    node.done(&create);
    until("it runs", || node.done(&["vm", "list"]).contains("Running"));
    let type_in = |console: &WebSocket, line: &str| {
        let mut stream = console.stream();
        stream.write_all(line.as_bytes()).unwrap();
    };

    // Two readers and a writer. A unit test of the daemon has one that never reads.
    let readers = [
        console(&node, "&read_only=true"),
        console(&node, "&read_only=true"),
    ];
    let writer = console(&node, "");
    for one in readers.iter().chain([&writer]) {
        read_until(one, "@lab ready");
    }
    type_in(&writer, "now\n");
    for one in readers.iter().chain([&writer]) {
        read_until(one, "\"now_us\"");
    }

    // A second writer is refused; it may read, or take the console.
    let (_, errors) = node.says(&["vm", "console", "web"], 10);
    assert!(
        errors.contains("writes to this console") && errors.contains("--take"),
        "{errors}"
    );
    let second = console(&node, "&take=true");
    let closed = loop {
        // The end of its stream, after the output that it has not read.
        match writer.stream().read(&mut [0; 4096]) {
            Ok(0) => break writer.close().unwrap(),
            other => assert!(other.unwrap() > 0),
        }
    };
    assert_eq!(closed.code, 1008, "{closed:?}");
    assert!(closed.reason.contains("took the console"), "{closed:?}");
    type_in(&second, "now\n");
    read_until(&readers[0], "\"now_us\"");
    let log = node.done(&["vm", "console", "web", "--log"]);
    assert!(log.contains("@lab ready"), "{log}");
    drop((readers, second));

    let mut follower = node.command(&["vm", "console", "web", "--read-only"]);
    let mut follower = follower
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = follower.stdout.take().unwrap();
    output.read_exact(&mut [0]).unwrap();
    let rest = std::thread::spawn(move || output.read_to_end(&mut Vec::new()));
    node.done(&["vm", "stop", "web", "--force"]);
    let ended = follower.wait_with_output().unwrap();
    rest.join().unwrap().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert!(said.contains("The VM web ended: it is Stopped."), "{said}");
    let (_, errors) = node.says(&["vm", "console", "web"], 10);
    assert!(errors.contains("does not run"), "{errors}");
    node.done(&["vm", "delete", "web"]);
}

#[test]
fn a_machines_life_in_the_words_of_the_command_line() {
    let node = Node::start("life");
    let guest = BellhopArguments::small().unwrap();
    let create = create(&guest, &format!("from=vdpasim_net,mac={MAC}"));
    let create: Vec<&str> = create.iter().map(String::as_str).collect();
    let plan = node.done(&[&create[..], &["--dry-run"]].concat());
    for step in [
        "1. create the directories of web\n",
        "NIC net0: add the vDPA device",
        "boot /",
    ] {
        assert!(plan.contains(step), "{plan}");
    }
    assert_eq!(node.done(&["vm", "list", "-o", "name"]), "");
    let made = node.done(&create);
    assert!(made.starts_with("web: ") && made.contains("pid "), "{made}");
    until("it runs", || node.done(&["vm", "list"]).contains("Running"));
    let web = |words: &[&str]| node.completions(words).lines().any(|line| line == "web");
    until("its name is offered", || web(&["vm", "show", "w"]));
    let nic = ["vm", "nic", "swap", "web", "n"];
    until("its NIC is offered", || {
        node.completions(&nic).contains("net0")
    });
    let vms: Value = serde_json::from_str(&node.done(&["vm", "list", "-o", "json"])).unwrap();
    assert_eq!(
        (&vms[0]["name"], &vms[0]["spec"]["cpus"]),
        (&"web".into(), &1.into()),
        "{vms}"
    );
    assert_eq!(node.done(&["vm", "list", "-o", "name"]), "web\n");
    let words = [
        "vm",
        "list",
        "-o",
        "csv",
        "--columns",
        "name,state",
        "--no-headers",
    ];
    assert_eq!(node.done(&words), "web,Running\n");
    let yaml = node.done(&["vm", "list", "-o", "yaml"]);
    assert!(yaml.contains("    phase: Running\n"), "{yaml}");
    // The name is taken, also for the same VM; and one that runs is not replaced.
    let (_, errors) = node.says(&create, 10);
    assert!(
        errors.contains("web exists already") && errors.contains("hint: `bellhop vm show`"),
        "{errors}"
    );
    node.done(&[&create[..], &["--cpus", "2", "--if-not-exists"]].concat());
    let mut replace = create.clone();
    replace[1] = "replace";
    let (_, errors) = node.says(&[&replace[..], &["--cpus", "2"]].concat(), 10);
    assert!(
        errors.starts_with("error: ") && errors.contains("request: "),
        "{errors}"
    );

    // What the guest said before is there for who comes later.
    let mut console = node.command(&["vm", "console", "web"]);
    let mut console = console
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = console.stdout.take().unwrap();
    let mut heard = Vec::new();
    let start = Instant::now();
    while !String::from_utf8_lossy(&heard).contains("@lab ready") {
        assert!(
            start.elapsed() < NOTICE,
            "{}",
            String::from_utf8_lossy(&heard)
        );
        let mut buffer = [0; 4096];
        let count = output.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "{}", String::from_utf8_lossy(&heard));
        heard.extend_from_slice(&buffer[..count]);
    }
    console.kill().unwrap();
    console.wait().unwrap();

    let shown = node.done(&["vm", "show", "web"]);
    assert!(shown.contains("nic net0: /dev/vhost-vdpa-"), "{shown}");
    assert!(shown.contains("queue 0: "), "{shown}");
    assert!(
        shown.contains(&format!("from=vdpasim_net,mac={MAC}")),
        "{shown}"
    );
    let top = node.done(&["top", "--once"]);
    assert!(top.starts_with("VMs: 1, running: 1\n"), "{top}");
    assert!(
        top.contains(&format!("\nweb  net0  {MAC}  web.net0")),
        "{top}"
    );
    assert!(node.done(&["vm", "pause", "web"]).contains("Paused"));
    let (_, errors) = node.says(&["vm", "stop", "web"], 10);
    assert!(errors.contains("bellhop vm resume web"), "{errors}");
    assert!(node.done(&["vm", "resume", "web"]).contains("Running"));

    let report = node.directory.join("report.tar.gz");
    let state = node.state();
    let words = [
        "report",
        "--file",
        report.to_str().unwrap(),
        "--state-dir",
        state.to_str().unwrap(),
    ];
    node.done(&words);
    let report = unpack(&report, &node.directory.join("unpacked"));
    assert!(read(&report.join("vms/web/vm.json")).contains("Running"));
    assert!(read(&report.join("vms/web/nics/net0.json")).contains("queues"));
    assert!(report.join("vms/web/metrics.txt").exists());

    let (_, errors) = node.says(&["vm", "delete", "web"], 10);
    assert!(errors.contains("bellhop vm stop web"), "{errors}");
    for button in ["nmi", "reset"] {
        let pressed = node.done(&["vm", button, "web", "-o", "name"]);
        assert_eq!(pressed, "web\n");
    }
    let (_, errors) = node.says(&["vm", "migration", "show", "web"], 5);
    assert!(errors.starts_with("error: "), "{errors}");
    // With the guest's consent or without it: the small one need not listen to its power button.
    let stopped = node
        .command(&["vm", "stop", "web", "--timeout", "5s"])
        .output()
        .unwrap();
    match stopped.status.code() {
        Some(0) => {}
        Some(6) => {
            let stopped = node.done(&["vm", "stop", "web", "--force"]);
            assert!(stopped.contains("Stopped"), "{stopped}");
        }
        _ => panic!("{stopped:?}"),
    }
    let (_, errors) = node.says(&["vm", "resume", "web"], 10);
    assert!(errors.contains("bellhop vm start web"), "{errors}");
    // One that is stopped survives a mistake, and is replaced in words that mean it.
    let mut broken = replace.clone();
    broken[4] = "/nonexistent";
    let (_, errors) = node.says(&broken, 11);
    assert!(errors.contains("/nonexistent"), "{errors}");
    assert!(node.done(&["vm", "show", "web"]).contains("1 vCPU"));
    let replaced = node.done(&[&replace[..], &["--cpus", "2", "--stopped"]].concat());
    assert!(replaced.contains("Stopped"), "{replaced}");
    assert!(node.done(&["vm", "show", "web"]).contains("2 vCPUs"));
    node.done(&["vm", "start", "web"]);
    until("it runs again", || {
        node.done(&["vm", "list"]).contains("Running")
    });
    let deleted = node.done(&["vm", "delete", "web", "--force", "-j"]);
    assert_eq!(deleted, "{\"deleted\":true,\"name\":\"web\"}\n");
    let (_, errors) = node.says(&["vm", "show", "web", "-j"], 5);
    let error: Value = serde_json::from_str(&errors).unwrap();
    assert_eq!(error["code"], "no_such_vm", "{error}");
    assert_eq!(node.done(&["vm", "list", "-j"]).trim(), "[]");
}
