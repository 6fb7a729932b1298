//! Requests to the kernel about NICs, devices and ports: how many at a time, and what their errors are to a client.
//!
//! Owns the bound and the table of statuses. It must not know what is asked.
//!
//! | what | status |
//! |---|---|
//! | the client named what is not there | 404 |
//! | the client's values cannot be | 422 |
//! | it cannot be done on this host, or not now: in use, no driver, no right, refused by the kernel | 409 |
//! | the kernel does not answer, or too many requests wait for it | 503 |
//! | the kernel's answers or files make no sense | 500 |

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tokio::sync::Semaphore;
use vdpa_mgmt::nic::StoreError;
use vdpa_mgmt::pci::Address;
use vdpa_mgmt::{Error, ErrorKind};
use vmm::http::{HttpError, Problem, on_worker};

use crate::commands::vf;

/// Requests at a time: the kernel has one lock for vDPA and one for network interfaces, so more of
/// them would only wait there, where nothing ends them.
const REQUESTS_MAX: usize = 4;
/// How long a request waits for its turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why it was not done.
#[derive(Debug, thiserror::Error)]
pub(in crate::node) enum ManagementError {
    #[error(transparent)]
    Mgmt(#[from] Error),
    #[error(transparent)]
    Functions(#[from] vf::CommandError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Http(#[from] HttpError),
    /// What is there has the name, but not the properties.
    #[error("there is another vDPA device {name}: its {what} is {is}, not {wanted}")]
    Differs {
        name: String,
        what: &'static str,
        is: String,
        wanted: String,
    },
    /// Deleting it would leave the rest of a NIC behind.
    #[error(
        "the vDPA device {0} is a part of the NIC of that name: remove that, with all that it was made of"
    )]
    PartOfNic(String),
    /// It would go, or come back as another one.
    #[error("the NIC {nic} is made on a virtual function of {function}: remove that first")]
    CarriesNic { function: Address, nic: String },
    /// Too many wait.
    #[error("{REQUESTS_MAX} requests wait for the kernel already, for {} s", PATIENCE.as_secs())]
    Busy,
}

type Kind = (StatusCode, &'static str);

const NOT_FOUND: Kind = (StatusCode::NOT_FOUND, "not_found");
const UNUSABLE: Kind = (StatusCode::UNPROCESSABLE_ENTITY, "unusable");
const NO_ANSWER: Kind = (StatusCode::SERVICE_UNAVAILABLE, "no_answer");
const HOST_FAILED: Kind = (StatusCode::INTERNAL_SERVER_ERROR, "host_failed");

/// A conflict with how the host is now.
fn conflict(code: &'static str) -> Kind {
    (StatusCode::CONFLICT, code)
}

impl Problem for ManagementError {
    fn kind(&self) -> Kind {
        match self {
            Self::Mgmt(error) => mgmt(error),
            Self::Functions(error) => functions(error),
            Self::Store(StoreError::NotPermitted { .. }) => conflict("not_permitted"),
            Self::Store(StoreError::NoNic(_)) => NOT_FOUND,
            Self::Store(_) => HOST_FAILED,
            Self::Http(error) => error.kind(),
            Self::Differs { .. } => conflict("differs"),
            Self::PartOfNic(_) | Self::CarriesNic { .. } => conflict("part_of_nic"),
            Self::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
        }
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Http(error) => error.hint(),
            Self::Differs { .. } => Some("give another name, or delete that device first"),
            Self::PartOfNic(_) | Self::CarriesNic { .. } => Some(
                "`bellhop nic remove`; the NIC of a virtual machine goes with DELETE /v1/vms/{name}/nics/{id}",
            ),
            Self::Busy => Some("try again later"),
            _ => None,
        }
    }
}

impl IntoResponse for ManagementError {
    fn into_response(self) -> Response {
        self.to_response()
    }
}

