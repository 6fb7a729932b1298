//! A vDPA device in a machine's configuration: by its path, or as an open descriptor.
//!
//! Owns the way from the number of a descriptor, which is all that JSON, TOML and a command line can hold, to
//! the descriptor itself. It must not know how descriptors travel.
//!
//! ```text
//!   {"path": P} ──> Path(P) ───────────────────────────────┐
//!                                                          ├──> the machine opens, or takes it
//!   {"fd": N} ──> Number(N) ─ VdpaConfig::take_descriptor ─> Descriptor ┘        │
//!                    │ nobody has taken it: the machine refuses                  │ VdpaConfig::release
//!                                                          Path(as opened) <─────┘
//! ```

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use devices::virtio::vdpa::DoorbellMode;
use serde::{Deserialize, Serialize};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};
use vdpa::device::check_fd;

use super::{MacAddress, VmConfig, schema};

/// A vDPA device to be given to the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "VdpaFields", into = "VdpaFields")]
pub struct VdpaConfig {
    /// Which device.
    pub source: VdpaSource,
    /// A name for messages; the file's name where none is given. Required for a descriptor.
    pub id: Option<String>,
    /// The MAC address that the guest sees; the device's own where none is given.
    pub mac: Option<MacAddress>,
    /// Number of virtqueues, control virtqueue included. The device knows it;
    /// if given, it must agree.
    pub num_queues: Option<u16>,
    /// Whether the guest kicks by stores in the device's own doorbell pages
    /// (`auto`: where queues have them; `on`: all data queues must; `off`: by eventfds).
    pub doorbell: DoorbellMode,
    /// Kick the device and interrupt the driver, once, when a queue hangs (`ring_watch`): that
    /// heals a kick or an interrupt that was lost.
    pub rescue: bool,
    /// The vhost-vdpa character device that replaces this one, once, if this one needs a reset
    /// (DEVICE_NEEDS_RESET). The guest's driver continues. The device is opened only then.
    pub failover: Option<PathBuf>,
}

/// How a vDPA device is named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VdpaSource {
    /// The vhost-vdpa character device, such as `/dev/vhost-vdpa-0`.
    Path(PathBuf),
    /// A descriptor that is still to be taken: of a request the index among those that came with
    /// it, of a command line or a configuration file an inherited one. A machine refuses it.
    Number(u32),
    /// An open vhost-vdpa device.
    Descriptor(VdpaDescriptor),
}

/// A checked vhost-vdpa device that another process opened. Clones are the same open file. Two are
/// equal only if they are clones.
#[derive(Clone)]
pub struct VdpaDescriptor {
    fd: Arc<OwnedFd>,
    path: PathBuf,
}

impl fmt::Debug for VdpaDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VdpaDescriptor").field(&self.path).finish()
    }
}

impl PartialEq for VdpaDescriptor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.fd, &other.fd)
    }
}

impl Eq for VdpaDescriptor {}

impl VdpaDescriptor {
    /// Takes a descriptor, after a look at what it is; it is closed if it is anything else than a
    /// vhost-vdpa device that is open for reading and writing. The device is left as it is.
    ///
    /// # Errors
    /// As [`check_fd`].
    pub fn new(fd: OwnedFd) -> Result<Self, vdpa::Error> {
        let path = check_fd(fd.as_fd())?;
        Ok(Self {
            fd: Arc::new(fd),
            path,
        })
    }

    /// The path under which it was opened, as the kernel says. There may be another file by now, or
    /// none.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another descriptor of the same open file.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }
}

/// Why a number in a configuration stands for no descriptor.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    /// A descriptor has no name of its own.
    #[error("a NIC that is given as fd={0} needs an id")]
    NoName(u32),
    /// There is none, or another NIC has it.
    #[error("fd={number} of NIC {id} {reason}")]
    Missing {
        /// The NIC.
        id: String,
        /// What was asked for.
        number: u32,
        /// Why it is not to be had.
        reason: String,
    },
    /// It is something else.
    #[error("fd={number} of NIC {id} cannot be used")]
    Unusable {
        /// The NIC.
        id: String,
        /// What was asked for.
        number: u32,
        /// What it is.
        #[source]
        source: vdpa::Error,
    },
}

