//! `KEY=VALUE` for single values of a VM's spec.
//!
//! Owns the notation, and its conversion to a merge patch.

use std::str::FromStr;

use bellhop_common::error::Error;
use serde_json::{Map, Value, json};

/// A change of one value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    /// The member, and optionally a member of it.
    key: (String, Option<String>),
    /// The new value; null removes the member.
    value: Value,
}

/// Members whose values are always strings.
const TEXTS: [&str; 5] = ["labels", "annotations", "kernel", "initramfs", "cmdline"];

impl FromStr for Setting {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (key, value) = match (text.split_once('='), text.strip_suffix('-')) {
            (Some((key, value)), _) => (key, Some(value)),
            (None, Some(key)) => (key, None),
            (None, None) => ("", None),
        };
        let (member, below) = match key.split_once('.') {
            Some((member, below)) => (member, Some(below)),
            None => (key, None),
        };
        if member.is_empty() || below == Some("") {
            let message = format!("{text:?} is neither KEY=VALUE nor KEY-");
            return Err(Error::wrong(message));
        }
        let value = match value {
            None => Value::Null,
            Some(value) if TEXTS.contains(&member) => value.into(),
            Some(value) => serde_json::from_str(value).unwrap_or_else(|_| value.into()),
        };
        // A size alone does not change the kind of pages.
        let below = match (member, below, &value) {
            ("memory", None, Value::String(_)) => Some("size"),
            (_, below, _) => below,
        };
        Ok(Self {
            key: (member.to_owned(), below.map(str::to_owned)),
            value,
        })
    }
}

/// The merge patch for all settings; the last one for a key counts.
pub(crate) fn patch(settings: &[Setting]) -> Map<String, Value> {
    let mut patch = Map::new();
    for Setting { key, value } in settings {
        let (member, below) = key;
        let at = patch.entry(member.clone()).or_insert_with(|| json!({}));
        match (below, at) {
            (Some(below), Value::Object(members)) => {
                members.insert(below.clone(), value.clone());
            }
            (Some(below), at) => *at = json!({ below: value }),
            (None, at) => *at = value.clone(),
        }
    }
    patch
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patch_of(settings: &[&str]) -> Value {
        let settings: Vec<Setting> = settings.iter().map(|one| one.parse().unwrap()).collect();
        patch(&settings).into()
    }

    #[test]
    fn settings_become_a_merge_patch() {
        for (settings, wanted) in [
            (
                vec!["memory=2G", "restart=always", "cpus=2"],
                json!({"memory": {"size": "2G"}, "restart": "always", "cpus": 2}),
            ),
            (
                vec!["memory=2G", "memory.hugepages-"],
                json!({"memory": {"size": "2G", "hugepages": null}}),
            ),
            (
                vec!["labels.example.org/a=1", "labels.b-", "annotations.n=x=y"],
                json!({"labels": {"example.org/a": "1", "b": null}, "annotations": {"n": "x=y"}}),
            ),
            (
                vec![
                    "cmdline=console=ttyS0 quiet",
                    "initramfs-",
                    "ring_watch=off",
                ],
                json!({"cmdline": "console=ttyS0 quiet", "initramfs": null, "ring_watch": "off"}),
            ),
            (
                vec!["cpu_affinity=[[0,1],[2]]", "labels-", "cmdline="],
                json!({"cpu_affinity": [[0, 1], [2]], "labels": null, "cmdline": ""}),
            ),
            (vec!["labels-", "labels.a=b"], json!({"labels": {"a": "b"}})),
            (vec!["cpus=1", "cpus=2"], json!({"cpus": 2})),
        ] {
            assert_eq!(patch_of(&settings), wanted);
        }
        for wrong in ["", "=", "=2", "-", "cpus", "labels.=a", ".a=b"] {
            assert!(wrong.parse::<Setting>().is_err(), "{wrong}");
        }
    }
}
