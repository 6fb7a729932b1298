//! Requests to the kernel about NICs, devices and ports: the status of their errors.
//!
//! | error | status |
//! |---|---|
//! | the named object does not exist | 404 |
//! | a value in the request is invalid | 422 |
//! | impossible here or now: in use, no driver, no permission, refused by the kernel | 409 |
//! | the kernel does not answer, or too many requests wait for it | 503 |
//! | the kernel's answers or files are malformed | 500 |

use axum::http::StatusCode;
use vdpa_mgmt::nic::StoreError;
use vdpa_mgmt::{Connection, Error as MgmtError, ErrorKind as MgmtErrorKind};

use crate::error::{Error, ErrorKind, HOST_FAILED, UNUSABLE, conflict};

const NOT_FOUND: ErrorKind = ErrorKind::Answer(StatusCode::NOT_FOUND, "not_found");

vdpa::error_from! {
    MgmtError as error => kind(&error),
    StoreError as error => match error {
        StoreError::NotPermitted { .. } => conflict("not_permitted"),
        // No NIC can have the name.
        StoreError::NoNic(_) | StoreError::Name(_) => NOT_FOUND,
        _ => HOST_FAILED,
    },
}

/// Deleting the named object would leave the rest of a NIC behind.
pub(super) fn part_of_nic(message: String) -> Error {
    Error::conflict("part_of_nic", message).hint(
        "use `bellhop nic delete`, or for the NIC of a virtual machine DELETE \
         /v1/vms/{name}/nics/{id}",
    )
}

fn kind(error: &MgmtError) -> ErrorKind {
    match error.kind() {
        MgmtErrorKind::NotFound | MgmtErrorKind::NoParam => NOT_FOUND,
        MgmtErrorKind::BadName => ErrorKind::Answer(StatusCode::BAD_REQUEST, "bad_parameter"),
        MgmtErrorKind::Invalid | MgmtErrorKind::Unusable | MgmtErrorKind::NoMgmtDevice => UNUSABLE,
        MgmtErrorKind::NoVdpa | MgmtErrorKind::OtherNamespace => conflict("no_vdpa"),
        MgmtErrorKind::NoDevlink => conflict("no_devlink"),
        MgmtErrorKind::NotPermitted => conflict("not_permitted"),
        MgmtErrorKind::NameTaken => conflict("name_taken"),
        MgmtErrorKind::InUse => conflict("in_use"),
        MgmtErrorKind::NoRoom => conflict("no_room"),
        MgmtErrorKind::NoSriov => conflict("no_sriov"),
        MgmtErrorKind::NotNegotiated => conflict("not_negotiated"),
        MgmtErrorKind::NotSupported | MgmtErrorKind::Refused | MgmtErrorKind::NotUndone => {
            conflict("refused")
        }
        MgmtErrorKind::NoAnswer { .. } | MgmtErrorKind::Interrupted => {
            ErrorKind::Answer(StatusCode::SERVICE_UNAVAILABLE, "no_answer")
        }
        MgmtErrorKind::Malformed | MgmtErrorKind::Failed => HOST_FAILED,
    }
}

/// A list, or an empty one if the kernel lacks the subsystem and so has no such objects.
pub(super) fn or_none<T, E>(
    list: Result<Vec<T>, E>,
    absent: impl FnOnce(&E) -> bool,
) -> Result<Vec<T>, E> {
    match list {
        Err(error) if absent(&error) => Ok(Vec::new()),
        list => list,
    }
}

/// All objects of a kind in vDPA management; none without vDPA management.
pub(super) fn of_vdpa<T>(
    list: impl FnOnce(&Connection) -> Result<Vec<T>, MgmtError>,
) -> Result<Vec<T>, MgmtError> {
    or_none(Connection::open().and_then(|open| list(&open)), no_vdpa)
}

/// Whether this host currently has no vDPA management.
fn no_vdpa(error: &MgmtError) -> bool {
    matches!(
        error.kind(),
        MgmtErrorKind::NoVdpa | MgmtErrorKind::OtherNamespace
    )
}

/// Whether this host currently has no devlink.
pub(super) fn no_devlink(error: &MgmtError) -> bool {
    error.kind() == MgmtErrorKind::NoDevlink
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_the_modules_is_no_failure() {
        let error = |kind| MgmtError::new(kind, "it failed");
        let none = or_none::<(), _>(Err(error(MgmtErrorKind::NoVdpa)), no_vdpa);
        assert!(none.unwrap().is_empty());
        let none = or_none::<(), _>(Err(error(MgmtErrorKind::NoDevlink)), no_devlink);
        assert!(none.unwrap().is_empty());
        for (kind, status) in [
            (MgmtErrorKind::NoVdpa, StatusCode::CONFLICT),
            (MgmtErrorKind::NoDevlink, StatusCode::CONFLICT),
            (MgmtErrorKind::NotFound, StatusCode::NOT_FOUND),
        ] {
            assert_eq!(Error::from(error(kind)).answer().0, status);
        }
    }
}
