//! `bellhop vm edit`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::time::SystemTime;

use bellhop_api::merge_patch;
use bellhop_common::client::{Condition, Node, STRANGE};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::private_file;
use serde_json::{Map, Value};

use super::of_vm;
use super::spec_patch::{send, show};
use crate::commands::machine_arguments::{flat, resource};
use crate::config_file;

/// Change a VM's spec, labels and annotations in an editor
///
/// The editor is $VISUAL or $EDITOR, else vi. A removed value gets its default.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The command prints each changed value, and when it takes effect, as `bellhop vm set` does. If
another client has changed the VM meanwhile, the command changes nothing. If the daemon rejects the
change, the command keeps the text.

Examples:
  bellhop vm edit web
  EDITOR='sed -i s/512M/1G/' bellhop vm edit web")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let editor = ["VISUAL", "EDITOR"].into_iter().find_map(|variable| {
        let editor = std::env::var(variable).ok();
        editor.filter(|editor| !editor.is_empty())
    });
    let editor = editor.unwrap_or_else(|| "vi".to_owned());
    let directory = std::env::temp_dir();
    edit(&arguments.name, &editor, &directory, node, format)
}

/// Edits the VM in a new file of a directory.
fn edit(
    name: &str,
    editor: &str,
    directory: &Path,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let answer = node.get_whole(&of_vm(name))?;
    let tag = answer.headers.get("etag");
    let tag = tag.and_then(|tag| tag.to_str().ok()).map(str::to_owned);
    let vm = serde_json::from_slice(&answer.body).map_err(Error::context(STRANGE))?;
    let mut before = flat(vm);
    // A name cannot be changed, and start and stop change the state.
    before.remove("name");
    before.remove("state");
    let file = write(&before, directory)?;
    let edited = run(editor, &file).and_then(|()| config_file::read(&file));
    let done = edited.and_then(|after| {
        let patch = merge_patch::between(&resource(before), &resource(after));
        send(node, name, tag.map(Condition::At), &patch, false)
    });
    match done {
        Ok(answer) => {
            // A leftover file does no harm.
            let _ = fs::remove_file(&file);
            show(name, &answer, format)
        }
        Err(error) => {
            let kept = format!("the text is kept in {}", file.display());
            error.in_words().hint(kept).print();
            Ok(error.code())
        }
    }
}

/// Writes the fields to a new file that only this user can read.
fn write(fields: &Map<String, Value>, directory: &Path) -> Result<PathBuf, Error> {
    let text = toml::to_string_pretty(fields);
    let text = text.map_err(Error::context("cannot write the VM as TOML"))?;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let file = format!("bellhop-vm-{}-{}.toml", process::id(), now.as_nanos());
    let file = directory.join(file);
    let written = private_file::create(&file, text.as_bytes(), 0o600);
    written.map_err(Error::context(format!("cannot write {}", file.display())))?;
    Ok(file)
}

/// Runs the editor until it ends. It may have options, so a shell starts it.
fn run(editor: &str, file: &Path) -> Result<(), Error> {
    let script = format!("{editor} \"$1\"");
    let ended = Command::new("/bin/sh")
        .args(["-c", &script, "sh"])
        .arg(file)
        .status()
        .map_err(Error::context("cannot start the editor"))?;
    if ended.success() {
        Ok(())
    } else {
        Err(Error::failed(format!("the editor failed: {ended}")))
    }
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::{self, FakeDaemon};
    use serde_json::json;

    use super::super::tests::format;
    use super::*;

    fn daemon(status: u16, answer: &Value) -> FakeDaemon {
        let spec = json!({"kernel": "/k", "cpus": 2, "memory": {"size": "1G"}, "state": "Stopped",
            "disks": [{"path": "/d", "id": "disk0"}]});
        let vm = json!({"name": "web", "generation": 7, "labels": {"a/b": "c"},
            "annotations": {}, "spec": spec, "status": {"phase": "Stopped"}});
        FakeDaemon::default()
            .answer_with(200, &[("etag", "\"g7\"")], &vm)
            .answer(status, answer)
    }

    /// A new directory for the files of a test.
    fn directory(test: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("bellhop-edit-{test}-{}", process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        directory
    }

    #[test]
    fn the_edited_text_becomes_a_patch_for_the_generation_that_was_read() {
        let directory = directory("patch");
        let none = json!({"vm": fake::vm(&json!({})), "changes": []});
        for (editor, patch) in [
            ("sed -i s/1G/2G/", r#"{"spec":{"memory":{"size":"2G"}}}"#),
            ("sed -i /cpus/d", r#"{"spec":{"cpus":null}}"#),
            ("sed -i /a.b/d", r#"{"labels":{"a/b":null}}"#),
            (
                "sed -i '1i restart = \"always\"'",
                r#"{"spec":{"restart":"always"}}"#,
            ),
            ("true", "{}"),
        ] {
            let fake = daemon(200, &none);
            let code = edit("web", editor, &directory, &fake.node(), format(&["-j"]));
            assert_eq!(code.unwrap(), Code::Success);
            let asked = format!("PATCH /v1/vms/web if-match: \"g7\" {patch}");
            assert_eq!(fake.asked(), ["GET /v1/vms/web", &asked]);
        }
        // Fails if a file is left.
        fs::remove_dir(&directory).unwrap();
    }

    #[test]
    fn what_fails_changes_nothing_and_keeps_the_text() {
        let directory = directory("refused");
        for editor in ["false", "printf 'cpus =' >"] {
            let fake = daemon(200, &Value::Null);
            let code = edit("web", editor, &directory, &fake.node(), format(&[]));
            assert_ne!(code.unwrap(), Code::Success, "{editor}");
            assert_eq!(fake.asked().len(), 1);
        }
        let refused = json!({"code": "generation_conflict", "message": "no"});
        let fake = daemon(412, &refused);
        let code = edit("web", "true", &directory, &fake.node(), format(&[]));
        assert_eq!(code.unwrap(), Code::Conflict);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 3);
        fs::remove_dir_all(&directory).unwrap();
    }
}
