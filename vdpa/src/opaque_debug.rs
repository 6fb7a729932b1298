//! `Debug` for types with parts that have none, or that are secret or long.

/// Implements `Debug` with these values only: `TYPE`, or `TYPE, this => NAME: VALUE, …`.
#[doc(hidden)]
#[macro_export]
macro_rules! opaque_debug {
    ($type:ident $(<$lifetime:lifetime>)?) => {
        impl std::fmt::Debug for $type $(<$lifetime>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($type)).finish_non_exhaustive()
            }
        }
    };
    (
        $type:ident $(<$lifetime:lifetime>)?, $this:ident =>
        $($name:ident: $value:expr),+ $(,)?
    ) => {
        impl std::fmt::Debug for $type $(<$lifetime>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $this = self;
                f.debug_struct(stringify!($type))
                    $(.field(stringify!($name), &$value))+
                    .finish_non_exhaustive()
            }
        }
    };
}
