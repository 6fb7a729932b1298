//! Drives virtio-iommu as any driver, with devices that refuse its changes.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| devices::virtio::iommu::iommu_anything(input));
