//! Every decoder of `vdpa::mgmt`, with what the kernel and other processes could send.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vdpa::mgmt::decode_anything(input));
