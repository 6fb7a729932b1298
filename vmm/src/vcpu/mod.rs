//! Virtual processors: one thread each, and the set of them, which runs, pauses and is reset
//! together.
//!
//! This module owns the vCPU file descriptors, the threads that run them and the signal that
//! interrupts them. It must not know which devices are on the buses, how a kernel is loaded, or why
//! a caller pauses the vCPUs.
//!
//! ```text
//!      Vcpus::new
//!          |
//!          v             resume
//!      +--------+ ------------------------> +---------+ --+ KVM_RUN; port and MMIO
//!      | parked |                           | running |   | exits go to the buses
//!      +--------+ <------------------------ +---------+ <-+
//!       |   |  ^    pause
//!       |   |  |    a failure, which is reported first
//!       |   +--+ reset, set_entry
//!  drop |
//!       v
//!      +-------+
//!      | ended |  thread joined
//!      +-------+
//! ```
//!
//! **No wakeup is lost**, because only the controlling thread writes the state that the vCPU thread
//! acts on. To interrupt, it writes the request, then `immediate_exit` in the page that the vCPU
//! shares with KVM, then sends the signal. A signal before `KVM_RUN` is harmless: KVM checks
//! `immediate_exit` on entry and returns EINTR at once.
//!
//! The vCPU thread reads the request only after `KVM_RUN` returned EINTR. By then KVM has completed
//! the instruction of the last exit, so the registers of a parked vCPU can be saved. The next
//! resume clears `immediate_exit`.
//!
//! Application processors wait for their start-up IPI inside KVM. This module treats them like the
//! boot processor, except for the entry point.

mod exits;
mod failure;
mod msrs;
mod registers;
mod run_page;
mod saved;
mod state;
mod thread;
mod tsc;
mod xsave;

use std::collections::BTreeMap;
use std::sync::Arc;

use kvm_bindings::{CpuId, kvm_cpuid_entry2, kvm_msr_entry, kvm_regs, kvm_sregs};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use crate::Error;
use crate::config::HostCpus;
use crate::kvm::cpuid::{Processor, guest_cpuid};
use crate::kvm::pre_fault::PreFault;
use crate::kvm::statistics::Statistics;
use crate::kvm::{Hypervisor, Vm};
use failure::Reports;
use state::InitialState;
use thread::{Vcpu, VcpuThread, not_set_up};

pub use exits::{Buses, FaultHandler};
pub use failure::{VcpuFailure, VcpuReport};
pub use saved::{CpuidLeaf, MsrState, TscState, VcpuState};

fn no_vcpu() -> Error {
    Error::host("the machine has no vCPU")
}

/// All vCPUs of a machine. Dropping it ends and joins their threads.
#[derive(Debug)]
pub struct Vcpus {
    threads: Vec<VcpuThread>,
    /// For kvmclock, the base of a saved TSC.
    vm: Arc<VmFd>,
    /// One per vCPU; empty on kernels without this feature.
    statistics: Vec<Statistics>,
    reports: Arc<Reports>,
}

impl Vcpus {
    /// Creates `count` vCPUs with APIC ids from 0, each on a thread named `vcpuN`, all parked. Each
    /// gets the leaves `shown`, all or some of those that the host supports, with its own topology
    /// ([`guest_cpuid`]). `affinity` has the host CPUs for each of them, or is empty: then they run
    /// anywhere. The VM must have its memory by the time they resume. `faults` handles memory
    /// faults of the guest.
    ///
    /// # Errors
    /// KVM or the host returns an error, or a thread cannot run on its CPUs.
    pub fn new(
        hypervisor: &Hypervisor,
        vm: &Vm,
        count: u8,
        shown: &[kvm_cpuid_entry2],
        affinity: &[HostCpus],
        buses: &Buses,
        faults: &Arc<dyn FaultHandler>,
    ) -> Result<Self, Error> {
        let mut msr_indices = msrs::all(hypervisor.msr_indices().map_err(not_set_up(0))?);
        msr_indices.retain(|&index| msrs::belongs(index, shown));
        let reports = Reports::new().map_err(Error::failed("vCPU 0: eventfd"))?;
        let reports = Arc::new(reports);

        // All descriptors first: KVM synchronizes the TSCs of vCPUs that are created close
        // together.
        let mut created = Vec::with_capacity(count.into());
        for index in 0..count {
            let leaves = guest_cpuid(
                shown,
                Processor {
                    apic_id: index,
                    count,
                },
            );
            let cpuid = CpuId::from_entries(&leaves).map_err(|_| {
                let count = leaves.len();
                Error::host(format!(
                    "the guest's CPUID has {count} leaves, more than KVM takes"
                ))
            })?;
            let fd = vm
                .fd()
                .create_vcpu(index.into())
                .map_err(Error::failed("KVM_CREATE_VCPU"))
                .map_err(not_set_up(index))?;
            fd.set_cpuid2(&cpuid)
                .map_err(Error::failed("KVM_SET_CPUID2"))
                .map_err(not_set_up(index))?;
            created.push((fd, leaves));
        }
        let mut threads = Vec::with_capacity(created.len());
        let mut statistics = Vec::with_capacity(created.len());
        for (index, (fd, cpuid)) in (0..count).zip(created) {
            // This must happen now: while a vCPU runs, its descriptor answers no request.
            statistics.extend(Statistics::open(&fd).map_err(not_set_up(index))?);
            let initial = InitialState::capture(&fd, &msr_indices).map_err(not_set_up(index))?;
            threads.push(VcpuThread::spawn(
                index,
                affinity.get(usize::from(index)).cloned(),
                Vcpu { fd, cpuid, initial },
                buses.clone(),
                Arc::clone(faults),
                Arc::clone(&reports),
            )?);
        }
        Ok(Self {
            threads,
            vm: Arc::clone(vm.fd()),
            statistics,
            reports,
        })
    }

