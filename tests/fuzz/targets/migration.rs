//! Feeds the destination of a migration with input that another host could send.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    if let Err(problem) = vmm::migration::receive_anything(input) {
        panic!("{problem}");
    }
});
