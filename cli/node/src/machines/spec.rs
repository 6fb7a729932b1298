//! The spec of a VM, as clients write it ([`body`]) and the store keeps it.
//!
//! The VM's part is [`VmConfig`] unchanged, so the node accepts all that `bellhop run` accepts.
//! NICs, the state and the restart policy are the node's own. The types cannot hold values that
//! cannot work. It must not know the effects of a spec.

mod body;
pub mod file;
mod name;
mod nic;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use bellhop_api::node::SendToNode;
pub(crate) use bellhop_api::node::{Desired, DeviceId, NicId, Restart};
use bellhop_api::node::{Labels, check_annotations, check_labels};
use serde::de::{self, DeserializeOwned, Deserializer};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ArrayBuilder, Object, Schema};
use utoipa::{PartialSchema, ToSchema};
use vdpa_mgmt::NetConfig;
use vdpa_mgmt::pci::Address;
use vmm::config::{DiskConfig, IommuConfig, VfioConfig, VmConfig};

pub(crate) use self::body::{VmBody, VmPatch, refused};
pub(crate) use self::name::{OWNER, VmName, bad_vm_name, owned_by};
pub(crate) use self::nic::{ExistingDevice, NicSource, NicSpec, host_request};
use crate::error::Error;

/// The longest name of a vDPA device, in bytes.
const DEVICE_NAME_MAX: usize = 63;
/// The longest name of a disk, in bytes: the guest reads it as the disk's serial number.
const DISK_NAME_MAX: usize = 20;
/// Devices that every VM has, or may have.
const RNG: &str = "rng";
const IOMMU: &str = "iommu";

/// The desired spec of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmSpec {
    /// The VM without vDPA devices, which are in `nics`. Each disk has its name.
    machine: VmConfig,
    nics: Vec<NicSpec>,
    /// The state requested at the VM's creation.
    pub(crate) state: Desired,
    /// The reaction to an end without a request.
    pub(crate) restart: Restart,
    /// Limited in number and length by [`check_labels`] and [`check_annotations`].
    pub(crate) labels: Labels,
    pub(crate) annotations: Labels,
}

/// The VM for this node.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReceiveFromNode {
    /// As for `PUT /v1/vms/{name}`. Its boot files are on this host, and its NICs are created here.
    pub(crate) vm: VmBody,
    /// The machine as its process runs it, without devices, where that differs from `vm`: changes
    /// that wait for the next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) running: Option<VmConfig>,
    /// The certificate of the source for this migration (PEM), over a network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) certificate: Option<String>,
}

/// The direction of a migration.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NodeMigrationRequest {
    /// Send it to another node.
    Send(SendToNode),
    /// Wait for it: the request of another node's daemon.
    Receive(Box<ReceiveFromNode>),
}

/// The addresses of functions by VFIO.
pub(crate) fn addresses(functions: &[VfioConfig]) -> impl Iterator<Item = Address> {
    let hosts = functions.iter().filter_map(VfioConfig::host);
    hosts.filter_map(|host| host.parse().ok())
}

fn two_nics(id: &NicId) -> Error {
    Error::invalid(format!("two NICs have the name {id}"))
}

impl VmSpec {
    pub(crate) fn nics(&self) -> &[NicSpec] {
        &self.nics
    }

    pub(crate) fn nic(&self, id: &NicId) -> Option<&NicSpec> {
        self.nics.iter().find(|nic| nic.id() == id)
    }

    /// The VM without its vDPA devices.
    pub(crate) fn machine(&self) -> &VmConfig {
        &self.machine
    }

    /// The VM without devices. A process keeps it until its end, while devices come and go.
    pub(crate) fn fixed(&self) -> VmConfig {
        let behind = self.nics.iter().any(NicSpec::is_behind_iommu);
        let iommu = self.machine.iommu_needed();
        VmConfig {
            disks: Vec::new(),
            vfio: Vec::new(),
            iommu: iommu.or_else(|| behind.then(IommuConfig::default)),
            ..self.machine.clone()
        }
    }

    /// The same spec with another VM configuration.
    pub(crate) fn with_machine(&self, machine: &VmConfig) -> Self {
        Self {
            machine: machine.clone(),
            ..self.clone()
        }
    }

