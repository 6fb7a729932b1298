//! The thread of one vCPU, and its handle.
//!
//! Owns the protocol between the two: the request, the state, the signal. The parent module's
//! documentation has the state machine and the argument that no wakeup is lost.

use std::io;
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};

use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::VcpuFd;
use parking_lot::{Condvar, Mutex};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler, unblock_signal};

use super::exits::{self, Buses, FaultHandler};
use super::failure::{Reports, VcpuFailure, VcpuReport};
use super::registers;
use super::run_page::RunPage;
use super::state::InitialState;
use crate::Error;
use crate::config::{HostCpus, show_list};
use crate::sandbox::seccomp;

/// Stack of a vCPU thread in bytes. Device accesses run on it; the start of a vDPA device with its
/// log lines is the deepest, and an unoptimized build needs the most. The default of 2 MiB would
/// be eligible for a transparent huge page, all of it resident.
const STACK_SIZE: usize = 1024 * 1024;

/// The error of a failed step of a vCPU's setup.
pub(super) fn not_set_up(index: u8) -> impl FnOnce(Error) -> Error {
    move |source| Error::host(format!("cannot set up vCPU {index}")).because(source)
}

/// The handle's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    Park,
    Run,
    End,
}

/// The thread's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Parked,
    Running,
    Ended,
}

/// The state shared by handle and thread.
struct Control {
    index: u8,
    inner: Mutex<(Request, State)>,
    changed: Condvar,
    page: RunPage,
    vcpu: Mutex<Vcpu>,
}

/// The vCPU that the thread runs; the handle may use it while the thread is parked.
pub(super) struct Vcpu {
    pub(super) fd: VcpuFd,
    /// The CPUID that was set. (KVM_GET_CPUID2 would include what the guest has enabled.)
    pub(super) cpuid: Vec<kvm_cpuid_entry2>,
    pub(super) initial: InitialState,
}

/// Handle of one vCPU thread. Dropping it ends and joins the thread.
pub(super) struct VcpuThread {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

vdpa::opaque_debug! {
    VcpuThread, this =>
    index: this.control.index,
    state: *this.control.inner.lock(),
}

impl VcpuThread {
    /// Starts the thread, parked, on its host CPUs.
    pub(super) fn spawn(
        index: u8,
        cpus: Option<HostCpus>,
        vcpu: Vcpu,
        buses: Buses,
        faults: Arc<dyn FaultHandler>,
        reports: Arc<Reports>,
    ) -> Result<Self, Error> {
        let failed = |what: &str| Error::failed::<io::Error>(format!("vCPU {index}: {what}"));
        install_handler().map_err(failed("installing the vCPU signal's handler"))?;
        let control = Arc::new(Control {
            index,
            inner: Mutex::new((Request::Park, State::Parked)),
            changed: Condvar::new(),
            page: RunPage::map(&vcpu.fd).map_err(failed("mapping kvm_run"))?,
            vcpu: Mutex::new(vcpu),
        });
        let body = Body {
            control: Arc::clone(&control),
            buses,
            faults,
            reports,
        };
        let (pinned, was_pinned) = mpsc::sync_channel(1);
        let thread = Builder::new()
            .name(format!("vcpu{index}"))
            .stack_size(STACK_SIZE)
            .spawn(move || {
                let is_pinned = cpus.map_or(Ok(()), |cpus| pin(index, &cpus));
                let go_on = is_pinned.is_ok();
                // The receiver waits below.
                let _ = pinned.send(is_pinned);
                if go_on {
                    seccomp::enter(seccomp::Thread::Vcpu);
                    body.main();
                }
            })
            .map_err(failed("starting the thread"))?;
        let was_pinned = was_pinned.recv().map_err(io::Error::other);
        was_pinned.map_err(failed("starting the thread"))??;
        Ok(Self {
            control,
            thread: Some(thread),
        })
    }

    /// Resumes the vCPU.
    pub(super) fn resume(&self) {
        let mut inner = self.control.inner.lock();
        if inner.0 == Request::Park {
            self.control.page.set_immediate_exit(false);
            inner.0 = Request::Run;
            self.control.changed.notify_all();
        }
    }

    /// Asks the vCPU to park; does not wait.
    pub(super) fn interrupt(&self) {
        self.request(Request::Park);
    }

    /// Asks the thread to end; does not wait.
    pub(super) fn end(&self) {
        self.request(Request::End);
    }

    fn request(&self, request: Request) {
        let mut inner = self.control.inner.lock();
        if inner.0 == Request::End {
            return;
        }
        inner.0 = request;
        self.control.page.set_immediate_exit(true);
        self.control.changed.notify_all();
        if inner.1 == State::Running
            && let Some(thread) = &self.thread
            && let Err(error) = thread.kill(SIGRTMIN())
        {
            tracing::error!(index = self.control.index, %error, "cannot signal a vCPU");
        }
    }

    /// Waits until the vCPU is parked (or its thread has ended).
    pub(super) fn wait_parked(&self) {
        let mut inner = self.control.inner.lock();
        let changed = &self.control.changed;
        changed.wait_while(&mut inner, |inner| inner.1 == State::Running);
    }

