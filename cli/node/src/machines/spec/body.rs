//! A VM in a request: the members of [`Vm`](bellhop_api::node::Vm) that clients set, and those of
//! the daemon, which they may send back.
//!
//! ```text
//!   name         must be that of the path      labels, annotations, spec   are set
//!   generation   a condition, as `If-Match`    status                      is ignored
//! ```
//! Owns the form of a request's body. It must not know the effects of a spec.

use std::borrow::Cow;

use bellhop_api::node::{
    Labels, annotations_schema, check_annotations, check_labels, labels_schema,
};
use serde::de::{self, Deserializer};
use serde::ser::{self, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{
    AdditionalProperties, AnyOfBuilder, Object, ObjectBuilder, Schema, SchemaType, Type,
};
use utoipa::{PartialSchema, ToSchema};
use vmm::http::HttpError;
use vmm::http::body::invalid;

use super::{VmName, VmSpec};
use crate::error::Error;
use crate::machines::condition::Condition;

/// A virtual machine in a request.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmBody {
    /// Its name, if it is given, is that of the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
    name: Option<String>,
    /// Its labels, for selectors.
    #[serde(default, deserialize_with = "labels")]
    #[schema(schema_with = labels_schema)]
    labels: Labels,
    /// Its annotations.
    #[serde(default, deserialize_with = "annotations")]
    #[schema(schema_with = annotations_schema)]
    annotations: Labels,
    /// The request is carried out only at this generation, as with `If-Match`; else 412.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
    /// Its desired configuration.
    #[schema(value_type = VmSpec)]
    spec: Members,
    /// Ignored: the daemon observes it.
    #[serde(default, rename = "status", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    _status: Option<Map<String, Value>>,
}

/// A spec whose labels and annotations are elsewhere.
#[derive(Debug)]
struct Members(VmSpec);

impl Serialize for Members {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let members = self.0.members().map_err(ser::Error::custom)?;
        members.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let members = Map::deserialize(deserializer)?;
        VmSpec::of_members(members, Labels::new(), Labels::new()).map(Self)
    }
}

fn labels<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Labels, D::Error> {
    let labels = Labels::deserialize(deserializer)?;
    check_labels(&labels).map_err(de::Error::custom)?;
    Ok(labels)
}

fn annotations<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Labels, D::Error> {
    let annotations = Labels::deserialize(deserializer)?;
    check_annotations(&annotations).map_err(de::Error::custom)?;
    Ok(annotations)
}

impl From<VmSpec> for VmBody {
    fn from(spec: VmSpec) -> Self {
        Self {
            name: None,
            labels: spec.labels.clone(),
            annotations: spec.annotations.clone(),
            generation: None,
            spec: Members(spec),
            _status: None,
        }
    }
}

impl From<VmBody> for VmSpec {
    fn from(body: VmBody) -> Self {
        Self {
            labels: body.labels,
            annotations: body.annotations,
            ..body.spec.0
        }
    }
}

impl VmBody {
    /// The spec for the VM of this name, and the request's condition.
    ///
    /// # Errors
    /// The body has another name.
    pub(crate) fn for_vm(
        self,
        vm: &VmName,
        condition: Condition,
    ) -> Result<(VmSpec, Condition), Error> {
        if self.name.as_ref().is_some_and(|name| name != vm.as_str()) {
            let (at, reason) = ("/name", format!("the path says {vm}: leave `name` out"));
            return Err(refused(at, reason));
        }
        let condition = match self.generation {
            Some(generation) => condition.and_at(generation),
            None => condition,
        };
        Ok((self.into(), condition))
    }

    /// Reads the result of a patch.
    pub(crate) fn read(patched: Value) -> Result<Self, Error> {
        let body = serde_path_to_error::deserialize(patched);
        body.map_err(|error| invalid(error).into())
    }
}

