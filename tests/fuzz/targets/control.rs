//! Sends any control commands, and any answers of a device.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| devices::virtio::vdpa::control_anything(input));
