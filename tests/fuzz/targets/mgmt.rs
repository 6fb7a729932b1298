//! Feeds every decoder of `vdpa_mgmt` with input that the kernel and other processes could send.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| vdpa_mgmt::decode_anything(input));
