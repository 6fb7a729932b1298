//! Structures of the KVM uapi in a saved state. They are exactly the structure's bytes, in the
//! layout of `include/uapi/asm/kvm.h` for x86-64 (little-endian; the kernel never changes it).
//!
//! For `#[serde(with = "...")]`. The implementations in `kvm-bindings` accept any number of bytes,
//! and pad with zeros or truncate. A saved state comes from a file or a peer, and one that is too
//! short is damaged. Owns the lengths only: KVM checks the content.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserializer, Serializer};
use zerocopy::{FromBytes, Immutable, IntoBytes};

pub(crate) fn serialize<T, S>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    T: IntoBytes + Immutable,
    S: Serializer,
{
    serializer.serialize_bytes(value.as_bytes())
}

pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromBytes,
    D: Deserializer<'de>,
{
    deserializer.deserialize_bytes(Bytes(PhantomData))
}

struct Bytes<T>(PhantomData<T>);

impl<'de, T: FromBytes> Visitor<'de> for Bytes<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", size_of::<T>())
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<T, E> {
        T::read_from_bytes(bytes).map_err(|_| E::invalid_length(bytes.len(), &self))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<T, A::Error> {
        let mut bytes = Vec::with_capacity(size_of::<T>());
        while let Some(byte) = sequence.next_element::<u8>()? {
            if bytes.len() == size_of::<T>() {
                return Err(A::Error::invalid_length(bytes.len() + 1, &self));
            }
            bytes.push(byte);
        }
        self.visit_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_xcr;
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Holder(#[serde(with = "super")] kvm_xcr);

    #[derive(Serialize)]
    struct Any<'a>(&'a [u8]);

    #[test]
    fn only_the_right_length_is_taken() {
        let value = Holder(kvm_xcr {
            xcr: 1,
            reserved: 2,
            value: 3,
        });
        let bytes = postcard::to_stdvec(&value).unwrap();
        assert_eq!(bytes.len(), 1 + size_of::<kvm_xcr>());
        assert_eq!(postcard::from_bytes::<Holder>(&bytes).unwrap(), value);
        let text = serde_json::to_string(&value).unwrap();
        assert_eq!(serde_json::from_str::<Holder>(&text).unwrap(), value);
        for length in [
            0,
            1,
            size_of::<kvm_xcr>() - 1,
            size_of::<kvm_xcr>() + 1,
            4096,
        ] {
            let content = vec![7; length];
            let bytes = postcard::to_stdvec(&Any(&content)).unwrap();
            assert!(postcard::from_bytes::<Holder>(&bytes).is_err(), "{length}");
            let text = serde_json::to_string(&content).unwrap();
            assert!(serde_json::from_str::<Holder>(&text).is_err(), "{length}");
        }
    }
}