impl VdpaConfig {
    /// The name by which the machine knows it.
    #[must_use]
    pub fn name(&self) -> String {
        let path = match &self.source {
            _ if self.id.is_some() => return self.id.clone().unwrap_or_default(),
            VdpaSource::Number(number) => return format!("fd{number}"),
            VdpaSource::Path(path) => path,
            VdpaSource::Descriptor(descriptor) => &descriptor.path,
        };
        let name = path.file_name().unwrap_or(path.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// The device's path as far as it is known, for people.
    #[must_use]
    pub fn shown_path(&self) -> Cow<'_, str> {
        match &self.source {
            VdpaSource::Path(path) => path.to_string_lossy(),
            VdpaSource::Descriptor(descriptor) => descriptor.path.to_string_lossy(),
            VdpaSource::Number(number) => format!("fd={number}").into(),
        }
    }

    /// Whether this is the device at `path`, as far as paths say it.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        match &self.source {
            VdpaSource::Path(own) => own == path,
            VdpaSource::Descriptor(descriptor) => descriptor.path == path,
            VdpaSource::Number(_) => false,
        }
    }

    /// Replaces the number of a descriptor by what `take` gives for it; `take`'s error says why
    /// there is none.
    ///
    /// # Errors
    /// See [`DescriptorError`].
    pub fn take_descriptor(
        &mut self,
        take: impl FnOnce(u32) -> Result<OwnedFd, String>,
    ) -> Result<(), DescriptorError> {
        let VdpaSource::Number(number) = self.source else {
            return Ok(());
        };
        let id = self.id.clone().ok_or(DescriptorError::NoName(number))?;
        let fd = match take(number) {
            Ok(fd) => fd,
            Err(reason) => return Err(DescriptorError::Missing { id, number, reason }),
        };
        let descriptor = VdpaDescriptor::new(fd).map_err(|source| DescriptorError::Unusable {
            id,
            number,
            source,
        })?;
        self.source = VdpaSource::Descriptor(descriptor);
        Ok(())
    }

    /// Lets go of the descriptor, for who only wants to say which device it is: a device opens
    /// once, so it is not free as long as anybody has it.
    pub fn release(&mut self) {
        if let VdpaSource::Descriptor(descriptor) = &self.source {
            self.source = VdpaSource::Path(descriptor.path.clone());
        }
    }

    /// A copy that holds no descriptor.
    #[must_use]
    pub fn released(&self) -> Self {
        let mut copy = self.clone();
        copy.release();
        copy
    }
}

impl VmConfig {
    /// Puts `nic` in the place of the device that has its name: where that is on this host, and
    /// what else `nic` says.
    ///
    /// # Errors
    /// [`NoSuchNic`].
    pub fn replace_nic(&mut self, nic: VdpaConfig) -> Result<(), NoSuchNic> {
        let id = nic.name();
        let Some(old) = self.vdpa.iter_mut().find(|old| old.name() == id) else {
            let has = self.vdpa.iter().map(VdpaConfig::name).collect();
            return Err(NoSuchNic { id, has });
        };
        *old = nic;
        Ok(())
    }
}

/// A machine has no vDPA device of this name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoSuchNic {
    /// The name.
    pub id: String,
    /// Those that it has.
    pub has: Vec<String>,
}

/// As it is written. A vDPA device to be given to the guest: by `path`, or by `fd`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct VdpaFields {
    /// The vhost-vdpa character device, such as `/dev/vhost-vdpa-0`. Either this or `fd`. Of one
    /// that came as a descriptor this shows where it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    path: Option<PathBuf>,
    /// The vhost-vdpa device as a descriptor, open for reading and writing: the index, from 0,
    /// among those that came with the request (SCM_RIGHTS, at most 16). Its `id` is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fd: Option<u32>,
    /// A name for messages; the file's name where none is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// The MAC address that the guest sees; the device's own where none is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::mac)]
    mac: Option<MacAddress>,
    /// Number of virtqueues, control virtqueue included. The device knows it;
    /// if given, it must agree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    num_queues: Option<u16>,
    /// Whether the guest kicks by stores in the device's own doorbell pages
    /// (`auto`: where queues have them; `on`: all data queues must; `off`: by eventfds).
    #[serde(default)]
    #[schema(schema_with = schema::doorbell)]
    doorbell: DoorbellMode,
    /// Kick the device and interrupt the driver, once, when a queue hangs (`ring_watch`): that
    /// heals a kick or an interrupt that was lost.
    #[serde(default)]
    rescue: bool,
    /// The vhost-vdpa character device that takes the place of this one if it says that it needs a
    /// reset (DEVICE_NEEDS_RESET): the NIC moves there, once, as `PATCH /v1/vm/nics/{id}` moves it.
    /// Opened only then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    failover: Option<PathBuf>,
}

