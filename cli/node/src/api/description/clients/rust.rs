//! The table of the Rust client: a line of its macro `operations` for each operation.

use serde_json::Value;

use super::{Operation, referred, sentence};

const HEAD: &str = "\
//! Each operation of the node's API. Generated from its description; a test compares both.

operations! {";

/// The modules of `bellhop_api`, and those of their records that operations answer with.
/// Other answers are read as JSON values.
const RECORDS: [(&str, &[&str]); 3] = [
    (
        "node",
        &[
            "Operation",
            "Plan",
            "Snapshot",
            "Version",
            "Vm",
            "VmChanges",
        ],
    ),
    (
        "machine",
        &[
            "DiskInfo",
            "IommuInfo",
            "MigrationStatus",
            "NicInfo",
            "NicSummary",
            "SnapshotInfo",
            "VmStatus",
        ],
    ),
    ("config", &["VmConfig"]),
];

pub(super) fn table(description: &Value) -> String {
    let mut text = HEAD.to_owned();
    for operation in Operation::all(description) {
        let in_path = operation.parameters.iter();
        let in_path = in_path.filter(|one| one.place == "path");
        let names: Vec<&str> = in_path.map(|one| one.name).collect();
        let body = operation.body.map_or("", |_| "; body");
        let doc = sentence(operation.summary, "    /// ");
        let streamed = if operation.is_stream() {
            "    ///\n    /// [`Node::events`](super::super::Node::events) reads the stream.\n"
        } else {
            ""
        };
        text.push_str(&format!(
            "\n    /// {doc}.\n{streamed}    {method} {id}({names}{body}) {segments}\n        \
             {answer};\n",
            method = operation.method,
            id = operation.id,
            names = names.join(", "),
            segments = operation.segments(),
            answer = answer(&operation),
        ));
    }
    text.push_str("}\n");
    text
}

/// How the answer is read, and its type.
fn answer(operation: &Operation<'_>) -> String {
    let record = match operation.answers.as_slice() {
        [] => return "read ()".to_owned(),
        [("application/json", schema)] => referred(schema).and_then(record),
        [(kind, _)] if kind.starts_with("text/") => return "text String".to_owned(),
        _ => None,
    };
    match record {
        Some(record) if operation.may_be_empty => format!("read Option<{record}>"),
        Some(record) => format!("read {record}"),
        None => "read serde_json::Value".to_owned(),
    }
}

fn record(name: &str) -> Option<String> {
    if let Some(item) = name.strip_prefix("Items_") {
        return Some(format!("bellhop_api::Items<{}>", record(item)?));
    }
    let (module, _) = RECORDS.iter().find(|(_, names)| names.contains(&name))?;
    Some(format!("bellhop_api::{module}::{name}"))
}
