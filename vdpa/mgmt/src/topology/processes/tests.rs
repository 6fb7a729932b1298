#![allow(clippy::unwrap_used, reason = "tests")]
use super::*;

fn line(words: &[&str]) -> Vec<u8> {
    words
        .iter()
        .flat_map(|word| [word.as_bytes(), b"\0"].concat())
        .collect()
}

#[test]
fn a_bellhop_is_known_by_its_command_line() {
    let words = [
        "bellhop",
        "--log-level",
        "run",
        "--log-level=info",
        "run",
        "--kernel",
        "vmlinux",
        "--vdpa",
        "path=/dev/vhost-vdpa-1,id=other",
        "--cmdline",
        "--vdpa",
        "--vdpa=path=/dev/vhost-vdpa-7,id=nic",
        "--cpus=2",
    ];
    let run = bellhop_run(&line(&words), "vhost-vdpa-7").unwrap();
    assert_eq!(run.kernel.as_deref(), Some("vmlinux"));
    assert_eq!((run.id.as_deref(), run.config), (Some("nic"), None));
    for file in [
        &["--config=vm.toml"][..],
        &["--file", "vm.toml"],
        &["-f", "vm.toml"],
    ] {
        let words = [&["/bin/bellhop", "run"], file].concat();
        let run = bellhop_run(&line(&words), "x").unwrap();
        assert_eq!((run.config.as_deref(), run.id), (Some("vm.toml"), None));
    }
    let words = ["bellhop", "run", "--vdpa", "/dev/vhost-vdpa-7,id=nic"];
    let run = bellhop_run(&line(&words), "vhost-vdpa-7").unwrap();
    assert_eq!(run.id.as_deref(), Some("nic"));
    for other in [
        &["bellhop"][..],
        &["bellhop", "probe", "run"],
        &[],
        &["bellhop", "--log-level"],
    ] {
        assert_eq!(bellhop_run(&line(other), "x"), None, "{other:?}");
    }
}

#[test]
fn hostile_command_lines_are_read_without_harm() {
    for bytes in [
        &b"\0"[..],
        b"bellhop\0run\0--vdpa",
        b"bellhop\0run\0--vdpa\0path=\0--vdpa\0path=/\0--vdpa\0,,=\0--kernel",
        b"bellhop\0run\0--kernel\0\xff\xfe\0--vdpa=\0--=",
    ] {
        let _ = bellhop_run(bytes, "vhost-vdpa-0");
    }
}

#[test]
fn doorbells_are_pages_of_the_same_file_that_can_be_stored_to() {
    let file = fs::metadata("/dev/null").unwrap();
    let device = format!(
        "{:02x}:{:02x} {}",
        rustix::fs::major(file.dev()),
        rustix::fs::minor(file.dev()),
        file.ino()
    );
    let of = |text: String| mapping(&text, &file);
    assert_eq!(
        of(format!(
            "7f0000000000-7f0000001000 -w-s 00003000 {device}  /dev/x (deleted)"
        )),
        Some((0x3000, 0x1000))
    );
    for no in [
        format!("7f0000000000-7f0000001000 r--s 00003000 {device} /dev/x"),
        format!("7f0000000000-7f0000001000 rw-p 00003000 {device} /dev/x"),
        format!("7f0000001000-7f0000000000 -w-s 00003000 {device} /dev/x"),
        format!("7f0000000000-7f0000001000 -w-s zzz {device} /dev/x"),
        format!("7f0000000000-7f0000001000 -w-s 00003000 {device}9 /dev/x"),
        format!("7f0000000000-7f0000001000 - 00003000 {device}"),
        "7f0000000000-7f0000001000 -w-s 00003000 00:00 0".to_owned(),
        String::new(),
        "a b c d e f g".to_owned(),
    ] {
        assert_eq!(of(no.clone()), None, "{no}");
    }
}
