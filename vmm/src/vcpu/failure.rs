//! Why a vCPU cannot continue, and where its thread reports it.

use std::fmt;
use std::io;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

/// Why a vCPU cannot continue. The guest is lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VcpuFailure {
    /// KVM_EXIT_SHUTDOWN: an exception while delivering a double fault.
    #[error("the guest triple-faulted")]
    TripleFault,
    /// KVM_EXIT_FAIL_ENTRY: the processor rejected the guest's state.
    #[error("the processor {cpu} refused to enter the guest, hardware reason {reason:#x}")]
    FailEntry {
        /// The hardware's code (VMX exit qualification or SVM exit code).
        reason: u64,
        /// The host CPU.
        cpu: u32,
    },
    /// KVM_EXIT_INTERNAL_ERROR.
    #[error("KVM failed: {} (suberror {suberror}, data {data:x?})", suberror_text(*.suberror))]
    InternalError {
        /// `KVM_INTERNAL_ERROR_*`.
        suberror: u32,
        /// KVM's data; the meaning depends on the suberror.
        data: Vec<u64>,
    },
    /// The guest accessed memory that the host could not provide.
    #[error(
        "the host could not provide the memory that the guest used{}",
        at_text(*.guest_address)
    )]
    MemoryFault {
        /// The address, if the kernel reports it (Linux 6.8 and later).
        guest_address: Option<u64>,
    },
    /// An exit that this machine does not handle.
    #[error("unexpected exit from KVM: {0}")]
    UnexpectedExit(String),
    /// KVM_RUN failed.
    #[error("KVM_RUN failed with errno {errno}")]
    Run {
        /// The error number.
        errno: i32,
    },
    /// The vCPU's thread panicked.
    #[error("the thread of the vCPU panicked")]
    ThreadEnded,
}

fn suberror_text(suberror: u32) -> &'static str {
    match suberror {
        kvm_bindings::KVM_INTERNAL_ERROR_EMULATION => "an instruction that it cannot emulate",
        kvm_bindings::KVM_INTERNAL_ERROR_SIMUL_EX => "exceptions at the same time",
        kvm_bindings::KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit while it delivered an event",
        kvm_bindings::KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => {
            "an unknown exit of the processor"
        }
        _ => "reason unknown",
    }
}

fn at_text(address: Option<u64>) -> String {
    address.map_or_else(String::new, |address| format!(" at {address:#x}"))
}

/// A failure, and the guest's position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VcpuReport {
    /// The vCPU's index.
    pub index: u8,
    /// Its instruction pointer at that time, if readable.
    pub instruction_pointer: Option<u64>,
    /// The failure.
    pub failure: VcpuFailure,
}

impl fmt::Display for VcpuReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {}", self.index)?;
        if let Some(pointer) = self.instruction_pointer {
            write!(f, " at {pointer:#x}")?;
        }
        write!(f, ": {}", self.failure)
    }
}

/// Collects the failures of vCPU threads; the first one counts.
#[derive(Debug)]
pub(super) struct Reports {
    first: Mutex<Option<VcpuReport>>,
    event: EventFd,
}

impl Reports {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            first: Mutex::default(),
            event: vdpa::eventfd::new()?,
        })
    }

    /// Readable once there is a failure.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    pub(super) fn first(&self) -> Option<VcpuReport> {
        self.first.lock().clone()
    }

    pub(super) fn take(&self) -> Option<VcpuReport> {
        let mut first = self.first.lock();
        // The count only shows that there is a report.
        let _ = self.event.read();
        first.take()
    }

    pub(super) fn put(&self, report: VcpuReport) {
        let mut first = self.first.lock();
        if first.is_none() {
            *first = Some(report);
        } else {
            tracing::error!(%report, "a further vCPU failed");
        }
        if let Err(error) = self.event.write(1) {
            tracing::error!(%error, "cannot report a vCPU's failure");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_read_well() {
        let report = VcpuReport {
            index: 3,
            instruction_pointer: Some(0xfff0),
            failure: VcpuFailure::InternalError {
                suberror: 1,
                data: vec![0x0f, 0xc7],
            },
        };
        assert_eq!(
            report.to_string(),
            "vCPU 3 at 0xfff0: KVM failed: an instruction that it cannot emulate (suberror 1, data \
             [f, c7])"
        );
        let report = VcpuReport {
            index: 0,
            instruction_pointer: None,
            failure: VcpuFailure::MemoryFault {
                guest_address: Some(0xc000_0000),
            },
        };
        assert!(report.to_string().ends_with("used at 0xc0000000"));
    }

    #[test]
    fn the_first_report_counts() {
        let reports = Reports::new().unwrap();
        for index in [1, 0] {
            reports.put(VcpuReport {
                index,
                instruction_pointer: None,
                failure: VcpuFailure::TripleFault,
            });
        }
        assert_eq!(reports.event.read().unwrap(), 2);
        assert_eq!(reports.first.lock().as_ref().unwrap().index, 1);
    }
}
