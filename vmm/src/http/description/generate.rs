//! The text of a description: utoipa's part, and the parts that utoipa cannot derive.
//!
//! Owns tags, the header of each response, the media type of errors, limits of integers and the
//! form of texts. It must not know the APIs.

use bellhop_api::PROBLEM_JSON;
use serde_json::{Map, Value, json};
use utoipa::openapi::OpenApi;

/// A group of operations.
#[derive(Debug)]
pub struct Tag {
    /// Its name.
    pub name: &'static str,
    /// Its description.
    pub about: &'static str,
    /// The prefixes of its paths. An operation has the tag with the longest matching prefix.
    pub paths: &'static [&'static str],
}

/// The file: pretty-printed JSON with a trailing line break.
#[must_use]
pub fn text(description: &OpenApi, tags: &[Tag]) -> String {
    // A description always serializes to JSON.
    let mut whole = serde_json::to_value(description).unwrap_or_default();
    complete(&mut whole);
    if let Some(schemas) = whole["components"]["schemas"].as_object_mut() {
        let copies = schemas.clone();
        schemas
            .values_mut()
            .for_each(|schema| refer(schema, &copies));
    }
    whole["tags"] = tags
        .iter()
        .map(|tag| json!({ "name": tag.name, "description": tag.about }))
        .collect();
    whole["components"]["headers"]["RequestId"] = json!({
        "description": "The ID of the request: the client's `x-request-id`, or a generated one. \
                        The log has it, too.",
        "schema": { "type": "string", "pattern": "^[!-~]{1,64}$" },
    });
    for (path, item) in whole["paths"].as_object_mut().into_iter().flatten() {
        let fitting = tags
            .iter()
            .filter_map(|tag| Some((begins(tag, path)?, tag.name)));
        let tag = fitting.max().map(|(_, name)| name);
        for (_, operation) in item.as_object_mut().into_iter().flatten() {
            operation["tags"] = tag.into_iter().collect();
            let parameters = operation
                .get_mut("parameters")
                .and_then(Value::as_array_mut);
            parameters.into_iter().flatten().for_each(not_null);
            let responses = operation["responses"].as_object_mut();
            for (status, response) in responses.into_iter().flatten() {
                let content = response.get_mut("content");
                if let Some(content) = content.and_then(Value::as_object_mut)
                    && status.starts_with(['4', '5'])
                    && let Some(media) = content.remove("application/json")
                {
                    content.insert(PROBLEM_JSON.to_owned(), media);
                }
                response["headers"]["x-request-id"] =
                    json!({ "$ref": "#/components/headers/RequestId" });
            }
        }
    }
    let mut text = serde_json::to_string_pretty(&whole).unwrap_or_default();
    text.push('\n');
    text
}

