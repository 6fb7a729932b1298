//! The precondition of a request on a VM: absent, present, or at a given generation.
//!
//! Owns the comparison and its errors.

use axum::http::StatusCode;

use super::record::Record;
use super::spec::VmName;
use crate::error::Error;

/// A precondition on the VM that a request names: if it does not hold, the request is rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Condition {
    /// No precondition.
    None,
    /// The VM must not exist.
    Absent,
    /// The VM must exist.
    Present,
    /// The VM must exist at one of these generations, in the form of [`tag`].
    At(Vec<String>),
}

/// A generation in the form that clients read and write.
pub(crate) fn tag(generation: u64) -> String {
    format!("g{generation}")
}

impl Condition {
    /// This precondition, and this generation.
    pub(crate) fn and_at(self, generation: u64) -> Self {
        let wanted = tag(generation);
        match self {
            Self::None | Self::Present => Self::At(vec![wanted]),
            Self::At(mut tags) => {
                tags.retain(|tag| *tag == wanted);
                Self::At(tags)
            }
            // Both never hold.
            Self::Absent => Self::At(Vec::new()),
        }
    }

    /// Checks the precondition against this record. The caller holds the VM's lock.
    ///
    /// # Errors
    /// It does not hold.
    pub(super) fn check(&self, vm: &VmName, record: Option<&Record>) -> Result<(), Error> {
        match (self, record) {
            (Self::None, _) | (Self::Absent, None) | (Self::Present, Some(_)) => Ok(()),
            (Self::Absent, Some(_)) => Err(exists(vm)),
            (Self::Present | Self::At(_), None) => Err(absent(vm)),
            (Self::At(tags), Some(record)) => {
                let now = tag(record.generation);
                if tags.contains(&now) {
                    Ok(())
                } else {
                    Err(conflict(vm, &now, tags))
                }
            }
        }
    }
}

fn precondition_failed(code: &'static str, message: String) -> Error {
    Error::answered(StatusCode::PRECONDITION_FAILED, code, message)
}

fn exists(vm: &VmName) -> Error {
    let message = format!("the virtual machine {vm} exists already");
    precondition_failed("vm_exists", message).hint("delete it first, or use another name")
}

fn absent(vm: &VmName) -> Error {
    let message = format!("the virtual machine {vm} does not exist, but the request requires it");
    precondition_failed("no_such_vm", message).hint("GET /v1/vms lists them")
}

fn conflict(vm: &VmName, now: &str, tags: &[String]) -> Error {
    let wanted = if tags.is_empty() {
        "an unknown generation".to_owned()
    } else {
        tags.join(" or ")
    };
    let message = format!("{vm} is at generation {now}, but the request requires {wanted}");
    precondition_failed("generation_conflict", message)
        .hint("GET it again, and repeat the change with the new generation")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_generation_narrows_a_condition() {
        let at = |tags: &[&str]| Condition::At(tags.iter().map(|&tag| tag.to_owned()).collect());
        for (condition, narrowed) in [
            (Condition::None, at(&["g17"])),
            (Condition::Present, at(&["g17"])),
            (Condition::Absent, at(&[])),
            (at(&["g3", "g17"]), at(&["g17"])),
            (at(&["g3"]), at(&[])),
        ] {
            assert_eq!(condition.and_at(17), narrowed);
        }
    }

    #[test]
    fn a_condition_holds_or_names_both_values() {
        let vm: VmName = "web".parse().unwrap();
        let spec = serde_json::from_value(json!({ "kernel": "/k" })).unwrap();
        let mut record = Record::new(spec);
        record.generation = 17;
        let at = |tags: &[&str]| Condition::At(tags.iter().map(|&tag| tag.to_owned()).collect());
        for (condition, absent, present) in [
            (Condition::None, None, None),
            (Condition::Absent, None, Some("vm_exists")),
            (Condition::Present, Some("no_such_vm"), None),
            (at(&["g17"]), Some("no_such_vm"), None),
            (at(&["g3", "g17"]), Some("no_such_vm"), None),
            (at(&["g3"]), Some("no_such_vm"), Some("generation_conflict")),
            (
                at(&["g017"]),
                Some("no_such_vm"),
                Some("generation_conflict"),
            ),
            (at(&[]), Some("no_such_vm"), Some("generation_conflict")),
        ] {
            for (record, code) in [(None, absent), (Some(&record), present)] {
                let error = condition.check(&vm, record).err();
                let answer = error.map(|error| error.answer());
                let expected = code.map(|code| (StatusCode::PRECONDITION_FAILED, code));
                assert_eq!(answer, expected, "{condition:?}");
            }
        }
        let error = at(&["g3"]).check(&vm, Some(&record)).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("g17") && message.contains("g3"),
            "{message}"
        );
    }
}
