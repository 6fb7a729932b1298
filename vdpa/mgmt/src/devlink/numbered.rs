//! The kernel's enumerations, which newer kernels extend.
//!
//! A macro defines the conversion between a number and a variant; the attribute does not matter.

/// Defines an enumeration: each variant with the kernel's number and its name for users. An unknown
/// number becomes `Other`, which users see as `$what` and the number.
macro_rules! numbered {
    (
        $(#[$meta:meta])*
        $name:ident: $number:ty, $what:literal {
            $($(#[$doc:meta])* $variant:ident = $value:literal $text:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
            #[doc = concat!("One of a newer kernel: ", $what, " with this number.")]
            Other($number),
        }

        impl $name {
            /// The kernel's word; none for one of a newer kernel.
            #[must_use]
            pub fn word(self) -> Option<&'static str> {
                match self {
                    $(Self::$variant => Some($text),)+
                    Self::Other(_) => None,
                }
            }
        }

        impl From<$number> for $name {
            fn from(number: $number) -> Self {
                match number {
                    $($value => Self::$variant,)+
                    other => Self::Other(other),
                }
            }
        }

        impl From<$name> for $number {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => $value,)+
                    $name::Other(other) => other,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    Self::Other(other) => write!(f, "{} {other}", $what),
                    known => f.write_str(known.word().unwrap_or_default()),
                }
            }
        }
    };
}
pub(super) use numbered;
