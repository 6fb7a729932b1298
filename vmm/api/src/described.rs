//! Enums of words, with the meaning of each word in the API's description.
//!
//! utoipa drops the documentation of unit variants. `described!` writes the schema instead, from
//! the documentation of the enum and of its variants.

use std::fmt::Write as _;

use serde::Serialize;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaType, Type};

/// Defines an enum, its schema and `MEANINGS`, which has the documentation of each variant.
macro_rules! described {
    (
        $(#[doc = $about:literal])+
        #[derive($($derive:ident),+ $(,)?)]
        $(#[serde($($container:tt)*)])?
        $vis:vis enum $name:ident {
            $(
                $(#[doc = $meaning:literal])+
                $(#[default $($default:tt)?])?
                $(#[serde($($rule:tt)*)])?
                $variant:ident,
            )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive($($derive),+)]
        $(#[serde($($container)*)])?
        $vis enum $name {
            $(
                $(#[doc = $meaning])+
                $(#[default $($default)?])?
                $(#[serde($($rule)*)])?
                $variant,
            )+
        }

        impl $name {
            const MEANINGS: &'static [(Self, &'static str)] = &[
                $((Self::$variant, concat!($($meaning, "\n"),+)),)+
            ];
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                $crate::described::schema(concat!($($about, "\n"),+), Self::MEANINGS)
            }
        }

        impl utoipa::ToSchema for $name {}
    };
}

/// The documentation of a variant on one line.
pub(crate) fn line(documentation: &str) -> String {
    let words: Vec<&str> = documentation.split_whitespace().collect();
    words.join(" ")
}

/// A schema that lists the words and, in its description, their meanings.
pub(crate) fn schema<T: Serialize>(about: &str, meanings: &[(T, &str)]) -> RefOr<Schema> {
    let about: Vec<&str> = about.lines().map(str::trim).collect();
    let mut description = about.join("\n");
    description.push('\n');
    let mut words = Vec::new();
    for (word, meaning) in meanings {
        // A word that is never serialized, such as `Unknown`, is not described.
        if let Ok(serde_json::Value::String(word)) = serde_json::to_value(word) {
            // Writing to a string does not fail.
            let _ = write!(description, "\n* `{word}`: {}", line(meaning));
            words.push(word);
        }
    }
    let schema = ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::String))
        .description(Some(description))
        .enum_values(Some(words));
    RefOr::T(Schema::Object(schema.build()))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;
    use utoipa::PartialSchema as _;

    use super::*;

    described! {
        /// How it is
        /// served.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Tea {
            /// With
            /// milk.
            #[default]
            WithMilk,
            /// Without.
            #[serde(rename = "plain")]
            Black,
            /// A word of a later version.
            #[serde(other, skip_serializing)]
            Unknown,
        }
    }

    #[test]
    fn each_word_that_is_written_is_described() {
        let schema = json!(Tea::schema());
        assert_eq!(schema["enum"], json!(["with_milk", "plain"]));
        assert_eq!(
            schema["description"],
            "How it is\nserved.\n\n* `with_milk`: With milk.\n* `plain`: Without."
        );
        assert_eq!(
            serde_json::from_value::<Tea>(json!("x")).unwrap(),
            Tea::Unknown
        );
        assert_eq!(Tea::default(), Tea::WithMilk);
        assert_eq!(Tea::MEANINGS.len(), 3);
    }
}