    /// Runs `work` on the parked vCPU.
    pub(super) fn with_parked<T>(
        &self,
        work: impl FnOnce(&VcpuFd, &InitialState) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.with_vcpu(|vcpu| work(&vcpu.fd, &vcpu.initial))?
            .map_err(not_set_up(self.control.index))
    }

    /// Like [`VcpuThread::with_parked`], with the whole vCPU and any result.
    pub(super) fn with_vcpu<T>(&self, work: impl FnOnce(&mut Vcpu) -> T) -> Result<T, Error> {
        // Held during the work, so that the vCPU is not resumed meanwhile.
        let inner = self.control.inner.lock();
        if *inner != (Request::Park, State::Parked) {
            let index = self.control.index;
            return Err(Error::host(format!("vCPU {index} is not paused")));
        }
        let mut vcpu = self.control.vcpu.lock();
        Ok(work(&mut vcpu))
    }
}

impl Drop for VcpuThread {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(index = self.control.index, "the thread of a vCPU panicked");
        }
    }
}

/// The thread's own state.
struct Body {
    control: Arc<Control>,
    buses: Buses,
    faults: Arc<dyn FaultHandler>,
    reports: Arc<Reports>,
}

impl Body {
    fn main(self) {
        let end = EndGuard(&self);
        // The thread inherited the mask of its creator.
        if let Err(error) = unblock_signal(SIGRTMIN()) {
            tracing::error!(index = self.control.index, %error, "vCPU signal stays blocked");
            return;
        }
        while self.wait_for_run() {
            self.run();
        }
        std::mem::forget(end);
        self.finish();
    }

    /// Parks until a request arrives; `false`: end.
    fn wait_for_run(&self) -> bool {
        let mut inner = self.control.inner.lock();
        inner.1 = State::Parked;
        let changed = &self.control.changed;
        changed.notify_all();
        changed.wait_while(&mut inner, |inner| inner.0 == Request::Park);
        if inner.0 == Request::End {
            return false;
        }
        inner.1 = State::Running;
        true
    }

    /// Runs until the request changes or the vCPU fails.
    fn run(&self) {
        let mut vcpu = self.control.vcpu.lock();
        loop {
            match exits::run(&mut vcpu.fd, &self.control.page, &self.buses, &*self.faults) {
                // Another signal of the process arrived at this thread.
                Ok(()) if self.control.inner.lock().0 == Request::Run => {}
                Ok(()) => return,
                Err(failure) => {
                    registers::log(self.control.index, &vcpu.fd, &failure);
                    let report = VcpuReport {
                        index: self.control.index,
                        instruction_pointer: vcpu.fd.get_regs().ok().map(|regs| regs.rip),
                        failure,
                    };
                    drop(vcpu);
                    // Park without a request, unless the thread is to end.
                    let mut inner = self.control.inner.lock();
                    if inner.0 == Request::Run {
                        inner.0 = Request::Park;
                    }
                    drop(inner);
                    self.reports.put(report);
                    return;
                }
            }
        }
    }

    fn finish(&self) {
        self.control.inner.lock().1 = State::Ended;
        self.control.changed.notify_all();
    }
}

/// Sets the thread's final state and reports it, also while it unwinds, so that no waiter blocks
/// forever.
struct EndGuard<'a>(&'a Body);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.0.finish();
        self.0.reports.put(VcpuReport {
            index: self.0.control.index,
            instruction_pointer: None,
            failure: VcpuFailure::ThreadEnded,
        });
    }
}

/// Restricts the calling thread, that of vCPU `index`, to these CPUs.
fn pin(index: u8, cpus: &HostCpus) -> Result<(), Error> {
    run_on(cpus).map_err(|source| {
        Error::unusable(format!(
            "vCPU {index} cannot run on CPUs {cpus}; the cgroup of this process (cpuset.cpus) may \
             not have all of them"
        ))
        .because(source)
    })
}

fn run_on(cpus: &HostCpus) -> io::Result<()> {
    let mut wanted = CpuSet::new();
    for cpu in cpus.iter() {
        wanted.set(cpu.into());
    }
    sched_setaffinity(None, &wanted)?;
    // The kernel silently omits CPUs that are outside the cgroup.
    let got = sched_getaffinity(None)?;
    if got == wanted {
        return Ok(());
    }
    let left = (0..HostCpus::MAX).filter(|cpu| got.is_set((*cpu).into()));
    Err(io::Error::other(format!(
        "the kernel leaves only CPUs {} of them",
        show_list(left)
    )))
}

/// Installs a handler for the signal that interrupts vCPUs, once per process. The handler does
/// nothing: the signal's arrival ends KVM_RUN.
fn install_handler() -> io::Result<()> {
    extern "C" fn interrupted(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| {
            register_signal_handler(SIGRTMIN(), interrupted).map_err(|error| error.errno())
        })
        .map_err(io::Error::from_raw_os_error)
}
