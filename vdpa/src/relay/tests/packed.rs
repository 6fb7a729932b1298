//! Packed rings: a guest that is our own driver, a device written by the
//! specification alone, honest and hostile ones of both.

mod hostile;
mod model;
mod traffic;