/// The length of the prefix of a tag that a path has.
fn begins(tag: &Tag, path: &str) -> Option<usize> {
    let fits = |begin: &&&str| {
        path.strip_prefix(**begin)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    tag.paths.iter().filter(fits).map(|begin| begin.len()).max()
}

/// A parameter is text, so it is never null. utoipa knows that only for those in the query.
fn not_null(parameter: &mut Value) {
    if let Some(kind) = parameter.pointer_mut("/schema/type")
        && let Some([one, _]) = kind.as_array().map(Vec::as_slice)
    {
        *kind = one.clone();
    }
}

/// Replaces copies of schemas within others by references. utoipa copies the arguments of generic
/// types, and so do hand-written schemas.
fn refer(part: &mut Value, schemas: &Map<String, Value>) {
    let parts: Vec<&mut Value> = match part {
        Value::Object(fields) => fields.values_mut().collect(),
        Value::Array(parts) => parts.iter_mut().collect(),
        _ => return,
    };
    for part in parts {
        match schemas.iter().find(|(_, schema)| **schema == *part) {
            Some((name, _)) => *part = json!({ "$ref": format!("#/components/schemas/{name}") }),
            None => refer(part, schemas),
        }
    }
}

/// Gives integers the limits of their format, and texts the form of Markdown.
fn complete(part: &mut Value) {
    match part {
        Value::Object(fields) => {
            for word in ["description", "summary"] {
                if let Some(Value::String(text)) = fields.get_mut(word) {
                    *text = joined(text);
                }
            }
            // utoipa writes `u-int8`; the registry of formats has no hyphen.
            let format = fields.get("format").and_then(Value::as_str);
            let format = format.and_then(|format| format.strip_prefix("u-"));
            if let Some(format) = format.map(|format| format!("u{format}")) {
                let most = match format.as_str() {
                    "uint8" => Some(u64::from(u8::MAX)),
                    "uint16" => Some(u64::from(u16::MAX)),
                    "uint32" => Some(u64::from(u32::MAX)),
                    "uint64" => Some(u64::MAX),
                    _ => None,
                };
                if let Some(most) = most {
                    fields.entry("maximum").or_insert(most.into());
                }
                fields.insert("format".to_owned(), format.into());
            }
            fields.values_mut().for_each(complete);
        }
        Value::Array(parts) => parts.iter_mut().for_each(complete),
        _ => {}
    }
}

/// Joins lines that were wrapped in the source: one line for each paragraph and list item.
fn joined(text: &str) -> String {
    let mut joined = String::new();
    for line in text.lines().map(str::trim) {
        let within = !joined.is_empty() && !joined.ends_with('\n');
        if line.is_empty() && within {
            joined.push_str("\n\n");
        } else if within {
            joined.push(if line.starts_with("* ") { '\n' } else { ' ' });
        }
        joined.push_str(line);
    }
    joined.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_to_paragraphs_and_items() {
        assert_eq!(
            joined("One\ntwo.\n\nThree\n  four.\n"),
            "One two.\n\nThree four."
        );
        assert_eq!(
            joined("Words\n\n* `a`: one\n* `b`: two"),
            "Words\n\n* `a`: one\n* `b`: two"
        );
    }

    #[test]
    fn the_longest_path_is_the_tag() {
        let tag = |paths| Tag {
            name: "",
            about: "",
            paths,
        };
        let (vm, nics) = (tag(&["/v1/vm"]), tag(&["/v1/vm/nics", "/v1/x"]));
        assert_eq!(begins(&vm, "/v1/vm/nics/{id}"), Some(6));
        assert_eq!(begins(&nics, "/v1/vm/nics/{id}"), Some(11));
        assert_eq!(begins(&vm, "/v1/vms"), None);
    }

    #[test]
    fn copies_become_references() {
        let word = json!({ "type": "string", "enum": ["a"] });
        let mut list = json!({ "properties": { "items": { "type": "array", "items": word } } });
        let schemas = Map::from_iter([("Word".to_owned(), word)]);
        refer(&mut list, &schemas);
        let items = &list["properties"]["items"]["items"];
        assert_eq!(*items, json!({ "$ref": "#/components/schemas/Word" }));
    }

    #[test]
    fn parameters_are_not_null() {
        let mut parameter = json!({ "schema": { "type": ["string", "null"] } });
        not_null(&mut parameter);
        assert_eq!(parameter["schema"]["type"], "string");
        let mut named = json!({ "schema": { "$ref": "#/components/schemas/Word" } });
        not_null(&mut named);
        assert!(named["schema"]["type"].is_null());
    }

    #[test]
    fn integers_get_the_limits_of_their_format() {
        let mut schema = json!({ "properties": { "format": { "format": "u-int8" } } });
        complete(&mut schema);
        let expected = json!({ "format": "uint8", "maximum": 255 });
        assert_eq!(schema["properties"]["format"], expected);
        let mut limited = json!({ "format": "u-int16", "maximum": 9 });
        complete(&mut limited);
        assert_eq!(limited["maximum"], 9);
    }
}
