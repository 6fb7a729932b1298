//! What a virtual machine is to be like, as clients say it and the store keeps it.
//!
//! A machine's part is [`VmConfig`] as it is, so that what `bellhop run` accepts is accepted here; NICs,
//! the state and the restart policy are the node's. Values that could not work cannot be held. It must not know
//! what is done about it.

mod stand_by;

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::de::{self, DeserializeOwned, Deserializer};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ArrayBuilder, Object, Schema};
use utoipa::{PartialSchema, ToSchema};
use vdpa::mgmt::NetConfig;
use vdpa::mgmt::connectivity::Connectivity;
use vdpa::mgmt::link::VlanId;
use vdpa::mgmt::nic::{Kind, NicRequest};
use vdpa::mgmt::sriov::Rates;
use vmm::config::{DoorbellMode, MacAddress, VdpaConfig, VdpaSource, VmConfig};

use self::stand_by::NicStandBy;

/// The longest name of a virtual machine, in bytes.
const VM_NAME_MAX: usize = 63;
/// The longest name of a NIC, in bytes: what the machine's own API takes.
const NIC_ID_MAX: usize = 64;
/// The longest name of a vDPA device, in bytes.
const DEVICE_NAME_MAX: usize = 63;

/// The name of a virtual machine: 1 to 63 of `a-z`, `0-9` and `-`, not `-` first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub(crate) struct VmName(String);

/// What cannot name a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a virtual machine's name has 1 to {VM_NAME_MAX} lower-case letters, digits and hyphens, and does not begin \
     with a hyphen"
)]
pub(crate) struct BadVmName;

impl VmName {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of the vDPA device that is made for a NIC of this machine. No other machine's can have it:
    /// a machine's name has no dot.
    pub(crate) fn device(&self, nic: &NicId) -> String {
        format!("{}.{}", self.0, nic.0)
    }

    /// The name of the vDPA device that is made to stand by for that one. No other NIC's can have it: a NIC's name has no tilde.
    pub(crate) fn stand_by(&self, nic: &NicId) -> String {
        format!("{}~", self.device(nic))
    }

    /// What the record of such a device says about whose it is.
    pub(crate) fn owner(&self, nic: &NicId) -> String {
        format!("{OWNER}{}/{}", self.0, nic.0)
    }
}

/// What the owner of each NIC that a node has made begins with.
pub(crate) const OWNER: &str = "node:";

impl FromStr for VmName {
    type Err = BadVmName;

