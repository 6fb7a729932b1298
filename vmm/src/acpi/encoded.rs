//! AML in its encoded form, as a part of other AML.

use acpi_tables::{Aml, AmlSink};

/// AML that is already encoded.
pub(super) struct Encoded(pub(super) Vec<u8>);

impl Aml for Encoded {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}
