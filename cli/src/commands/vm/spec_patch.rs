//! Changes of a VM by merge patches, for `bellhop vm set`, `vm edit`, `vm apply` and `vm diff`.

use bellhop_api::node::{Applied, SpecChange, VmChanges};
use bellhop_common::client::{Condition, MAKING, Node};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use serde_json::Value;

use super::{of_vm, read};

/// Sends a merge patch, and returns the answer; with `dry_run` nothing is changed.
pub(super) fn send(
    node: &Node,
    name: &str,
    condition: Option<Condition>,
    patch: &Value,
    dry_run: bool,
) -> Result<Value, Error> {
    let query = if dry_run { "?dry_run=true" } else { "" };
    let at = format!("{}{query}", of_vm(name));
    let answer = node.merge_patch(&at, condition, patch, MAKING);
    answer.map_err(|error| {
        error
            .advise(
                "vm_runs",
                format!(
                    "`bellhop vm nic` and `bellhop vm disk` change them while {name} runs, and \
                     `bellhop vm stop {name}` stops it"
                ),
            )
            .advise(
                "generation_conflict",
                "another client has changed the VM: run the command again",
            )
    })
}

/// Prints the changes.
pub(super) fn show(name: &str, answer: &Value, format: Format) -> Result<Code, Error> {
    let changes: VmChanges = read(answer)?;
    format.print(answer, || text(name, &changes.changes))
}

fn text(name: &str, changes: &[SpecChange]) -> String {
    let name = printable(name);
    if changes.is_empty() {
        return format!("{name}: no changes\n");
    }
    let lines = changes.iter().map(|change| {
        let field = dotted(&change.field);
        let (from, to) = (shown(&change.from), shown(&change.to));
        let when = match change.applied {
            Applied::Now => "now",
            Applied::NextStart => "at the next start",
        };
        printable(&format!("{name}: {field}: {from} -> {to} ({when})")) + "\n"
    });
    lines.collect()
}

/// A JSON pointer as a key of `vm set`: `memory.size`.
pub(super) fn dotted(pointer: &str) -> String {
    let pointer = pointer.strip_prefix("/spec").unwrap_or(pointer);
    let pointer = pointer.trim_start_matches('/').replace('/', ".");
    pointer.replace("~1", "/").replace("~0", "~")
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn changes_are_lines_with_their_times() {
        let change = |field: &str, from: Value, to: Value, applied| SpecChange {
            field: field.to_owned(),
            from,
            to,
            applied,
        };
        let changes = [
            change(
                "/spec/memory/size",
                json!("1G"),
                json!("2G"),
                Applied::NextStart,
            ),
            change("/labels/a~1b", Value::Null, json!("c\u{1b}"), Applied::Now),
        ];
        let wanted = "web: memory.size: 1G -> 2G (at the next start)\n\
                      web: labels.a/b: none -> c? (now)\n";
        assert_eq!(text("web", &changes), wanted);
        assert_eq!(text("web", &[]), "web: no changes\n");
    }
}
