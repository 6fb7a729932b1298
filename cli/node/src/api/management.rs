//! Requests to the kernel about NICs, devices and ports: their number at a time, and the status of
//! their errors.
//!
//! Owns the limit and the table of statuses.
//!
//! | error | status |
//! |---|---|
//! | the named object does not exist | 404 |
//! | a value in the request is invalid | 422 |
//! | impossible here or now: in use, no driver, no permission, refused by the kernel | 409 |
//! | the kernel does not answer, or too many requests wait for it | 503 |
//! | the kernel's answers or files are malformed | 500 |

use std::time::Duration;

use axum::http::StatusCode;
use bellhop_api::node::Role;
use vdpa_mgmt::nic::StoreError;
use vdpa_mgmt::{Connection, Error as MgmtError, ErrorKind as MgmtErrorKind};
use vmm::http::budget::Budget;
use vmm::http::on_worker;

use crate::error::{Error, ErrorKind, HOST_FAILED, UNUSABLE, conflict};

/// The most requests at a time. The kernel has one lock for vDPA and one for network interfaces, so
/// more requests would only wait there without a timeout.
const REQUESTS_MAX: usize = 4;
/// The time limit for a request in the queue.
const PATIENCE: Duration = Duration::from_secs(10);

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

/// The places of requests to the kernel.
#[derive(Debug, Clone)]
pub(crate) struct KernelPermits(Budget);

impl Default for KernelPermits {
    fn default() -> Self {
        Self(Budget::new(REQUESTS_MAX))
    }
}

impl KernelPermits {
    /// Runs `work` for a client of this role on a worker thread. Its turn ends with the work, also
    /// if the client disconnects.
    pub(crate) async fn run<T, E>(
        &self,
        role: Role,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, Error>
    where
        T: Send + 'static,
        E: Into<Error> + Send + 'static,
    {
        let place = tokio::time::timeout(PATIENCE, self.0.take(role)).await;
        let place = place.map_err(|_| {
            let message = format!(
                "the kernel has not finished earlier requests for {} s",
                PATIENCE.as_secs()
            );
            Error::unavailable("busy", message).hint("try again later")
        })?;
        let done = on_worker(move || {
            let done = work();
            drop(place);
            done
        });
        done.await?.map_err(Into::into)
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

    #[tokio::test]
    async fn requests_wait_for_their_turn() {
        let kernel_permits = KernelPermits::default();
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let wait = std::sync::Arc::new(parking_lot::Mutex::new(wait));
        let waiting: Vec<_> = (0..REQUESTS_MAX)
            .map(|_| {
                let (kernel_permits, wait) = (kernel_permits.clone(), wait.clone());
                tokio::spawn(async move {
                    let work = move || {
                        let _ = wait.lock().recv();
                        Ok::<_, MgmtError>(())
                    };
                    kernel_permits.run(Role::Admin, work).await
                })
            })
            .collect();
        while kernel_permits.0.free() > 0 {
            tokio::task::yield_now().await;
        }
        // The clients disconnect; their requests continue, and keep their turns.
        waiting[0].abort();
        tokio::task::yield_now().await;
        assert_eq!(kernel_permits.0.free(), 0);
        drop(release);
        for waiting in waiting.into_iter().skip(1) {
            assert!(waiting.await.unwrap().is_ok());
        }
        let next = kernel_permits.run(Role::Read, || Ok::<_, MgmtError>(1));
        assert!(next.await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn readers_use_up_no_turns_of_others() {
        let kernel_permits = KernelPermits::default();
        let held: Vec<_> = std::iter::from_fn(|| kernel_permits.0.try_take(Role::Read)).collect();
        let ask = |role| kernel_permits.run(role, || Ok::<_, MgmtError>(()));
        assert_eq!(ask(Role::Read).await.unwrap_err().answer().1, "busy");
        for role in [Role::Operate, Role::Admin] {
            assert!(ask(role).await.is_ok(), "{role}");
        }
        drop(held);
        assert!(ask(Role::Read).await.is_ok());
    }

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
