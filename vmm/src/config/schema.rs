//! What the API's description says of values that are text with a form of their own.
//!
//! It must not know how they are parsed; a test holds both against each other.

use utoipa::openapi::schema::{
    AdditionalProperties, Object, ObjectBuilder, OneOfBuilder, Schema, SchemaType, Type,
};

/// Six pairs of hexadecimal digits.
const MAC_PATTERN: &str = "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$";
/// A number and its unit.
const SIZE_PATTERN: &str = "^[0-9]+[KkMmGgTt](iB|B)?$";

/// A string; its builder, for more to be said.
fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::new(Type::String))
}

fn size() -> ObjectBuilder {
    text()
        .pattern(Some(SIZE_PATTERN))
        .description(Some("An amount of memory with its unit"))
}

/// [`MacAddress`](super::MacAddress).
pub(crate) fn mac() -> Object {
    text()
        .pattern(Some(MAC_PATTERN))
        .description(Some(
            "The MAC address that the guest sees, unicast; the device's own where none is given",
        ))
        .examples(["52:54:00:12:34:56"])
        .build()
}

/// [`MemoryConfig`](super::MemoryConfig).
pub(crate) fn memory() -> Schema {
    let full = ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::Object))
        .property("size", size().build())
        .property(
            "hugepages",
            text()
                .enum_values(Some(["2M", "1G"]))
                .description(Some("Back it with huge pages of the host of this size")),
        )
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)));
    OneOfBuilder::new()
        .item(size().examples(["512M"]))
        .item(full)
        .description(Some("Guest memory; 512M where none is given"))
        .build()
        .into()
}

/// [`DoorbellMode`](super::DoorbellMode).
pub(crate) fn doorbell() -> Object {
    text()
        .enum_values(Some(["auto", "on", "off"]))
        .description(Some(
            "Whether the guest kicks by stores in the device's own doorbell pages (auto: where \
             queues have them; on: all data queues must; off: by eventfds)",
        ))
        .build()
}
