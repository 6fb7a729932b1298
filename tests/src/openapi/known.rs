//! Facts that a test knows and a description does not: existing files, usable names.

use serde_json::Value;
use std::collections::BTreeMap;

/// Values for properties and parameters, by their names: `kernel`, or `VmConfig.kernel` for one of
/// that schema only. `VmConfig.*` are whole values: the first is the smallest, the last the
/// largest.
#[derive(Debug, Clone, Default)]
pub struct Known(BTreeMap<String, Vec<Value>>);

impl Known {
    /// Adds a value. The first value of a name is used in the smallest valid request.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0
            .entry(name.to_owned())
            .or_default()
            .push(value.into());
        self
    }

    /// The values of a property of a schema.
    #[must_use]
    pub fn of(&self, schema: &str, property: &str) -> &[Value] {
        self.0
            .get(&format!("{schema}.{property}"))
            .or_else(|| self.0.get(property))
            .map_or(&[], Vec::as_slice)
    }
}