    /// Resumes all vCPUs.
    pub fn resume(&self) {
        for thread in &self.threads {
            thread.resume();
        }
    }

    /// Interrupts all vCPUs and waits until each is parked. A vCPU in the middle of a device access
    /// finishes it first. So the caller must not hold a lock that a device needs.
    pub fn pause(&self) {
        for thread in &self.threads {
            thread.interrupt();
        }
        for thread in &self.threads {
            thread.wait_parked();
        }
    }

    /// Returns a mapper of guest memory for parked vCPUs, to use before they run. `None` on kernels
    /// without it (before Linux 6.11).
    ///
    /// # Errors
    /// A vCPU is not paused, or no descriptor is left.
    pub fn pre_fault(&self) -> Result<Option<PreFault>, Error> {
        if !PreFault::is_supported(&self.vm) {
            return Ok(None);
        }
        let threads = self.threads.iter();
        let vcpus: Result<_, _> = threads
            .map(|thread| thread.with_parked(|fd, _| PreFault::descriptor(fd)))
            .collect();
        Ok(Some(PreFault::new(vcpus?)))
    }

    /// Resets all vCPUs to the power-on state: registers, local APIC, timers, paravirtual MSRs (KVM
    /// then stops writing to guest memory). Discards pending failures.
    ///
    /// # Errors
    /// A vCPU is not paused, or KVM returns an error.
    pub fn reset(&self) -> Result<(), Error> {
        for thread in &self.threads {
            thread.with_parked(|fd, initial| initial.restore(fd))?;
        }
        self.take_report();
        Ok(())
    }

    /// Sets model-specific registers of every processor to values that firmware would have set,
    /// beyond the power-on state.
    ///
    /// # Errors
    /// A vCPU is not paused, or KVM returns an error. An MSR that the host does not know is skipped
    /// with a log line.
    pub fn set_msrs(&self, values: &[kvm_msr_entry]) -> Result<(), Error> {
        for thread in &self.threads {
            thread.with_parked(|fd, _| msrs::write(fd, values))?;
        }
        Ok(())
    }

    /// Sets the entry point of the boot processor. `special` changes its special registers,
    /// starting from the power-on values.
    ///
    /// # Errors
    /// There is no vCPU, it is not paused, or KVM returns an error.
    pub fn set_entry(
        &self,
        regs: &kvm_regs,
        special: impl FnOnce(&mut kvm_sregs),
    ) -> Result<(), Error> {
        let boot = self.threads.first().ok_or_else(no_vcpu)?;
        boot.with_parked(|fd, _| {
            let mut sregs = fd.get_sregs().map_err(Error::failed("KVM_GET_SREGS"))?;
            special(&mut sregs);
            fd.set_sregs(&sregs)
                .map_err(Error::failed("KVM_SET_SREGS"))?;
            fd.set_regs(regs).map_err(Error::failed("KVM_SET_REGS"))
        })
    }

    /// Returns KVM's counters since the creation of the vCPUs, by name, summed over all of them:
    /// `exits`, `halt_exits`, `mmio_exits`, … (`Documentation/virt/kvm/api.rst`, KVM_GET_STATS_FD).
    /// Works while they run. Empty on kernels before Linux 5.14.
    ///
    /// # Errors
    /// KVM returns an error.
    pub fn statistics(&self) -> Result<BTreeMap<String, u64>, Error> {
        let mut sums = BTreeMap::new();
        for (index, statistics) in (0u8..).zip(&self.statistics) {
            let values = statistics.read().map_err(not_set_up(index))?;
            for (name, value) in values {
                let sum: &mut u64 = sums.entry(name).or_default();
                *sum = sum.saturating_add(value);
            }
        }
        Ok(sums)
    }

    /// Readable once a vCPU has failed.
    #[must_use]
    pub fn failure_event(&self) -> &EventFd {
        self.reports.event()
    }

    /// Returns the first failure that was not taken yet, and leaves it there. Parked vCPUs add no
    /// later failure: each reports before it parks.
    #[must_use]
    pub fn failure(&self) -> Option<VcpuReport> {
        self.reports.first()
    }

    /// Takes the first failure since the last call; later ones are in the log.
    pub fn take_report(&self) -> Option<VcpuReport> {
        self.reports.take()
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        // All at once, so that ending 32 threads takes as long as ending one; each thread's own
        // drop then joins it.
        for thread in &self.threads {
            thread.end();
        }
    }
}
