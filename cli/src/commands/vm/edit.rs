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

use super::spec_patch::{of_spec, send, show};
use crate::config_file;

/// Change a VM's spec in an editor
///
/// The editor is $VISUAL or $EDITOR, else vi. A value that is removed gets its default.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Each value that was changed is printed, and when it takes effect, as for `bellhop vm set`. If
another client has changed the VM meanwhile, nothing is changed. If the daemon refuses the change,
the text is kept.

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
    edit(&arguments.name, &editor, node, format)
}

fn edit(name: &str, editor: &str, node: &Node, format: Format) -> Result<Code, Error> {
    let answer = node.get_whole(&of_spec(name))?;
    let tag = answer.headers.get("etag");
    let tag = tag.and_then(|tag| tag.to_str().ok()).map(str::to_owned);
    let mut before: Map<String, Value> =
        serde_json::from_slice(&answer.body).map_err(Error::context(STRANGE))?;
    // Start and stop change it.
    before.remove("state");
    let file = write(&before)?;
    let edited = run(editor, &file).and_then(|()| config_file::read::<Value>(&file));
    let done = edited.and_then(|after| {
        let patch = merge_patch::between(&before.into(), &after);
        send(node, name, tag.map(Condition::At), &patch, false)
    });
    match done {
        Ok(answer) => {
            // A file that is left over does no harm.
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

/// Writes the spec to a new file that only this user can read.
fn write(spec: &Map<String, Value>) -> Result<PathBuf, Error> {
    let text = toml::to_string_pretty(spec);
    let text = text.map_err(Error::context("cannot write the spec as TOML"))?;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let file = format!("bellhop-vm-{}-{}.toml", process::id(), now.as_nanos());
    let file = std::env::temp_dir().join(file);
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
    use bellhop_common::client::made_up::MadeUp;
    use serde_json::json;

    use super::super::tests::format;
    use super::*;

    fn daemon(status: u16, answer: &Value) -> MadeUp {
        let spec = json!({"kernel": "/k", "cpus": 2, "memory": {"size": "1G"}, "state": "Stopped",
            "disks": [{"path": "/d", "id": "disk0"}], "labels": {"a/b": "c"}});
        MadeUp::default()
            .answer_with(200, &[("etag", "\"g7\"")], &spec)
            .answer(status, answer)
    }

    #[test]
    fn the_edited_text_becomes_a_patch_for_the_generation_that_was_read() {
        let none = json!({"generation": 8, "changes": []});
        for (editor, patch) in [
            ("sed -i s/1G/2G/", r#"{"memory":{"size":"2G"}}"#),
            ("sed -i /cpus/d", r#"{"cpus":null}"#),
            (
                "sed -i '1i restart = \"always\"'",
                r#"{"restart":"always"}"#,
            ),
            ("true", "{}"),
        ] {
            let made_up = daemon(200, &none);
            let code = edit("web", editor, &made_up.node(), format(&["-j"])).unwrap();
            assert_eq!(code, Code::Success);
            let asked = format!("PATCH /v1/vms/web/spec if-match: \"g7\" {patch}");
            assert_eq!(made_up.asked(), ["GET /v1/vms/web/spec", &asked]);
        }
    }

    #[test]
    fn what_fails_changes_nothing() {
        for editor in ["false", "printf 'cpus =' >"] {
            let made_up = daemon(200, &Value::Null);
            let code = edit("web", editor, &made_up.node(), format(&[])).unwrap();
            assert_ne!(code, Code::Success, "{editor}");
            assert_eq!(made_up.asked().len(), 1);
        }
        let refused = json!({"code": "generation_conflict", "message": "no"});
        let made_up = daemon(412, &refused);
        let code = edit("web", "true", &made_up.node(), format(&[])).unwrap();
        assert_eq!(code, Code::Conflict);
    }
}
