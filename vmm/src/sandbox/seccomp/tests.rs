//! Each filter is tight, and lets a thread do its work.
//!
//! A filter cannot be removed, so each case runs in a process of its own.

use std::io::Write as _;
use std::net::ToSocketAddrs as _;
use std::os::raw::c_long;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::time::Instant;

use devices::virtio::block::Block;
use devices::virtio::block::disk::Disk;

use super::table::VCPU_SIGNAL;
use super::*;

mod tight;

/// The filters of a thread of this kind: those of the main thread, then its own.
fn filters(thread: Thread) -> Vec<BpfProgram> {
    let kill = SeccompAction::KillProcess;
    let mut filters = vec![compile::filter(Thread::Vmm, kill.clone()).unwrap()];
    filters.extend(compile::refused().unwrap());
    filters.push(compile::filter(thread, kill).unwrap());
    filters
}

/// Forks, and returns the child's end. `work` returns its exit code.
fn in_child(filters: &[BpfProgram], work: impl FnOnce() -> i32) -> ExitStatus {
    // SAFETY: needed because a filter stays until the process ends. The child makes system calls
    // only, and ends without unwinding or destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let applied = filters
            .iter()
            .try_for_each(|one| seccompiler::apply_filter(one));
        let code = applied.map_or(255, |()| work());
        // SAFETY: ends this process at once, in which nothing else runs.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: waits for this process' own child and writes to a local variable.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    ExitStatus::from_raw(status)
}

