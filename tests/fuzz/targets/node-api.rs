//! Sends any requests of any caller to the daemon's API.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bellhop_node::request_anything(input));
