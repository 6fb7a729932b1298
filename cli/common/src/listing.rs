//! Named objects with fields, in the form of iproute2's `vdpa` and `devlink`. Output is text, or
//! with -j and -p JSON with the same keys in the same order.
//!
//! Owns the layout. Names from a device or its vendor are not trusted: control characters do not
//! reach a terminal.

use serde::{Serialize, Serializer};

use crate::error::Error;
use crate::exit::Code;
#[cfg(feature = "testing")]
pub use crate::format::testing::captured;
pub use crate::format::{Format, print};
use crate::text::printable;

/// The layout of an entry as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A line for each field.
    Lines,
    /// All on one line.
    Line,
    /// All on one line with a space at its end; lists on lines of their own.
    LineThenLists,
    /// All on one line; blocks on lines of their own.
    LineThenBlocks,
}

/// A field's value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// Text, shown without control characters.
    Text(String),
    /// A number.
    Number(u64),
    /// `true` or `false`.
    Flag(bool),
    /// `on` or `off` as text, a flag in JSON.
    Switch(bool),
    /// Items, each a word.
    List(Vec<Item>),
    /// Bytes per second; as text in bits per second with a unit.
    Rate(u64),
    /// Fields that form an object of their own.
    #[serde(serialize_with = "as_map")]
    Block(Vec<(String, Value)>),
    /// The fields of an object whose name is the key.
    #[serde(serialize_with = "as_map")]
    Named(Vec<(String, Value)>),
}

/// An element of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Item {
    /// A feature or class with a name.
    Name(&'static str),
    /// A feature without a name: `bit_N` as text, N in JSON.
    Bit(u32),
}

/// An object and its fields, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Entry {
    #[serde(skip)]
    name: String,
    #[serde(serialize_with = "as_map")]
    fields: Vec<(String, Value)>,
}

impl Entry {
    /// An object without fields.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            fields: Vec::new(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Adds a field if there is one.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: impl Into<Option<Value>>) -> Self {
        let field = value.into().map(|value| (key.into(), value));
        self.fields.extend(field);
        self
    }

    /// Adds a text.
    #[must_use]
    pub fn with_text(self, key: &str, text: impl Into<String>) -> Self {
        self.with(key, Value::Text(text.into()))
    }

    /// Adds a text if there is one.
    #[must_use]
    pub fn with_some(self, key: &str, text: Option<impl Into<String>>) -> Self {
        self.with(key, text.map(|text| Value::Text(text.into())))
    }

    /// Adds names with commas between them, if there are any.
    #[must_use]
    pub fn with_joined(self, key: &str, list: &[String]) -> Self {
        self.with_some(key, (!list.is_empty()).then(|| list.join(",")))
    }

    /// Adds a number if there is one.
    #[must_use]
    pub fn with_number(self, key: &str, number: Option<impl Into<u64>>) -> Self {
        self.with(key, number.map(|number| Value::Number(number.into())))
    }

    /// Adds a flag if it is known.
    #[must_use]
    pub fn with_flag(self, key: &str, flag: Option<bool>) -> Self {
        self.with(key, flag.map(Value::Flag))
    }

    /// Adds `on` or `off` if it is known.
    #[must_use]
    pub fn with_switch(self, key: &str, on: Option<bool>) -> Self {
        self.with(key, on.map(Value::Switch))
    }

    fn text(&self, layout: Layout) -> String {
        let mut text = format!("{}: ", printable(&self.name));
        if layout == Layout::LineThenBlocks {
            return text + &blocks(&self.fields, 0) + "\n";
        }
        for (key, value) in &self.fields {
            let field = format!("{}{}", printable(key), value.text());
            let is_list = matches!(value, Value::List(_) | Value::Block(_) | Value::Named(_));
            let own_line = layout == Layout::Lines || layout == Layout::LineThenLists && is_list;
            text.push_str(&if own_line {
                format!("\n  {field}")
            } else {
                format!("{field} ")
            });
        }
        if layout == Layout::Line && !self.fields.is_empty() {
            text.pop();
        }
        text.push('\n');
        text
    }
}

impl Value {
    /// The text, with a space before each word.
    fn text(&self) -> String {
        match self {
            Self::Text(text) => format!(" {}", printable(text)),
            Self::Number(number) => format!(" {number}"),
            Self::Flag(flag) => format!(" {flag}"),
            Self::Switch(true) => " on".to_owned(),
            Self::Switch(false) => " off".to_owned(),
            Self::List(list) => list
                .iter()
                .map(|item| match item {
                    Item::Name(name) => format!(" {name}"),
                    Item::Bit(bit) => format!(" bit_{bit}"),
                })
                .collect(),
            Self::Rate(bytes) => format!(" {}", bits_per_second(*bytes)),
            Self::Block(fields) | Self::Named(fields) => fields
                .iter()
                .map(|(key, value)| format!(" {}{}", printable(key), value.text()))
                .collect(),
        }
    }
}

/// A rate in iproute2's form: in the largest unit without a loss, or, from 1000 of a unit on, in
/// the next one, truncated.
fn bits_per_second(bytes: u64) -> String {
    let mut bits = u128::from(bytes) * 8;
    for unit in ["", "K", "M", "G"] {
        if bits < 1000 || (!bits.is_multiple_of(1000) && bits < 1_000_000) {
            return format!("{bits}{unit}bit");
        }
        bits /= 1000;
    }
    format!("{bits}Tbit")
}