/// A system call and its first three arguments.
type Made = (&'static str, c_long, [u64; 3]);

/// Makes a call. The exit code is its error number, or 0.
fn make((_, number, [a, b, c]): Made) -> i32 {
    // SAFETY: needed to make calls that no wrapper makes. Those of this file have descriptors and
    // addresses that do not exist, or change only this process, which ends next.
    match unsafe { libc::syscall(number, a, b, c, 0, 0, 0) } {
        -1 => std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(254),
        _ => 0,
    }
}

fn end_of(thread: Thread, made: Made) -> ExitStatus {
    in_child(&filters(thread), || make(made))
}

#[track_caller]
fn assert_denied(thread: Thread, made: Made) {
    let end = end_of(thread, made);
    assert_eq!(
        end.signal(),
        Some(libc::SIGSYS),
        "{thread:?}: {} {end}",
        made.0
    );
}

#[track_caller]
fn assert_fails(thread: Thread, made: Made, errno: i32) {
    let end = end_of(thread, made);
    assert_eq!(end.code(), Some(errno), "{thread:?}: {} {end}", made.0);
}

const NONE: [u64; 3] = [0; 3];
/// A descriptor that is not open.
const CLOSED: u64 = 0xffff_ffff;

#[test]
fn calls_that_no_thread_makes_end_the_process() {
    let log = c"/tmp/log".as_ptr().addr() as u64;
    let made: [Made; 43] = [
        ("ptrace", libc::SYS_ptrace, NONE),
        ("process_vm_readv", libc::SYS_process_vm_readv, NONE),
        ("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, NONE),
        ("mount", libc::SYS_mount, NONE),
        ("chroot", libc::SYS_chroot, NONE),
        ("pivot_root", libc::SYS_pivot_root, NONE),
        ("unshare", libc::SYS_unshare, NONE),
        ("setns", libc::SYS_setns, NONE),
        ("setuid", libc::SYS_setuid, NONE),
        ("bpf", libc::SYS_bpf, NONE),
        ("keyctl", libc::SYS_keyctl, NONE),
        ("perf_event_open", libc::SYS_perf_event_open, NONE),
        ("userfaultfd", libc::SYS_userfaultfd, NONE),
        ("init_module", libc::SYS_init_module, NONE),
        ("kexec_load", libc::SYS_kexec_load, NONE),
        ("open_by_handle_at", libc::SYS_open_by_handle_at, NONE),
        ("personality", libc::SYS_personality, NONE),
        ("execveat", libc::SYS_execveat, NONE),
        ("memfd_secret", libc::SYS_memfd_secret, NONE),
        ("getpid of x32", libc::SYS_getpid | 0x4000_0000, NONE),
        ("clone as fork", libc::SYS_clone, [17, 0, 0]),
        (
            "clone with a user namespace",
            libc::SYS_clone,
            [0x1000_0011, 0, 0],
        ),
        ("socket of packets", libc::SYS_socket, [17, 3, 0]),
        ("socket of vsock", libc::SYS_socket, [40, 1, 0]),
        ("ioctl TIOCSTI", libc::SYS_ioctl, [CLOSED, 0x5412, 0]),
        (
            "ioctl KVM_CREATE_GUEST_MEMFD",
            libc::SYS_ioctl,
            [CLOSED, 0xc040_aed4, 0],
        ),
        ("prctl PR_SET_DUMPABLE 1", libc::SYS_prctl, [4, 1, 0]),
        ("prctl PR_SET_PTRACER", libc::SYS_prctl, [0x5961_6d61, 1, 0]),
        ("madvise MADV_HWPOISON", libc::SYS_madvise, [0, 0, 100]),
        ("futex FUTEX_LOCK_PI", libc::SYS_futex, [0, 6, 0]),
        ("fcntl F_SETOWN", libc::SYS_fcntl, [CLOSED, 8, 0]),
        ("tgkill of another process", libc::SYS_tgkill, [1, 1, 6]),
        ("kill with SIGTERM", libc::SYS_kill, [0, 15, 0]),
        (
            "setsockopt SO_ATTACH_FILTER",
            libc::SYS_setsockopt,
            [CLOSED, 1, 26],
        ),
        // A file may belong to root outside the sandbox.
        ("fchmod 4755", libc::SYS_fchmod, [CLOSED, 0o4755, 0]),
        (
            "open of a log with mode 4755",
            libc::SYS_open,
            [log, table::LOG.into(), 0o4755],
        ),
        (
            "sendmsg MSG_FASTOPEN",
            libc::SYS_sendmsg,
            [CLOSED, 0, 0x2000_0000],
        ),
        // A ring without restrictions bypasses the filters.
        ("io_uring_setup", libc::SYS_io_uring_setup, [4, log, 0]),
        ("its eventfd", libc::SYS_io_uring_register, [CLOSED, 4, 0]),
        ("restrictions", libc::SYS_io_uring_register, [CLOSED, 11, 0]),
        ("their start", libc::SYS_io_uring_register, [CLOSED, 12, 0]),
        (
            "a registered ring",
            libc::SYS_io_uring_register,
            [CLOSED, 1 << 31 | 24, 0],
        ),
    ];
    for made in made {
        assert_denied(Thread::Vmm, made);
        assert_denied(Thread::Vcpu, made);
    }
}

#[test]
fn a_thread_may_not_do_the_work_of_another() {
    let path = c"/proc/self/mem".as_ptr().addr() as u64;
    for thread in [
        Thread::Vcpu,
        Thread::Relay,
        Thread::Migrate,
        Thread::Handshake,
    ] {
        assert_denied(thread, ("execve", libc::SYS_execve, NONE));
        assert_denied(thread, ("capset", libc::SYS_capset, NONE));
        assert_denied(thread, ("socket", libc::SYS_socket, [1, 1, 0]));
        assert_denied(thread, ("connect", libc::SYS_connect, NONE));
        assert_denied(thread, ("bind", libc::SYS_bind, NONE));
        assert_denied(thread, ("kill", libc::SYS_kill, [0, 9, 0]));
        let cwd = u64::from((-100_i32).cast_unsigned());
        assert_denied(thread, ("openat O_RDWR", libc::SYS_openat, [cwd, path, 2]));
        assert_denied(thread, ("open O_RDWR", libc::SYS_open, [path, 2, 0]));
        let create = kvm::KVM_CREATE_VM();
        assert_denied(
            thread,
            ("KVM_CREATE_VM", libc::SYS_ioctl, [CLOSED, create, 0]),
        );
        // Only the vmm thread and workers of the API open functions by VFIO.
        for request in [kvm::KVM_CREATE_DEVICE(), 0x3b6a, 0x3b76, 0x3b81] {
            assert_denied(thread, ("VFIO", libc::SYS_ioctl, [CLOSED, request, 0]));
        }
    }
    let run = kvm::KVM_RUN();
    for thread in Thread::ALL {
        let made = ("KVM_RUN", libc::SYS_ioctl, [CLOSED, run, 0]);
        match thread {
            Thread::Vmm | Thread::Vcpu => assert_fails(thread, made, libc::EBADF),
            _ => assert_denied(thread, made),
        }
    }
    let suspend = vdpa::uapi::suspend().number();
    let made = ("VHOST_VDPA_SUSPEND", libc::SYS_ioctl, [CLOSED, suspend, 0]);
    assert_fails(Thread::Vcpu, made, libc::EBADF);
    assert_fails(Thread::Failover, made, libc::EBADF);
    assert_denied(Thread::Relay, made);
    assert_denied(Thread::Migrate, made);
}

#[test]
fn a_software_nic_serves_rings_and_nothing_else() {
    let filters = compile::confined(Thread::SoftwareNic).unwrap();
    let path = c"/proc/self/mem".as_ptr().addr() as u64;
    let cwd = u64::from((-100_i32).cast_unsigned());
    let suspend = vdpa::uapi::suspend().number();
    for made in [
        ("openat O_RDWR", libc::SYS_openat, [cwd, path, 2]),
        ("socket", libc::SYS_socket, [1, 1, 0]),
        ("execve", libc::SYS_execve, NONE),
        ("clone", libc::SYS_clone, NONE),
        ("kill", libc::SYS_kill, [0, 9, 0]),
        ("unshare", libc::SYS_unshare, NONE),
        ("KVM_RUN", libc::SYS_ioctl, [CLOSED, kvm::KVM_RUN(), 0]),
        ("VHOST_VDPA_SUSPEND", libc::SYS_ioctl, [CLOSED, suspend, 0]),
        ("TUNSETIFF", libc::SYS_ioctl, [CLOSED, libc::TUNSETIFF, 0]),
        (
            "TUNSETPERSIST",
            libc::SYS_ioctl,
            [CLOSED, libc::TUNSETPERSIST, 0],
        ),
        ("sendto of data", libc::SYS_sendto, [CLOSED, path, 1]),
        ("recvfrom of data", libc::SYS_recvfrom, [CLOSED, path, 1]),
        ("bind", libc::SYS_bind, [CLOSED, path, 16]),
        ("setsockopt", libc::SYS_setsockopt, [CLOSED, 283, 4]),
    ] {
        let end = in_child(&filters, || make(made));
        assert_eq!(end.signal(), Some(libc::SIGSYS), "{} {end}", made.0);
    }
    for (name, number) in vdpa::uapi::vduse::ioctl_numbers() {
        let end = in_child(&filters, || {
            make((name, libc::SYS_ioctl, [CLOSED, number, 0]))
        });
        assert_eq!(end.code(), Some(libc::EBADF), "{name} {end}");
    }
}

/// The limit of its data counts all memory that it can map, except that of files.
#[test]
fn a_software_nic_maps_no_memory_beyond_its_limit() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsRawFd as _;

    let filters = compile::confined(Thread::SoftwareNic).unwrap();
    let file = memfd_create("memory of a driver", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    let end_of_map = |flags, file| {
        in_child(&filters, || {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: needed to map as no wrapper does. The kernel chooses the address, and nothing
            // accesses the memory.
            let map = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, flags, file, 0) };
            let failed = (map == libc::MAP_FAILED).then(std::io::Error::last_os_error);
            failed.map_or(0, |error| error.raw_os_error().unwrap_or(254))
        })
    };
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    for flags in [
        libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        libc::MAP_SHARED_VALIDATE | libc::MAP_ANONYMOUS,
        libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        private | libc::MAP_GROWSDOWN,
        private | libc::MAP_HUGETLB,
    ] {
        let end = end_of_map(flags, -1);
        assert_eq!(end.code(), Some(libc::EACCES), "{flags:#x} {end}");
    }
    for made in [
        ("mremap", libc::SYS_mremap, NONE),
        ("mprotect PROT_NONE", libc::SYS_mprotect, NONE),
        ("mprotect PROT_READ", libc::SYS_mprotect, [0, 0, 1]),
    ] {
        let end = in_child(&filters, || make(made));
        assert_eq!(end.code(), Some(libc::EACCES), "{} {end}", made.0);
    }
    // The allocator, and `vduse::memory`.
    assert_eq!(end_of_map(private, -1).code(), Some(0));
    let made = ("mprotect", libc::SYS_mprotect, [0, 0, 3]);
    assert_eq!(in_child(&filters, || make(made)).code(), Some(0));
    for flags in [libc::MAP_SHARED, libc::MAP_SHARED | libc::MAP_NORESERVE] {
        let end = end_of_map(flags, file.as_raw_fd());
        assert_eq!(end.code(), Some(0), "{flags:#x} {end}");
    }
}

