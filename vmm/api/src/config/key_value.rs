//! Parses `key=value,key=value` into the same serde types as TOML and JSON.
//!
//! A comma inside a value is doubled (`path=a,,b`), as in QEMU. Booleans are `on` and `off` (or
//! `true` and `false`). The types themselves reject unknown and duplicate keys.

use std::borrow::Cow;

use serde::de::value::MapDeserializer;
use serde::de::{self, DeserializeOwned, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

/// Why a list of options is invalid; the message names the option.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct KeyValueError(String);

impl de::Error for KeyValueError {
    fn custom<T: std::fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

/// Parses `key=value,key=value` into `T`.
///
/// # Errors
/// Malformed text, an unknown or duplicate key, a missing key, a value of the wrong kind.
pub fn from_key_value<T: DeserializeOwned>(text: &str) -> Result<T, KeyValueError> {
    read(pairs(text)?)
}

/// The same for an object with a path, which may come first without its key: `FILE,key=value`.
///
/// # Errors
/// As [`from_key_value`].
pub fn from_path_or_key_value<T: DeserializeOwned>(text: &str) -> Result<T, KeyValueError> {
    let first = text.split(',').next().unwrap_or(text);
    // No key has a slash.
    if text.starts_with('/') || !(first.is_empty() || first.contains('=')) {
        from_key_value(&format!("path={text}"))
    } else {
        from_key_value(text)
    }
}

/// The same except for one key, whose value is returned separately as text: `keys` are its
/// spellings.
///
/// # Errors
/// As [`from_key_value`].
pub fn from_key_value_but<T: DeserializeOwned>(
    text: &str,
    keys: &[&str],
) -> Result<(T, Option<String>), KeyValueError> {
    let mut pairs = pairs(text)?;
    let at = pairs
        .iter()
        .position(|(name, _)| keys.contains(&name.as_str()));
    let value = at.map(|at| pairs.remove(at).1.text);
    if pairs.iter().any(|(name, _)| keys.contains(&name.as_str())) {
        let names = keys.join(" or ");
        return Err(KeyValueError(format!("{names} is given twice")));
    }
    Ok((read(pairs)?, value))
}

fn read<T: DeserializeOwned>(pairs: Vec<(String, Value)>) -> Result<T, KeyValueError> {
    T::deserialize(MapDeserializer::new(pairs.into_iter()))
}

fn pairs(text: &str) -> Result<Vec<(String, Value)>, KeyValueError> {
    let mut pairs: Vec<(String, Value)> = Vec::new();
    for option in split(text) {
        let Some((key, value)) = option.split_once('=') else {
            return Err(KeyValueError(format!(
                "{option:?} is not of the form key=value"
            )));
        };
        if pairs.iter().any(|(earlier, _)| earlier == key) {
            return Err(KeyValueError(format!("{key} is given twice")));
        }
        let value = Value {
            key: key.to_owned(),
            text: value.to_owned(),
        };
        pairs.push((key.to_owned(), value));
    }
    Ok(pairs)
}

/// Splits at single commas; doubled ones become one.
fn split(text: &str) -> Vec<Cow<'_, str>> {
    let mut options = Vec::new();
    let mut current = String::new();
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c != ',' {
            current.push(c);
        } else if rest.next_if_eq(&',').is_some() {
            current.push(',');
        } else {
            options.push(Cow::Owned(std::mem::take(&mut current)));
        }
    }
    options.push(Cow::Owned(current));
    options
}

/// One value as text; the requested type decides whether it is a number or a boolean.
struct Value {
    key: String,
    text: String,
}

impl Value {
    fn parse<T: std::str::FromStr>(&self, what: &str) -> Result<T, KeyValueError> {
        self.text
            .parse()
            .map_err(|_| KeyValueError(format!("{}={:?}: expected {what}", self.key, self.text)))
    }

    fn boolean(&self) -> Result<bool, KeyValueError> {
        match self.text.as_str() {
            "on" | "true" => Ok(true),
            "off" | "false" => Ok(false),
            _ => self.parse("on or off"),
        }
    }
}

impl IntoDeserializer<'_, KeyValueError> for Value {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! unsigned {
    ($($method:ident $visit:ident),*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyValueError> {
            visitor.$visit(self.parse("a number in range")?)
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Value {
    type Error = KeyValueError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyValueError> {
        let Self { key, text } = self;
        visitor
            .visit_string(text)
            .map_err(|KeyValueError(message)| KeyValueError(format!("{key}: {message}")))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyValueError> {
        visitor.visit_bool(self.boolean()?)
    }

    unsigned!(
        deserialize_u8 visit_u8,
        deserialize_u16 visit_u16,
        deserialize_u32 visit_u32,
        deserialize_u64 visit_u64
    );

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyValueError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, KeyValueError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, KeyValueError> {
        let Self { key, text } = self;
        visitor
            .visit_enum(IntoDeserializer::<KeyValueError>::into_deserializer(text))
            .map_err(|KeyValueError(message)| KeyValueError(format!("{key}: {message}")))
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}
