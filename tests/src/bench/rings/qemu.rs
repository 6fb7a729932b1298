//! QEMU with shadow virtqueues (`x-svq=on`): the lab's guest, and the cost of the thread that runs
//! the shadow virtqueues.
//!
//! QEMU shadows in its main loop, which has no other work for this guest. Its threads are
//! identified by their names (`debug-threads=on`). Their run time is the kernel's account.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::super::peer::{self, Nic};
use super::traffic::{FRAME, WINDOW};
use crate::error::{Error, Result};
use crate::guest::{BellhopArguments, Guest};
use crate::schedstat::{self, Account};

/// How long the guest's console may be silent during boot.
const SILENCE: Duration = Duration::from_secs(60);

/// How often an exchange is tried.
const ATTEMPTS: u32 = 5;

/// Microseconds for which the guest sleeps after each frame that must travel alone. With the time
/// to wake up, this is longer than QEMU takes for a frame.
const PAUSE: u32 = 200;

/// The prefix of QEMU's names for its vCPU threads.
const PROCESSOR: &str = "CPU ";
/// The prefix of threads that the kernel runs on QEMU's behalf.
const KERNEL: &str = "kvm-";

/// A guest whose NIC is shadowed by QEMU. Dropping it kills QEMU.
#[derive(Debug)]
pub(super) struct Qemu {
    guest: Guest,
}

/// One exchange of frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exchanged {
    /// Frames that returned to the guest that had sent them.
    pub(super) frames: u32,
    pub(super) elapsed: Duration,
    /// Processor time of the thread with the shadow virtqueues.
    pub(super) processor_time: Duration,
}

impl Qemu {
    /// Boots the lab's guest on the vDPA device.
    ///
    /// # Errors
    /// [`Error::Missing`] without QEMU; those of [`Guest::start_command`].
    pub(super) fn start(device: &Path, mac: &str) -> Result<Self> {
        let program = peer::qemu()?;
        let arguments = BellhopArguments::small()?;
        let nic = Nic {
            device,
            mac,
            shadowed: true,
            iommu: false,
        };
        let command = || peer::command(&program, &arguments, nic);
        let guest = Guest::start_command(command, SILENCE)?;
        Ok(Self { guest })
    }

    /// Makes the guest send frames to its own address, with as many in flight as ours has. The
    /// simulator drops frames when QEMU is late with receive buffers, and the guest then waits in
    /// vain. Such an exchange is void and is repeated.
    ///
    /// # Errors
    /// A frame was damaged, or frames are lost every time; those of [`Guest::command`].
    pub(super) fn exchange(&mut self, frames: u32) -> Result<Exchanged> {
        self.until_whole(&format!("frames {frames} {FRAME} {WINDOW}"), frames, 0)
    }

    /// Makes the guest send frames to its own address one by one, at an even pace. Frames still in
    /// flight after the last one do not count.
    ///
    /// # Errors
    /// As [`Qemu::exchange`].
    pub(super) fn pace(&mut self, frames: u32) -> Result<Exchanged> {
        self.until_whole(&format!("pace {frames} {FRAME} {PAUSE}"), frames, WINDOW)
    }

    /// Repeats a command that exchanges frames until at most `missing` of them are lost.
    fn until_whole(&mut self, command: &str, frames: u32, missing: u32) -> Result<Exchanged> {
        let mut last = Value::Null;
        for _ in 0..ATTEMPTS {
            let before = schedstat::accounts(self.guest.pid())?;
            let answer = self.guest.command(command)?;
            let processor_time = busiest(&before, &schedstat::accounts(self.guest.pid())?);
            let number = |name: &str| answer[name].as_u64();
            if number("corrupt") != Some(0) {
                return Err(spoiled(&answer));
            }
            let received = number("rx").and_then(|received| u32::try_from(received).ok());
            if let (Some(received), Some(elapsed)) = (received, number("elapsed_us"))
                && received + missing >= frames
            {
                return Ok(Exchanged {
                    frames: received,
                    elapsed: Duration::from_micros(elapsed),
                    processor_time,
                });
            }
            eprintln!(
                "  QEMU's guest got {} of {frames} frames back: once more",
                answer["rx"]
            );
            last = answer;
        }
        Err(spoiled(&last))
    }

    /// Switches the guest off.
    ///
    /// # Errors
    /// Those of [`Guest::power_off`].
    pub(super) fn power_off(self) -> Result<()> {
        self.guest.power_off().map(|_| ())
    }
}

fn spoiled(answer: &Value) -> Error {
    Error::invalid(
        "the exchange of frames in QEMU's guest",
        format!("frames were lost each time, or damaged: {answer}"),
    )
}

/// The longest run time of one thread between two samples, without vCPU threads.
fn busiest(before: &BTreeMap<PathBuf, Account>, after: &BTreeMap<PathBuf, Account>) -> Duration {
    after
        .iter()
        .filter(|(_, now)| !now.name.starts_with(PROCESSOR) && !now.name.starts_with(KERNEL))
        .map(|(task, now)| {
            let then = before.get(task).map_or(Duration::ZERO, |then| then.ran);
            now.ran.saturating_sub(then)
        })
        .max()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_thread_counts_that_is_no_processor() {
        let threads = |times: [u64; 3]| -> BTreeMap<PathBuf, Account> {
            ["bench", "call_rcu", "CPU 0/KVM"]
                .into_iter()
                .zip(times)
                .map(|(name, ran)| {
                    let account = Account {
                        name: name.to_owned(),
                        ran: Duration::from_nanos(ran),
                        waited: Duration::ZERO,
                    };
                    (PathBuf::from(name), account)
                })
                .collect()
        };
        let most = busiest(&threads([100, 10, 0]), &threads([105, 40, 900]));
        assert_eq!(most, Duration::from_nanos(30));
        assert_eq!(busiest(&BTreeMap::new(), &BTreeMap::new()), Duration::ZERO);
    }
}
