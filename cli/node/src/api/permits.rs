//! Work that waits for the host: its number at a time, for clients of each role.
//!
//! Owns the limits. Without them, requests that wait for a hung file system or a busy kernel would
//! take all threads for blocking work.

use std::time::Duration;

use bellhop_api::node::Role;
use vmm::http::budget::Budget;
use vmm::http::on_worker;

use crate::error::Error;

/// The most requests to the kernel at a time. It has one lock for vDPA and one for network
/// interfaces, so more requests would only wait there without a timeout.
const KERNEL_MAX: usize = 4;
/// The most readers of files at a time: logs and snapshots. It is a quarter of the daemon's
/// threads for blocking work.
const FILES_MAX: usize = 16;
/// The time limit for a request in the queue.
const PATIENCE: Duration = Duration::from_secs(10);

/// The places of work that waits for a part of the host.
#[derive(Debug, Clone)]
pub(crate) struct Permits {
    places: Budget,
    /// The part, for errors.
    part: &'static str,
}

impl Permits {
    /// For requests to the kernel about NICs, devices and ports.
    pub(crate) fn for_kernel() -> Self {
        Self {
            places: Budget::new(KERNEL_MAX),
            part: "the kernel",
        }
    }

    /// For logs and snapshots.
    pub(crate) fn for_files() -> Self {
        Self {
            places: Budget::new(FILES_MAX),
            part: "the file system of the daemon's directories",
        }
    }

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
        let place = tokio::time::timeout(PATIENCE, self.places.take(role)).await;
        let place = place.map_err(|_| {
            let (part, seconds) = (self.part, PATIENCE.as_secs());
            let message = format!("{part} has not finished earlier requests for {seconds} s");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_wait_for_their_turn() {
        let permits = Permits::for_kernel();
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let wait = std::sync::Arc::new(parking_lot::Mutex::new(wait));
        let waiting: Vec<_> = (0..KERNEL_MAX)
            .map(|_| {
                let (permits, wait) = (permits.clone(), wait.clone());
                tokio::spawn(async move {
                    let work = move || {
                        let _ = wait.lock().recv();
                        Ok::<_, Error>(())
                    };
                    permits.run(Role::Admin, work).await
                })
            })
            .collect();
        while permits.places.free() > 0 {
            tokio::task::yield_now().await;
        }
        // The clients disconnect; their requests continue, and keep their turns.
        waiting[0].abort();
        tokio::task::yield_now().await;
        assert_eq!(permits.places.free(), 0);
        drop(release);
        for waiting in waiting.into_iter().skip(1) {
            assert!(waiting.await.unwrap().is_ok());
        }
        let next = permits.run(Role::Read, || Ok::<_, Error>(1));
        assert!(next.await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn readers_use_up_no_turns_of_others() {
        let permits = Permits::for_kernel();
        let held: Vec<_> = std::iter::from_fn(|| permits.places.try_take(Role::Read)).collect();
        let ask = |role| permits.run(role, || Ok::<_, Error>(()));
        assert_eq!(ask(Role::Read).await.unwrap_err().answer().1, "busy");
        for role in [Role::Operate, Role::Admin] {
            assert!(ask(role).await.is_ok(), "{role}");
        }
        drop(held);
        assert!(ask(Role::Read).await.is_ok());
    }
}
