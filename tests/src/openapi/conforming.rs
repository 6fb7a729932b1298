//! Values that conform to a schema.

use super::known::Known;
use super::pattern::Pattern;
use super::random::Random;
use super::schema::{name, resolve};
use serde_json::{Map, Value, json};

/// Deeper schemas are cut: a description may refer to itself.
const DEPTH_MAX: u32 = 12;

/// How much a value contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Only required properties.
    Least,
    /// Everything, and one of each list.
    All,
    /// A random choice.
    Any,
}

/// Generates values.
#[derive(Debug)]
pub struct Maker<'a> {
    /// The description.
    pub whole: &'a Value,
    /// The test's known values.
    pub known: &'a Known,
    /// Chooses among several values.
    pub random: &'a mut Random,
}

impl Maker<'_> {
    /// A value of this schema.
    pub fn value(&mut self, schema: &Value, extent: Extent) -> Value {
        self.make(schema, "", "", extent, 0)
    }

    /// A value for a parameter, as text and not encoded. `operation` takes the place of a schema's
    /// name.
    pub fn parameter(
        &mut self,
        operation: &str,
        parameter: &super::Parameter,
        extent: Extent,
    ) -> String {
        match self.make(&parameter.schema, operation, &parameter.name, extent, 0) {
            Value::String(text) => text,
            other => other.to_string(),
        }
    }

    fn make(
        &mut self,
        schema: &Value,
        owner: &str,
        property: &str,
        extent: Extent,
        depth: u32,
    ) -> Value {
        let known = self.known.of(owner, property);
        let chosen = match extent {
            Extent::Any => self.random.one_of(known),
            Extent::Least | Extent::All => known.first(),
        };
        if let Some(known) = chosen {
            return known.clone();
        }
        let owner = match name(schema) {
            "" => owner,
            named => named,
        };
        let whole = self.known.of(owner, "*");
        let chosen = match extent {
            Extent::Least => whole.first(),
            Extent::All => whole.last(),
            Extent::Any => self.random.one_of(whole),
        };
        // For constraints that a schema cannot express: one field excludes another.
        if let (Some(known), false) = (chosen, name(schema).is_empty()) {
            return known.clone();
        }
        let schema = resolve(self.whole, schema);
        if let Some(only) = schema.get("const") {
            return only.clone();
        }
        for word in ["enum", "examples"] {
            if let Some(all) = schema[word].as_array() {
                let chosen = match extent {
                    Extent::Any => self.random.one_of(all),
                    Extent::Least | Extent::All => all.first(),
                };
                return chosen.cloned().unwrap_or_default();
            }
        }
        for word in ["oneOf", "anyOf"] {
            if let Some(all) = schema[word].as_array() {
                let some: Vec<&Value> = all.iter().filter(|one| one["type"] != "null").collect();
                let chosen = match extent {
                    Extent::Any => self.random.one_of(&some),
                    Extent::Least | Extent::All => some.first(),
                };
                return chosen.map_or(Value::Null, |one| {
                    self.make(one, owner, property, extent, depth + 1)
                });
            }
        }
        if let Some(parts) = schema["allOf"].as_array() {
            let mut all = Map::new();
            for part in parts {
                if let Value::Object(fields) = self.make(part, owner, property, extent, depth + 1) {
                    all.extend(fields);
                }
            }
            return Value::Object(all);
        }
        match kind(schema) {
            "object" => self.object(schema, owner, extent, depth),
            "array" => {
                let count = match extent {
                    Extent::Least => 0,
                    Extent::All => 1,
                    Extent::Any => self.random.below(3),
                };
                let count = if depth < DEPTH_MAX { count } else { 0 };
                let least = schema["minItems"]
                    .as_u64()
                    .and_then(|least| usize::try_from(least).ok());
                let most = schema["maxItems"]
                    .as_u64()
                    .and_then(|most| usize::try_from(most).ok());
                let count = count
                    .max(least.unwrap_or(0))
                    .min(most.unwrap_or(usize::MAX));
                (0..count)
                    .map(|_| self.make(&schema["items"], owner, property, extent, depth + 1))
                    .collect()
            }
            "string" => self.text(schema).into(),
            "integer" | "number" => self.number(schema, extent),
            "boolean" => json!(self.random.below(2) == 0),
            "null" => Value::Null,
            _ => json!({}),
        }
    }

    fn object(&mut self, schema: &Value, owner: &str, extent: Extent, depth: u32) -> Value {
        let mut fields = Map::new();
        for (property, schema_of) in schema["properties"].as_object().into_iter().flatten() {
            let needed = needs(schema, property);
            let wanted = match extent {
                Extent::Least => false,
                Extent::All => depth < DEPTH_MAX,
                Extent::Any => depth < DEPTH_MAX && self.random.below(2) == 0,
            };
            if needed || wanted {
                let value = self.make(schema_of, owner, property, extent, depth + 1);
                fields.insert(property.clone(), value);
            }
        }
        Value::Object(fields)
    }

    fn text(&mut self, schema: &Value) -> String {
        let pattern = schema["pattern"].as_str();
        if let Some(pattern) = pattern.and_then(|pattern| Pattern::new(pattern).ok()) {
            return pattern.sample(self.random);
        }
        let least = schema["minLength"].as_u64().unwrap_or(1).max(1);
        "w".repeat(usize::try_from(least).unwrap_or(1))
    }

    fn number(&mut self, schema: &Value, extent: Extent) -> Value {
        if let (Some(default), true) = (schema.get("default"), extent != Extent::Any) {
            return default.clone();
        }
        let least = schema["minimum"].as_i64().unwrap_or(0);
        // The limits of a format do not tell which values are useful.
        let formats = [i64::from(u8::MAX), i64::from(u16::MAX), i64::from(u32::MAX)];
        let most = schema["maximum"].as_i64();
        let most = most
            .filter(|most| !formats.contains(most))
            .unwrap_or(least.saturating_add(3));
        let steps = usize::try_from(most.saturating_sub(least)).unwrap_or(0);
        let step = match extent {
            Extent::Any => self.random.below(steps.saturating_add(1)),
            Extent::Least | Extent::All => 0,
        };
        json!(least.saturating_add(i64::try_from(step).unwrap_or(0)))
    }
}

/// True if a property is required.
pub(super) fn needs(schema: &Value, property: &str) -> bool {
    let required = schema["required"].as_array();
    required.is_some_and(|all| all.iter().any(|one| one == property))
}

/// The type that a value of a schema gets here: the first of several that is not null.
fn kind(schema: &Value) -> &str {
    match &schema["type"] {
        Value::String(one) => one,
        Value::Array(all) => all
            .iter()
            .filter_map(Value::as_str)
            .find(|one| *one != "null")
            .unwrap_or("null"),
        _ if schema["properties"].is_object() => "object",
        _ => "",
    }
}