/// The error for a member, named by a JSON pointer.
pub(crate) fn refused(at: &str, reason: String) -> Error {
    let at = at.to_owned();
    HttpError::Invalid { at, reason }.into()
}

/// A merge patch (RFC 7396) of a [`VmBody`].
pub(crate) enum VmPatch {}

impl VmPatch {
    /// Fails if a member is unknown. Applied to the VM, one with the value null would have no
    /// effect.
    pub(crate) fn check(patch: &Value) -> Result<(), Error> {
        check_members(&Self::schema(), patch, "")
    }
}

fn check_members(schema: &RefOr<Schema>, patch: &Value, at: &str) -> Result<(), Error> {
    let (Some(object), Value::Object(patch)) = (object_of(schema), patch) else {
        return Ok(());
    };
    for (name, value) in patch {
        let Some(member) = object.properties.get(name) else {
            let known: Vec<&str> = object.properties.keys().map(String::as_str).collect();
            let known = known.join("`, `");
            let reason = format!("unknown field `{name}`, expected one of `{known}`");
            return Err(refused(at, reason));
        };
        check_members(member, value, &format!("{at}/{name}"))?;
    }
    Ok(())
}

/// The object with named members that a schema allows.
fn object_of(schema: &RefOr<Schema>) -> Option<&Object> {
    let RefOr::T(schema) = schema else {
        return None;
    };
    match schema {
        Schema::Object(object) => Some(object).filter(|object| !object.properties.is_empty()),
        Schema::OneOf(one) => one.items.iter().find_map(object_of),
        Schema::AnyOf(any) => any.items.iter().find_map(object_of),
        _ => None,
    }
}

/// A member, or null, which restores its default.
fn or_null(member: RefOr<Schema>) -> RefOr<Schema> {
    let null = ObjectBuilder::new().schema_type(SchemaType::new(Type::Null));
    let either = AnyOfBuilder::new().item(member).item(null);
    RefOr::T(Schema::AnyOf(either.build()))
}

/// Labels in a patch: null removes one.
fn removable(mut labels: Object) -> RefOr<Schema> {
    if let Some(AdditionalProperties::RefOr(RefOr::T(Schema::Object(value)))) =
        labels.additional_properties.as_deref_mut()
    {
        value.schema_type = SchemaType::Array(vec![Type::String, Type::Null]);
    }
    or_null(labels.into())
}

/// A patch of a spec.
fn spec_patch() -> RefOr<Schema> {
    let mut schema = VmSpec::schema();
    if let RefOr::T(Schema::Object(object)) = &mut schema {
        let required = std::mem::take(&mut object.required);
        let optional = object.properties.iter_mut();
        for (_, member) in optional.filter(|(name, _)| !required.contains(name)) {
            *member = or_null(member.clone());
        }
        object.description = Some("Its desired configuration: null restores a default".to_owned());
    }
    schema
}

impl PartialSchema for VmPatch {
    fn schema() -> RefOr<Schema> {
        let mut schema = VmBody::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema {
            for (name, member) in [
                ("labels", removable(labels_schema())),
                ("annotations", removable(annotations_schema())),
                ("spec", spec_patch()),
            ] {
                object.properties.insert(name.to_owned(), member);
            }
            object.required.clear();
            object.description = Some("A merge patch (RFC 7396) for a `VmBody`".to_owned());
        }
        schema
    }
}

impl ToSchema for VmPatch {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("VmPatch")
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        VmSpec::schemas(schemas);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bellhop_api::node::{VmNicDevice, VmObserved};
    use serde_json::json;

    use super::*;
    use crate::machines::condition::tag;
    use crate::machines::spec::{Desired, NicSpec};

    fn read(body: Value) -> Result<(VmSpec, Condition), Error> {
        let vm = "web".parse().unwrap();
        VmBody::read(body)?.for_vm(&vm, Condition::None)
    }