    /// Whether the spec is the same except for its desired state.
    pub(crate) fn is_same_machine(&self, other: &Self) -> bool {
        let state = other.state;
        Self {
            state,
            ..self.clone()
        } == *other
    }

    /// The spec with one more NIC.
    ///
    /// # Errors
    /// Another NIC has its name.
    pub(crate) fn with_nic(&self, nic: NicSpec) -> Result<Self, Error> {
        if self.nic(nic.id()).is_some() {
            return Err(two_nics(nic.id()));
        }
        let mut spec = self.clone();
        spec.nics.push(nic);
        Ok(spec)
    }

    /// The spec with the NIC of the same name replaced; unchanged if there is none.
    pub(crate) fn with_nic_replaced(&self, nic: &NicSpec) -> Self {
        let mut spec = self.clone();
        let mut nics = spec.nics.iter_mut();
        if let Some(there) = nics.find(|there| there.id() == nic.id()) {
            *there = nic.clone();
        }
        spec
    }

    /// The spec for another node: see [`NicSpec::elsewhere`]. `device` returns the configuration
    /// that a NIC's device on this host reports. `vfio` has the addresses of functions there, by
    /// name.
    ///
    /// # Errors
    /// A NIC cannot be converted, or there is no function of a name, or an address is none.
    pub(crate) fn elsewhere(
        &self,
        from: Option<&str>,
        vfio: &BTreeMap<String, String>,
        device: impl Fn(&NicSpec) -> Option<NetConfig>,
    ) -> Result<Self, Error> {
        let mut spec = self.clone();
        for function in &mut spec.machine.vfio {
            // The guest's device keeps its name, which may be the address here.
            function.id = Some(function.name());
        }
        for (name, address) in vfio {
            let mut functions = spec.machine.vfio.iter_mut();
            let function = functions.find(|function| function.name() == *name);
            let function = function
                .ok_or_else(|| Error::invalid(format!("vfio: the VM has no function {name}")))?;
            let there: VfioConfig = serde_json::from_value(json!({ "host": address }))
                .map_err(|error| Error::invalid(format!("vfio: {name}: {error}")))?;
            function.source = there.source;
        }
        for nic in &mut spec.nics {
            *nic = nic.elsewhere(from, device(nic).as_ref())?;
        }
        spec.state = Desired::Running;
        Ok(spec)
    }

    /// The boot files, with their kinds.
    pub(crate) fn boot_files(&self) -> impl Iterator<Item = (&'static str, &PathBuf)> {
        let initramfs = self.machine.initramfs.iter();
        std::iter::once(("kernel", &self.machine.kernel))
            .chain(initramfs.map(|path| ("initramfs", path)))
    }

    /// The spec without one of its NICs.
    pub(crate) fn without_nic(&self, id: &NicId) -> Self {
        let mut spec = self.clone();
        spec.nics.retain(|nic| nic.id() != id);
        spec
    }

    /// The addresses of its functions by VFIO. A checked spec has no function without one.
    pub(crate) fn functions(&self) -> impl Iterator<Item = Address> {
        addresses(&self.machine.vfio)
    }

    /// The functions of another spec that this one lacks.
    pub(crate) fn functions_of(&self, other: &Self) -> Vec<Address> {
        let own: Vec<Address> = self.functions().collect();
        let others = other.functions();
        others.filter(|function| !own.contains(function)).collect()
    }

    /// The function by VFIO of this name.
    pub(crate) fn function(&self, id: &DeviceId) -> Option<&VfioConfig> {
        let mut functions = self.machine.vfio.iter();
        functions.find(|function| function.name() == id.as_str())
    }

    /// The spec with one more function.
    pub(crate) fn with_function(&self, function: VfioConfig) -> Self {
        let mut spec = self.clone();
        spec.machine.vfio.push(function);
        spec
    }

    /// The spec without one of its functions.
    pub(crate) fn without_function(&self, id: &DeviceId) -> Self {
        let mut spec = self.clone();
        let functions = &mut spec.machine.vfio;
        functions.retain(|function| function.name() != id.as_str());
        spec
    }

    /// The disk of this name.
    pub(crate) fn disk(&self, id: &DeviceId) -> Option<&DiskConfig> {
        let mut disks = self.machine.disks.iter();
        disks.find(|disk| disk.id.as_deref() == Some(id.as_str()))
    }

