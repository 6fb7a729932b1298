//! `/v1/vdpa-devices`: vDPA devices: list, create, show, change, delete.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::node::{Event, EventChange};
use bellhop_api::responses::{KernelErrors, NameErrors, NamedBodyErrors, NamedChangeErrors};
use bellhop_common::listing::Listing;
use bellhop_common::management::dev;
use bellhop_common::text::address;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vdpa_mgmt::nic::{Store, StoreError};
use vdpa_mgmt::{
    ClassConfig, Connection, DeviceConfig, Error as MgmtError, ErrorKind, MgmtDeviceName,
    NewDevice, VdpaDevice,
};
use vmm::config::MacAddress;
use vmm::http::body::JsonBody;
use vmm::http::parameters::DeviceName;

use super::listings::{VdpaDeviceDetails, VdpaDeviceListing};
use super::management::{of_vdpa, part_of_nic};
use super::state::{Api, SenderRole};
use crate::error::Error;

/// A device in the form of `bellhop dev show NAME -j` and `bellhop dev config show NAME -j`.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    #[serde(flatten)]
    device: Listing,
    #[serde(flatten)]
    config: Listing,
}

/// The settings of a vDPA device.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct VdpaDeviceSpec {
    /// Its management device: NAME or BUS/NAME, as in `/v1/mgmtdevs`.
    #[schema(value_type = String, example = "pci/0000:01:00.1")]
    mgmtdev: MgmtDeviceName,
    /// Its unicast address.
    #[schema(value_type = Option<String>, example = "52:54:00:12:34:56")]
    #[schema(pattern = "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$")]
    mac: Option<MacAddress>,
    /// Its largest payload, in bytes.
    #[schema(minimum = 68)]
    mtu: Option<u16>,
    /// Queue pairs.
    #[schema(minimum = 1, maximum = 32768)]
    max_vqp: Option<u16>,
    /// Feature bits that it offers, and no others.
    device_features: Option<u64>,
}

/// A change of a vDPA device.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct VdpaDeviceChange {
    /// Another unicast address (Linux 6.12 and later).
    #[schema(value_type = String, example = "52:54:00:12:34:57")]
    #[schema(pattern = "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$")]
    mac: MacAddress,
}

impl VdpaDeviceSpec {
    fn named(&self, name: &str) -> Result<NewDevice, MgmtError> {
        let device = NewDevice::new(name, self.mgmtdev.clone())?;
        let device = device.mac(self.mac.map(MacAddress::bytes))?;
        let device = device.mtu(self.mtu)?.max_vqp(self.max_vqp)?;
        Ok(device.device_features(self.device_features))
    }

    /// Checks whether an existing device matches the request.
    fn compare(&self, device: &VdpaDevice, config: Option<&DeviceConfig>) -> Result<(), Error> {
        let (mac, mtu, pairs) = match config.map(|config| &config.class) {
            Some(ClassConfig::Net(net)) => (net.mac, net.mtu, net.max_vq_pairs),
            Some(ClassConfig::Block(_) | ClassConfig::Other) | None => (None, None, None),
        };
        let number = |number: u16| number.to_string();
        let mask = |mask: u64| format!("{mask:#x}");
        // Features that the request omits cannot differ.
        let is_features = config.and_then(|config| config.device_features);
        let features = self.device_features.filter(|_| is_features.is_some());
        let mgmtdevs = [&device.mgmtdev, &self.mgmtdev].map(|mgmtdev| Some(mgmtdev.to_string()));
        for (what, [is, wanted]) in [
            ("mgmtdev", mgmtdevs),
            (
                "mac",
                [
                    mac.map(|mac| address(&mac)),
                    self.mac.map(|mac| mac.to_string()),
                ],
            ),
            ("mtu", [mtu, self.mtu].map(|mtu| mtu.map(number))),
            (
                "max_vqp",
                [pairs, self.max_vqp].map(|pairs| pairs.map(number)),
            ),
            (
                "device_features",
                [is_features, features].map(|features| features.map(mask)),
            ),
        ] {
            if let Some(wanted) = wanted.filter(|wanted| is.as_ref() != Some(wanted)) {
                let name = &device.name;
                let is = is.as_deref().unwrap_or("unknown");
                let message =
                    format!("another vDPA device {name} exists: its {what} is {is}, not {wanted}");
                let error = Error::conflict("differs", message);
                return Err(error.hint("use another name, or delete that device first"));
            }
        }
        Ok(())
    }
}

fn config(connection: &Connection, name: &str) -> Result<Option<DeviceConfig>, MgmtError> {
    match connection.config(name) {
        Ok(config) => Ok(Some(config)),
        // A device class that the kernel does not describe.
        Err(error) if error.kind() == ErrorKind::Refused => Ok(None),
        Err(error) => Err(error),
    }
}

