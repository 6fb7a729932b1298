//! Work that waits, away from the thread that serves.

use super::problem::HttpError;

/// Carries out what has to wait, on one of the runtime's worker threads. It is carried out to its
/// end also if the client goes.
///
/// # Errors
/// [`HttpError::Worker`] if the work panicked, or the server ends.
pub async fn on_worker<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, HttpError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(HttpError::Worker)
}
