//! Runs relays between any driver and any device.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vdpa::relay::relay_anything(input));
