//! Serves a queue of a NIC without hardware, with any driver, mappings and messages.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vdpa::vduse::nic::serve_anything(input));
