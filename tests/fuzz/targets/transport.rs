//! Drives the virtio-pci transport as any guest: configuration space, BARs, registers, MSI-X.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| devices::virtio::pci::transport_anything(input));