#[test]
fn every_thread_allocates_waits_and_aborts() {
    for thread in Thread::ALL {
        assert_fails(
            thread,
            ("read", libc::SYS_read, [CLOSED, 0, 0]),
            libc::EBADF,
        );
        assert_fails(
            thread,
            ("futex", libc::SYS_futex, [4, 128, 0]),
            libc::EFAULT,
        );
        assert_fails(thread, ("munmap", libc::SYS_munmap, NONE), libc::EINVAL);
        let end = in_child(&filters(thread), || {
            // SAFETY: ends this process, in which nothing else runs.
            unsafe { libc::abort() }
        });
        // The child has another process ID than the one in its filter, as the program that is asked
        // before an upgrade: its signal is denied, and it ends all the same.
        assert!(end.signal().is_some(), "{thread:?}: {end}");
    }
    assert_eq!(u32::try_from(libc::SIGRTMIN()), Ok(VCPU_SIGNAL));
}

#[test]
fn calls_with_another_way_fail() {
    for thread in [Thread::Vmm, Thread::Vcpu] {
        assert_fails(thread, ("clone3", libc::SYS_clone3, NONE), libc::ENOSYS);
    }
    for thread in Thread::ALL {
        assert_fails(thread, ("mmap", libc::SYS_mmap, [0, 4096, 5]), libc::EACCES);
        assert_fails(
            thread,
            ("mprotect", libc::SYS_mprotect, [0, 4096, 4]),
            libc::EACCES,
        );
    }
    assert_fails(
        Thread::Vmm,
        ("socket", libc::SYS_socket, [16, 3, 0]),
        libc::EACCES,
    );
    assert_denied(Thread::Vcpu, ("socket", libc::SYS_socket, [16, 3, 0]));
}

