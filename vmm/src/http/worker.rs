//! Blocking work outside of the serving thread.

use super::problem::HttpError;

/// Runs blocking work on one of the runtime's worker threads, to its end even if the client
/// disconnects.
///
/// # Errors
/// [`HttpError::Worker`] if the work panicked, or the server ends.
pub async fn on_worker<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, HttpError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(HttpError::Worker)
}