    /// The spec with one more disk, which has its name.
    pub(crate) fn with_disk(&self, disk: DiskConfig) -> Self {
        let mut spec = self.clone();
        spec.machine.disks.push(disk);
        spec
    }

    /// The spec without one of its disks.
    pub(crate) fn without_disk(&self, id: &DeviceId) -> Self {
        let mut spec = self.clone();
        let disks = &mut spec.machine.disks;
        disks.retain(|disk| disk.id.as_deref() != Some(id.as_str()));
        spec
    }

    /// Checks the names of all devices.
    fn check_names(&self) -> Result<(), Error> {
        let disks = &self.machine.disks;
        let ids = disks.iter().filter_map(|disk| disk.id.as_deref());
        let bad = |id: &str| id.len() > DISK_NAME_MAX || id.parse::<DeviceId>().is_err();
        if let Some(number) = ids.clone().position(bad) {
            return Err(Error::invalid(format!(
                "disks[{number}].id: a disk's name has 1 to {DISK_NAME_MAX} letters, digits, dots, \
                 underscores, colons or hyphens"
            )));
        }
        let vfio = &self.machine.vfio;
        let bad = |function: &VfioConfig| function.name().parse::<DeviceId>().is_err();
        if let Some(number) = vfio.iter().position(bad) {
            return Err(Error::invalid(format!(
                "vfio[{number}].id: a device's name has letters, digits, dots, underscores, colons \
                 or hyphens"
            )));
        }
        if let Some(number) = vfio.iter().position(|function| function.host().is_none()) {
            return Err(Error::invalid(format!(
                "vfio[{number}]: give `host`, the address of a PCI function of this node"
            )));
        }
        let nics = self.nics.iter().map(|nic| nic.id().to_string());
        let functions = vfio.iter().map(VfioConfig::name);
        let mut names = BTreeSet::from([RNG, IOMMU].map(str::to_owned));
        let all = nics.chain(ids.map(str::to_owned)).chain(functions);
        match all.into_iter().find(|id| !names.insert(id.clone())) {
            Some(id) => Err(Error::invalid(format!(
                "another device of the VM has the id {id}: give this one another id"
            ))),
            None => Ok(()),
        }
    }

    /// Checks whether a VM of this name can have this spec.
    ///
    /// # Errors
    /// A path is relative, a device's name would be too long, or two devices have the same name.
    pub(crate) fn check(&self, vm: &VmName) -> Result<(), Error> {
        self.check_names()?;
        let disks = self.machine.disks.iter();
        let disks = disks.map(|disk| ("a disk's path", &disk.path));
        let files = self.boot_files().chain(disks);
        let nics = self.nics.iter().flat_map(NicSpec::paths);
        let mut paths = files.map(|(what, path)| (what, path.as_path())).chain(nics);
        if let Some((what, path)) = paths.find(|(_, path)| !path.is_absolute()) {
            return Err(Error::invalid(format!(
                "{what} is {}: give an absolute path, because the VM has another working directory",
                path.display()
            )));
        }
        let long = |nic: &&NicSpec| {
            nic.created_names(vm)
                .any(|device| device.len() > DEVICE_NAME_MAX)
        };
        match self.nics.iter().find(long) {
            Some(nic) => Err(Error::invalid(format!(
                "the names {vm} and {} have more than {} bytes together, the limit for the name of \
                 a vDPA device: shorten one",
                nic.id(),
                DEVICE_NAME_MAX - 1
            ))),
            None => Ok(()),
        }
    }
}

impl Serialize for VmSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = self.members().map_err(serde::ser::Error::custom)?;
        for (name, labels) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            if !labels.is_empty() {
                fields.insert(name.to_owned(), json!(labels));
            }
        }
        fields.serialize(serializer)
    }
}

impl VmSpec {
    /// The members of `spec` in the API: all but labels and annotations.
    pub(crate) fn members(&self) -> serde_json::Result<Map<String, Value>> {
        let mut members = match serde_json::to_value(&self.machine)? {
            Value::Object(machine) => machine,
            _ => Map::new(),
        };
        members.remove(VDPA);
        for (name, value) in [
            ("nics", serde_json::to_value(&self.nics)?),
            ("state", json!(self.state)),
            ("restart", json!(self.restart)),
        ] {
            members.insert(name.to_owned(), value);
        }
        Ok(members)
    }

