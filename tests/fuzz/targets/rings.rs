//! Drives the rings of rng and block, split and packed, as any driver.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| devices::virtio::rings_anything(input));
