//! Sends any requests to the API of a VM.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vmm::api::request_anything(input));
