//! Tests of packed rings: the guest is the library's own driver, the device follows the
//! specification alone. Honest and hostile ones of both.

pub(super) mod fuzz;
#[cfg(test)]
mod hostile;
mod model;
#[cfg(test)]
mod traffic;