fn mgmt(error: &Error) -> Kind {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NoParam => NOT_FOUND,
        ErrorKind::BadName => (StatusCode::BAD_REQUEST, "bad_parameter"),
        ErrorKind::Invalid | ErrorKind::Unusable | ErrorKind::NoMgmtDevice => UNUSABLE,
        ErrorKind::NoVdpa | ErrorKind::OtherNamespace => conflict("no_vdpa"),
        ErrorKind::NoDevlink => conflict("no_devlink"),
        ErrorKind::NotPermitted => conflict("not_permitted"),
        ErrorKind::NameTaken => conflict("name_taken"),
        ErrorKind::InUse => conflict("in_use"),
        ErrorKind::NoRoom => conflict("no_room"),
        ErrorKind::NoSriov => conflict("no_sriov"),
        ErrorKind::NotNegotiated => conflict("not_negotiated"),
        ErrorKind::NotSupported | ErrorKind::Refused | ErrorKind::NotUndone => conflict("refused"),
        ErrorKind::NoAnswer { .. } | ErrorKind::Interrupted => NO_ANSWER,
        ErrorKind::Malformed | ErrorKind::Failed => HOST_FAILED,
    }
}

fn functions(error: &vf::CommandError) -> Kind {
    match error {
        vf::CommandError::Mgmt(error) => mgmt(error),
        vf::CommandError::Words(_) => UNUSABLE,
        vf::CommandError::NotPci(_) | vf::CommandError::NoInterface(_) => NOT_FOUND,
        vf::CommandError::Output(_) => HOST_FAILED,
    }
}

/// The turns of requests to the kernel.
#[derive(Debug, Clone)]
pub(in crate::node) struct Turns(Arc<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(REQUESTS_MAX)))
    }
}

impl Turns {
    /// Carries out `work` on a worker thread, to its end also if the client goes: its turn is over only
    /// then.
    pub(in crate::node) async fn run<T, E>(
        &self,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, ManagementError>
    where
        T: Send + 'static,
        E: Into<ManagementError> + Send + 'static,
    {
        let turn = tokio::time::timeout(PATIENCE, self.0.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Err(ManagementError::Busy);
        };
        let done = on_worker(move || {
            let done = work();
            drop(turn);
            done
        });
        done.await?.map_err(Into::into)
    }
}

/// A list where the kernel has what it is of; none where it has not, for that is what there is then.
pub(super) fn or_none<T, E>(
    list: Result<Vec<T>, E>,
    absent: impl FnOnce(&E) -> bool,
) -> Result<Vec<T>, E> {
    match list {
        Err(error) if absent(&error) => Ok(Vec::new()),
        list => list,
    }
}

/// Whether this host, as it is, has no vDPA management.
pub(super) fn no_vdpa(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NoVdpa | ErrorKind::OtherNamespace)
}

/// Whether this host, as it is, has no devlink.
pub(super) fn no_devlink(error: &Error) -> bool {
    error.kind() == ErrorKind::NoDevlink
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_wait_for_their_turn() {
        let turns = Turns::default();
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let wait = Arc::new(parking_lot::Mutex::new(wait));
        let waiting: Vec<_> = (0..REQUESTS_MAX)
            .map(|_| {
                let (turns, wait) = (turns.clone(), wait.clone());
                tokio::spawn(async move {
                    let work = move || {
                        let _ = wait.lock().recv();
                        Ok::<_, Error>(())
                    };
                    turns.run(work).await
                })
            })
            .collect();
        while turns.0.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        // The clients go; what they asked for goes on, and so do their turns.
        waiting[0].abort();
        tokio::task::yield_now().await;
        assert_eq!(turns.0.available_permits(), 0);
        drop(release);
        for waiting in waiting.into_iter().skip(1) {
            assert!(waiting.await.unwrap().is_ok());
        }
        assert!(turns.run(|| Ok::<_, Error>(1)).await.is_ok());
    }

    #[test]
    fn a_host_without_the_modules_is_no_failure() {
        let error = |kind| Error::new(kind, "it failed");
        let none = or_none::<(), _>(Err(error(ErrorKind::NoVdpa)), no_vdpa);
        assert!(none.unwrap().is_empty());
        let none = or_none::<(), _>(Err(error(ErrorKind::NoDevlink)), no_devlink);
        assert!(none.unwrap().is_empty());
        for (kind, status) in [
            (ErrorKind::NoVdpa, StatusCode::CONFLICT),
            (ErrorKind::NoDevlink, StatusCode::CONFLICT),
            (ErrorKind::NotFound, StatusCode::NOT_FOUND),
        ] {
            assert_eq!(ManagementError::from(error(kind)).kind().0, status);
        }
    }
}