    fn from_str(text: &str) -> Result<Self, BadVmName> {
        let known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let fits = (1..=VM_NAME_MAX).contains(&text.len()) && text.bytes().all(known);
        match fits && !text.starts_with('-') {
            true => Ok(Self(text.to_owned())),
            false => Err(BadVmName),
        }
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a NIC: 1 to 64 letters, digits, `.`, `_`, `:` or `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Cow<'_, str>")]
pub(crate) struct NicId(String);

/// What cannot name a NIC.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a NIC's name has 1 to {NIC_ID_MAX} letters, digits, dots, underscores, colons or hyphens")]
pub(crate) struct BadNicId;

impl NicId {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for NicId {
    type Err = BadNicId;

    fn from_str(text: &str) -> Result<Self, BadNicId> {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        match (1..=NIC_ID_MAX).contains(&text.len()) && text.bytes().all(known) {
            true => Ok(Self(text.to_owned())),
            false => Err(BadNicId),
        }
    }
}

impl TryFrom<Cow<'_, str>> for NicId {
    type Error = BadNicId;

    fn try_from(text: Cow<'_, str>) -> Result<Self, BadNicId> {
        text.parse()
    }
}

impl fmt::Display for NicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a machine should run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) enum Desired {
    /// It runs, also after the host's reboot.
    #[default]
    Running,
    /// It is there with its NICs, and does not run.
    Stopped,
}

/// What happens when a machine ends without having been told to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) enum Restart {
    /// It stays stopped.
    Never,
    /// It is started again if it crashed; not if its guest powered off.
    #[default]
    OnFailure,
    /// It is started again in any case.
    Always,
}

/// The MTU of Ethernet, in bytes.
const MTU: u16 = 1500;

fn mac_address(bytes: [u8; 6]) -> Option<MacAddress> {
    let text = bytes.map(|byte| format!("{byte:02x}")).join(":");
    text.parse().ok()
}

/// What of a NIC a vDPA device is made on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NicKind {
    /// A management device as it is, a subfunction in switchdev mode, else a virtual function.
    #[default]
    Auto,
    /// A virtual function.
    Vf,
    /// A subfunction.
    Sf,
}

/// A NIC of a virtual machine: made from a NIC of the host (`from`), or a vDPA device that is there already (`path` or
/// `device`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct RawNic {
    /// Its name in this machine.
    #[schema(value_type = String, pattern = "^[A-Za-z0-9._:-]{1,64}$")]
    id: NicId,
    /// What the device is made of: a network interface, `pci/ADDRESS`, a devlink handle, or a management device such as
    /// `vdpasim_net`. It is taken back when the machine goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    /// A vhost-vdpa character device that is there already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    path: Option<PathBuf>,
    /// A vDPA device that is there already, by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// What of the NIC it is made on.
    #[serde(default, skip_serializing_if = "is_default")]
    kind: NicKind,
    /// The bridge that it is connected with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bridge: Option<String>,
    /// The VLAN that it is in, without seeing tags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 4094)]
    vlan: Option<u16>,
    /// The MAC address that the guest sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, pattern = "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$")]
    mac: Option<MacAddress>,
    /// Its MTU, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 68)]
    mtu: Option<u16>,
    /// Its queue pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 32768)]
    queue_pairs: Option<u16>,
    /// What it sends at most, in Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    max_tx_rate: Option<u32>,
    /// What it can always send, in Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    min_tx_rate: Option<u32>,
    /// How many virtual functions the host's NIC gets if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    virtual_functions: Option<u32>,
    /// Whether the guest kicks by stores in the device's own doorbell pages.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schema(value_type = String, pattern = "^(auto|on|off)$", default = "auto")]
    doorbell: DoorbellMode,
    /// Kick the device and interrupt the driver, once, when a queue hangs.
    #[serde(default, skip_serializing_if = "is_default")]
    rescue: bool,
    /// The device that stands by for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failover: Option<NicStandBy>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Where a NIC's device comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NicSource {
    /// It is made for the machine, like this; name and owner are the machine's to give.
    From(Box<NicRequest>),
    /// It is there: its character device.
    Path(PathBuf),
    /// It is there: its name.
    Device(String),
}

/// A vDPA device that is there already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExistingDevice {
    /// Its character device.
    Path(PathBuf),
    /// Its name.
    Name(String),
}

/// A NIC of a virtual machine, checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawNic", into = "RawNic")]
pub(crate) struct NicSpec {
    id: NicId,
    source: NicSource,
    stand_by: Option<NicSource>,
    raw: RawNic,
}

impl NicSpec {
    pub(crate) fn id(&self) -> &NicId {
        &self.id
    }

    pub(crate) fn source(&self) -> &NicSource {
        &self.source
    }

    /// The address that was asked for; none: the device's own.
    pub(crate) fn mac(&self) -> Option<MacAddress> {
        self.raw.mac
    }

    /// The same NIC on a device that is there already. What is for devices that are made is gone, and so is what stands by for
    /// it if that is this device, or made.
    pub(crate) fn moved_to(&self, device: ExistingDevice) -> Self {
        let stands_by = self.raw.failover.as_ref();
        let failover = stands_by.and_then(|stands_by| stands_by.of_moved(&device));
        let stand_by = self.stand_by.clone().filter(|_| failover.is_some());
        let (source, path, name) = match device {
            ExistingDevice::Path(path) => (NicSource::Path(path.clone()), Some(path), None),
            ExistingDevice::Name(name) => (NicSource::Device(name.clone()), None, Some(name)),
        };
        let raw = RawNic {
            id: self.id.clone(),
            from: None,
            path,
            device: name,
            kind: NicKind::default(),
            bridge: None,
            vlan: None,
            mac: self.raw.mac,
            mtu: None,
            queue_pairs: None,
            max_tx_rate: None,
            min_tx_rate: None,
            virtual_functions: None,
            doorbell: self.raw.doorbell,
            rescue: self.raw.rescue,
            failover,
        };
        Self {
            id: self.id.clone(),
            source,
            stand_by,
            raw,
        }
    }

    /// As the machine takes it, on this device; the character device `failover` stands by.
    pub(crate) fn vdpa(&self, source: VdpaSource, failover: Option<PathBuf>) -> VdpaConfig {
        VdpaConfig {
            source,
            id: Some(self.id.to_string()),
            mac: self.raw.mac,
            num_queues: None,
            doorbell: self.raw.doorbell,
            rescue: self.raw.rescue,
            failover,
        }
    }

    /// The NIC that another node is to make for the same guest: on what is called `from` there, if that is given, else on what is
    /// called as here. What its device here has without having been asked for is asked for there.
    ///
    /// # Errors
    /// `from` cannot be meant.
    pub(crate) fn elsewhere(
        &self,
        from: Option<&str>,
        device: Option<&NetConfig>,
    ) -> Result<Self, BadSpec> {
        let mut raw = self.raw.clone();
        if let Some(from) = from {
            raw.from = Some(from.to_owned());
            raw.path = None;
            raw.device = None;
            // These are about the NIC of this host.
            raw.kind = NicKind::default();
            raw.virtual_functions = None;
            raw.failover = raw.failover.map(|_| NicStandBy::made_of(from));
        }
        if raw.from.is_some() {
            raw.has_as(device);
        }
        Self::try_from(raw).map_err(|error| BadSpec::Nic(error.to_string()))
    }

    /// The device to be made for `vm`; none if it is there already.
    pub(crate) fn request(&self, vm: &VmName) -> Option<NicRequest> {
        match &self.source {
            NicSource::From(request) => Some(NicRequest {
                name: vm.device(&self.id),
                owner: Some(vm.owner(&self.id)),
                ..(**request).clone()
            }),
            NicSource::Path(_) | NicSource::Device(_) => None,
        }
    }
}

impl From<NicSpec> for RawNic {
    fn from(nic: NicSpec) -> Self {
        nic.raw
    }
}

// The names of fields are all that a client needs to see of it.
impl PartialSchema for NicSpec {
    fn schema() -> RefOr<Schema> {
        RawNic::schema()
    }
}

impl ToSchema for NicSpec {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("NicSpec")
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        <RawNic as ToSchema>::schemas(schemas);
    }
}

/// What is wrong with a NIC.
#[derive(Debug, thiserror::Error)]
enum BadNic {
    #[error("{id} has {count} of from, path and device: give one", id = .id)]
    Source { id: NicId, count: usize },
    #[error("{id} has {what}, which is for devices that are made (`from`): leave it out")]
    OnlyFrom { id: NicId, what: &'static str },
    #[error("{id}: failover has {count} of from, path and device: give one")]
    StandBySource { id: NicId, count: usize },
    #[error("{id}: failover is the NIC's own device: name another one that can take its place")]
    OwnStandBy { id: NicId },
    #[error("{id}: {why}")]
    Value { id: NicId, why: String },
}

impl TryFrom<RawNic> for NicSpec {
    type Error = BadNic;

    fn try_from(raw: RawNic) -> Result<Self, BadNic> {
        let id = raw.id.clone();
        let source = match (&raw.from, &raw.path, &raw.device) {
            (Some(from), None, None) => NicSource::From(Box::new(request(&raw, from)?)),
            (None, Some(path), None) => NicSource::Path(path.clone()),
            (None, None, Some(device)) => NicSource::Device(device.clone()),
            (from, path, device) => {
                let given = [from.is_some(), path.is_some(), device.is_some()];
                let count = given.into_iter().filter(|given| *given).count();
                return Err(BadNic::Source { id, count });
            }
        };
        if !matches!(source, NicSource::From(_)) {
            let given = [
                (raw.kind != NicKind::Auto, "kind"),
                (raw.bridge.is_some(), "bridge"),
                (raw.vlan.is_some(), "vlan"),
                (raw.mtu.is_some(), "mtu"),
                (raw.queue_pairs.is_some(), "queue_pairs"),
                (raw.max_tx_rate.is_some(), "max_tx_rate"),
                (raw.min_tx_rate.is_some(), "min_tx_rate"),
                (raw.virtual_functions.is_some(), "virtual_functions"),
            ];
            if let Some(&(_, what)) = given.iter().find(|one| one.0) {
                return Err(BadNic::OnlyFrom { id, what });
            }
        }
        let stand_by = raw
            .failover
            .as_ref()
            .map(|stand_by| stand_by.source(&raw, &source))
            .transpose()?;
        Ok(Self {
            id,
            source,
            stand_by,
            raw,
        })
    }
}

/// What is to be made, without name and owner.
fn request(raw: &RawNic, from: &str) -> Result<NicRequest, BadNic> {
    let wrong = |why: String| BadNic::Value {
        id: raw.id.clone(),
        why,
    };
    let rates = match (raw.min_tx_rate, raw.max_tx_rate) {
        (None, None) => None,
        (min, max) => Some(
            Rates::new(min.unwrap_or_default(), max.unwrap_or_default())
                .map_err(|error| wrong(error.to_string()))?,
        ),
    };
    let vlan = raw
        .vlan
        .map(|vlan| vlan.to_string().parse::<VlanId>())
        .transpose()
        .map_err(|error| wrong(error.to_string()))?;
    let connectivity = (raw.bridge.is_some() || vlan.is_some()).then(|| Connectivity {
        bridge: raw.bridge.clone(),
        vlan,
        // The representor has to let through what the function sends.
        mtu: raw.mtu.filter(|_| raw.bridge.is_some()).map(u32::from),
    });
    let request = NicRequest {
        kind: match raw.kind {
            NicKind::Auto => Kind::Auto,
            NicKind::Vf => Kind::VirtualFunction,
            NicKind::Sf => Kind::Subfunction,
        },
        mac: raw.mac.map(MacAddress::bytes),
        mtu: raw.mtu,
        max_vqp: raw.queue_pairs,
        connectivity,
        rates,
        virtual_functions: raw.virtual_functions,
        ..NicRequest::new("nic", from)
    };
    // Values that no device can have, whatever it is made on.
    if let Ok(any) = "any".parse() {
        request
            .device(any)
            .map_err(|error| wrong(error.to_string()))?;
    }
    Ok(request)
}

/// A virtual machine as it is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmSpec {
    /// The machine; without vDPA devices, which are `nics`.
    machine: VmConfig,
    nics: Vec<NicSpec>,
    /// As it was asked for when the machine was made.
    pub(crate) state: Desired,
    /// What happens when it ends by itself.
    pub(crate) restart: Restart,
}

/// What is wrong with a specification as a whole.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadSpec {
    /// NICs are not given as vDPA devices.
    #[error("unknown field `vdpa`: give `nics`")]
    Vdpa,
    /// The body has another name than the path.
    #[error("the path says {0}, the body another id: leave the body's away")]
    OtherId(NicId),
    /// What is wrong with a NIC.
    #[error("the body is no NIC: {0}")]
    Nic(String),
    /// Not exactly one of the two.
    #[error("give the vDPA device that the NIC is to be on, as either `path` or `device`")]
    OneDevice,
    /// Two of one name.
    #[error("two NICs have the name {0}")]
    TwoNics(NicId),
    /// A path that is relative to who knows what.
    #[error("{what} is {}: give an absolute path, for the machine is run elsewhere", path.display())]
    Relative {
        /// Which of them.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// The device's name would be too long.
    #[error(
        "the names {vm} and {nic} have more than {max} bytes together, which is all that the name of a vDPA \
         device has room for: give a shorter one",
        max = DEVICE_NAME_MAX - 1
    )]
    LongNames {
        /// The machine.
        vm: VmName,
        /// The NIC.
        nic: NicId,
    },
}

impl VmSpec {
    pub(crate) fn nics(&self) -> &[NicSpec] {
        &self.nics
    }

    pub(crate) fn nic(&self, id: &NicId) -> Option<&NicSpec> {
        self.nics.iter().find(|nic| nic.id == *id)
    }

    /// The machine without its vDPA devices.
    pub(crate) fn machine(&self) -> &VmConfig {
        &self.machine
    }

    /// Whether it is the same but for what it is to do.
    pub(crate) fn is_same_machine(&self, other: &Self) -> bool {
        (&self.machine, &self.nics, self.restart) == (&other.machine, &other.nics, other.restart)
    }

    /// With one more NIC.
    ///
    /// # Errors
    /// [`BadSpec::TwoNics`].
    pub(crate) fn with_nic(&self, nic: NicSpec) -> Result<Self, BadSpec> {
        if self.nic(&nic.id).is_some() {
            return Err(BadSpec::TwoNics(nic.id));
        }
        let mut spec = self.clone();
        spec.nics.push(nic);
        Ok(spec)
    }

    /// With another NIC in the place of the one of its name; the same if there is none.
    pub(crate) fn with_nic_replaced(&self, nic: &NicSpec) -> Self {
        let mut spec = self.clone();
        let mut nics = spec.nics.iter_mut();
        if let Some(there) = nics.find(|there| there.id == nic.id) {
            *there = nic.clone();
        }
        spec
    }

    /// As another node is to have it: see [`NicSpec::elsewhere`]. `device` is what a NIC's device here says of itself.
    ///
    /// # Errors
    /// A NIC cannot be so.
    pub(crate) fn elsewhere(
        &self,
        from: Option<&str>,
        device: impl Fn(&NicSpec) -> Option<NetConfig>,
    ) -> Result<Self, BadSpec> {
        let mut spec = self.clone();
        for nic in &mut spec.nics {
            *nic = nic.elsewhere(from, device(nic).as_ref())?;
        }
        spec.state = Desired::Running;
        Ok(spec)
    }

    /// The files that it boots from, and what they are.
    pub(crate) fn boot_files(&self) -> impl Iterator<Item = (&'static str, &PathBuf)> {
        let initramfs = self.machine.initramfs.iter();
        std::iter::once(("kernel", &self.machine.kernel))
            .chain(initramfs.map(|path| ("initramfs", path)))
    }

    /// Without one of its NICs.
    pub(crate) fn without_nic(&self, id: &NicId) -> Self {
        let mut spec = self.clone();
        spec.nics.retain(|nic| nic.id != *id);
        spec
    }

    /// Whether a machine of this name can be so.
    ///
    /// # Errors
    /// [`BadSpec::LongNames`], [`BadSpec::Relative`].
    pub(crate) fn check(&self, vm: &VmName) -> Result<(), BadSpec> {
        let machine = &self.machine;
        let kernel = [("kernel", &machine.kernel)].into_iter();
        let initramfs = machine.initramfs.iter().map(|path| ("initramfs", path));
        let disks = machine
            .disks
            .iter()
            .map(|disk| ("a disk's path", &disk.path));
        let files = kernel.chain(initramfs).chain(disks);
        let nics = self.nics.iter().flat_map(NicSpec::paths);
        let mut paths = files.map(|(what, path)| (what, path.as_path())).chain(nics);
        if let Some((what, path)) = paths.find(|(_, path)| !path.is_absolute()) {
            return Err(BadSpec::Relative {
                what,
                path: path.to_owned(),
            });
        }
        let long = |nic: &&NicSpec| {
            nic.made_names(vm)
                .any(|device| device.len() > DEVICE_NAME_MAX)
        };
        match self.nics.iter().find(long) {
            Some(nic) => Err(BadSpec::LongNames {
                vm: vm.clone(),
                nic: nic.id.clone(),
            }),
            None => Ok(()),
        }
    }
}

impl Serialize for VmSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Flat<'a> {
            #[serde(flatten)]
            machine: &'a Map<String, Value>,
            nics: &'a [NicSpec],
            state: Desired,
            restart: Restart,
        }
        let mut machine = match serde_json::to_value(&self.machine) {
            Ok(Value::Object(machine)) => machine,
            Ok(_) => return Err(serde::ser::Error::custom("a machine is an object")),
            Err(error) => return Err(serde::ser::Error::custom(error)),
        };
        machine.remove(VDPA);
        Flat {
            machine: &machine,
            nics: &self.nics,
            state: self.state,
            restart: self.restart,
        }
        .serialize(serializer)
    }
}

/// The field of [`VmConfig`] that is not for clients of the node.
const VDPA: &str = "vdpa";

impl<'de> Deserialize<'de> for VmSpec {
    // By hand: serde's `flatten` neither refuses unknown fields nor tells where a value is wrong.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Map::deserialize(deserializer)?;
        let nics: Vec<NicSpec> = take(&mut fields, "nics")?;
        let state = take(&mut fields, "state")?;
        let restart = take(&mut fields, "restart")?;
        if fields.contains_key(VDPA) {
            return Err(de::Error::custom(BadSpec::Vdpa));
        }
        for (position, nic) in nics.iter().enumerate() {
            if nics
                .iter()
                .skip(position + 1)
                .any(|other| other.id == nic.id)
            {
                return Err(de::Error::custom(BadSpec::TwoNics(nic.id.clone())));
            }
        }
        Ok(Self {
            machine: place("", Value::Object(fields))?,
            nics,
            state,
            restart,
        })
    }
}

fn take<T: DeserializeOwned + Default, E: de::Error>(
    fields: &mut Map<String, Value>,
    name: &str,
) -> Result<T, E> {
    fields
        .remove(name)
        .map_or_else(|| Ok(T::default()), |value| place(name, value))
}

/// Reads a value; an error says where in it.
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
        object.description = Some("A virtual machine as it is to be".to_owned());
        RefOr::T(Schema::Object(object))
    }
}

impl ToSchema for VmSpec {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("VmSpec")
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        <VmConfig as ToSchema>::schemas(schemas);
        <RawNic as ToSchema>::schemas(schemas);
    }
}

#[cfg(test)]
mod tests;
