//! The modules `records` and `operations` of the Python package.
//!
//! Records are typed dictionaries, which are plain dictionaries at run time: members that a later
//! version adds are kept. They need Python 3.9. `NotRequired`, which is younger, is only for type
//! checkers.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{COLUMNS, Operation, Parameter, referred, sentence};

const RECORDS_HEAD: &str = r#""""Records of the node's API. Generated from its description.

Do not edit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union

if TYPE_CHECKING:
    from typing_extensions import NotRequired
"#;

const OPERATIONS_HEAD: &str = r#""""Operations of the node's API. Generated from its description.

Do not edit.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any, Iterator, Literal

from .records import *  # noqa: F403
from .transport import Transport


class Operations(Transport):
    """A method for each operation. A refusal raises `Problem`."""
"#;

/// Python keywords, which cannot be names of members.
const KEYWORDS: [&str; 12] = [
    "and", "as", "class", "for", "from", "global", "if", "import", "in", "is", "not", "or",
];

pub(super) fn operations(description: &Value) -> String {
    let mut text = OPERATIONS_HEAD.to_owned();
    for operation in Operation::all(description) {
        text.push_str(&method(&operation));
    }
    text
}

fn method(operation: &Operation<'_>) -> String {
    let (in_path, others): (Vec<&Parameter<'_>>, Vec<_>) =
        (operation.parameters.iter()).partition(|one| one.place == "path");
    let mut nested = Vec::new();
    let mut parameters = vec!["self".to_owned()];
    parameters.extend(in_path.into_iter().map(parameter));
    if let Some((_, schema)) = operation.body {
        parameters.push(format!("body: {}", kind(schema, "", &mut nested)));
    }
    if !others.is_empty() {
        parameters.push("*".to_owned());
        parameters.extend(others.iter().copied().map(parameter));
    }
    let mut kinds = BTreeSet::new();
    for (_, schema) in &operation.answers {
        kinds.insert(kind(schema, "", &mut nested));
    }
    if operation.may_be_empty || kinds.is_empty() {
        kinds.insert("None".to_owned());
    }
    assert!(nested.is_empty(), "{}: name its schemas", operation.id);
    let kinds = kinds.into_iter().collect::<Vec<_>>().join(" | ");
    let (function, answer) = if operation.is_stream() {
        ("_stream", format!("Iterator[{kinds}]"))
    } else {
        ("_call", kinds)
    };
    let mut arguments = vec![format!("{:?}", operation.method), operation.segments()];
    for (place, name) in [("query", "query"), ("header", "headers")] {
        let those = others.iter().filter(|one| one.place == place);
        let those = those.map(|one| format!("{:?}: {}", one.name, variable(one.name)));
        let those = those.collect::<Vec<_>>().join(", ");
        if !those.is_empty() {
            arguments.push(format!("{name}={{{those}}}"));
        }
    }
    if let Some((media_type, _)) = operation.body {
        arguments.push("body=body".to_owned());
        if media_type != "application/json" {
            arguments.push(format!("media_type={media_type:?}"));
        }
    }
    let start = format!("    def {}(", operation.id);
    let head = listed(&start, &parameters, &format!(") -> {answer}:"));
    let call = listed(&format!("        return self.{function}("), &arguments, ")");
    let doc = sentence(operation.summary, "        ");
    format!("\n{head}\n        \"\"\"{doc}.\"\"\"\n{call}\n")
}

fn parameter(parameter: &Parameter<'_>) -> String {
    let name = variable(parameter.name);
    let kind = kind(parameter.schema, "", &mut Vec::new());
    if parameter.is_required {
        format!("{name}: {kind}")
    } else {
        let kind = kind.trim_end_matches(" | None");
        format!("{name}: {kind} | None = None")
    }
}

fn variable(name: &str) -> String {
    let name = name.to_ascii_lowercase().replace('-', "_");
    if KEYWORDS.contains(&name.as_str()) {
        name + "_"
    } else {
        name
    }
}

/// Items between `start` and `end`: on one line, or each on a line of its own.
fn listed(start: &str, items: &[String], end: &str) -> String {
    let line = format!("{start}{}{end}", items.join(", "));
    if line.len() <= COLUMNS {
        return line;
    }
    let indent = start.len() - start.trim_start().len();
    let mut text = start.to_owned();
    for item in items {
        text.push_str(&format!("\n{:indent$}    {item},", ""));
    }
    format!("{text}\n{:indent$}{end}", "")
}

/// A record that is a class.
struct Class {
    name: String,
    about: String,
    bases: Vec<String>,
    /// Names and types.
    members: Vec<(String, String)>,
}

pub(super) fn records(description: &Value) -> String {
    let mut text = RECORDS_HEAD.to_owned();
    let mut classes = Vec::new();
    for (name, schema) in description["components"]["schemas"].as_object().unwrap() {
        let name = name.replace('_', "");
        if schema["properties"].is_object() || schema["allOf"].is_array() {
            class(&name, schema, &mut classes);
            continue;
        }
        let (kind, items) = match schema["enum"].as_array() {
            Some(words) => ("Literal", literals(words)),
            None => {
                let kinds = kinds(schema, &name, &mut classes).into_iter();
                // Quoted, because the class may follow later.
                ("Union", kinds.map(|kind| format!("{kind:?}")).collect())
            }
        };
        let alias = listed(&format!("{name} = {kind}["), &items, "]");
        text.push_str(&format!("\n{alias}\n"));
    }
    // A class follows its bases.
    let mut written = BTreeSet::new();
    while !classes.is_empty() {
        let is_ready = |class: &Class| class.bases.iter().all(|base| written.contains(base));
        let (ready, rest): (Vec<_>, Vec<_>) = classes.into_iter().partition(is_ready);
        assert!(!ready.is_empty(), "a base is no class");
        for class in ready {
            text.push_str(&class.text());
            assert!(written.insert(class.name.clone()), "two {}", class.name);
        }
        classes = rest;
    }
    text
}

fn class(name: &str, schema: &Value, classes: &mut Vec<Class>) {
    let about = schema["description"].as_str().unwrap_or_default();
    let mut class = Class {
        name: name.to_owned(),
        about: about.to_owned(),
        bases: Vec::new(),
        members: Vec::new(),
    };
    let whole = std::slice::from_ref(schema);
    for part in schema["allOf"].as_array().map_or(whole, Vec::as_slice) {
        class
            .bases
            .extend(referred(part).map(|base| base.replace('_', "")));
        for (member, schema) in part["properties"].as_object().into_iter().flatten() {
            let place = format!("{name}{}", in_camel_case(member));
            let mut kind = kind(schema, &place, classes);
            let mut required = part["required"].as_array().into_iter().flatten();
            if !required.any(|one| one == member) {
                kind = format!("NotRequired[{kind}]");
            }
            class.members.push((member.clone(), kind));
        }
    }
    classes.push(class);
}

impl Class {
    fn text(&self) -> String {
        let Self { name, members, .. } = self;
        if members.iter().any(|(member, _)| !is_identifier(member)) {
            assert!(self.bases.is_empty(), "{name} has a base");
            let mut text = format!("\n\n{name} = TypedDict(\n    {name:?},\n    {{\n");
            for (member, kind) in members {
                text.push_str(&format!("        {member:?}: {kind:?},\n"));
            }
            text.push_str("    },\n)\n");
            return text;
        }
        let bases = match self.bases.as_slice() {
            [] => "TypedDict".to_owned(),
            bases => bases.join(", "),
        };
        let about = match sentence(&self.about, "    ") {
            about if about.is_empty() => "One of several forms".to_owned(),
            about => about.replace('\\', "\\\\"),
        };
        let mut text = format!("\n\nclass {name}({bases}):\n    \"\"\"{about}.\"\"\"\n\n");
        for (member, kind) in members {
            text.push_str(&format!("    {member}: {kind}\n"));
        }
        text
    }
}

fn is_identifier(name: &str) -> bool {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    !KEYWORDS.contains(&name) && name.chars().all(fits)
}

/// The type of a schema. Objects within it become classes whose names begin with `place`.
fn kind(schema: &Value, place: &str, classes: &mut Vec<Class>) -> String {
    kinds(schema, place, classes).join(" | ")
}

fn kinds(schema: &Value, place: &str, classes: &mut Vec<Class>) -> Vec<String> {
    if let Some(name) = referred(schema) {
        return vec![name.replace('_', "")];
    }
    if let Some(words) = schema["enum"].as_array() {
        return vec![format!("Literal[{}]", literals(words).join(", "))];
    }
    let union = ["oneOf", "anyOf"].map(|word| schema[word].as_array());
    if let Some(parts) = union.into_iter().flatten().next() {
        let mut all = Vec::new();
        for part in parts {
            // An object is named after the members that it needs.
            let required = part["required"].as_array().into_iter().flatten();
            let required = required.filter_map(Value::as_str).map(in_camel_case);
            let place = format!("{place}{}", required.collect::<String>());
            all.extend(kinds(part, &place, classes));
        }
        return all;
    }
    let one = std::slice::from_ref(&schema["type"]);
    let types = schema["type"].as_array().map_or(one, Vec::as_slice);
    let mut type_of = |word: &Value| match word.as_str() {
        Some("string") => "str".to_owned(),
        Some("integer") => "int".to_owned(),
        Some("number") => "float".to_owned(),
        Some("boolean") => "bool".to_owned(),
        Some("null") => "None".to_owned(),
        Some("array") => format!("list[{}]", kind(&schema["items"], place, classes)),
        Some("object") if schema["properties"].is_object() => {
            let taken = |name: &String| classes.iter().any(|class| class.name == *name);
            let mut names = (2..).map(|number| format!("{place}{number}"));
            let name = Some(place.to_owned()).filter(|name| !taken(name));
            let name = name.or_else(|| names.find(|name| !taken(name))).unwrap();
            class(&name, schema, classes);
            name
        }
        Some("object") if schema["additionalProperties"].is_object() => {
            let values = kind(&schema["additionalProperties"], place, classes);
            format!("dict[str, {values}]")
        }
        Some("object") => "dict[str, Any]".to_owned(),
        _ => "Any".to_owned(),
    };
    types.iter().map(&mut type_of).collect()
}

/// The words of an enum.
fn literals(words: &[Value]) -> Vec<String> {
    let literal = |word: &Value| match word {
        Value::Null => "None".to_owned(),
        word => word.to_string(),
    };
    words.iter().map(literal).collect()
}

fn in_camel_case(name: &str) -> String {
    let words = name.split(['_', '-', '.']);
    words
        .flat_map(|word| {
            let mut letters = word.chars();
            let first = letters.next().map(|letter| letter.to_ascii_uppercase());
            first.into_iter().chain(letters)
        })
        .collect()
}
