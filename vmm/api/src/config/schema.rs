//! Schemas of values with their own text format, for the API's description.
//!
//! It must not know the parsers; a test compares both.

use utoipa::openapi::schema::{
    AdditionalProperties, Array, ArrayBuilder, Object, ObjectBuilder, OneOfBuilder, Schema,
    SchemaType, Type,
};

use super::HostCpus;

/// Six pairs of hexadecimal digits; the first byte of a unicast address is even.
const MAC_PATTERN: &str = "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$";
/// A number and its unit.
const SIZE_PATTERN: &str = "^[0-9]+[KkMmGgTt](iB|B)?$";

/// The meaning of the sizes of huge pages.
const HUGEPAGES: &str = "Back guest memory with huge pages of the host of this size\n\n\
                         * `2M`: 2 MiB\n* `1G`: 1 GiB";

/// The builder of a string schema.
fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::new(Type::String))
}

/// A string, or null.
fn text_or_null() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::Array(vec![Type::String, Type::Null]))
}

/// One of these strings, or null.
fn one_of_or_null(texts: &[&str]) -> ObjectBuilder {
    let texts = texts.iter().copied().map(serde_json::Value::from);
    text_or_null().enum_values(Some(texts.chain([serde_json::Value::Null])))
}

fn integer(minimum: u16, maximum: u16) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::Integer))
        .minimum(Some(minimum))
        .maximum(Some(maximum))
}

fn size() -> ObjectBuilder {
    text()
        .pattern(Some(SIZE_PATTERN))
        .description(Some("An amount of memory with its unit"))
}

/// [`MacAddress`](super::MacAddress), or null as if it were absent.
pub fn mac() -> Object {
    text_or_null()
        .pattern(Some(MAC_PATTERN))
        .description(Some(
            "The unicast MAC address that the guest sees; the device's own by default",
        ))
        .examples(["52:54:00:12:34:56"])
        .build()
}

/// [`MemorySize`](super::MemorySize), or null as if it were absent.
pub fn memory_max() -> Object {
    size()
        .schema_type(SchemaType::Array(vec![Type::String, Type::Null]))
        .description(Some(
            "The most memory that a guest may have. By default the free memory of this host when \
             the source connects, of `host_numa_node` and `hugepages` if given",
        ))
        .examples(["16G"])
        .build()
}

/// [`MemorySize`](super::MemorySize) per second, or null as if it were absent.
pub fn bps() -> Object {
    size()
        .schema_type(SchemaType::Array(vec![Type::String, Type::Null]))
        .description(Some(
            "The most bytes that the guest may read and write in a second, with the unit",
        ))
        .examples(["100M"])
        .build()
}

/// [`HugePageSize`](super::HugePageSize), or null as if it were absent.
pub fn hugepages() -> Object {
    one_of_or_null(&["2M", "1G"])
        .description(Some(HUGEPAGES))
        .build()
}

/// [`MemoryConfig`](super::MemoryConfig).
pub fn memory() -> Schema {
    let full = ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::Object))
        .property("size", size().build())
        .property(
            "hugepages",
            text()
                .enum_values(Some(["2M", "1G"]))
                .description(Some(HUGEPAGES)),
        )
        .property(
            "host_numa_node",
            integer(0, u16::MAX)
                .description(Some("Allocate it on this NUMA node of the host only")),
        )
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)));
    OneOfBuilder::new()
        .item(size().examples(["512M"]))
        .item(full)
        .description(Some("Guest memory; 512M by default"))
        .build()
        .into()
}

/// [`CpuAffinity`](super::CpuAffinity).
pub fn cpu_affinity() -> Array {
    let cpus = ArrayBuilder::new()
        .items(integer(0, HostCpus::MAX - 1))
        .min_items(Some(1))
        .description(Some("CPUs of the host, by number"));
    ArrayBuilder::new()
        .items(cpus)
        .description(Some(
            "The host CPUs of each vCPU: one list per vCPU, in their order; all CPUs by default",
        ))
        .examples([serde_json::json!([[0, 1], [2]])])
        .build()
}

