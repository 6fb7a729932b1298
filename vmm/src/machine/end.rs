//! Why a machine ended, for API clients and the node daemon, which read it later.
//!
//! Owns the texts. It must not know who reads them.

pub use bellhop_api::machine::{End, EndReason};
use vdpa::causes::in_one_line;

use crate::Error;
use crate::vcpu::VcpuReport;

/// How a machine's run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// The guest switched the power off.
    PoweredOff,
    /// A [`StopHandle`](super::StopHandle) or the console's user requested it.
    Stopped,
    /// A vCPU could not continue.
    Crashed(VcpuReport),
    /// It is quiesced for another program, which
    /// [`Machine::take_hand_over`](super::Machine::take_hand_over) names.
    HandedOver,
    /// The guest runs elsewhere: [`Handle::migrate`](super::Handle::migrate) found so, or
    /// [`Handle::resolve`](super::Handle::resolve) declared it.
    Moved,
    /// It was asked to stop, or failed, after it had committed the guest to another process and
    /// before the confirmation. The guest runs there or nowhere, which stays unknown.
    Indeterminate,
}

/// The end of a machine after a request to stop, as `detail` states.
pub(crate) fn stopped(detail: &str) -> End {
    End {
        reason: EndReason::Stopped,
        detail: detail.to_owned(),
    }
}

/// The end of a machine that could not be built, or could not continue.
#[must_use]
pub fn failed(error: &dyn std::error::Error) -> End {
    End {
        reason: EndReason::Failed,
        detail: in_one_line(error),
    }
}

impl From<&Exit> for End {
    fn from(exit: &Exit) -> Self {
        match exit {
            Exit::PoweredOff => Self {
                reason: EndReason::PoweredOff,
                detail: "the guest powered off".to_owned(),
            },
            Exit::Stopped => stopped("it was asked to stop"),
            Exit::Moved => Self {
                reason: EndReason::Moved,
                detail: "it has moved: its guest runs elsewhere".to_owned(),
            },
            Exit::Indeterminate => Self {
                reason: EndReason::Indeterminate,
                detail: "it ended while its guest's location was unknown: the guest runs at the \
                         destination or nowhere"
                    .to_owned(),
            },
            Exit::HandedOver => stopped("another program continues it"),
            Exit::Crashed(report) => Self {
                reason: EndReason::Crashed,
                detail: format!("the guest crashed: {report}"),
            },
        }
    }
}

/// Converts the result of a run to its end.
pub(super) fn of_run(run: &Result<Exit, Error>) -> End {
    match run {
        Ok(exit) => End::from(exit),
        Err(error) => failed(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::{VcpuFailure, VcpuReport};

    #[test]
    fn each_end_has_its_words() {
        let crash = Exit::Crashed(VcpuReport {
            index: 1,
            instruction_pointer: Some(0xfff0),
            failure: VcpuFailure::TripleFault,
        });
        let failure = Error::failed("epoll_wait")(std::io::Error::from_raw_os_error(libc::EBADF));
        for (run, reason, words) in [
            (Ok(Exit::PoweredOff), EndReason::PoweredOff, "powered off"),
            (Ok(Exit::Stopped), EndReason::Stopped, "asked"),
            (Ok(Exit::Moved), EndReason::Moved, "elsewhere"),
            (
                Ok(Exit::Indeterminate),
                EndReason::Indeterminate,
                "location was unknown",
            ),
            (Ok(crash), EndReason::Crashed, "vCPU 1 at 0xfff0"),
            (
                Err(failure),
                EndReason::Failed,
                "epoll_wait failed: Bad file",
            ),
        ] {
            let end = of_run(&run);
            assert_eq!(end.reason, reason);
            assert!(end.detail.contains(words), "{}", end.detail);
        }
    }
}
