//! Every decoder of `vmm::snapshot`, with what a file or the other end of a migration could hold.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm::snapshot::decode_anything(input));