fn shown(connection: &Connection, name: &str) -> Result<Shown, MgmtError> {
    let device = connection.device(name)?;
    let config = config(connection, name)?;
    Ok(Shown {
        device: dev::listing(std::slice::from_ref(&device)),
        config: dev::config_listing(config.as_slice()),
    })
}

/// List vDPA devices
///
/// As `bellhop dev show -j`. The list is empty without the vDPA management of the kernel (`modprobe
/// vdpa`).
#[utoipa::path(get, path = "/v1/vdpa-devices", operation_id = "list_vdpa_devices", responses(
    (status = 200, description = "All vDPA devices", body = VdpaDeviceListing),
    KernelErrors,
))]
pub(super) async fn list(
    State(node): Api,
    SenderRole(role): SenderRole,
) -> Result<Json<Listing>, Error> {
    let devices = node
        .kernel_permits
        .run(role, || of_vdpa(Connection::devices))
        .await?;
    Ok(Json(dev::listing(&devices)))
}

/// Read a vDPA device
///
/// `dev` is as in `bellhop dev show -j`, `config` as in `bellhop dev config show -j`.
#[utoipa::path(get, path = "/v1/vdpa-devices/{name}", operation_id = "get_vdpa_device",
    params(("name" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The device's name")),
    responses(
    (status = 200, description = "The device", body = VdpaDeviceDetails),
    NameErrors, KernelErrors,
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    DeviceName(name): DeviceName,
) -> Result<Json<Shown>, Error> {
    let show = move || shown(&Connection::open()?, &name);
    Ok(Json(node.kernel_permits.run(role, show).await?))
}

/// Create a vDPA device
///
/// An identical device changes nothing. A different one of this name is not replaced.
#[utoipa::path(put, path = "/v1/vdpa-devices/{name}", operation_id = "put_vdpa_device",
    params(("name" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,63}$",
        description = "The device's name")),
    request_body = VdpaDeviceSpec,
    responses(
    (status = 200, description = "It existed already", body = VdpaDeviceDetails),
    (status = 201, description = "Created", body = VdpaDeviceDetails),
    NamedBodyErrors, KernelErrors,
))]
pub(super) async fn put(
    State(node): Api,
    SenderRole(role): SenderRole,
    DeviceName(name): DeviceName,
    JsonBody(spec): JsonBody<VdpaDeviceSpec>,
) -> Result<(StatusCode, Json<Shown>), Error> {
    let own = node.clone();
    let make = move || {
        let new = spec.named(&name)?;
        let connection = Connection::open()?;
        let status = match connection.add(&new) {
            Ok(()) => {
                let detail = format!("created on {} on request", spec.mgmtdev);
                let subject = format!("/v1/vdpa-devices/{name}");
                let event = Event::new(subject, EventChange::Created);
                own.events.publish(event.detail(detail));
                StatusCode::CREATED
            }
            Err(error) if matches!(error.kind(), ErrorKind::NameTaken | ErrorKind::NoRoom) => {
                // Without such a device, the only one of the management device has another name.
                let device = connection
                    .device(&name)
                    .map_err(|found| match found.kind() {
                        ErrorKind::NotFound => error,
                        _ => found,
                    })?;
                spec.compare(&device, config(&connection, &name)?.as_ref())?;
                StatusCode::OK
            }
            Err(error) => return Err(error.into()),
        };
        Ok::<_, Error>((status, shown(&connection, &name)?))
    };
    let (status, device) = node.kernel_permits.run(role, make).await?;
    Ok((status, Json(device)))
}

/// Set the MAC address of a vDPA device
///
/// For network devices, with Linux 6.12 and later.
#[utoipa::path(patch, path = "/v1/vdpa-devices/{name}", operation_id = "patch_vdpa_device",
    params(("name" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The device's name")),
    request_body = VdpaDeviceChange,
    responses(
    (status = 200, description = "The device as it is now", body = VdpaDeviceDetails),
    NamedChangeErrors, KernelErrors,
))]
pub(super) async fn change(
    State(node): Api,
    SenderRole(role): SenderRole,
    DeviceName(name): DeviceName,
    JsonBody(change): JsonBody<VdpaDeviceChange>,
) -> Result<Json<Shown>, Error> {
    let own = node.clone();
    let set = move || {
        let connection = Connection::open()?;
        connection.set_mac(&name, change.mac.bytes())?;
        let detail = format!("its address is {}", change.mac);
        let subject = format!("/v1/vdpa-devices/{name}");
        let event = Event::new(subject, EventChange::Changed);
        own.events.publish(event.detail(detail));
        shown(&connection, &name)
    };
    Ok(Json(node.kernel_permits.run(role, set).await?))
}

