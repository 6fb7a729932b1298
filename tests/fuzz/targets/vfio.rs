//! Passes any function of a host through to any guest.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| devices::vfio::vfio_anything(input));
