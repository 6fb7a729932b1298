//! All system calls with all arguments, by walking the compiled programs.
//!
//! [`CALLS`] repeats which kind of thread makes which call, without the table. So a row that is
//! added to the table by mistake, or to the wrong group, is an error. The walk takes both ways at
//! each branch on an argument. So a call that is not in the list is denied whatever its arguments.

use std::collections::{BTreeMap, BTreeSet};

use seccompiler::sock_filter;

use super::*;

/// More than any kernel has: Linux 6.18 ends at 469.
const NUMBERS: u32 = 1024;
const X86_64: u32 = 0xc000_003e;
const I386: u32 = 0x4000_0003;
/// The bit of the calls of x32.
const X32: u32 = 0x4000_0000;

/// Calls of every thread.
const EVERY: &str = "\
    brk clock_gettime clock_nanosleep close dup2 dup3 exit exit_group fchmod fcntl fstat futex \
    getcwd geteuid getpid getrandom gettid madvise mmap mprotect mremap munmap open openat poll \
    ppoll prctl read readlink rename restart_syscall rseq rt_sigaction rt_sigprocmask \
    rt_sigreturn sched_getaffinity sched_yield seccomp set_robust_list sigaltstack statx tgkill \
    write writev";

/// A kind of thread, the kinds that it starts, and its calls beyond theirs.
const CALLS: [(Thread, &[Thread], &str); 12] = [
    (Thread::Relay, &[], ""),
    (Thread::VmTeardown, &[], ""),
    (Thread::Stop, &[], "epoll_create1 epoll_ctl epoll_wait"),
    (
        Thread::SoftwareNic,
        &[],
        "epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd2 fstatfs ioctl \
         recvfrom sendto",
    ),
    (
        Thread::Handshake,
        &[],
        "accept4 getpeername getsockname getsockopt ioctl recvfrom recvmsg sendmsg sendto \
         setsockopt shutdown",
    ),
    (
        Thread::Migrate,
        &[],
        "accept4 getpeername getsockname getsockopt ioctl lseek pread64 pwrite64 recvfrom recvmsg \
         sendmsg sendto setsockopt shutdown",
    ),
    (
        Thread::Failover,
        &[],
        "epoll_create1 epoll_ctl eventfd2 flock fstatfs fsync ftruncate getdents64 ioctl \
         lseek memfd_create mkdirat newfstatat pread64 \
         prlimit64 pwrite64 readlinkat renameat timerfd_create timerfd_settime unlink unlinkat",
    ),
    (
        Thread::Vcpu,
        &[Thread::Relay],
        "clone clone3 epoll_create1 epoll_ctl eventfd2 ftruncate io_uring_enter io_uring_register \
         ioctl memfd_create pread64 prlimit64 pwrite64 timerfd_create timerfd_settime",
    ),
    (
        Thread::Migration,
        &[Thread::Migrate],
        "clone clone3 connect epoll_create1 epoll_ctl eventfd2 flock fstatfs fsync ftruncate \
         getdents64 memfd_create mkdirat newfstatat prlimit64 readlinkat renameat \
         sendmmsg socket timerfd_create timerfd_settime uname unlink unlinkat",
    ),
    (
        Thread::ApiWorker,
        &[Thread::Migration],
        "arch_prctl bind execve io_uring_enter io_uring_register kill listen pipe2 \
         set_tid_address wait4",
    ),
    (Thread::Api, &[Thread::ApiWorker], "epoll_wait"),
    (
        Thread::Vmm,
        &[
            Thread::Vcpu,
            Thread::Api,
            Thread::Handshake,
            Thread::Stop,
            Thread::Failover,
            Thread::VmTeardown,
        ],
        "capget capset getpgrp mbind sched_setaffinity socketpair sysinfo",
    ),
];

/// The values that a program returns for a call, over all its arguments.
fn returned(program: &[sock_filter], arch: u32, number: u32) -> BTreeSet<u32> {
    let mut values = BTreeSet::new();
    // Instructions to walk from, with the accumulator where it does not depend on an argument.
    let mut open = vec![(0, None)];
    let mut seen = BTreeSet::new();
    while let Some((mut at, accumulator)) = open.pop() {
        if !seen.insert((at, accumulator)) {
            continue;
        }
        let sock_filter { code, jt, jf, k } = program[at];
        at += 1;
        let compared = |matches: fn(u32, u32) -> bool| {
            accumulator.map_or(vec![jt, jf], |value| {
                vec![if matches(value, k) { jt } else { jf }]
            })
        };
        let jumps = match code {
            // BPF_LD of a word of `struct seccomp_data`: number, architecture, or an argument.
            0x20 => {
                let loaded = [Some(number), None, None, None, Some(arch)];
                open.push((at, loaded.get(k as usize).copied().flatten()));
                continue;
            }
            // BPF_ALU, AND.
            0x54 => {
                open.push((at, accumulator.map(|value| value & k)));
                continue;
            }
            // BPF_RET.
            0x06 => {
                values.insert(k);
                continue;
            }
            // BPF_JMP: JA, JEQ, JGT, JGE.
            0x05 => {
                open.push((at + k as usize, accumulator));
                continue;
            }
            0x15 => compared(|value, k| value == k),
            0x25 => compared(|value, k| value > k),
            0x35 => compared(|value, k| value >= k),
            other => panic!("unknown instruction {other:#x}"),
        };
        open.extend(
            jumps
                .iter()
                .map(|&jump| (at + usize::from(jump), accumulator)),
        );
    }
    values
}

fn expected(thread: Thread) -> BTreeSet<&'static str> {
    let (_, starts, own) = CALLS.iter().find(|row| row.0 == thread).unwrap();
    let own = EVERY.split_whitespace().chain(own.split_whitespace());
    starts
        .iter()
        .flat_map(|&thread| expected(thread))
        .chain(own)
        .collect()
}

#[test]
fn no_thread_makes_a_call_outside_its_list() {
    let started = Instant::now();
    let calls = [Thread::Vmm, Thread::SoftwareNic]
        .map(Thread::calls)
        .concat();
    let names: BTreeMap<u32, &str> = calls
        .iter()
        .map(|call| {
            (
                u32::try_from(call.number).unwrap(),
                &call.name["SYS_".len()..],
            )
        })
        .collect();
    assert!(
        Thread::ALL
            .iter()
            .all(|thread| CALLS.iter().any(|row| row.0 == *thread))
    );
    let denied = BTreeSet::from([libc::SECCOMP_RET_KILL_PROCESS]);
    for (thread, ..) in CALLS {
        let program = compile::filter(thread, SeccompAction::KillProcess).unwrap();
        let mut allowed = BTreeSet::new();
        for number in 0..NUMBERS {
            let values = returned(&program, X86_64, number);
            if values.contains(&libc::SECCOMP_RET_ALLOW) {
                allowed.insert(names[&number]);
            } else {
                assert_eq!(values, denied, "{thread:?}: {number}");
            }
            for (arch, number) in [(X86_64, number | X32), (I386, number)] {
                assert_eq!(
                    returned(&program, arch, number),
                    denied,
                    "{thread:?}: {number}"
                );
            }
        }
        let expected = expected(thread);
        let more: Vec<_> = allowed.difference(&expected).collect();
        let less: Vec<_> = expected.difference(&allowed).collect();
        assert!(
            more.is_empty() && less.is_empty(),
            "{thread:?}: also makes {more:?}, and does not make {less:?}"
        );
    }
    println!("all calls of all kinds in {:?}", started.elapsed());
}
