//! Checks whether a value conforms to a schema: the part of JSON Schema (2020-12) that our
//! descriptions use.
//!
//! Formats are not checked: utoipa gives `int32` to all numbers up to 32 bits, signed or unsigned.

use super::Description;
use super::pattern::Pattern;
use crate::error::{Error, Result};
use serde_json::Value;

/// Keywords that constrain a value and that are understood here.
const UNDERSTOOD: [&str; 18] = [
    "$ref",
    "type",
    "enum",
    "const",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "items",
    "minItems",
    "maxItems",
    "required",
    "properties",
    "additionalProperties",
    "allOf",
    "oneOf",
    "anyOf",
];

/// Keywords that do not affect whether a value conforms.
const NOTES: [&str; 9] = [
    "description",
    "format",
    "default",
    "examples",
    "example",
    "title",
    "deprecated",
    "propertyNames",
    "contentMediaType",
];

/// Follows references; an unresolvable reference stays.
#[must_use]
pub fn resolve<'a>(whole: &'a Value, mut schema: &'a Value) -> &'a Value {
    // A description cannot have more. The limit ends the loop for one that refers to itself.
    for _ in 0..32 {
        let target = schema["$ref"].as_str().and_then(|to| to.strip_prefix('#'));
        match target.and_then(|target| whole.pointer(target)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

/// The name of the schema that a reference points to; empty without a reference.
#[must_use]
pub fn name(schema: &Value) -> &str {
    let target = schema["$ref"].as_str().unwrap_or_default();
    target.rsplit('/').next().unwrap_or_default()
}

/// Fails for schemas with a keyword that is not understood here.
///
/// # Errors
/// [`Error::Invalid`] with the keyword.
pub(super) fn understood(description: &Description) -> Result<()> {
    let whole = description.whole();
    let schemas = whole["components"]["schemas"].as_object();
    for (name, schema) in schemas.into_iter().flatten() {
        understand(schema).map_err(|why| Error::invalid(format!("the schema {name}"), why))?;
    }
    for operation in description.operations() {
        let parameters = operation.path.iter().chain(&operation.query);
        for schema in parameters.map(|one| &one.schema).chain(&operation.body) {
            understand(schema).map_err(|why| {
                Error::invalid(format!("{} {}", operation.method, operation.template), why)
            })?;
        }
    }
    Ok(())
}

fn understand(schema: &Value) -> std::result::Result<(), String> {
    let Some(fields) = schema.as_object() else {
        return match schema {
            Value::Bool(_) => Ok(()),
            other => Err(format!("{other} is no schema")),
        };
    };
    for (word, value) in fields {
        match word.as_str() {
            "pattern" => {
                Pattern::new(value.as_str().unwrap_or_default())
                    .map_err(|error| error.to_string())?;
            }
            "items" | "additionalProperties" => understand(value)?,
            "properties" => {
                for schema in value.as_object().into_iter().flatten() {
                    understand(schema.1)?;
                }
            }
            "allOf" | "oneOf" | "anyOf" => {
                for schema in value.as_array().into_iter().flatten() {
                    understand(schema)?;
                }
            }
            known if UNDERSTOOD.contains(&known) || NOTES.contains(&known) => {}
            other => return Err(format!("{other:?} is not understood")),
        }
    }
    Ok(())
}

/// Checks that a value conforms.
///
/// # Errors
/// The place where it does not, and the reason.
pub fn conforms(whole: &Value, schema: &Value, value: &Value) -> std::result::Result<(), String> {
    let at = |place: &str, why: String| format!("{place}: {why}");
    if let Value::Bool(any) = schema {
        return any
            .then_some(())
            .ok_or_else(|| "nothing may be here".into());
    }
    let schema = resolve(whole, schema);
    is_of_type(schema, value)?;
    if let Some(all) = schema["enum"].as_array()
        && !all.contains(value)
    {
        return Err(format!("{value} is none of {all:?}"));
    }
    if let Some(only) = schema.get("const")
        && only != value
    {
        return Err(format!("{value} is not {only}"));
    }
    for part in schema["allOf"].as_array().into_iter().flatten() {
        conforms(whole, part, value)?;
    }
    for (word, least_one) in [("oneOf", true), ("anyOf", false)] {
        if let Some(all) = schema[word].as_array() {
            let fitting = all.iter().filter(|one| conforms(whole, one, value).is_ok());
            match (fitting.count(), least_one) {
                (0, _) => return Err(format!("{value} is none of {word}")),
                (1, _) | (_, false) => {}
                (more, true) => return Err(format!("{value} is {more} of {word}")),
            }
        }
    }
    match value {
        Value::String(text) => is_text(schema, text),
        Value::Number(number) => {
            let outside = |word: &str, wrong: fn(f64, f64) -> bool| {
                let limit = schema[word].as_f64();
                limit
                    .zip(number.as_f64())
                    .is_some_and(|(limit, is)| wrong(is, limit))
            };
            if outside("minimum", |is, limit| is < limit)
                || outside("maximum", |is, limit| is > limit)
            {
                Err(format!("{value} is out of range"))
            } else {
                Ok(())
            }
        }
        Value::Array(items) if !has_room(schema, items.len()) => {
            Err(format!("{} items", items.len()))
        }
        Value::Array(items) => items
            .iter()
            .enumerate()
            .try_for_each(|(index, item)| match schema.get("items") {
                Some(schema) => {
                    conforms(whole, schema, item).map_err(|why| at(&index.to_string(), why))
                }
                None => Ok(()),
            }),
        Value::Object(fields) => {
            for name in schema["required"].as_array().into_iter().flatten() {
                let name = name.as_str().unwrap_or_default();
                if !fields.contains_key(name) {
                    return Err(format!("{name} is missing"));
                }
            }
            for (name, field) in fields {
                let known = schema["properties"].get(name);
                let schema = known.or_else(|| schema.get("additionalProperties"));
                if let Some(schema) = schema {
                    conforms(whole, schema, field).map_err(|why| at(name, why))?;
                }
            }
            Ok(())
        }
        Value::Null | Value::Bool(_) => Ok(()),
    }
}

fn has_room(schema: &Value, items: usize) -> bool {
    let items = u64::try_from(items).unwrap_or(u64::MAX);
    let few = schema["minItems"]
        .as_u64()
        .is_some_and(|least| items < least);
    let many = schema["maxItems"].as_u64().is_some_and(|most| items > most);
    !few && !many
}

fn is_of_type(schema: &Value, value: &Value) -> std::result::Result<(), String> {
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
        _ => return Ok(()),
    };
    let is = |kind: &&str| match *kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    };
    if types.iter().any(is) {
        Ok(())
    } else {
        Err(format!("{value} is no {types:?}"))
    }
}

fn is_text(schema: &Value, text: &str) -> std::result::Result<(), String> {
    let length = u64::try_from(text.chars().count()).unwrap_or(u64::MAX);
    let short = schema["minLength"]
        .as_u64()
        .is_some_and(|least| length < least);
    let long = schema["maxLength"]
        .as_u64()
        .is_some_and(|most| length > most);
    if short || long {
        return Err(format!("{length} characters"));
    }
    let Some(pattern) = schema["pattern"].as_str() else {
        return Ok(());
    };
    let pattern = Pattern::new(pattern).map_err(|error| error.to_string())?;
    if pattern.matches(text) {
        Ok(())
    } else {
        Err(format!("{text:?} is not as it must be"))
    }
}
