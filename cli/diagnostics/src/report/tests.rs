//! A bundle on a host without a daemon, and its list of missing parts.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bellhop_common::client::{Address, Credentials};
use flate2::read::GzDecoder;

use super::*;
use crate::doctor::Host;

/// The names and contents in a `.tar.gz` from [`Bundle`].
fn unpack(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(GzDecoder::new(bytes));
    let files = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_str().unwrap().to_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        (name, content)
    });
    files.collect()
}

fn directory(name: &str) -> PathBuf {
    let file = format!("bellhop-report-test-{}-{name}", std::process::id());
    let path = std::env::temp_dir().join(file);
    std::fs::create_dir(&path).unwrap();
    path
}

fn context(directory: &Path, console: bool) -> Context {
    Context {
        host: Host::this(),
        node: Address::Socket(directory.join("node.socket")),
        credentials: Credentials::default(),
        state_dir: directory.to_owned(),
        runtime_dir: directory.to_owned(),
        console,
    }
}

#[test]
fn without_a_daemon_the_report_has_the_reason_and_the_rest() {
    let directory = directory("alone");
    let vm = directory.join("vms/web");
    std::fs::create_dir_all(&vm).unwrap();
    std::fs::write(vm.join("vmm.log"), "a line\n").unwrap();
    std::fs::write(vm.join("console.log"), "login: root\n").unwrap();
    let now = UNIX_EPOCH + Duration::from_secs(1_795_297_500);

    let bundle = collect(&context(&directory, false), now);
    assert_eq!(bundle.name(), "bellhop-report-20261121T214500Z");
    let missing = bundle.missing();
    assert!(missing >= 2);
    let files = unpack(&bundle.finish().unwrap());
    let find = |name: &str| {
        let name = format!("bellhop-report-20261121T214500Z/{name}");
        let file = files.iter().find(|file| file.0 == name)?;
        Some(String::from_utf8_lossy(&file.1).into_owned())
    };
    let errors = find("errors.txt").unwrap();
    assert!(
        errors.contains("node: cannot reach the node daemon"),
        "{errors}"
    );
    assert!(errors.contains("vms/web/vm.json: "), "{errors}");
    assert!(errors.lines().count() >= missing);
    assert!(find("versions.txt").unwrap().starts_with("bellhop "));
    assert!(find("host/proc_version").unwrap().starts_with("Linux "));
    assert!(find("doctor.json").unwrap().contains("findings"));
    assert_eq!(find("logs/vms/web/vmm.log").unwrap(), "a line\n");
    assert_eq!(find("logs/vms/web/console.log"), None);

    let files = unpack(&collect(&context(&directory, true), now).finish().unwrap());
    assert!(files.iter().any(|file| file.0.ends_with("console.log")));
    std::fs::remove_dir_all(&directory).unwrap();
}
