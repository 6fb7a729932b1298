//! Requests made from an API's OpenAPI description, and what must be true of each answer.
//!
//! ```text
//!   description ──> schema.rs   does a value conform?  ─┐
//!        │          conforming.rs values that do        ├─> cases.rs ──> exchange.rs ──> judge.rs
//!        │          faults.rs   values with one fault  ─┘   requests     any bytes           │
//!        └───────────────────────────────────────────────────────────────────────────────────┘
//! ```
//! A generator of requests cannot know the effect of what a description allows. So a test provides
//! the known words ([`known`]) and leaves out what would end its subject. The order of cases
//! depends only on the description and the seed.
//!
//! This module owns requests and judgements. It must not know which API it tests, and it shares no
//! code with a server.

pub mod cases;
pub mod conforming;
pub mod exchange;
pub mod faults;
pub mod judge;
pub mod known;
pub mod pattern;
pub mod random;
pub mod schema;

use crate::error::{Error, Result};
use serde_json::Value;

/// A parameter in the URL.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Its schema.
    pub schema: Value,
}

/// An operation of the API.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// The method, in capitals.
    pub method: String,
    /// The path, with `{name}` for each parameter.
    pub template: String,
    /// Parameters in the path.
    pub path: Vec<Parameter>,
    /// Parameters after the question mark.
    pub query: Vec<Parameter>,
    /// The schema of the body, if the operation takes a JSON body.
    pub body: Option<Value>,
    /// The described answers, by status.
    pub responses: Value,
}

impl Operation {
    /// The path with these values for its parameters; they are not encoded.
    #[must_use]
    pub fn at(&self, value: impl Fn(&Parameter) -> String) -> String {
        let mut path = self.template.clone();
        for parameter in &self.path {
            for written in [
                format!("{{{}}}", parameter.name),
                format!("{{*{}}}", parameter.name),
            ] {
                path = path.replace(&written, &value(parameter));
            }
        }
        path
    }
}

/// An API's description.
#[derive(Debug, Clone)]
pub struct Description {
    whole: Value,
    operations: Vec<Operation>,
}

impl Description {
    /// Parses an OpenAPI 3.1 document.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the place that it does not understand: such a part would remain
    /// untested.
    pub fn new(whole: Value) -> Result<Self> {
        let mut operations = Vec::new();
        let paths = whole["paths"]
            .as_object()
            .ok_or_else(|| Error::invalid("an API's description", "it has no paths"))?;
        for (template, item) in paths {
            for (method, operation) in item.as_object().into_iter().flatten() {
                operations.push(read(&whole, template, method, operation)?);
            }
        }
        let description = Self { whole, operations };
        schema::understood(&description)?;
        Ok(description)
    }

    /// All operations.
    #[must_use]
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// The document.
    #[must_use]
    pub fn whole(&self) -> &Value {
        &self.whole
    }

    /// The operation of a request, if it is described; `path` may have a query. A path without
    /// parameters takes precedence.
    #[must_use]
    pub fn operation(&self, method: &str, path: &str) -> Option<&Operation> {
        let path = path.split('?').next().unwrap_or_default();
        self.operations
            .iter()
            .filter(|one| one.method == method && matches(&one.template, path))
            .min_by_key(|one| one.path.len())
    }

    /// True if any method is described for this path.
    #[must_use]
    pub fn knows_path(&self, path: &str) -> bool {
        let path = path.split('?').next().unwrap_or_default();
        self.operations
            .iter()
            .any(|one| matches(&one.template, path))
    }
}

fn matches(template: &str, path: &str) -> bool {
    let (mut wanted, mut given) = (template.split('/'), path.split('/'));
    loop {
        match (wanted.next(), given.next()) {
            (None, None) => return true,
            (Some(wanted), Some(_)) if wanted.starts_with("{*") => return true,
            (Some(wanted), Some(given)) if wanted == given => {}
            (Some(wanted), Some(given)) if wanted.starts_with('{') && !given.is_empty() => {}
            _ => return false,
        }
    }
}

fn read(whole: &Value, template: &str, method: &str, operation: &Value) -> Result<Operation> {
    let wrong =
        |why: String| Error::invalid(format!("the description of {method} {template}"), why);
    let mut found = Operation {
        method: method.to_ascii_uppercase(),
        template: template.to_owned(),
        path: Vec::new(),
        query: Vec::new(),
        body: None,
        responses: operation["responses"].clone(),
    };
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        let parameter = schema::resolve(whole, parameter);
        let name = parameter["name"]
            .as_str()
            .ok_or_else(|| wrong("a parameter has no name".into()))?;
        let one = Parameter {
            name: name.to_owned(),
            schema: parameter["schema"].clone(),
        };
        match parameter["in"].as_str() {
            Some("path") => found.path.push(one),
            Some("query") => found.query.push(one),
            // Headers have tests of their own.
            Some("header") => {}
            other => return Err(wrong(format!("{name} is in {other:?}"))),
        }
    }
    let named = template.matches('{').count();
    if named != found.path.len() {
        return Err(wrong(format!(
            "{named} parameters in the path, {} described",
            found.path.len()
        )));
    }
    let body = &operation["requestBody"];
    if !body.is_null() {
        let types = ["application/json", "application/merge-patch+json"];
        let schemas = types.map(|one| &body["content"][one]["schema"]);
        let schema = schemas.into_iter().find(|schema| !schema.is_null());
        let schema = schema.ok_or_else(|| wrong("a body that is not JSON".into()))?;
        found.body = Some(schema.clone());
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
