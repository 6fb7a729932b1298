//! The clients that are generated from the description: the Python package and the table of the
//! Rust client.
//! Owns their texts, and the parts of an operation that both need.

mod python;
mod rust;

use serde_json::Value;

use super::SERVED;

/// The Python package.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../clients/python/bellhop");
/// The table of the Rust client.
const RUST: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../common/src/client/operations/table.rs"
);
/// The longest line of a generated text, in characters.
const COLUMNS: usize = 100;

/// An operation in the form that clients need.
struct Operation<'a> {
    id: &'a str,
    method: String,
    path: &'a str,
    summary: &'a str,
    parameters: Vec<Parameter<'a>>,
    /// The media type and the schema.
    body: Option<(&'a str, &'a Value)>,
    /// Media types and schemas of successes.
    answers: Vec<(&'a str, &'a Value)>,
    /// Whether a success has no body.
    may_be_empty: bool,
}

struct Parameter<'a> {
    name: &'a str,
    place: &'a str,
    schema: &'a Value,
    is_required: bool,
}

impl<'a> Operation<'a> {
    fn all(description: &'a Value) -> Vec<Self> {
        let mut all = Vec::new();
        for (path, item) in description["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                all.push(Self::new(path, method, operation));
            }
        }
        all
    }

    fn new(path: &'a str, method: &str, operation: &'a Value) -> Self {
        let text = |part: &'a Value| part.as_str().unwrap();
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        let mut answers: Vec<(&str, &Value)> = Vec::new();
        let mut may_be_empty = false;
        for (status, response) in operation["responses"].as_object().unwrap() {
            if status.starts_with('2') {
                let contents = contents(response);
                may_be_empty |= contents.is_empty();
                let new = contents.into_iter().filter(|one| !answers.contains(one));
                let new: Vec<_> = new.collect();
                answers.extend(new);
            }
        }
        Self {
            id: text(&operation["operationId"]),
            method: method.to_ascii_uppercase(),
            path,
            summary: text(&operation["summary"]),
            parameters: parameters
                .map(|parameter| Parameter {
                    name: text(&parameter["name"]),
                    place: text(&parameter["in"]),
                    schema: &parameter["schema"],
                    is_required: parameter["required"] == true,
                })
                .collect(),
            body: contents(&operation["requestBody"]).first().copied(),
            answers,
            may_be_empty,
        }
    }

    /// The segments of the path as an expression of either language: literals and variables.
    fn segments(&self) -> String {
        let segments = self.path.split('/').skip(1).map(|segment| {
            let parameter = segment.strip_prefix('{').and_then(|s| s.strip_suffix('}'));
            parameter.map_or_else(|| format!("{segment:?}"), str::to_owned)
        });
        format!("[{}]", segments.collect::<Vec<_>>().join(", "))
    }

    fn is_stream(&self) -> bool {
        let mut kinds = self.answers.iter().map(|(kind, _)| *kind);
        kinds.any(|kind| kind == "text/event-stream")
    }
}

fn contents(part: &Value) -> Vec<(&str, &Value)> {
    let content = part["content"].as_object().into_iter().flatten();
    content
        .map(|(kind, content)| (kind.as_str(), &content["schema"]))
        .collect()
}

/// The name of the schema that is referred to.
fn referred(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.rsplit('/').next()
}

/// The first sentence of a text, in lines that begin with `indent`.
fn sentence(text: &str, indent: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let sentence = line.split_once(". ").map_or(line, |(first, _)| first);
    let mut lines = vec![String::new()];
    for word in sentence.trim_end_matches('.').split(' ') {
        let last = lines.last_mut().unwrap();
        if !last.is_empty() && indent.len() + last.len() + word.len() + 8 > COLUMNS {
            lines.push(word.to_owned());
        } else {
            last.push_str(if last.is_empty() { "" } else { " " });
            last.push_str(word);
        }
    }
    lines.join(&format!("\n{indent}"))
}

#[test]
fn clients_have_each_operation() {
    let files = [
        (format!("{PYTHON}/records.py"), python::records(&SERVED)),
        (
            format!("{PYTHON}/operations.py"),
            python::operations(&SERVED),
        ),
        (RUST.to_owned(), rust::table(&SERVED)),
    ];
    for (path, text) in files {
        if std::env::var_os("BELLHOP_WRITE_OPENAPI").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let copy = std::fs::read_to_string(&path).unwrap();
        assert!(
            copy == text,
            "{path} does not fit the description: \
             BELLHOP_WRITE_OPENAPI=1 cargo test -p bellhop-node --lib api:: writes it"
        );
    }
}
