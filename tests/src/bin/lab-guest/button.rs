//! The ACPI power button, as the guest's kernel reports it (`linux/input.h`).

use lab::error::{Error, Result};
use lab::files;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// `struct input_event` on a 64-bit kernel: two words of time, u16 type, u16 code, s32 value.
const EVENT_LEN: usize = 24;
const EV_KEY: u16 = 1;
const KEY_POWER: u16 = 116;

/// `button`: reports that it listens, then waits until the button is pressed.
pub(crate) fn wait(limit: Duration) -> Result<Value> {
    let path = device()?;
    let mut file = File::open(&path).map_err(Error::file("open", &path))?;
    crate::say("", &json!({ "listening": path.display().to_string() }));
    let start = Instant::now();
    while let Some(left) = limit.checked_sub(start.elapsed()) {
        let timeout = Timespec::try_from(left).map_err(|_| Error::Usage("too long".into()))?;
        let mut fds = [PollFd::new(&file, PollFlags::IN)];
        if poll(&mut fds, Some(&timeout)).map_err(Error::system("poll"))? == 0 {
            break;
        }
        let mut event = [0; EVENT_LEN];
        file.read_exact(&mut event)
            .map_err(Error::file("read", &path))?;
        let half = |at: usize| u16::from_le_bytes([event[at], event[at + 1]]);
        if (half(16), half(18), half(20)) == (EV_KEY, KEY_POWER, 1) {
            return Ok(json!({ "pressed": true }));
        }
    }
    Ok(json!({ "pressed": false }))
}

/// The event file of the power button.
fn device() -> Result<PathBuf> {
    for entry in files::list(Path::new("/sys/class/input"))? {
        let name = files::read_text(&entry.join("device/name")).unwrap_or_default();
        if name.trim() == "Power Button"
            && let Some(file) = entry.file_name()
        {
            return Ok(Path::new("/dev/input").join(file));
        }
    }
    Err(Error::missing(
        "the guest has no power button",
        "is it in the ACPI tables, and CONFIG_ACPI_BUTTON in the kernel?",
    ))
}