/// Fields on one line, then their blocks, indented by four spaces per level. The name of an object
/// stands alone if it has no fields.
fn blocks(fields: &[(String, Value)], depth: usize) -> String {
    let mut line = Vec::new();
    let mut below = String::new();
    for (key, value) in fields {
        let key = printable(key);
        match value {
            Value::Block(fields) => {
                let (title, inside) = (4 * depth + 2, 4 * depth + 4);
                let fields = blocks(fields, depth + 1);
                below.push_str(&format!("\n{:title$}{key}:\n{:inside$}{fields}", "", ""));
            }
            Value::Named(fields) if fields.is_empty() => line.push(key),
            Value::Named(_) => line.push(format!("{key}:{}", value.text())),
            value => line.push(format!("{key}{}", value.text())),
        }
    }
    line.join(" ") + &below
}

/// The full result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The one key of the JSON object.
    pub section: &'static str,
    /// How each entry is laid out as text.
    pub layout: Layout,
    /// The objects, in order.
    pub entries: Vec<Entry>,
}

impl Listing {
    /// Prints the listing on standard output.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn print(&self, format: Format) -> Result<Code, Error> {
        format.print(self, || self.text())
    }

    fn text(&self) -> String {
        self.entries
            .iter()
            .map(|entry| entry.text(self.layout))
            .collect()
    }
}

impl Serialize for Listing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Entries<'a>(&'a [Entry]);
        impl Serialize for Entries<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().map(|entry| (&entry.name, entry)))
            }
        }
        serializer.collect_map([(self.section, Entries(&self.entries))])
    }
}

fn as_map<S: Serializer>(fields: &[(String, Value)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(fields.iter().map(|(key, value)| (key, value)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::json;

    fn listing(layout: Layout) -> Listing {
        let list = Value::List(vec![Item::Name("MAC"), Item::Bit(40)]);
        Listing {
            section: "dev",
            layout,
            entries: vec![
                Entry::new("n0")
                    .with_text("mac", "02")
                    .with_number("mtu", Some(1500_u16))
                    .with_number("none", None::<u16>)
                    .with_flag("link_announce", Some(false))
                    .with("features", list)
                    .with("empty", Value::List(vec![])),
                Entry::new("b0"),
            ],
        }
    }

    #[test]
    fn json_is_in_order_with_numbers_for_nameless_bits() {
        let expected = concat!(
            r#"{"dev":{"n0":{"mac":"02","mtu":1500,"link_announce":false,"#,
            r#""features":["MAC",40],"empty":[]},"b0":{}}}"#,
            "\n"
        );
        assert_eq!(json(&listing(Layout::Line), false).unwrap(), expected);
    }

    #[test]
    fn pretty_json_is_laid_out_as_iproute2s() {
        let expected = "\
{
    \"dev\": {
        \"n0\": {
            \"mac\": \"02\",
            \"mtu\": 1500,
            \"link_announce\": false,
            \"features\": [ \"MAC\",40 ],
            \"empty\": [ ]
        },
        \"b0\": {}
    }
}
";
        assert_eq!(json(&listing(Layout::Line), true).unwrap(), expected);
    }

    #[test]
    fn text_is_laid_out_as_iproute2s() {
        let text = listing(Layout::Lines).text();
        assert!(text.starts_with("n0: \n  mac 02\n  mtu 1500\n"), "{text:?}");
        assert!(
            text.ends_with("\n  features MAC bit_40\n  empty\nb0: \n"),
            "{text:?}"
        );
        let text = listing(Layout::LineThenLists).text();
        let expected =
            "n0: mac 02 mtu 1500 link_announce false \n  features MAC bit_40\n  empty\nb0: \n";
        assert_eq!(text, expected);
        let text = listing(Layout::Line).text();
        assert!(text.starts_with("n0: mac 02 mtu 1500 link_announce false"));
    }

    #[test]
    fn rates_have_units() {
        for (bytes, text) in [
            (1, "8bit"),
            (125, "1Kbit"),
            (1_250_000, "10Mbit"),
            (187_500_000, "1500Mbit"),
            (12_345_678, "98765Kbit"),
            (125_000_000_000_000, "1000Tbit"),
        ] {
            assert_eq!(bits_per_second(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn blocks_are_laid_out_as_devlinks() {
        let handle = |fields| vec![("auxiliary/sf.2".to_owned(), Value::Named(fields))];
        let entry = |fields| {
            let nested = Value::Block(handle(fields));
            let function = Value::Block(vec![
                ("hw_addr".to_owned(), Value::Text("02".to_owned())),
                ("state".to_owned(), Value::Text("active".to_owned())),
                ("nested_devlink".to_owned(), nested),
            ]);
            Entry::new("pci/0/1")
                .with_text("type", "eth")
                .with_flag("splittable", Some(false))
                .with("function", function)
        };
        let expected = "\
pci/0/1: type eth splittable false
  function:
    hw_addr 02 state active
      nested_devlink:
        auxiliary/sf.2
";
        let layout = Layout::LineThenBlocks;
        assert_eq!(entry(vec![]).text(layout), expected);
        let namespace = vec![("netnsid".to_owned(), Value::Number(3))];
        let text = entry(namespace).text(layout);
        assert!(
            text.ends_with("        auxiliary/sf.2: netnsid 3\n"),
            "{text}"
        );
        let listing = Listing {
            section: "port",
            layout,
            entries: vec![entry(vec![])],
        };
        let expected = concat!(
            r#"{"port":{"pci/0/1":{"type":"eth","splittable":false,"function":"#,
            r#"{"hw_addr":"02","state":"active","nested_devlink":{"auxiliary/sf.2":{}}}}}}"#,
            "\n"
        );
        assert_eq!(json(&listing, false).unwrap(), expected);
    }

    #[test]
    fn nothing_steers_a_terminal() {
        let entry = Entry::new("n\x1b[31m").with_text("k\n", "v\r");
        assert_eq!(entry.text(Layout::Line), "n?[31m: k? v?\n");
    }
}