    /// The spec with these [`members`](Self::members).
    fn of_members<E: de::Error>(
        mut members: Map<String, Value>,
        labels: Labels,
        annotations: Labels,
    ) -> Result<Self, E> {
        Self::check_members(&members)?;
        let nics: Vec<NicSpec> = take(&mut members, "nics")?;
        let state = take(&mut members, "state")?;
        let restart = take(&mut members, "restart")?;
        let mut ids = BTreeSet::new();
        if let Some(nic) = nics.iter().find(|nic| !ids.insert(nic.id())) {
            return Err(de::Error::custom(two_nics(nic.id())));
        }
        let mut machine: VmConfig = place("", Value::Object(members))?;
        // Disks keep their names when others are removed.
        for (number, disk) in machine.disks.iter_mut().enumerate() {
            disk.id = Some(disk.name(number));
        }
        Ok(Self {
            machine,
            nics,
            state,
            restart,
            labels,
            annotations,
        })
    }

    /// Fails if one of these members is unknown.
    fn check_members<E: de::Error>(members: &Map<String, Value>) -> Result<(), E> {
        if members.contains_key(VDPA) {
            return Err(de::Error::custom("unknown field `vdpa`: give `nics`"));
        }
        let known: Vec<String> = match Self::schema() {
            RefOr::T(Schema::Object(object)) => object.properties.into_keys().collect(),
            _ => Vec::new(),
        };
        match members.keys().find(|&member| !known.contains(member)) {
            None => Ok(()),
            Some(member) => Err(de::Error::custom(format_args!(
                "unknown field `{member}`, expected one of `{}`",
                known.join("`, `")
            ))),
        }
    }
}

/// The field of [`VmConfig`] that clients of the node cannot set.
const VDPA: &str = "vdpa";

impl<'de> Deserialize<'de> for VmSpec {
    // Written by hand: serde's `flatten` neither rejects unknown fields nor reports the position of
    // a wrong value.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Map::deserialize(deserializer)?;
        let labels: Labels = take(&mut fields, "labels")?;
        check_labels(&labels).map_err(|error| wrong("labels", error))?;
        let annotations: Labels = take(&mut fields, "annotations")?;
        check_annotations(&annotations).map_err(|error| wrong("annotations", error))?;
        Self::of_members(fields, labels, annotations)
    }
}

/// An error about the value of a field.
fn wrong<E: de::Error>(field: &str, why: impl fmt::Display) -> E {
    E::custom(format_args!("{field}: {why}"))
}

fn take<T: DeserializeOwned + Default, E: de::Error>(
    fields: &mut Map<String, Value>,
    name: &str,
) -> Result<T, E> {
    fields
        .remove(name)
        .map_or_else(|| Ok(T::default()), |value| place(name, value))
}

/// Deserializes a value; an error has its position.
fn place<T: DeserializeOwned, E: de::Error>(name: &str, value: Value) -> Result<T, E> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = match (name, error.path().to_string().as_str()) {
            ("", ".") => return E::custom(error.into_inner()),
            ("", path) => path.to_owned(),
            (name, ".") => name.to_owned(),
            (name, path) if path.starts_with('[') => format!("{name}{path}"),
            (name, path) => format!("{name}.{path}"),
        };
        E::custom(format_args!("{path}: {}", error.into_inner()))
    })
}

impl PartialSchema for VmSpec {
    fn schema() -> RefOr<Schema> {
        let mut object = match VmConfig::schema() {
            RefOr::T(Schema::Object(object)) => object,
            _ => Object::new(),
        };
        object.properties.remove(VDPA);
        let nics = ArrayBuilder::new()
            .items(NicSpec::schema())
            .description(Some("Its NICs, in the order of their PCI slots"));
        let fields: [(&str, RefOr<Schema>); 3] = [
            ("nics", RefOr::T(Schema::Array(nics.build()))),
            ("state", Desired::schema()),
            ("restart", Restart::schema()),
        ];
        for (name, schema) in fields {
            object.properties.insert(name.to_owned(), schema);
        }
        object.description = Some("The configuration of a virtual machine".to_owned());
        RefOr::T(Schema::Object(object))
    }
}

impl ToSchema for VmSpec {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("VmSpec")
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        <VmConfig as ToSchema>::schemas(schemas);
        <NicSpec as ToSchema>::schemas(schemas);
    }
}

#[cfg(test)]
mod tests;
