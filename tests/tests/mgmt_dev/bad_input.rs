//! Impossible requests are rejected with the reason and the remedy.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use lab::labnic::Labnic;
use lab::sim::{SimDevice, require_lab};

use super::support::{MAC, bellhop, complaint, complaint_with, listed, program};

#[track_caller]
fn refused(line: &str, words: &[&str]) {
    refused_with(1, line, words);
}

#[track_caller]
fn refused_with(code: i32, line: &str, words: &[&str]) {
    let arguments: Vec<&str> = line.split(' ').collect();
    let text = complaint_with(code, &bellhop(&arguments), words);
    // One error and its causes.
    assert!(text.starts_with("error: "), "{text}");
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
}

#[test]
fn wrong_arguments_are_explained() {
    require_lab().unwrap();
    let before = listed();
    let on = "dev add name lab-bad mgmtdev vdpasim_net";
    for (line, words) in [
        (
            format!("{on} speed 3"),
            ["unknown word \"speed\"", "max_vqp"],
        ),
        (format!("{on} mtu"), ["mtu", "no value"]),
        (format!("{on} mtu 67"), ["mtu 67", "68"]),
        (format!("{on} mtu 65536"), ["mtu \"65536\"", "number"]),
        (format!("{on} mtu 1500 mtu 1500"), ["mtu", "twice"]),
        (format!("{on} max_vqp 0"), ["max_vqp 0", "1 to 32768"]),
        (
            format!("{on} mac 01:00:5e:00:00:01"),
            ["01:00:5e:00:00:01", "unicast"],
        ),
        (
            format!("{on} mac 02-00-5e-00-00-01"),
            ["MAC address", "52:54:00"],
        ),
        (
            format!("{on} device_features xyz"),
            ["device_features", "hexadecimal"],
        ),
        (
            format!("{on} mac {MAC} device_features 0x300000000"),
            ["needs the feature MAC", "0x20"],
        ),
        ("dev add name lab-bad".to_owned(), ["mgmtdev", "missing"]),
        (
            "dev add mgmtdev vdpasim_net".to_owned(),
            ["name", "missing"],
        ),
        (
            "dev add name a/b mgmtdev vdpasim_net".to_owned(),
            ["a/b", "63 bytes"],
        ),
        (
            "dev add name lab-bad mgmtdev a/b/c".to_owned(),
            ["a/b/c", "BUS/NAME"],
        ),
        ("dev show a/b".to_owned(), ["a/b", "vDPA device"]),
        (
            "dev vstats show lab-bad queue 0".to_owned(),
            ["unknown word", "qidx"],
        ),
        (
            "dev vstats show lab-bad qidx 1e3".to_owned(),
            ["qidx", "number"],
        ),
        (
            "dev set name lab-bad mtu 1500".to_owned(),
            ["unknown word \"mtu\"", "mac"],
        ),
    ] {
        refused_with(2, &line, &words);
    }
    refused_with(
        2,
        &format!("dev add name {} mgmtdev vdpasim_net", "x".repeat(64)),
        &["63 bytes"],
    );
    for line in [
        "dev",
        "dev add",
        "dev del",
        "dev vstats show x",
        "mgmtdev",
        "dev frob",
    ] {
        let arguments: Vec<&str> = line.split(' ').collect();
        assert_eq!(bellhop(&arguments).status.code(), Some(2), "{line}");
    }
    assert_eq!(listed(), before);
}

#[test]
fn the_kernels_words_and_the_remedy_reach_the_user() {
    require_lab().unwrap();
    let net = SimDevice::net("bad", MAC, 1500).unwrap();
    let block = SimDevice::block("bad-blk").unwrap();
    let (net, block) = (net.name(), block.name());
    for line in [
        "dev show lab-none",
        "dev del lab-none",
        "dev config show lab-none",
        "dev vstats show lab-none qidx 0",
        "dev set name lab-none mac 02:5e:10:53:11:09",
    ] {
        refused(
            line,
            &[
                "no vDPA device lab-none",
                "bellhop dev show",
                "vdpa: device not found",
            ],
        );
    }
    let remedy = [
        "no management device nope",
        "bellhop mgmtdev show",
        "Fail to find the specified",
    ];
    refused("dev add name lab-x mgmtdev nope", &remedy);
    refused("mgmtdev show nope", &remedy);
    refused(
        "mgmtdev show pci/0000:99:00.0",
        &["no management device pci/0000:99:00.0"],
    );
    refused(
        &format!("dev add name {net} mgmtdev vdpasim_net"),
        &["the name lab-bad is taken", "File exists"],
    );
    refused(
        "dev add name lab-x mgmtdev vdpasim_net max_vqp 2",
        &["does not accept max_vqp", "not supported: 0x1000"],
    );
    refused(
        &format!("dev add name lab-x mgmtdev vdpasim_blk mac {MAC} mtu 1500"),
        &["does not accept mac, mtu"],
    );
    refused(
        &format!("dev vstats show {net} qidx 0"),
        &["no driver", "feature negotiation not complete"],
    );
    refused(
        &format!("dev vstats show {net} qidx 99999"),
        &["queue index exceeds max value"],
    );
    refused(
        &format!("dev vstats show {block} qidx 0"),
        &["counters of queue 0", "not supported"],
    );
    // The kernel reports success here.
    refused(
        &format!("dev set name {block} mac 02:5e:10:53:11:09"),
        &[
            "cannot change lab-bad-blk",
            "lab-bad-blk device not supported",
        ],
    );
    // Features that the simulator does not have.
    refused(
        "dev add name lab-x mgmtdev vdpasim_net device_features 0xffff",
        &["cannot add lab-x on vdpasim_net", "Invalid argument"],
    );
    assert!(!listed().contains(&"lab-x".to_owned()));
}

#[test]
fn refusals_of_the_lab_nic_are_reported() {
    let labnic = Labnic::load(&[]).unwrap();
    refused(
        "dev add name lab-x mgmtdev labnic max_vqp 9",
        &["cannot add lab-x on labnic"],
    );
    let nic = labnic.add("bad", &["max_vqp", "2"]).unwrap();
    let (mut driver, _iotlb) = vdpa::device::Device::open(nic.path())
        .unwrap()
        .own()
        .unwrap();
    let features = driver.info().features;
    driver.negotiate(features).unwrap();
    refused(
        &format!("dev vstats show {} qidx 5", nic.name()),
        &["queue 5 of lab-bad", "labnic: there is no such queue"],
    );
}

#[test]
fn without_rights_or_in_another_namespace_the_error_has_a_remedy() {
    require_lab().unwrap();
    let net = SimDevice::net("bad", MAC, 1500).unwrap();
    let unprivileged = |line: &str| {
        Command::new(program())
            .args(line.split(' '))
            .uid(65534)
            .gid(65534)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    for line in [
        "dev add name lab-x mgmtdev vdpasim_net".to_owned(),
        format!("dev del {}", net.name()),
        format!("dev set name {} mac 02:5e:10:53:11:09", net.name()),
        format!("dev vstats show {} qidx 0", net.name()),
    ] {
        complaint(&unprivileged(&line), &["CAP_NET_ADMIN", "root"]);
    }
    // Listing needs no privileges.
    assert!(unprivileged("dev show").status.success());
    let output = Command::new("unshare")
        .arg("-n")
        .arg(program())
        .args(["dev", "show"])
        .output()
        .unwrap();
    complaint(&output, &["initial network namespace", "nsenter"]);
}
