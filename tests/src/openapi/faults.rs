//! Values with a single fault each, and bodies that are not values at all.
//!
//! A change counts as a fault only if the schema forbids it ([`conforms`]). A change that conforms
//! is merely unusual, and the server may accept it.

use super::schema::{conforms, resolve};
use serde_json::{Map, Value, json};

/// How deep nesting goes: deeper than serde_json follows (128), and too deep for a thread's stack.
const NESTING: usize = 20_000;

/// The length of a long text, in bytes. Bodies may have 64 KiB.
const LONG: usize = 30_000;

/// A changed value.
#[derive(Debug, Clone, PartialEq)]
pub struct Changed {
    /// The change and its place, for human readers.
    pub what: String,
    /// The value with the change.
    pub value: Value,
    /// True if the schema forbids it.
    pub is_fault: bool,
}

/// Every change of every part of `value`, which has this schema.
#[must_use]
pub fn changes(whole: &Value, schema: &Value, value: &Value) -> Vec<Changed> {
    let mut places = Vec::new();
    walk(value, &mut Vec::new(), &mut places);
    let mut all = Vec::new();
    for place in places {
        let Some(there) = pointer(value, &place) else {
            continue;
        };
        for (what, new) in replacements(there) {
            let Some(changed) = replaced(value, &place, new) else {
                continue;
            };
            let is_fault = conforms(whole, resolve(whole, schema), &changed).is_err();
            all.push(Changed {
                what: format!("{what} at {}", shown(&place)),
                value: changed,
                is_fault,
            });
        }
    }
    all
}

type Place = Vec<Step>;

#[derive(Debug, Clone, PartialEq)]
enum Step {
    Field(String),
    Item(usize),
}

fn shown(place: &[Step]) -> String {
    let mut text = String::from("/");
    for step in place {
        match step {
            Step::Field(name) => text.push_str(name),
            Step::Item(index) => text.push_str(&index.to_string()),
        }
        text.push('/');
    }
    text
}

fn walk(value: &Value, place: &mut Place, places: &mut Vec<Place>) {
    places.push(place.clone());
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                place.push(Step::Field(name.clone()));
                walk(field, place, places);
                place.pop();
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                place.push(Step::Item(index));
                walk(item, place, places);
                place.pop();
            }
        }
        _ => {}
    }
}

fn pointer<'a>(value: &'a Value, place: &[Step]) -> Option<&'a Value> {
    place.iter().try_fold(value, |value, step| match step {
        Step::Field(name) => value.get(name),
        Step::Item(index) => value.get(*index),
    })
}

fn replaced(value: &Value, place: &[Step], new: Value) -> Option<Value> {
    let mut changed = value.clone();
    let mut there = &mut changed;
    for step in place {
        there = match step {
            Step::Field(name) => there.get_mut(name)?,
            Step::Item(index) => there.get_mut(*index)?,
        };
    }
    *there = new;
    Some(changed)
}

/// Replacements for a value.
fn replacements(there: &Value) -> Vec<(String, Value)> {
    let mut all: Vec<(String, Value)> = [
        json!(null),
        json!(true),
        json!(0),
        json!("no such word"),
        json!([]),
        json!({}),
    ]
    .into_iter()
    .filter(|other| other != there)
    .map(|other| (format!("{other} instead"), other))
    .collect();
    match there {
        Value::Object(fields) => all.extend(objects(fields)),
        Value::Array(items) => all.extend(arrays(items)),
        Value::String(_) => all.extend(texts()),
        Value::Number(_) => all.extend(numbers()),
        Value::Null | Value::Bool(_) => {}
    }
    all
}

fn objects(fields: &Map<String, Value>) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    for name in fields.keys() {
        let mut fewer = fields.clone();
        fewer.remove(name);
        all.push((format!("without {name}"), Value::Object(fewer)));
    }
    for surplus in ["surplus", "", "__proto__", "\u{0}"] {
        let mut more = fields.clone();
        more.insert(surplus.to_owned(), json!(1));
        all.push((format!("with {surplus:?}"), Value::Object(more)));
    }
    all
}