#[test]
fn filters_are_small_and_compile_fast() {
    let started = Instant::now();
    for thread in Thread::ALL {
        let length = filters(thread).last().unwrap().len();
        println!(
            "{thread:?}: {} rules, {length} instructions",
            compile::rules(thread).len()
        );
        // The kernel limits a program (BPF_MAXINSNS), and the sum of those of a thread to 32,768.
        assert!(length < 3072, "{thread:?}: {length}");
    }
    println!(
        "three filters of each kind compiled in {:?}",
        started.elapsed()
    );
    // The answer of a program before an upgrade goes through a pipe.
    let answer: usize = needed().iter().map(|call| call.len() + 20).sum();
    assert!(answer < 48 << 10, "{answer}");
}

#[test]
fn a_program_with_a_call_that_this_one_lacks_is_found() {
    let ours = needed();
    assert!(ours.contains("ioctl 1=0xae80"), "KVM_RUN");
    assert_eq!(denied(&ours, ours.iter().map(String::as_str)), None);
    assert_eq!(denied(&ours, ["openat 2=0x80000"].into_iter()), None);
    for more in [
        "ptrace",
        "ioctl 1=0x5412",
        "ioctl",
        "socket 0=0x11",
        // Of a version that creates rings under its filters.
        "io_uring_setup",
        "io_uring_register 1=0xb",
    ] {
        let calls = ours.iter().map(String::as_str).chain([more]);
        assert_eq!(denied(&ours, calls), Some(more));
    }
    // This process has no filters.
    assert_eq!(first_denied(["ptrace"].into_iter()), None);
}

