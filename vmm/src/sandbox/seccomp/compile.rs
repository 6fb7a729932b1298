//! Compiles the table to programs that the kernel runs before each system call.
//!
//! A row with lists of values becomes one rule per combination. The rules as text tell a running
//! VMM whether the filter that it has suffices for another program.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::raw::c_int;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use super::table::{Call, Calls, REFUSED, Test, Thread, UNCOUNTED, When};

/// One condition on one argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Condition {
    Bits { argument: u8, mask: u32, value: u32 },
    OwnPid { argument: u8 },
    Null { argument: u8 },
}

/// A system call with exactly these arguments.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rule {
    name: &'static str,
    number: i64,
    conditions: Vec<Condition>,
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bits {
                argument,
                mask: u32::MAX,
                value,
            } => write!(f, "{argument}={value:#x}"),
            Self::Bits {
                argument,
                mask,
                value,
            } => write!(f, "{argument}&{mask:#x}={value:#x}"),
            Self::OwnPid { argument } => write!(f, "{argument}=pid"),
            Self::Null { argument } => write!(f, "{argument}=null"),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        for condition in &self.conditions {
            write!(f, " {condition}")?;
        }
        Ok(())
    }
}

/// The alternatives of one condition of a row.
fn alternatives(when: &When) -> Vec<Condition> {
    let argument = when.argument;
    let values = |mask, values: &[u32]| {
        let bits = |&value| Condition::Bits {
            argument,
            mask,
            value,
        };
        values.iter().map(bits).collect()
    };
    // Each ioctl number has 32 bits.
    let numbers = |numbers: Vec<u64>| {
        let numbers: Vec<u32> = numbers
            .into_iter()
            .filter_map(|number| u32::try_from(number).ok())
            .collect();
        values(u32::MAX, &numbers)
    };
    let named = |numbers_of: Vec<(&str, std::os::raw::c_ulong)>| {
        numbers(numbers_of.into_iter().map(|(_, number)| number).collect())
    };
    match when.test {
        Test::OneOf(wanted) => values(u32::MAX, wanted),
        Test::Masked(mask, wanted) => values(mask, wanted),
        Test::Ioctl(wanted) => numbers(wanted.iter().map(|number| number()).collect()),
        Test::Vhost => named(vdpa::uapi::ioctl_numbers()),
        Test::Vduse => named(vdpa::uapi::vduse::ioctl_numbers()),
        Test::OwnPid => vec![Condition::OwnPid { argument }],
        Test::Null => vec![Condition::Null { argument }],
    }
}

/// The rules of one row.
fn rules_of(call: &Call) -> Vec<Rule> {
    let none = Rule {
        name: call.name.strip_prefix("SYS_").unwrap_or(call.name),
        number: call.number,
        conditions: Vec::new(),
    };
    call.when.iter().fold(vec![none], |rules, when| {
        let with = |rule: Rule| {
            alternatives(when).into_iter().map(move |condition| {
                let mut rule = rule.clone();
                rule.conditions.push(condition);
                rule
            })
        };
        rules.into_iter().flat_map(with).collect()
    })
}

/// The rules of a thread, each once, in the order of the table.
pub(super) fn rules(thread: Thread) -> Vec<Rule> {
    let calls = thread.calls();
    let mut rules: Vec<Rule> = calls.into_iter().flat_map(rules_of).collect();
    let always: BTreeSet<i64> = rules
        .iter()
        .filter(|rule| rule.conditions.is_empty())
        .map(|rule| rule.number)
        .collect();
    let mut seen = BTreeSet::new();
    rules.retain(|rule| {
        let narrower = always.contains(&rule.number) && !rule.conditions.is_empty();
        !narrower && seen.insert(rule.clone())
    });
    rules
}

/// Compiles the rules of a thread; all other calls have the effect `otherwise`.
pub(super) fn filter(thread: Thread, otherwise: SeccompAction) -> Result<BpfProgram, BackendError> {
    program(rules(thread), otherwise, SeccompAction::Allow)
}

/// Compiles the calls that fail, a program per error number.
pub(super) fn refused() -> Result<Vec<BpfProgram>, BackendError> {
    failing(&REFUSED)
}

/// Compiles all filters of a thread of a process that is no VMM, with limited memory.
pub(super) fn confined(thread: Thread) -> Result<Vec<BpfProgram>, BackendError> {
    let mut programs = vec![filter(thread, SeccompAction::KillProcess)?];
    programs.extend(refused()?);
    programs.extend(failing(&UNCOUNTED)?);
    Ok(programs)
}

fn failing(calls: &[(c_int, Calls)]) -> Result<Vec<BpfProgram>, BackendError> {
    let programs = calls.iter().map(|(errno, calls)| {
        let fail = SeccompAction::Errno(errno.cast_unsigned());
        let rules = calls.iter().flat_map(rules_of).collect();
        program(rules, SeccompAction::Allow, fail)
    });
    programs.collect()
}

fn program(
    rules: Vec<Rule>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let mut chains: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for rule in rules {
        let chain = chains.entry(rule.number).or_default();
        if !rule.conditions.is_empty() {
            let conditions = rule.conditions.into_iter().map(condition);
            chain.push(SeccompRule::new(conditions.collect::<Result<_, _>>()?)?);
        }
    }
    SeccompFilter::new(chains, otherwise, matched, TargetArch::x86_64)?.try_into()
}

fn condition(condition: Condition) -> Result<SeccompCondition, BackendError> {
    use SeccompCmpArgLen::{Dword, Qword};
    use SeccompCmpOp::{Eq, MaskedEq};
    match condition {
        Condition::Bits {
            argument,
            mask: u32::MAX,
            value,
        } => SeccompCondition::new(argument, Dword, Eq, value.into()),
        Condition::Bits {
            argument,
            mask,
            value,
        } => SeccompCondition::new(argument, Dword, MaskedEq(mask.into()), value.into()),
        Condition::OwnPid { argument } => {
            SeccompCondition::new(argument, Dword, Eq, std::process::id().into())
        }
        Condition::Null { argument } => SeccompCondition::new(argument, Qword, Eq, 0),
    }
}
