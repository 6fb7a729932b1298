//! Guests without a machine: a shell script plays the VMM.

use super::console::{REMEMBERED, remember};
use super::*;
use std::io::{BufRead as _, BufReader};

fn script(text: &str) -> impl Fn() -> Command {
    move || {
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        command
    }
}

#[test]
fn a_guest_is_commanded() {
    let mut guest = Guest::start_command(
        script(
            "echo booting; echo '[1.0] x @lab ready {\"cpus_online\":2}'; read l; \
             echo \"@lab {\\\"got\\\":\\\"$l\\\"}\"; read l; \
             echo '@lab {\"error\":\"no\"}'; exit 3",
        ),
        Duration::from_secs(20),
    )
    .unwrap();
    assert_eq!(guest.ready()["cpus_online"], 2);
    assert_eq!(guest.command("info").unwrap()["got"], "info");
    let error = guest.command("more").unwrap_err().to_string();
    assert!(
        error.contains("refused") && error.contains("booting"),
        "{error}"
    );
    let status = guest.wait_exit(Duration::from_secs(20)).unwrap();
    assert_eq!(status.code(), Some(CRASHED));
    assert_eq!(guest.retries(), 0);
}

/// Starts a guest whose boot fails, and returns the error and how often it was started.
fn failing_boot(script_text: &str, silence: Duration) -> (String, usize) {
    let name = format!("lab-boot-{}-{}", std::process::id(), silence.as_millis());
    let starts = std::env::temp_dir().join(name);
    let counted = format!("echo x >>{}; {script_text}", starts.display());
    let error = Guest::start_command(script(&counted), silence).unwrap_err();
    let count = std::fs::read_to_string(&starts).unwrap().lines().count();
    std::fs::remove_file(starts).unwrap();
    (error.to_string(), count)
}

#[test]
fn a_boot_without_evidence_of_the_emulation_is_not_tried_again() {
    let (error, starts) = failing_boot("echo one; sleep 100", Duration::from_millis(300));
    assert!(error.contains("silent") && error.contains("one"), "{error}");
    assert_eq!(starts, 1);
    let (error, starts) = failing_boot("echo fault >&2; exit 3", Duration::from_secs(20));
    assert!(
        error.contains("exit status: 3") && error.contains("fault"),
        "{error}"
    );
    assert_eq!(starts, 1);
    let (error, starts) = failing_boot("echo no >&2; exit 2", Duration::from_secs(21));
    assert!(error.contains("exit status: 2"), "{error}");
    assert_eq!(starts, 1);
}

#[test]
fn a_console_on_a_socket_is_a_guest() {
    let path = std::env::temp_dir().join(format!("lab-attach-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let vmm = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut writer = stream.try_clone().unwrap();
        writer
            .write_all(b"noise\n@lab ready {\"cpus_online\":1}\n")
            .unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        assert_eq!(line, "info\n");
        writer.write_all(b"@lab {\"answer\":42}\n").unwrap();
        // Until the other end closes.
        BufReader::new(&stream).read_line(&mut line).unwrap();
    });
    let mut guest = Guest::attach(&path, 7, Duration::from_secs(20)).unwrap();
    assert_eq!((guest.pid(), &guest.ready()["cpus_online"]), (7, &1.into()));
    assert_eq!(guest.command("info").unwrap()["answer"], 42);
    assert!(guest.wait_exit(Duration::ZERO).is_err());
    drop(guest);
    vmm.join().unwrap();
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_line_that_is_cut_by_a_move_is_whole() {
    let limit = Duration::from_secs(20);
    for (begun, rest) in [
        (
            "@lab {\\\"n\\\":1}\\n@la",
            "b {\\\"n\\\":2}\\n@lab {\\\"n\\\":3}",
        ),
        (
            "@lab {\\\"n\\\":1}\\n@lab {\\\"n\\\":2}\\n",
            "@lab {\\\"n\\\":3}",
        ),
    ] {
        let mut before = Guest::wait_for(script(&format!("printf \"{begun}\""))()).unwrap();
        before.wait_exit(limit).unwrap();
        let last = format!("printf \"{rest}\"; read l; echo");
        let mut after = Guest::wait_for(script(&last)()).unwrap();
        after.comes_from(before).unwrap();
        after.send("").unwrap();
        for number in 1..=3 {
            assert_eq!(after.answer("", limit).unwrap()["n"], number);
        }
    }
}

#[test]
fn memory_is_bounded() {
    let mut text = String::new();
    for _ in 0..40 {
        remember(&mut text, &"ä".repeat(100_000));
    }
    assert!(text.len() <= 2 * REMEMBERED);
}
