//! Names: texts of a limited form.

/// Defines a name: a text that fulfils a condition, and the error for others. serde reads it as
/// text.
macro_rules! name {
    ($(#[$meta:meta])* $name:ident, $bad:ident, $fits:expr) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize
        )]
        #[serde(try_from = "std::borrow::Cow<'_, str>")]
        pub struct $name(String);

        impl $name {
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = $bad;

            fn from_str(text: &str) -> Result<Self, $bad> {
                let fits: fn(&str) -> bool = $fits;
                if fits(text) {
                    Ok(Self(text.to_owned()))
                } else {
                    Err($bad)
                }
            }
        }

        impl TryFrom<std::borrow::Cow<'_, str>> for $name {
            type Error = $bad;

            fn try_from(text: std::borrow::Cow<'_, str>) -> Result<Self, $bad> {
                text.parse()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
