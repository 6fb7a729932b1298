//! Virtual processors: one thread each, and the set of them as one thing that
//! runs, pauses and is reset together.
//!
//! This module owns the vCPU file descriptors, the threads that run them and
//! the signal that interrupts them. It must not know which devices sit on the
//! buses, how a kernel is loaded, or why somebody wants a pause.
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
//! **No wakeup is lost**, because only the controlling thread writes what the
//! vCPU thread acts on. To interrupt it writes the request, then
//! `immediate_exit` in the page that the vCPU shares with KVM, then sends the
//! signal. A signal that comes before `KVM_RUN` is harmless: KVM looks at
//! `immediate_exit` on entry and returns EINTR at once. The vCPU thread looks at
//! the request only when `KVM_RUN` said EINTR, which also means that the
//! instruction of the last exit has been completed: the registers of a parked vCPU
//! can be saved. `immediate_exit` is cleared by the next resume.
//!
//! Application processors wait for their start-up IPI inside KVM; nothing here
//! knows them from the boot processor but for the entry point.

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
    /// For kvmclock, which a saved TSC is relative to.
    vm: Arc<VmFd>,
    /// One per vCPU; empty on kernels without.
    statistics: Vec<Statistics>,
    reports: Arc<Reports>,
}

impl Vcpus {
    /// Makes `count` vCPUs with APIC ids from 0, each on a thread named
    /// `vcpuN`, all parked. Each is told of `shown`, what the host supports or less, with its own
    /// topology ([`guest_cpuid`]). `affinity` has the CPUs of the host for each of them, or is empty: then
    /// they run anywhere. The VM must have its memory by the time they resume.
    /// `faults` is asked about memory faults of the guest.
    ///
    /// # Errors
    /// KVM or the host refuses, or the threads cannot run where they are to.
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

        // All descriptors first: KVM synchronizes the TSCs of vCPUs that are
        // made close together.
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
            // Now or never: while a vCPU runs, its descriptor answers nothing.
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

    /// Lets all vCPUs run.
    pub fn resume(&self) {
        for thread in &self.threads {
            thread.resume();
        }
    }

    /// Interrupts all vCPUs and waits until each is parked. A vCPU in the
    /// middle of a device access finishes it first, so the caller must not
    /// hold a lock that a device needs.
    pub fn pause(&self) {
        for thread in &self.threads {
            thread.interrupt();
        }
        for thread in &self.threads {
            thread.wait_parked();
        }
    }

    /// What maps guest memory for the vCPUs before they run; for as long as they are parked. `None` on kernels without
    /// (before Linux 6.11).
    ///
    /// # Errors
    /// A vCPU is not paused, or KVM refuses: no descriptor is left.
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

    /// Puts all vCPUs back into the state of power-on: registers, local
    /// APIC, timers, paravirtual MSRs (KVM then writes to guest memory no more). Pending
    /// failures are forgotten.
    ///
    /// # Errors
    /// A vCPU is not paused, or KVM refuses.
    pub fn reset(&self) -> Result<(), Error> {
        for thread in &self.threads {
            thread.with_parked(|fd, initial| initial.restore(fd))?;
        }
        self.take_report();
        Ok(())
    }

    /// Sets model-specific registers of every processor, beyond what power-on
    /// gives them (what firmware would have set).
    ///
    /// # Errors
    /// A vCPU is not paused, or KVM refuses. An MSR that the host does
    /// not know is left out, with a line in the log.
    pub fn set_msrs(&self, values: &[kvm_msr_entry]) -> Result<(), Error> {
        for thread in &self.threads {
            thread.with_parked(|fd, _| msrs::write(fd, values))?;
        }
        Ok(())
    }

    /// Sets where the boot processor starts. `special` changes the special
    /// registers that power-on gave it.
    ///
    /// # Errors
    /// There is no vCPU, it is not paused, or KVM refuses.
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

    /// What KVM has counted since the vCPUs were made, by name, summed over all of
    /// them: `exits`, `halt_exits`, `mmio_exits`, … (`Documentation/virt/kvm/api.rst`,
    /// KVM_GET_STATS_FD). Works while they run. Empty on kernels before Linux 5.14.
    ///
    /// # Errors
    /// KVM refuses.
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

    /// The first failure that nobody has taken yet, and leaves it. Of parked vCPUs none comes after it: each says what
    /// failed before it parks.
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
        // All at once, so that ending 32 threads takes as long as ending one;
        // each thread's own drop then joins it.
        for thread in &self.threads {
            thread.end();
        }
    }
}
