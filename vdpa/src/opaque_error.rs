//! The common shape of each crate's error: a kind for code, a message with the remedy for the user,
//! and its source. The kinds belong to the crates.

/// Defines `Error` beside an `ErrorKind`, with these attributes and constructors of this
/// visibility. The crate adds `kind()` and constructors of its own.
#[doc(hidden)]
#[macro_export]
macro_rules! opaque_error {
    ($(#[$meta:meta])* $vis:vis) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct Error(Box<Inner>);

        #[derive(Debug)]
        struct Inner {
            kind: ErrorKind,
            /// `None` if the source is sufficient.
            message: Option<String>,
            hint: Option<&'static str>,
            source: Option<Box<dyn std::error::Error + Send + Sync>>,
        }

        impl Error {
            /// An error without a source.
            #[must_use]
            $vis fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
                Self(Box::new(Inner {
                    kind,
                    message: Some(message.into()),
                    hint: None,
                    source: None,
                }))
            }

            /// A kind for an error of another type, which keeps its text.
            #[must_use]
            $vis fn transparent(
                kind: ErrorKind,
                source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
            ) -> Self {
                let mut error = Self::new(kind, "").because(source);
                error.0.message = None;
                error
            }

            /// The same error with its source.
            #[must_use]
            $vis fn because(
                mut self,
                source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
            ) -> Self {
                self.0.source = Some(source.into());
                self
            }

            /// The same error with a hint.
            #[must_use]
            $vis fn hint(mut self, hint: &'static str) -> Self {
                self.0.hint = Some(hint);
                self
            }

            /// The remedy, if the text lacks it.
            #[must_use]
            $vis fn remedy(&self) -> Option<&'static str> {
                self.0.hint
            }
        }

        impl std::fmt::Display for Error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match (&self.0.message, &self.0.source) {
                    (Some(message), _) => f.write_str(message),
                    (None, Some(source)) => std::fmt::Display::fmt(source, f),
                    (None, None) => Ok(()),
                }
            }
        }

        impl std::error::Error for Error {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                let source = self.0.source.as_deref()?;
                if self.0.message.is_none() {
                    return source.source();
                }
                Some(source)
            }
        }
    };
}

/// Converts errors of other types, which keep their texts, into `Error`. Each row has the type, and
/// the kind of the result.
#[doc(hidden)]
#[macro_export]
macro_rules! error_from {
    ($($source:ty as $error:ident => $kind:expr),+ $(,)?) => {
        $(impl From<$source> for Error {
            fn from($error: $source) -> Self {
                Self::transparent($kind, $error)
            }
        })+
    };
}