#[test]
fn modes_have_words() {
    assert_eq!("on".parse(), Ok(Mode::On));
    assert_eq!("log".parse(), Ok(Mode::Log));
    assert_eq!("off".parse(), Ok(Mode::Off));
    assert!("yes".parse::<Mode>().is_err());
}

/// Runs `filtered`, a test that [`a_process_under_filters_works`] starts, with this variable.
const WORK: &str = "BELLHOP_TEST_UNDER_FILTERS";

fn run_filtered(work: &str) -> (ExitStatus, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "sandbox::seccomp::tests::filtered",
            "--nocapture",
        ])
        .env(WORK, work)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (
        output.status,
        text + &String::from_utf8_lossy(&output.stderr),
    )
}

/// Does nothing without the variable.
#[test]
fn filtered() {
    let Ok(work) = std::env::var(WORK) else {
        return;
    };
    crate::sandbox::rings::reserve();
    install(Mode::On, false).unwrap();
    match work.as_str() {
        "threads" => {
            for thread in Thread::ALL {
                let started = std::thread::Builder::new().name("test".to_owned());
                let started = started.spawn(move || {
                    enter(thread);
                    let mut numbers = vec![0_u8; 1 << 20];
                    let map = std::collections::HashMap::from([(1, 2)]);
                    numbers.truncate(map.len());
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    println!("{thread:?} {}", numbers.len());
                });
                started.unwrap().join().unwrap();
            }
        }
        // What a VMM does before an upgrade; each in the thread that does it.
        "program" => within(Thread::ApiWorker, || {
            // Static, as each program that takes a VM over.
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "sandbox::seccomp::tests::modes_have_words"]);
            command.stdin(std::process::Stdio::null());
            let child = command.stdout(std::process::Stdio::piped()).spawn();
            assert!(child.unwrap().wait().unwrap().success());
        }),
        "disk" => {
            let layout = crate::layout::Layout::new(16 << 20, 40).unwrap();
            let ram = crate::memory::GuestRam::new(&layout, None).unwrap();
            let memory = std::sync::Arc::new(ram.memory().clone());
            within(Thread::ApiWorker, move || {
                let path = std::env::temp_dir().join(format!("filtered-{}", std::process::id()));
                std::fs::write(&path, [0; 512]).unwrap();
                let disk = Disk::open(&path, false).unwrap();
                Block::new(disk, "disk", memory).unwrap();
                std::fs::remove_file(&path).unwrap();
            });
        }
        "names" => within(Thread::Migration, || {
            let _ = ("localhost", 7444).to_socket_addrs();
        }),
        "log" => within(Thread::Vcpu, || {
            let path = std::env::temp_dir().join(format!("filtered-{}", std::process::id()));
            // The main thread opens it in a VMM.
            let mut log = crate::rotating_file::RotatingFile::open(&path, 64).unwrap();
            for _ in 0..10 {
                log.append(b"a line of the log\n").unwrap();
            }
        }),
        "denied" => within(Thread::Vcpu, || {
            let _ = std::net::TcpListener::bind("127.0.0.1:0");
        }),
        other => panic!("{other}"),
    }
    std::io::stdout().flush().unwrap();
}

fn within(thread: Thread, work: impl FnOnce() + Send + 'static) {
    let started = std::thread::spawn(move || {
        enter(thread);
        work();
    });
    started.join().unwrap();
}

#[test]
fn a_process_under_filters_works() {
    for work in ["threads", "program", "disk", "names", "log"] {
        let (end, text) = run_filtered(work);
        assert!(end.success(), "{work}: {end}\n{text}");
    }
    let (end, text) = run_filtered("denied");
    assert_eq!(end.signal(), Some(libc::SIGSYS), "{end}\n{text}");
}