/// What cannot be a device's configuration.
#[derive(Debug, thiserror::Error)]
enum FieldsError {
    #[error("missing field `path`, or `fd` for a device that is open already")]
    Neither,
    #[error("both `path` and `fd` are given: a device has one of them")]
    Both,
    #[error("`failover` is the device itself: name another one that can take its place")]
    OwnFailover,
}

impl TryFrom<VdpaFields> for VdpaConfig {
    type Error = FieldsError;

    fn try_from(fields: VdpaFields) -> Result<Self, FieldsError> {
        let config = Self {
            source: match (fields.path, fields.fd) {
                (Some(path), None) => VdpaSource::Path(path),
                (None, Some(number)) => VdpaSource::Number(number),
                (None, None) => return Err(FieldsError::Neither),
                (Some(_), Some(_)) => return Err(FieldsError::Both),
            },
            id: fields.id,
            mac: fields.mac,
            num_queues: fields.num_queues,
            doorbell: fields.doorbell,
            rescue: fields.rescue,
            failover: fields.failover,
        };
        match &config.failover {
            Some(failover) if config.is_at(failover) => Err(FieldsError::OwnFailover),
            _ => Ok(config),
        }
    }
}

impl From<VdpaConfig> for VdpaFields {
    fn from(config: VdpaConfig) -> Self {
        let (path, fd) = match config.source {
            VdpaSource::Path(path) => (Some(path), None),
            VdpaSource::Descriptor(descriptor) => (Some(descriptor.path), None),
            VdpaSource::Number(number) => (None, Some(number)),
        };
        Self {
            path,
            fd,
            id: config.id,
            mac: config.mac,
            num_queues: config.num_queues,
            doorbell: config.doorbell,
            rescue: config.rescue,
            failover: config.failover,
        }
    }
}

impl PartialSchema for VdpaConfig {
    fn schema() -> RefOr<Schema> {
        VdpaFields::schema()
    }
}

impl ToSchema for VdpaConfig {
    fn name() -> Cow<'static, str> {
        "VdpaConfig".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        VdpaFields::schemas(schemas);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_device_has_a_path_or_a_descriptor() {
        let read = |text: &str| text.parse::<VdpaConfig>();
        assert_eq!(read("fd=5,id=a").unwrap().source, VdpaSource::Number(5));
        for (text, words) in [
            ("path=a,fd=5", ["`path`", "`fd`"]),
            ("id=a", ["`path`", "`fd`"]),
            ("fd=-1", ["fd", "-1"]),
            ("fd=4294967296", ["fd", "4294967296"]),
            ("fd=five", ["fd", "five"]),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        let json = serde_json::to_value(read("fd=5,id=a").unwrap()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"fd": 5, "id": "a", "doorbell": "auto", "rescue": false})
        );
    }

    #[test]
    fn what_is_no_device_is_refused_and_closed() {
        let mut config: VdpaConfig = "fd=0,id=a".parse().unwrap();
        let error = config.take_descriptor(|_| Err("is not there".to_owned()));
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("fd=0 of NIC a is not there")
        );
        let file = || Ok(File::open("/dev/null").unwrap().into());
        let error = config.take_descriptor(|_| file()).unwrap_err();
        assert!(matches!(error, DescriptorError::Unusable { .. }), "{error}");
        // As it was: another one may come.
        assert_eq!(config.source, VdpaSource::Number(0));
        let mut nameless: VdpaConfig = "fd=0".parse().unwrap();
        let error = nameless.take_descriptor(|_| file()).unwrap_err();
        assert!(matches!(error, DescriptorError::NoName(0)));
        let mut path: VdpaConfig = "path=/a".parse().unwrap();
        path.take_descriptor(|_| Err("is not asked for".to_owned()))
            .unwrap();
    }
}
