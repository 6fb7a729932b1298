//! Types whose text form is their `FromStr` and `Display`.

/// Converts such a type from and to a `String`, for `serde(try_from = "String", into = "String")`.
#[doc(hidden)]
#[macro_export]
macro_rules! text_form {
    ($name:ident, $error:ident) => {
        impl TryFrom<String> for $name {
            type Error = $error;

            fn try_from(text: String) -> Result<Self, $error> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }
    };
}