fn arrays(items: &[Value]) -> Vec<(String, Value)> {
    let Some(first) = items.first() else {
        return Vec::new();
    };
    let twice = vec![first.clone(); 2];
    // As many as a body has room for.
    let room = LONG / (first.to_string().len() + 1);
    let many = vec![first.clone(); room];
    vec![
        ("the same twice".to_owned(), Value::Array(twice)),
        (format!("{room} of the same"), Value::Array(many)),
    ]
}

fn texts() -> Vec<(String, Value)> {
    [
        "",
        " ",
        "\u{0}",
        "../../../../etc/passwd",
        "a\nb",
        "%s%n",
        "é\u{202e}\u{feff}",
        "-",
        "/",
        "/dev/null",
        "/proc/self/mem",
        "99999999999999999999T",
        "ff:ff:ff:ff:ff:ff",
    ]
    .into_iter()
    .map(|text| (format!("{text:?}"), json!(text)))
    .chain([("a long text".to_owned(), json!("x".repeat(LONG)))])
    .collect()
}

fn numbers() -> Vec<(String, Value)> {
    [
        json!(-1),
        json!(0),
        json!(1),
        json!(33),
        json!(255),
        json!(65_535),
        json!(65_536),
        json!(u32::MAX),
        json!(u64::from(u32::MAX) + 1),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1.5),
        json!(-0.0),
        json!(1e300),
    ]
    .into_iter()
    .map(|number| (number.to_string(), number))
    .collect()
}

/// Bodies that are not JSON, or not this JSON; the server must reject each.
#[must_use]
pub fn texts_instead(right: &Value) -> Vec<(String, Vec<u8>)> {
    let text = right.to_string();
    let mut all: Vec<(String, Vec<u8>)> = [
        "",
        " ",
        "{",
        "}",
        "nul",
        "{]",
        "{\"a\"}",
        "{\"a\":}",
        "'x'",
        "NaN",
        "+1",
        "01",
        "1e",
        "\"\\x\"",
        "\"\\ud800\"",
        "{} {}",
        "{,}",
        "[1,]",
        "// no\n{}",
        "\u{feff}{}",
        "1e999999999",
        "\"",
    ]
    .into_iter()
    .map(|text| (format!("{text:?} as the body"), text.as_bytes().to_vec()))
    .collect();
    // Truncated, and with trailing bytes.
    for part in 1..8 {
        let at = text.len() * part / 8;
        let cut = text.as_bytes().get(..at).unwrap_or_default();
        all.push((format!("the body cut at {at}"), cut.to_vec()));
    }
    all.push((
        "something behind the body".into(),
        format!("{text}x").into(),
    ));
    all.push((
        "a zero byte behind the body".into(),
        format!("{text}\u{0}").into(),
    ));
    for (what, open, close) in [("lists", "[", "]"), ("objects", "{\"a\":", "}")] {
        let nested = open.repeat(NESTING / open.len());
        all.push((format!("{what} without an end"), nested.clone().into()));
        let closed = format!("{nested}1{}", close.repeat(NESTING / open.len()));
        all.push((format!("nested {what}"), closed.into()));
    }
    if let Some(fields) = right.as_object() {
        // A duplicate field, and one that is not UTF-8.
        if let Some((name, value)) = fields.iter().next() {
            let twice = format!("{{\"{name}\":{value},{}", text.get(1..).unwrap_or_default());
            all.push((format!("{name} twice"), twice.into()));
        }
        let mut broken = b"{\"\xff\xfe\":1,".to_vec();
        broken.extend_from_slice(text.as_bytes().get(1..).unwrap_or_default());
        all.push(("a name that is not UTF-8".into(), broken));
        let mut broken = text.as_bytes().to_vec();
        if let Some(at) = text.find(":\"") {
            broken.insert(at + 2, 0xc3);
            broken.insert(at + 3, 0x28);
            all.push(("a text that is not UTF-8".into(), broken));
        }
    }
    let huge = format!("{}{text}", " ".repeat(200_000));
    all.push(("200,000 spaces in front of the body".into(), huge.into()));
    let number = format!("{{\"x\":{}}}", "9".repeat(LONG));
    all.push(("a number of many digits".into(), number.into()));
    all
}
