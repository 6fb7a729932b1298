//! Feeds every decoder of `vmm::snapshot` with input that a file or a migration peer could hold.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm::snapshot::decode_anything(input));
