//! JSON merge patches (RFC 7396): applied to a document, and computed from two of them.
//!
//! A member that is null in a patch is removed, so no patch sets a member to null.

use serde_json::{Map, Value};

/// Applies `patch` to `target`.
pub fn apply(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(members) = target else {
        return;
    };
    for (name, change) in changes {
        if change.is_null() {
            members.remove(name);
        } else {
            apply(members.entry(name.as_str()).or_insert(Value::Null), change);
        }
    }
}

/// The patch that turns `from` into `to`: an empty object if both are the same object.
#[must_use]
pub fn between(from: &Value, to: &Value) -> Value {
    let (Value::Object(old), Value::Object(new)) = (from, to) else {
        return to.clone();
    };
    let mut patch = Map::new();
    for (name, value) in new {
        match old.get(name) {
            Some(same) if same == value => {}
            Some(other) => {
                patch.insert(name.clone(), between(other, value));
            }
            None => {
                patch.insert(name.clone(), value.clone());
            }
        }
    }
    for name in old.keys().filter(|name| !new.contains_key(*name)) {
        patch.insert(name.clone(), Value::Null);
    }
    Value::Object(patch)
}

/// The members that a patch sets or removes, as JSON pointers (RFC 6901). A list is one member.
#[must_use]
pub fn pointers(patch: &Value) -> Vec<String> {
    let mut found = Vec::new();
    if *patch != Value::Object(Map::new()) {
        collect(patch, "", &mut found);
    }
    found
}

fn collect(patch: &Value, at: &str, found: &mut Vec<String>) {
    match patch {
        Value::Object(members) if !members.is_empty() => {
            for (name, change) in members {
                let name = name.replace('~', "~0").replace('/', "~1");
                collect(change, &format!("{at}/{name}"), found);
            }
        }
        _ => found.push(at.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The examples of RFC 7396, appendix A: the document, the patch, the result.
    fn examples() -> [(Value, Value, Value); 15] {
        [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (
                json!({"a": "b"}),
                json!({"b": "c"}),
                json!({"a": "b", "b": "c"}),
            ),
            (json!({"a": "b"}), json!({"a": null}), json!({})),
            (
                json!({"a": "b", "b": "c"}),
                json!({"a": null}),
                json!({"b": "c"}),
            ),
            (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "c"}), json!({"a": ["b"]}), json!({"a": ["b"]})),
            (
                json!({"a": {"b": "c"}}),
                json!({"a": {"b": "d", "c": null}}),
                json!({"a": {"b": "d"}}),
            ),
            (
                json!({"a": [{"b": "c"}]}),
                json!({"a": [1]}),
                json!({"a": [1]}),
            ),
            (json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"])),
            (json!({"a": "b"}), json!(["c"]), json!(["c"])),
            (json!({"a": "foo"}), json!(null), json!(null)),
            (json!({"a": "foo"}), json!("bar"), json!("bar")),
            (
                json!({"e": null}),
                json!({"a": 1}),
                json!({"e": null, "a": 1}),
            ),
            (
                json!([1, 2]),
                json!({"a": "b", "c": null}),
                json!({"a": "b"}),
            ),
            (
                json!({}),
                json!({"a": {"bb": {"ccc": null}}}),
                json!({"a": {"bb": {}}}),
            ),
        ]
    }

    #[test]
    fn patches_are_applied_as_in_the_rfc() {
        for (mut document, patch, result) in examples() {
            apply(&mut document, &patch);
            assert_eq!(document, result, "{patch}");
        }
    }

    #[test]
    fn a_computed_patch_turns_one_document_into_the_other() {
        let all = examples();
        let documents = all.iter().flat_map(|(from, _, to)| [from, to]);
        // No patch sets a member to null.
        let documents: Vec<_> = documents.filter(|one| one.get("e").is_none()).collect();
        for from in &documents {
            for to in &documents {
                let mut document = (*from).clone();
                apply(&mut document, &between(from, to));
                assert_eq!(document, **to, "{from}");
            }
        }
        let patch = between(
            &json!({"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}),
            &json!({"b": {"c": 2, "d": 4}, "e": [1, 2], "f": {}}),
        );
        let wanted = json!({"a": null, "b": {"d": 4}, "e": [1, 2], "f": {}});
        assert_eq!(patch, wanted);
    }

    #[test]
    fn members_are_named_by_pointers() {
        let patch = json!({"a": null, "b": {"c/d": 1, "e~": {}}, "f": [{"g": 1}]});
        assert_eq!(pointers(&patch), ["/a", "/b/c~1d", "/b/e~0", "/f"]);
        assert!(pointers(&json!({})).is_empty());
    }
}
