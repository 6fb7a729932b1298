//! The one table of system calls: who makes which, with which arguments, and why.
//!
//! A [`Thread`] may make the calls of its groups, and those of the threads that it starts: a thread
//! inherits the filter of its creator. Everything else ends the process. CONTRIBUTING.md says how
//! to find and add a call.
//!
//! The conditions compare the lower 32 bits of an argument. The kernel ignores the upper ones in
//! each argument that is compared here.

use std::os::raw::{c_int, c_ulong};

use libc::*;

use super::kvm::*;

/// The kinds of threads of a VM's process, as in ARCHITECTURE.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Thread {
    /// The caller of [`Machine::run`](crate::machine::Machine::run); starts all others.
    Vmm,
    /// Runs one vCPU.
    Vcpu,
    /// Serves the VM's API.
    Api,
    /// Blocking parts of the API's requests.
    ApiWorker,
    /// The source's side of a migration.
    Migration,
    /// Pages of one connection of a migration.
    Migrate,
    /// The handshake of a new connection at a migration's destination.
    Handshake,
    /// Waits for a request to stop while a VM arrives.
    Stop,
    /// Polls relayed queues.
    Relay,
    /// Opens a backup device and closes the failed one.
    Failover,
    /// Closes the KVM descriptors of a former program.
    VmTeardown,
    /// Not of a VM's process: a thread of a process that serves a software NIC.
    SoftwareNic,
}

