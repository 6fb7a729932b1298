//! A VM's spec in a file, for commands that do not ask the daemon.
//!
//! It has the fields and the checks of the spec in the API, so each command reads the same file.
//! `name` is not a field of the spec: the command takes it out.

use std::path::PathBuf;

use serde::Deserialize as _;
use serde_json::{Map, Value, json};
use vmm::config::{DeviceSource, VdpaConfig, VmConfig};

use super::{ExistingDevice, NicSource, NicSpec, VDPA, VmName, VmSpec, take};
use crate::api::DOCUMENT;
use crate::error::Error;
use crate::machines::host::by_name;

/// The schema of the spec in the API's description.
const SPEC: &str = "VmSpec";
/// The schema of a request's body there.
const BODY: &str = "VmBody";
/// The place of schemas in the API's description.
const COMPONENTS: &str = "#/components/schemas/";

/// Checks a spec as the daemon does before it looks at the host's files and devices.
///
/// # Errors
/// A field or the name is invalid.
pub fn check(name: Option<&str>, fields: Map<String, Value>) -> Result<(), Error> {
    let vm: VmName = name.unwrap_or("vm").parse()?;
    parse(fields)?.check(&vm)
}

/// The VM of a spec for a process of its own, without the daemon. `vdpa` may name
/// devices, too, as in the VM's own API. `state`, `restart`, labels and annotations have no effect.
///
/// # Errors
/// A field is invalid, a NIC needs a device that the daemon would create, or a device does not
/// exist.
pub fn machine(mut fields: Map<String, Value>) -> Result<VmConfig, Error> {
    let devices: Vec<VdpaConfig> = take(&mut fields, VDPA).map_err(invalid)?;
    let spec = parse(fields)?;
    let nics = spec.nics().iter().map(on_existing_device);
    let mut vdpa = nics.collect::<Result<Vec<_>, _>>()?;
    vdpa.extend(devices);
    Ok(VmConfig {
        vdpa,
        ..spec.machine().clone()
    })
}

/// The JSON Schema of a file: that of the spec in the API's description, `name`, `labels` and
/// `annotations`.
#[must_use]
pub fn schema() -> Value {
    let document: Value = serde_json::from_str(DOCUMENT).unwrap_or_default();
    let schemas = &document["components"]["schemas"];
    let mut definitions = Map::new();
    let mut wanted = vec![SPEC.to_owned()];
    while let Some(name) = wanted.pop() {
        if !definitions.contains_key(&name) {
            let schema = schemas[&name].to_string();
            wanted.extend(references(&schema).map(str::to_owned));
            let schema = schema.replace(COMPONENTS, "#/$defs/");
            let schema = serde_json::from_str(&schema).unwrap_or_default();
            definitions.insert(name, schema);
        }
    }
    let mut schema = definitions.remove(SPEC).unwrap_or_default();
    if let Some(members) = schema.as_object_mut() {
        members.insert(
            "$schema".to_owned(),
            json!("https://json-schema.org/draft/2020-12/schema"),
        );
        members.insert("$defs".to_owned(), definitions.into());
        if let Some(fields) = members.get_mut("properties").and_then(Value::as_object_mut) {
            let name = json!({
                "description": "The name of the VM, for commands without NAME",
                "pattern": "^[a-z0-9][a-z0-9-]{0,62}$",
                "type": "string",
            });
            fields.insert("name".to_owned(), name);
            for beside in ["labels", "annotations"] {
                let schema = schemas[BODY]["properties"][beside].clone();
                fields.insert(beside.to_owned(), schema);
            }
        }
    }
    schema
}

/// The names of the schemas to which a schema refers.
fn references(schema: &str) -> impl Iterator<Item = &str> {
    let parts = schema.split(COMPONENTS).skip(1);
    parts.filter_map(|part| part.split('"').next())
}

fn invalid(error: serde_json::Error) -> Error {
    Error::invalid(error.to_string())
}

fn parse(fields: Map<String, Value>) -> Result<VmSpec, Error> {
    VmSpec::deserialize(Value::Object(fields)).map_err(invalid)
}

