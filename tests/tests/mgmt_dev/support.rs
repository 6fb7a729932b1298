//! Runs both tools as a user does.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use lab::sim::require_lab;

/// Without a zero byte: the simulator compares addresses as C strings.
pub(crate) const MAC: &str = "02:5e:10:53:11:01";

/// The program under test.
pub(crate) fn program() -> PathBuf {
    require_lab().unwrap();
    std::env::var_os("BELLHOP").unwrap().into()
}

/// Runs `bellhop` with these arguments.
pub(crate) fn bellhop(arguments: &[&str]) -> Output {
    let mut command = Command::new(program());
    let command = command.args(arguments).stdin(Stdio::null());
    command.output().unwrap()
}

/// Runs iproute2's `vdpa` with these arguments.
pub(crate) fn iproute2(arguments: &[&str]) -> Output {
    require_lab().unwrap();
    let mut command = Command::new("vdpa");
    let command = command.args(arguments).stdin(Stdio::null());
    command.output().unwrap()
}

/// The output of a command that must succeed without any error output.
#[track_caller]
pub(crate) fn printed(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(errors, "");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The error output of a command that must fail with exit code 1 and print nothing.
#[track_caller]
pub(crate) fn complaint(output: &Output, words: &[&str]) -> String {
    complaint_with(1, output, words)
}

/// The error output of a command that must fail with this exit code and print nothing.
#[track_caller]
pub(crate) fn complaint_with(code: i32, output: &Output, words: &[&str]) -> String {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{errors}");
    assert!(output.stdout.is_empty(), "{output:?}");
    for word in words {
        assert!(errors.contains(word), "no {word:?} in {errors}");
    }
    errors
}

/// Names of all devices, as iproute2 lists them.
pub(crate) fn listed() -> Vec<String> {
    let text = printed(&iproute2(&["dev", "show"]));
    text.lines()
        .filter_map(|line| Some(line.split_once(':')?.0.to_owned()))
        .collect()
}