/// A test of an argument.
#[derive(Debug, Clone, Copy)]
pub(super) enum Test {
    /// It is one of these.
    OneOf(&'static [u32]),
    /// Its bits in the mask are one of these.
    Masked(u32, &'static [u32]),
    /// It is one of these ioctls.
    Ioctl(&'static [fn() -> c_ulong]),
    /// It is an ioctl of vhost-vdpa (`linux/vhost.h`).
    Vhost,
    /// It is an ioctl of VDUSE (`linux/vduse.h`).
    Vduse,
    /// It is the ID of this process.
    OwnPid,
    /// It is a null pointer, in all 64 bits.
    Null,
}

/// A test of the argument with this index.
#[derive(Debug, Clone, Copy)]
pub(super) struct When {
    pub(super) argument: u8,
    pub(super) test: Test,
}

/// A system call that is allowed if all conditions hold.
#[derive(Debug)]
pub(super) struct Call {
    /// `SYS_` and its name.
    pub(super) name: &'static str,
    pub(super) number: c_long,
    pub(super) when: &'static [When],
}

/// A group of calls.
pub(super) type Calls = &'static [Call];

/// Rows of the table: a call, its conditions (all must hold), the reason.
macro_rules! calls {
    ($($call:ident $([$($when:expr),+])? => $reason:literal;)+) => {
        &[$(Call {
            name: stringify!($call),
            number: $call,
            when: &[$($($when),+)?],
        }),+]
    };
}

const fn one_of(argument: u8, values: &'static [u32]) -> When {
    let test = Test::OneOf(values);
    When { argument, test }
}

const fn masked(argument: u8, mask: u32, values: &'static [u32]) -> When {
    let test = Test::Masked(mask, values);
    When { argument, test }
}

const fn ioctl_of(numbers: &'static [fn() -> c_ulong]) -> When {
    let test = Test::Ioctl(numbers);
    When { argument: 1, test }
}

const fn is(argument: u8, test: Test) -> When {
    When { argument, test }
}

/// The constant as the kernel sees it.
const fn bits(value: c_int) -> u32 {
    value.cast_unsigned()
}

const EXECUTABLE: u32 = bits(PROT_EXEC);
/// `MAP_SHARED_VALIDATE` has this bit of `MAP_SHARED`, too.
const SHARED_ANONYMOUS: u32 = bits(MAP_SHARED | MAP_ANONYMOUS);
/// Without the flags for private futexes and the clock.
const FUTEX_OPERATION: u32 = !bits(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME);
/// The first real-time signal that glibc leaves to programs: it interrupts vCPUs.
pub(super) const VCPU_SIGNAL: u32 = 34;
/// A request of VFIO (`linux/vfio.h`).
const fn vfio(number: c_ulong) -> c_ulong {
    // The letter is ';', and the numbers begin at 100.
    0x3b00 + 100 + number
}

/// A request of iommufd (`linux/iommufd.h`), with the same letter.
const fn iommufd(number: c_ulong) -> c_ulong {
    0x3b00 + number
}

/// How glibc creates a thread.
const NEW_THREAD: u32 = bits(
    CLONE_VM
        | CLONE_FS
        | CLONE_FILES
        | CLONE_SIGHAND
        | CLONE_THREAD
        | CLONE_SYSVSEM
        | CLONE_SETTLS
        | CLONE_PARENT_SETTID
        | CLONE_CHILD_CLEARTID,
);
/// How glibc starts another program (posix_spawn).
const NEW_PROCESS: u32 = bits(CLONE_VM | CLONE_VFORK | SIGCHLD);
/// How a log is opened (`rotating_file.rs`). The kernel's value of O_LARGEFILE is not libc's, 0.
pub(super) const LOG: u32 = bits(
    O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | 0o100_000,
);
/// How the standard library opens a file to read it.
const READ: u32 = bits(O_RDONLY | O_CLOEXEC);
/// The mode bits that make a program run as its owner or group. The owner may be root: the files
/// of a jail can have mapped owners.
const SET_ID: u32 = S_ISUID | S_ISGID;
/// A message with it connects a TCP socket, which Landlock does not see.
const CONNECTS: u32 = bits(MSG_FASTOPEN);
/// The mode of logs and sockets.
const PRIVATE: u32 = S_IRUSR | S_IWUSR;
const ARCH_SET_FS: u32 = 0x1002;
const ARCH_CET_STATUS: u32 = 0x3001;
/// `TCGETS2`, `TCSETS2` (`asm-generic/ioctls.h`).
const TERMIOS2: [u32; 2] = [0x802c_542a, 0x402c_542b];
/// `IORING_REGISTER_SYNC_CANCEL` (`linux/io_uring.h`).
const RING_CANCEL: u32 = 24;

/// Calls of every thread.
const EVERY: Calls = calls! {
    SYS_read => "eventfds, sockets, files";
    SYS_write => "eventfds, sockets, log lines";
    SYS_writev => "log lines, messages";
    SYS_close => "every descriptor";
    SYS_poll => "waits with a limit; the console";
    SYS_ppoll => "waits with a limit";
    SYS_fcntl [one_of(1, &[bits(F_GETFD), bits(F_DUPFD_CLOEXEC)])] =>
        "duplicates; checks of builds with assertions";
    SYS_brk => "the allocator";
    SYS_mmap => "the allocator, stacks; never executable, see REFUSED";
    SYS_mprotect => "the allocator, guard pages; never executable, see REFUSED";
    SYS_munmap => "the allocator, stacks";
    SYS_mremap => "the allocator";
    SYS_madvise [one_of(2, &[bits(MADV_DONTNEED), bits(MADV_FREE)])] =>
        "the allocator; stacks of ended threads";
    SYS_futex [masked(1, FUTEX_OPERATION, &[
        bits(FUTEX_WAIT), bits(FUTEX_WAKE), bits(FUTEX_WAIT_BITSET), bits(FUTEX_WAKE_BITSET),
    ])] => "locks, conditions, joins; nothing with priority inheritance";
    SYS_sched_yield => "locks that spin";
    SYS_sched_getaffinity => "glibc finds the stack of a new thread";
    SYS_gettid => "glibc finds the stack of a new thread; locks";
    SYS_getpid => "signals to an own thread";
    SYS_set_robust_list => "a new thread";
    SYS_rseq => "a new thread";
    SYS_sigaltstack => "the stack for a stack overflow's report";
    SYS_rt_sigprocmask => "start and end of a thread";
    SYS_rt_sigreturn => "the end of each signal handler";
    SYS_rt_sigaction [one_of(0, &[bits(SIGABRT), bits(SIGSEGV), bits(SIGBUS)])] =>
        "abort, and the report of a stack overflow";
    SYS_tgkill [is(0, Test::OwnPid), one_of(2, &[bits(SIGABRT), VCPU_SIGNAL])] =>
        "abort; the request to leave the guest";
    SYS_exit => "the end of a thread";
    SYS_exit_group => "the end of the process";
    SYS_restart_syscall => "the kernel continues an interrupted wait";
    SYS_getrandom => "hash maps, keys of TLS, the guest's random numbers";
    SYS_clock_gettime => "the time, where the vDSO has no usable clock";
    SYS_clock_nanosleep => "short pauses";
    SYS_prctl [one_of(0, &[bits(PR_SET_NAME)])] => "the name of a new thread";
    SYS_prctl [one_of(0, &[bits(PR_SET_NO_NEW_PRIVS)]), one_of(1, &[1])] => "a tighter filter";
    SYS_seccomp [one_of(0, &[SECCOMP_SET_MODE_FILTER]), one_of(1, &[0])] => "a tighter filter";
    SYS_openat [one_of(2, &[READ])] =>
        "/proc and sysfs: glibc's allocator, backtraces, causes of errors; only reads";
    SYS_readlink => "a backtrace finds this program";
    SYS_getcwd => "a backtrace shortens paths";
    SYS_open [one_of(1, &[LOG]), masked(2, SET_ID, &[0])] => "a log line may rotate the log";
    SYS_rename => "a log line may rotate the log";
    SYS_fstat => "the size of a log";
    SYS_statx => "the size of a log";
    SYS_geteuid => "the owner of a log";
    SYS_fchmod [one_of(1, &[PRIVATE])] => "the mode of a new log; never that of a disk's image";
    SYS_dup2 [one_of(1, &[1, 2])] => "standard output and error follow a rotated log";
    SYS_dup3 [one_of(1, &[1, 2])] => "standard output and error follow a rotated log";
};

/// Calls of threads that start threads.
const STARTS_THREADS: Calls = calls! {
    SYS_clone [one_of(0, &[NEW_THREAD])] => "a thread of this process; no namespace, no process";
    SYS_clone3 => "glibc's first try; see REFUSED";
};

/// A vhost-vdpa device under a guest's driver.
const DEVICES: Calls = calls! {
    SYS_ioctl [is(1, Test::Vhost)] => "the control path of a vDPA device";
    SYS_eventfd2 => "kicks and calls of a queue";
    SYS_epoll_create1 => "the VMM's control queue";
    SYS_epoll_ctl => "the guest's kicks of the control queue";
    SYS_timerfd_create => "the deadline of a control command";
    SYS_timerfd_settime => "the deadline of a control command";
    SYS_memfd_create => "rings of the VMM, shared with the device";
    SYS_ftruncate => "the size of such rings";
    SYS_fcntl [one_of(1, &[bits(F_ADD_SEALS), bits(F_GETFL)])] => "the seals of such rings";
    SYS_prlimit64 [is(2, Test::Null)] => "the limit of locked memory, for the cause of an error";
};

/// A function by VFIO under a guest's driver.
const FUNCTIONS: Calls = calls! {
    SYS_ioctl [ioctl_of(&[|| vfio(10), || vfio(11)])] => "its vectors; its reset";
    SYS_ioctl [ioctl_of(&[
        || vfio(13), || vfio(14), || iommufd(0x85), || iommufd(0x86),
    ])] => "guest memory for one behind the guest's IOMMU";
    SYS_pread64 => "a part of a BAR that is not mapped";
    SYS_pwrite64 => "such a part; memory and DMA of the function, on or off";
};

/// Opens and closes functions by VFIO.
const OPENS_FUNCTIONS: Calls = calls! {
    SYS_ioctl [ioctl_of(&[
        || vfio(0), || vfio(1), || vfio(2), || vfio(3), || vfio(4), || vfio(5), || vfio(6),
        || vfio(7), || vfio(8), || vfio(9), || vfio(12), || vfio(17), || vfio(18), || vfio(19),
        || vfio(20), || vfio(21),
    ])] => "containers, groups, files of functions, their properties, their migration";
    SYS_ioctl [ioctl_of(&[
        || iommufd(0x80), || iommufd(0x81), || iommufd(0x84),
    ])] => "address spaces of iommufd: made and destroyed, their ranges";
    SYS_ioctl [ioctl_of(&[KVM_CREATE_DEVICE, KVM_SET_DEVICE_ATTR])] =>
        "KVM's device for VFIO, and the groups in it";
    SYS_dup3 => "closes a function before its group leaves the container";
};

/// The disks' I/O. No thread creates a ring: it could omit the restrictions, which lie in memory.
/// So [`rings`](crate::sandbox::rings) exist before the filters.
const DISKS: Calls = calls! {
    SYS_io_uring_enter => "disk I/O; a ring has restrictions of its own";
    SYS_io_uring_register [one_of(1, &[RING_CANCEL])] => "a reset cancels I/O in flight";
};

/// What opening a device, a disk, a kernel or a snapshot needs.
const FILES: Calls = calls! {
    SYS_openat [masked(3, SET_ID, &[0])] => "every kind of file";
    SYS_open [masked(2, SET_ID, &[0])] => "credentials, logs, snapshots";
    SYS_newfstatat => "kinds of files";
    SYS_readlinkat => "paths of descriptors and of sysfs";
    SYS_getdents64 => "entries of snapshots, of sysfs, and of /proc for the holder of a device";
    SYS_lseek => "holes of memory images; parts of a kernel";
    SYS_pread64 => "memory images, statistics";
    SYS_pwrite64 => "memory images";
    SYS_mkdirat => "a snapshot";
    SYS_unlink => "sockets";
    SYS_unlinkat => "parts of a snapshot that failed";
    SYS_renameat => "a complete snapshot";
    SYS_fsync => "a complete snapshot";
    SYS_fstatfs => "free space; huge pages";
    SYS_flock => "a snapshot in progress";
    SYS_fcntl [one_of(1, &[
        bits(F_SETFD), bits(F_SETFL), bits(F_OFD_SETLK), bits(F_GET_SEALS),
    ])] => "the lock of a disk image; inherited descriptors; the seals of guest RAM";
};

/// A connection that exists.
const CONNECTION: Calls = calls! {
    SYS_recvfrom => "requests, pages";
    SYS_sendto [masked(3, CONNECTS, &[0])] => "answers, pages";
    SYS_recvmsg => "requests with descriptors";
    SYS_sendmsg [masked(2, CONNECTS, &[0])] => "answers with descriptors";
    SYS_shutdown => "the end of a connection";
    SYS_getsockopt [one_of(1, &[bits(SOL_SOCKET)])] => "the peer's process; errors";
    SYS_getsockname => "the chosen port";
    SYS_getpeername => "the peer's address in a log line";
    SYS_setsockopt [
        one_of(1, &[bits(SOL_SOCKET)]),
        one_of(2, &[bits(SO_REUSEADDR), bits(SO_RCVTIMEO), bits(SO_SNDTIMEO), bits(SO_KEEPALIVE)])
    ] => "limits of time; never a socket filter";
    SYS_setsockopt [
        one_of(1, &[bits(IPPROTO_TCP)]),
        one_of(2, &[
            bits(TCP_NODELAY), bits(TCP_USER_TIMEOUT), bits(TCP_KEEPIDLE), bits(TCP_KEEPINTVL),
            bits(TCP_KEEPCNT),
        ])
    ] => "small messages at once; limits of time";
    SYS_ioctl [ioctl_of(&[|| FIONBIO, || FIONREAD])] => "blocking or not; the resolver";
    SYS_accept4 => "the next connection";
};

/// A new connection.
const CONNECT: Calls = calls! {
    SYS_socket [one_of(0, &[bits(AF_UNIX), bits(AF_INET), bits(AF_INET6)])] =>
        "the API, the console, migrations, the resolver";
    SYS_socket [one_of(0, &[bits(AF_NETLINK)])] => "the resolver; see REFUSED";
    SYS_connect => "the destination of a migration; a stale socket";
    SYS_sendmmsg [masked(3, CONNECTS, &[0])] => "the resolver";
    SYS_uname => "the resolver";
};

/// A socket that listens.
const LISTEN: Calls = calls! {
    SYS_bind => "the API, the console, the destination of a migration";
    SYS_listen => "the API, the console, the destination of a migration";
};

/// An event loop.
const EVENT_LOOP: Calls = calls! {
    SYS_epoll_wait => "the event loop";
    SYS_epoll_ctl => "the event loop";
    SYS_epoll_create1 => "the event loop";
};

/// Another program: the question before an upgrade, and the upgrade.
///
/// execve cannot be limited to one program by a filter. It gains an attacker nothing here: the
/// filters stay, and no_new_privs lets no program add a privilege. It is not allowed to the threads
/// that a guest reaches: vCPUs and relays.
const PROGRAM: Calls = calls! {
    SYS_execve => "a live upgrade";
    SYS_clone [one_of(0, &[NEW_PROCESS])] => "asks a program whether it reads this VM's state";
    SYS_pipe2 => "its answer";
    SYS_dup2 => "its standard streams";
    SYS_wait4 => "its end";
    SYS_kill [one_of(1, &[bits(SIGKILL)])] => "its end if it hangs";
    SYS_rt_sigaction => "its signals have their default effect";
    SYS_arch_prctl [one_of(0, &[ARCH_SET_FS, ARCH_CET_STATUS])] => "a program starts";
    SYS_set_tid_address => "a program starts";
    SYS_prlimit64 [is(2, Test::Null)] => "a program starts";
    SYS_ioctl [ioctl_of(&[|| TCGETS, || TIOCGWINSZ])] => "whether a stream is a terminal";
};

/// What only the vmm thread does.
const MACHINE: Calls = calls! {
    SYS_ioctl [ioctl_of(&[
        KVM_GET_API_VERSION, KVM_CREATE_VM, KVM_GET_MSR_INDEX_LIST, KVM_CHECK_EXTENSION,
        KVM_GET_VCPU_MMAP_SIZE, KVM_GET_SUPPORTED_CPUID, KVM_CREATE_VCPU, KVM_SET_TSS_ADDR,
        KVM_SET_IDENTITY_MAP_ADDR, KVM_CREATE_IRQCHIP,
    ])] => "a VM is built";
    SYS_ioctl [ioctl_of(&[
        KVM_GET_IRQCHIP, KVM_SET_IRQCHIP, KVM_GET_CLOCK, KVM_SET_CLOCK, KVM_GET_REGS,
        KVM_SET_REGS, KVM_GET_SREGS, KVM_SET_SREGS, KVM_GET_MSRS, KVM_SET_MSRS, KVM_GET_LAPIC,
        KVM_SET_LAPIC, KVM_SET_CPUID2, KVM_GET_MP_STATE, KVM_SET_MP_STATE, KVM_GET_VCPU_EVENTS,
        KVM_SET_VCPU_EVENTS, KVM_GET_DEBUGREGS, KVM_SET_DEBUGREGS, KVM_GET_XSAVE, KVM_GET_XSAVE2,
        KVM_SET_XSAVE, KVM_GET_XCRS, KVM_SET_XCRS, KVM_KVMCLOCK_CTRL, KVM_SET_TSC_KHZ,
        KVM_GET_TSC_KHZ, KVM_SET_DEVICE_ATTR, KVM_GET_DEVICE_ATTR,
    ])] => "the state of vCPUs and interrupt controllers: reset, save, restore";
    SYS_ioctl [ioctl_of(&[
        || TIOCGPGRP, || TCSETS, || TERMIOS2[0].into(), || TERMIOS2[1].into(),
    ])] => "the console on a terminal; never TIOCSTI";
    SYS_madvise [one_of(2, &[
        bits(MADV_DONTFORK), bits(MADV_DONTDUMP), bits(MADV_HUGEPAGE), bits(MADV_POPULATE_WRITE),
    ])] => "guest RAM";
    SYS_getpgrp => "the console on a terminal";
    SYS_mbind => "guest RAM on a NUMA node";
    SYS_sysinfo => "free memory for a VM that arrives";
    SYS_sched_setaffinity => "a vCPU's host CPUs, set before its own filter";
    SYS_timerfd_create => "ring watch, throttled vCPUs";
    SYS_timerfd_settime => "ring watch, throttled vCPUs";
    SYS_socketpair => "the API's runtime";
    SYS_prctl [one_of(0, &[bits(PR_SET_DUMPABLE)]), one_of(1, &[0])] =>
        "a program that takes over a VM is not dumpable either";
    SYS_prctl [one_of(0, &[bits(PR_CAP_AMBIENT)]), one_of(1, &[bits(PR_CAP_AMBIENT_CLEAR_ALL)])] =>
        "it gives up all capabilities, as its predecessor did";
    SYS_capget => "it gives up all capabilities, as its predecessor did";
    SYS_capset => "it gives up all capabilities; a process without any gains none";
    SYS_prlimit64 [one_of(0, &[0]), one_of(1, &[RLIMIT_CORE])] => "it writes no core file";
};

/// Exits of the guest.
const VCPU: Calls = calls! {
    SYS_ioctl [ioctl_of(&[KVM_RUN])] => "the guest; first, because it is the most frequent";
    SYS_ioctl [ioctl_of(&[
        KVM_SET_USER_MEMORY_REGION, KVM_IOEVENTFD, KVM_IRQFD, KVM_SET_GSI_ROUTING, KVM_SIGNAL_MSI,
        KVM_IRQ_LINE,
    ])] => "BARs, doorbells and vectors follow the guest";
    SYS_ioctl [ioctl_of(&[KVM_GET_REGS, KVM_GET_SREGS])] => "the report of a failed vCPU";
};

/// Pages that a guest has written.
const DIRTY_LOG: Calls = calls! {
    SYS_ioctl [ioctl_of(&[
        KVM_CHECK_EXTENSION, KVM_ENABLE_CAP, KVM_SET_USER_MEMORY_REGION, KVM_GET_DIRTY_LOG,
        KVM_CLEAR_DIRTY_LOG,
    ])] => "the log of written pages";
};

/// Pages of guest RAM to and from a connection.
const PAGES: Calls = calls! {
    SYS_lseek => "holes of guest RAM";
    SYS_pread64 => "pages";
    SYS_pwrite64 => "pages";
    SYS_ioctl [ioctl_of(&[KVM_PRE_FAULT_MEMORY])] => "a page is mapped before the guest runs";
};

/// A NIC in userspace, between a driver's rings and a tap or a port. All files are open and all
/// threads are created before.
const SOFTWARE_NIC: Calls = calls! {
    SYS_ioctl [is(1, Test::Vduse)] => "interrupts, queues, the driver's memory";
    SYS_ioctl [ioctl_of(&[|| TUNSETOFFLOAD, || TUNSETQUEUE])] =>
        "the offloads that the driver takes, the queues that it fills";
    SYS_epoll_pwait2 => "the event loop, with a limit in nanoseconds";
    SYS_epoll_pwait => "the event loop on a kernel without epoll_pwait2";
    SYS_eventfd2 => "kicks of a queue";
    SYS_madvise [one_of(2, &[bits(MADV_HUGEPAGE)])] => "the driver's memory";
    SYS_fstatfs => "whether the driver's memory has reserved huge pages";
    SYS_sendto [one_of(2, &[0]), one_of(3, &[bits(MSG_DONTWAIT)]), is(4, Test::Null)] =>
        "an AF_XDP socket is woken for frames to transmit; no data is sent";
    SYS_recvfrom [one_of(2, &[0]), one_of(3, &[bits(MSG_DONTWAIT)])] =>
        "an AF_XDP socket is woken for buffers to receive; no data is received";
};

/// Counters of KVM.
const STATISTICS: Calls = calls! {
    SYS_ioctl [ioctl_of(&[KVM_GET_STATS_FD])] => "KVM's counters of a vCPU";
};

/// A thread's groups, and the threads that it starts.
struct Row {
    calls: &'static [Calls],
    starts: &'static [Thread],
}

impl Thread {
    /// All kinds of a VM's process.
    pub const ALL: [Self; 11] = [
        Self::Vmm,
        Self::Vcpu,
        Self::Api,
        Self::ApiWorker,
        Self::Migration,
        Self::Migrate,
        Self::Handshake,
        Self::Stop,
        Self::Relay,
        Self::Failover,
        Self::VmTeardown,
    ];

    const fn row(self) -> Row {
        let (calls, starts): (&[Calls], &[Thread]) = match self {
            Self::Vcpu => (
                &[VCPU, DEVICES, FUNCTIONS, DIRTY_LOG, DISKS, STARTS_THREADS],
                &[Self::Relay],
            ),
            Self::Relay | Self::VmTeardown => (&[], &[]),
            Self::Api => (
                &[CONNECTION, EVENT_LOOP, STARTS_THREADS],
                &[Self::ApiWorker],
            ),
            Self::ApiWorker => (
                &[
                    FILES,
                    DEVICES,
                    FUNCTIONS,
                    OPENS_FUNCTIONS,
                    DISKS,
                    CONNECTION,
                    LISTEN,
                    STATISTICS,
                    PROGRAM,
                    STARTS_THREADS,
                ],
                &[Self::Migration],
            ),
            Self::Migration => (
                &[
                    CONNECT,
                    CONNECTION,
                    DIRTY_LOG,
                    FILES,
                    DEVICES,
                    FUNCTIONS,
                    OPENS_FUNCTIONS,
                    STARTS_THREADS,
                ],
                &[Self::Migrate],
            ),
            Self::Migrate => (&[CONNECTION, PAGES], &[]),
            Self::Handshake => (&[CONNECTION], &[]),
            Self::Stop => (&[EVENT_LOOP], &[]),
            Self::SoftwareNic => (&[SOFTWARE_NIC, EVENT_LOOP], &[]),
            Self::Failover => (&[FILES, DEVICES], &[]),
            Self::Vmm => (
                &[MACHINE, LISTEN, STARTS_THREADS],
                &[
                    Self::Vcpu,
                    Self::Api,
                    Self::Handshake,
                    Self::Stop,
                    Self::Failover,
                    Self::VmTeardown,
                ],
            ),
        };
        Row { calls, starts }
    }

    /// The calls of this kind and of the threads that it starts, vCPUs' first; some repeatedly.
    pub(super) fn calls(self) -> Vec<&'static Call> {
        let row = self.row();
        let started = row.starts.iter().flat_map(|thread| thread.calls());
        let own = row.calls.iter().copied().flatten();
        started.chain(own).chain(EVERY).collect()
    }
}

/// Calls that fail instead of ending the process: glibc makes them, and has another way.
pub(super) const REFUSED: [(c_int, Calls); 2] = [
    (
        ENOSYS,
        calls! {
            SYS_clone3 => "its flags are in memory, which a filter cannot read: glibc uses clone";
        },
    ),
    (
        EACCES,
        calls! {
            SYS_mmap [masked(2, EXECUTABLE, &[EXECUTABLE])] =>
                "no code is loaded; the resolver tries to, and does without";
            SYS_mprotect [masked(2, EXECUTABLE, &[EXECUTABLE])] => "no memory becomes code";
            SYS_socket [one_of(0, &[bits(AF_NETLINK)])] =>
                "no configuration of the network; the resolver does without";
        },
    ),
];

/// Further calls that fail in a process with [limited
/// memory](crate::sandbox::privileges::limit_memory): the limit does not count what they leave.
pub(super) const UNCOUNTED: [(c_int, Calls); 1] = [(
    EACCES,
    calls! {
        SYS_mmap [masked(3, SHARED_ANONYMOUS, &[SHARED_ANONYMOUS])] =>
            "shared memory; that of a driver has a file";
        SYS_mmap [masked(3, bits(MAP_GROWSDOWN), &[bits(MAP_GROWSDOWN)])] => "another stack";
        SYS_mmap [masked(3, bits(MAP_HUGETLB), &[bits(MAP_HUGETLB)])] =>
            "the host's huge pages, which even a mapping without write access takes";
        SYS_mremap => "a larger stack; the allocator copies instead";
        SYS_mprotect [masked(2, bits(PROT_WRITE), &[0])] =>
            "memory that was written and is read-only now";
    },
)];