fn on_existing_device(nic: &NicSpec) -> Result<VdpaConfig, Error> {
    let path = |source: &NicSource| match source {
        NicSource::There(ExistingDevice::Path(path)) => Ok(path.clone()),
        NicSource::There(ExistingDevice::Name(name)) => by_name(name),
        NicSource::From(_) => Err(to_create(nic)),
    };
    let backup: Option<PathBuf> = nic.backup().map(path).transpose()?;
    Ok(nic.vdpa(DeviceSource::Path(path(nic.source())?), backup))
}

/// A NIC that only the daemon can create.
fn to_create(nic: &NicSpec) -> Error {
    let id = nic.id();
    Error::invalid(format!(
        "NIC {id} has `from`, but only the node daemon creates devices: use `bellhop vm create \
         --file`, or create a device with `bellhop nic create` and give its `path`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn one_file_is_for_both_commands() {
        let file = fields(json!({
            "kernel": "/k", "restart": "always", "state": "stopped", "labels": {"a": "b"},
            "nics": [{"id": "net0", "path": "/dev/vhost-vdpa-3", "doorbell": "Off",
                      "backup": {"path": "/dev/vhost-vdpa-4"}}],
        }));
        check(Some("web"), file.clone()).unwrap();
        let machine = machine(file).unwrap();
        let wanted = "id=net0,path=/dev/vhost-vdpa-3,doorbell=off,backup=/dev/vhost-vdpa-4";
        assert_eq!(machine.vdpa, [wanted.parse::<VdpaConfig>().unwrap()]);
    }

    #[test]
    fn devices_of_the_vm_api_come_after_the_nics() {
        let file = json!({"kernel": "k", "vdpa": [{"fd": 7, "id": "b"}],
            "nics": [{"id": "a", "path": "/dev/vhost-vdpa-0"}]});
        let machine = machine(fields(file.clone())).unwrap();
        let names: Vec<String> = machine.vdpa.iter().map(VdpaConfig::name).collect();
        assert_eq!(names, ["a", "b"]);
        let error = check(None, fields(file)).unwrap_err().to_string();
        assert!(error.contains("give `nics`"), "{error}");
        let file = json!({"kernel": "/k", "vfio": [{"host": "0000:03:10.1"}]});
        let there = super::machine(fields(file.clone())).unwrap().vfio;
        assert_eq!(there[0].name(), "0000:03:10.1");
        check(None, fields(file)).unwrap();
    }

    #[test]
    fn errors_name_the_wrong_member() {
        let from = json!({"kernel": "/k", "nics": [{"id": "net0", "from": "eth0"}]});
        let error = machine(fields(from.clone())).unwrap_err().to_string();
        assert!(error.contains("NIC net0 has"), "{error}");
        assert!(error.contains("bellhop vm create --file"), "{error}");
        check(Some("web"), fields(from)).unwrap();
        for (file, words) in [
            (
                json!({"kernel": "/k", "colour": 1}),
                "unknown field `colour`",
            ),
            (json!({"kernel": "/k", "cpus": 0}), "cpus: 0 vCPUs"),
            (json!({"kernel": "/k", "vdpa": [{"mac": 1}]}), "vdpa"),
            (
                json!({"kernel": "/k", "nics": [{"path": "/p"}]}),
                "field `id`",
            ),
            (json!({}), "missing field `kernel`"),
        ] {
            let error = machine(fields(file)).unwrap_err().to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
        for (name, kernel) in [("Web", "/k"), ("web", "k")] {
            check(Some(name), fields(json!({"kernel": kernel}))).unwrap_err();
        }
    }

    #[test]
    fn the_schema_is_complete() {
        let schema = schema();
        for field in ["kernel", "nics", "restart", "name", "labels", "annotations"] {
            assert!(schema["properties"][field].is_object(), "{field}");
        }
        let text = schema.to_string();
        assert!(!text.contains(COMPONENTS));
        for name in text.split("\"#/$defs/").skip(1) {
            let name = name.split('"').next().unwrap();
            assert!(schema["$defs"][name].is_object(), "{name}");
        }
    }
}