    #[test]
    fn a_vm_that_was_read_can_be_sent_back() {
        let body = json!({
            "name": "web", "generation": 17, "labels": { "tier": "web" },
            "annotations": { "note": "x y" }, "status": { "phase": "Running", "pid": 7 },
            "spec": { "kernel": "/k", "state": "Stopped", "disks": [{ "path": "/d" }] },
        });
        let (spec, condition) = read(body).unwrap();
        assert_eq!(condition, Condition::At(vec![tag(17)]));
        assert_eq!(spec.state, Desired::Stopped);
        assert_eq!((spec.labels.len(), spec.annotations.len()), (1, 1));
        let again = serde_json::to_value(VmBody::from(spec.clone())).unwrap();
        assert_eq!(read(again).unwrap(), (spec, Condition::None));
    }

    #[test]
    fn invalid_bodies_are_refused_at_their_place() {
        for (wrong, place, words) in [
            (json!({}), "", "missing field `spec`"),
            (json!({ "kernel": "/k" }), "/kernel", "unknown field"),
            (
                json!({ "name": "db", "spec": { "kernel": "/k" } }),
                "/name",
                "web",
            ),
            (json!({ "spec": { "cpus": 1 } }), "/spec", "`kernel`"),
            (
                json!({ "spec": { "kernel": "/k", "cpus": 0 } }),
                "/spec/cpus",
                "0 vCPUs",
            ),
            (
                json!({ "spec": { "kernel": "/k", "labels": {} } }),
                "/spec",
                "unknown field `labels`",
            ),
            (
                json!({ "spec": { "kernel": "/k" }, "labels": { "a b": "" } }),
                "/labels",
                "is not a key",
            ),
            (
                json!({ "spec": { "kernel": "/k" }, "status": 1 }),
                "/status",
                "map",
            ),
        ] {
            let error = read(wrong.clone()).unwrap_err();
            let fields = vmm::http::Problem::fields(&error);
            assert_eq!(fields[0].pointer, place, "{wrong}: {error}");
            assert!(error.to_string().contains(words), "{wrong}: {error}");
        }
    }

    #[test]
    fn null_for_an_unknown_member_of_a_patch_is_refused() {
        for known in [
            json!({ "spec": { "initramfs": null, "memory": { "hugepages": null } } }),
            json!({ "labels": { "any": null }, "annotations": null, "status": null }),
            json!({ "spec": { "memory": null, "nics": [], "cpus": null } }),
        ] {
            VmPatch::check(&known).unwrap();
        }
        for (unknown, place) in [
            (json!({ "vcpus": null }), ""),
            (json!({ "spec": { "vcpus": null } }), "/spec"),
            (json!({ "spec": { "vdpa": null } }), "/spec"),
            (json!({ "spec": { "labels": null } }), "/spec"),
            (
                json!({ "spec": { "memory": { "pages": null } } }),
                "/spec/memory",
            ),
            (
                json!({ "spec": { "memory": { "pages": { "size": null } } } }),
                "/spec/memory",
            ),
        ] {
            let error = VmPatch::check(&unknown).unwrap_err();
            let fields = vmm::http::Problem::fields(&error);
            assert_eq!(fields[0].pointer, place, "{unknown}: {error}");
        }
    }

    #[test]
    fn no_member_is_both_desired_and_observed() {
        let members = |schema: RefOr<Schema>| -> BTreeSet<String> {
            match schema {
                RefOr::T(Schema::Object(object)) => object.properties.into_keys().collect(),
                _ => BTreeSet::new(),
            }
        };
        let both = |desired, observed| {
            let (desired, observed) = (members(desired), members(observed));
            assert!(!desired.is_empty() && !observed.is_empty());
            desired.intersection(&observed).cloned().collect::<Vec<_>>()
        };
        let none = both(VmSpec::schema(), VmObserved::schema());
        assert_eq!(none, Vec::<String>::new());
        assert_eq!(both(NicSpec::schema(), VmNicDevice::schema()), ["id"]);
    }
}
