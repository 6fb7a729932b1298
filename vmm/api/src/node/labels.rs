//! Labels, which select VMs, and annotations, which are only stored.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

/// Keys and their values.
pub type Labels = BTreeMap<String, String>;

/// The most labels of a VM, the most annotations, and the most parts of a selector.
const LABELS_MAX: usize = 32;
/// The longest key, and the longest value of a label, in bytes.
const LABEL_MAX: usize = 63;
/// The longest value of an annotation, in characters.
const ANNOTATION_MAX: usize = 512;

const KEY_PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$";
const VALUE_PATTERN: &str = "^[A-Za-z0-9._/-]{0,63}$";

/// An invalid label, annotation or selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadLabel {
    /// An invalid key.
    #[error(
        "{0:?} is not a key: it has 1 to {LABEL_MAX} letters, digits, dots, underscores, \
         slashes or hyphens, and begins with a letter or digit"
    )]
    Key(String),
    /// An invalid value of a label.
    #[error(
        "{0:?} is not a label's value: it has up to {LABEL_MAX} letters, digits, dots, \
         underscores, slashes or hyphens"
    )]
    Value(String),
    /// An invalid value of the annotation with this key.
    #[error("the annotation {0} has more than {ANNOTATION_MAX} characters")]
    LongAnnotation(String),
    /// Too many.
    #[error("too many labels or annotations ({0}): at most {LABELS_MAX} are possible")]
    TooMany(usize),
}

/// The beginning of a client's text.
fn shown(text: &str) -> String {
    text.chars().take(LABEL_MAX).collect()
}

fn is_text(text: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
    text.len() <= LABEL_MAX && text.bytes().all(known)
}

fn check_key(key: &str) -> Result<(), BadLabel> {
    if is_text(key) && key.starts_with(|first: char| first.is_ascii_alphanumeric()) {
        Ok(())
    } else {
        Err(BadLabel::Key(shown(key)))
    }
}

fn check_value(value: &str) -> Result<(), BadLabel> {
    if is_text(value) {
        Ok(())
    } else {
        Err(BadLabel::Value(shown(value)))
    }
}

fn check_keys(all: &Labels) -> Result<(), BadLabel> {
    if all.len() > LABELS_MAX {
        return Err(BadLabel::TooMany(all.len()));
    }
    all.keys().try_for_each(|key| check_key(key))
}

/// Checks labels.
///
/// # Errors
/// There are too many, or one is invalid.
pub fn check_labels(labels: &Labels) -> Result<(), BadLabel> {
    check_keys(labels)?;
    labels.values().try_for_each(|value| check_value(value))
}

/// Checks annotations.
///
/// # Errors
/// There are too many, or one is invalid or too long.
pub fn check_annotations(annotations: &Labels) -> Result<(), BadLabel> {
    check_keys(annotations)?;
    let long = annotations
        .iter()
        .find(|(_, value)| value.chars().count() > ANNOTATION_MAX);
    long.map_or(Ok(()), |(key, _)| {
        Err(BadLabel::LongAnnotation(key.clone()))
    })
}

fn schema(about: &str, value: ObjectBuilder) -> Object {
    let text = || ObjectBuilder::new().schema_type(SchemaType::new(Type::String));
    ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::Object))
        .description(Some(about))
        .max_properties(Some(LABELS_MAX))
        .property_names(Some(text().pattern(Some(KEY_PATTERN)).build()))
        .additional_properties(Some(value.schema_type(SchemaType::new(Type::String))))
        .build()
}

/// The schema of labels.
#[must_use]
pub fn labels_schema() -> Object {
    schema(
        "Its labels, for selectors",
        ObjectBuilder::new().pattern(Some(VALUE_PATTERN)),
    )
}

/// The schema of annotations.
#[must_use]
pub fn annotations_schema() -> Object {
    schema(
        "Its annotations: texts for people and programs, which the daemon only stores",
        ObjectBuilder::new().max_length(Some(ANNOTATION_MAX)),
    )
}

/// Labels that a VM must have: `KEY=VALUE`, or `KEY` with any value, separated by commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selector(Vec<(String, Option<String>)>);

impl Selector {
    /// Whether a VM with these labels is selected.
    #[must_use]
    pub fn selects(&self, labels: &Labels) -> bool {
        self.0.iter().all(|(key, value)| {
            let label = labels.get(key);
            label.is_some_and(|label| value.as_ref().is_none_or(|value| value == label))
        })
    }
}

impl FromStr for Selector {
    type Err = BadLabel;

    fn from_str(text: &str) -> Result<Self, BadLabel> {
        let count = text.split(',').count();
        if count > LABELS_MAX {
            return Err(BadLabel::TooMany(count));
        }
        let parts = text.split(',').map(|part| {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (part, None),
            };
            check_key(key)?;
            value.map_or(Ok(()), check_value)?;
            Ok((key.to_owned(), value.map(str::to_owned)))
        });
        parts.collect::<Result<_, BadLabel>>().map(Self)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, value)) in self.0.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(f, "{comma}{key}")?;
            if let Some(value) = value {
                write!(f, "={value}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(all: &[(&str, &str)]) -> Labels {
        let all = all.iter();
        all.map(|&(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }

    #[test]
    fn a_selector_wants_each_of_its_labels() {
        let web = labels(&[("tier", "web"), ("example.org/env", "prod")]);
        for (text, selects) in [
            ("tier=web", true),
            ("tier", true),
            ("tier=web,example.org/env=prod", true),
            ("tier=", false),
            ("tier=db", false),
            ("tier=web,rack", false),
        ] {
            let selector: Selector = text.parse().unwrap();
            assert_eq!(selector.selects(&web), selects, "{text}");
            assert_eq!(selector.to_string(), text);
        }
        let many = vec!["a"; LABELS_MAX + 1].join(",");
        for wrong in ["", "=web", "tier=web,", "-a", "a b", "a=b=c", "a=ä", &many] {
            assert!(wrong.parse::<Selector>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn labels_and_annotations_have_limits() {
        let long = "a".repeat(64);
        assert_eq!(
            check_labels(&labels(&[("a", ""), ("b/c.d_e-f", "g")])),
            Ok(())
        );
        for (key, value) in [
            ("", "a"),
            (".a", "a"),
            (&long, "a"),
            ("a", &long),
            ("a", "b c"),
        ] {
            assert!(
                check_labels(&labels(&[(key, value)])).is_err(),
                "{key}={value}"
            );
        }
        let text = "ä\n".repeat(ANNOTATION_MAX / 2);
        assert_eq!(check_annotations(&labels(&[("a", &text)])), Ok(()));
        let long = "a".repeat(ANNOTATION_MAX + 1);
        assert!(check_annotations(&labels(&[("a", &long)])).is_err());
        let many: Labels = (0..=LABELS_MAX)
            .map(|number| (format!("a{number}"), String::new()))
            .collect();
        assert_eq!(check_labels(&many), Err(BadLabel::TooMany(33)));
        assert_eq!(check_annotations(&many), Err(BadLabel::TooMany(33)));
    }
}