/// [`DoorbellMode`](super::DoorbellMode).
pub fn doorbell() -> Object {
    text()
        .enum_values(Some(["auto", "on", "off"]))
        .description(Some(doorbell_text(
            "Whether the guest kicks by stores to the device's own doorbell pages",
        )))
        .build()
}

fn doorbell_text(about: &str) -> String {
    format!(
        "{about}\n\n* `auto`: on queues that have them\n* `on`: required for all data queues\n\
         * `off`: kicks go through eventfds"
    )
}

/// A change of the mode; null keeps it.
pub fn doorbell_change() -> Object {
    one_of_or_null(&["auto", "on", "off"])
        .description(Some(doorbell_text(
            "Whether the guest gets the device's doorbells; null keeps the setting",
        )))
        .build()
}

/// [`RingWatch`](super::RingWatch).
pub fn ring_watch() -> Schema {
    let off = text()
        .enum_values(Some(["off"]))
        .description(Some("`off`: queues are not watched"));
    let seconds = integer(1, super::RingWatch::MAX)
        .description(Some("Seconds after which a stuck queue is an alarm"))
        .examples([5])
        .build();
    OneOfBuilder::new()
        .item(off.build())
        .item(seconds)
        .description(Some(
            "Whether the VMM detects stuck queues, and after how many seconds; 5 by default. It \
             reads the rings in guest memory once a second, which wakes an otherwise idle process",
        ))
        .build()
        .into()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use utoipa::PartialSchema as _;

    use super::*;
    use crate::config::{
        CpuAffinity, CpuCount, DoorbellMode, HugePageSize, MacAddress, MemoryConfig, MemorySize,
        RingWatch, VdpaConfig, VmConfig,
    };

    fn values(schema: &Value) -> Vec<Value> {
        schema["enum"].as_array().unwrap().clone()
    }

    #[test]
    fn the_schema_matches_the_parser() {
        for mode in values(&json!(doorbell())) {
            serde_json::from_value::<DoorbellMode>(mode).unwrap();
        }
        let mac = json!(mac());
        serde_json::from_value::<MacAddress>(mac["examples"][0].clone()).unwrap();
        assert_eq!(mac["type"], json!(["string", "null"]));
        let none = json!({ "path": "/dev/vhost-vdpa-0", "mac": null });
        assert_eq!(
            serde_json::from_value::<VdpaConfig>(none).unwrap().mac,
            None
        );
        let affinity = json!(cpu_affinity());
        serde_json::from_value::<CpuAffinity>(affinity["examples"][0].clone()).unwrap();
        let memory = json!(memory());
        let [size, full] = [0, 1].map(|index| &memory["oneOf"][index]);
        serde_json::from_value::<MemoryConfig>(size["examples"][0].clone()).unwrap();
        for hugepages in values(&full["properties"]["hugepages"]) {
            let config = json!({ "size": "1G", "hugepages": hugepages });
            serde_json::from_value::<MemoryConfig>(config).unwrap();
        }
        let max = json!(memory_max());
        serde_json::from_value::<MemorySize>(max["examples"][0].clone()).unwrap();
        for size in values(&json!(hugepages())) {
            serde_json::from_value::<Option<HugePageSize>>(size).unwrap();
        }
        let watch = json!(ring_watch());
        let [off, seconds] = [0, 1].map(|index| &watch["oneOf"][index]);
        for value in [&off["enum"][0], &seconds["minimum"], &seconds["maximum"]] {
            serde_json::from_value::<RingWatch>(value.clone()).unwrap();
        }
        let vm = json!(VmConfig::schema());
        let cpus = &vm["properties"]["cpus"];
        assert_eq!(cpus["maximum"], CpuCount::MAX);
        let minimal = serde_json::from_value::<VmConfig>(json!({ "kernel": "k" })).unwrap();
        assert_eq!(cpus["default"], minimal.cpus.get());
        assert_eq!(vm["required"], json!(["kernel"]));
    }
}