/// Delete a vDPA device
///
/// No process may have the device open. A device that `bellhop nic create` or the daemon created
/// for a NIC can only be deleted with that NIC.
#[utoipa::path(delete, path = "/v1/vdpa-devices/{name}", operation_id = "delete_vdpa_device",
    params(("name" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The device's name")),
    responses(
    (status = 204, description = "Deleted"),
    NameErrors, KernelErrors,
))]
pub(super) async fn remove(
    State(node): Api,
    SenderRole(role): SenderRole,
    DeviceName(name): DeviceName,
) -> Result<StatusCode, Error> {
    let own = node.clone();
    let delete = move || {
        let connection = Connection::open()?;
        let device = connection.device(&name)?;
        match Store::open(&own.paths.nics())?.nic(&name) {
            Ok(nic) if nic.mgmtdev() == Some(&device.mgmtdev) => {
                return Err(part_of_nic(format!(
                    "the vDPA device {name} belongs to the NIC of that name: delete the NIC with \
                     all its parts"
                )));
            }
            // Not a possible name of a record.
            Ok(_) | Err(StoreError::NoNic(_) | StoreError::Name(_)) => {}
            Err(error) => return Err(error.into()),
        }
        connection.delete(&name)?;
        let subject = format!("/v1/vdpa-devices/{name}");
        let event = Event::new(subject, EventChange::Deleted);
        own.events.publish(event.detail("on request"));
        Ok(())
    };
    node.kernel_permits.run(role, delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdpa_mgmt::NetConfig;

    fn spec(text: &str) -> VdpaDeviceSpec {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_device_that_is_there_is_compared() {
        let device = VdpaDevice {
            name: "nic0".to_owned(),
            mgmtdev: "vdpasim_net".parse().unwrap(),
            device_id: 1,
            vendor_id: None,
            max_vqs: None,
            max_vq_size: None,
            min_vq_size: None,
        };
        let config = DeviceConfig {
            name: "nic0".to_owned(),
            class: ClassConfig::Net(NetConfig {
                mac: Some([0x52, 0x54, 0, 0, 0, 1]),
                mtu: Some(1500),
                max_vq_pairs: Some(2),
                ..NetConfig::default()
            }),
            device_id: 1,
            negotiated_features: None,
            device_features: Some(0x2f),
        };
        let what = |text: &str| match spec(text).compare(&device, Some(&config)) {
            Ok(()) => None,
            Err(error) => {
                assert_eq!(error.answer().1, "differs");
                let text = error.to_string();
                let (_, what) = text.split_once(": its ").unwrap();
                Some(what.split(' ').next().unwrap().to_owned())
            }
        };
        assert_eq!(what(r#"{"mgmtdev":"vdpasim_net"}"#), None);
        assert_eq!(
            what(r#"{"mgmtdev":"vdpasim_net","mac":"52:54:00:00:00:01","mtu":1500,"max_vqp":2}"#),
            None
        );
        assert_eq!(
            what(r#"{"mgmtdev":"vdpasim_net","device_features":47}"#),
            None
        );
        let other = what(r#"{"mgmtdev":"vdpasim_net","device_features":15}"#);
        assert_eq!(other, Some("device_features".to_owned()));
        assert_eq!(what(r#"{"mgmtdev":"vduse"}"#), Some("mgmtdev".to_owned()));
        assert_eq!(
            what(r#"{"mgmtdev":"vdpasim_net","mac":"52:54:00:00:00:02"}"#),
            Some("mac".to_owned())
        );
        assert_eq!(
            what(r#"{"mgmtdev":"vdpasim_net","mtu":1501}"#),
            Some("mtu".to_owned())
        );
        assert_eq!(
            what(r#"{"mgmtdev":"vdpasim_net","max_vqp":1}"#),
            Some("max_vqp".to_owned())
        );
    }

    #[test]
    fn values_that_no_device_can_have_are_refused_before_the_kernel_sees_them() {
        for bad in [
            r#"{"mgmtdev":"vdpasim_net","mtu":67}"#,
            r#"{"mgmtdev":"vdpasim_net","max_vqp":0}"#,
        ] {
            assert!(spec(bad).named("nic0").is_err(), "{bad}");
        }
        for bad in [
            "{}",
            r#"{"mgmtdev":"a/b/c"}"#,
            r#"{"mgmtdev":"a","mac":"01:00:00:00:00:01"}"#,
            r#"{"mgmtdev":"a","mtu":70000}"#,
            r#"{"mgmtdev":"a","vlan":1}"#,
        ] {
            assert!(
                serde_json::from_str::<VdpaDeviceSpec>(bad).is_err(),
                "{bad}"
            );
        }
        assert!(spec(r#"{"mgmtdev":"a"}"#).named(&"x".repeat(64)).is_err());
    }
}
