//! Tests of packed rings: the guest is the library's own driver, the device follows the
//! specification alone. Honest and hostile ones of both.

mod hostile;
mod model;
mod traffic;
