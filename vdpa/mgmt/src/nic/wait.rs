//! Waits for the kernel's own work. Its messages wake the caller, which also checks in between,
//! because some events have no message.

use std::time::{Duration, Instant};

use super::error::NicError;
use crate::uevent::Uevents;

/// Maximum time to wait for a message before the next check.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Waits until `look` finds something. Calls `interrupted` before each wait, and `begin` once if it
/// must wait at all.
///
/// # Errors
/// Those of `look`; [`NicError::NotInTime`], [`NicError::Interrupted`].
pub(super) fn until<T>(
    what: &str,
    patience: Duration,
    mut interrupted: impl FnMut() -> bool,
    begin: impl FnOnce(),
    mut look: impl FnMut() -> Result<Option<T>, NicError>,
) -> Result<T, NicError> {
    // Opened before the first check, so that no message is missed. Without messages the checks
    // suffice.
    let mut messages = Uevents::open().ok();
    if let Some(found) = look()? {
        return Ok(found);
    }
    begin();
    let started = Instant::now();
    loop {
        if interrupted() {
            return Err(NicError::Interrupted);
        }
        let heard = messages.as_mut().map(|messages| messages.any(LOOK_AGAIN));
        if !matches!(heard, Some(Ok(_))) {
            messages = None;
            std::thread::sleep(LOOK_AGAIN);
        }
        if let Some(found) = look()? {
            return Ok(found);
        }
        if started.elapsed() >= patience {
            return Err(NicError::NotInTime {
                what: what.to_owned(),
                patience,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn present_devices_are_not_waited_for() {
        let never = || panic!("waited");
        let found = until("it", Duration::ZERO, || true, never, || Ok(Some(7)));
        assert_eq!(found.unwrap(), 7);
    }

    #[test]
    fn it_ends_when_it_comes_and_when_it_does_not() {
        let mut looks = 0;
        let found = until(
            "it",
            Duration::from_secs(60),
            || false,
            || (),
            || {
                looks += 1;
                Ok((looks == 3).then_some(looks))
            },
        );
        assert_eq!(found.unwrap(), 3);
        let none = || -> Result<Option<()>, NicError> { Ok(None) };
        let late = until("it", Duration::ZERO, || false, || (), none);
        assert!(matches!(late, Err(NicError::NotInTime { .. })), "{late:?}");
        let ended = until("it", Duration::from_secs(60), || true, || (), none);
        assert!(matches!(ended, Err(NicError::Interrupted)), "{ended:?}");
    }
}
