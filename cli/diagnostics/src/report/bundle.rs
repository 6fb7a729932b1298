//! The parts of a report, and the list of missing parts.

use std::error::Error;
use std::fmt;
use std::io;

use bellhop_common::text::utc;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use tar::{Builder, EntryType, Header};
use vdpa::causes::in_one_line;

/// The maximum size of all parts together, in bytes, before compression.
const TOTAL_MAX: usize = 64 << 20;

/// A report under construction.
pub struct Bundle {
    archive: Builder<GzEncoder<Vec<u8>>>,
    /// The header of each file, without its name and size.
    header: Header,
    /// The directory that contains everything.
    top: String,
    errors: String,
    missing: usize,
    names: Vec<String>,
    left: usize,
}

impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Bundle");
        shown.field("names", &self.names).finish_non_exhaustive()
    }
}

impl Bundle {
    /// An empty report with this time (seconds since 1970).
    pub(super) fn new(time: u64) -> Self {
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o600);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(time);
        Self {
            archive: Builder::new(GzEncoder::new(Vec::new(), Compression::default())),
            header,
            top: format!("bellhop-report-{}", utc(time).replace(['-', ':'], "")),
            errors: String::new(),
            missing: 0,
            names: Vec::new(),
            left: TOTAL_MAX,
        }
    }

    /// The name of its directory, and, without an extension, of its file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.top
    }

    /// The number of parts that could not be collected.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.missing
    }

    /// Adds a part; `segments` are its directories and its name, which may be any text.
    pub(super) fn add(&mut self, segments: &[&str], content: &[u8]) {
        let segments: Vec<String> = segments.iter().map(|segment| plain(segment)).collect();
        let name = segments.join("/");
        let Some(left) = self.left.checked_sub(content.len()) else {
            return self.miss(&name, "the report would be too large");
        };
        if self.names.contains(&name) {
            return self.miss(&name, "a part with this name exists already");
        }
        match self.append(&format!("{}/{name}", self.top), content) {
            Ok(()) => {
                self.left = left;
                self.names.push(name);
            }
            Err(error) => self.miss(&name, &error.to_string()),
        }
    }

    fn append(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        let mut header = self.header.clone();
        header.set_size(u64::try_from(content.len()).map_err(io::Error::other)?);
        self.archive.append_data(&mut header, path, content)
    }

    /// Adds a part, or records why it cannot be collected.
    pub(super) fn put<E: Error>(&mut self, segments: &[&str], content: Result<Vec<u8>, E>) {
        match content {
            Ok(content) => self.add(segments, &content),
            Err(error) => self.miss(&segments.join("/"), &in_one_line(&error)),
        }
    }

    /// The same for a value, as JSON.
    pub(super) fn put_json<T: Serialize, E: Error>(
        &mut self,
        segments: &[&str],
        value: Result<T, E>,
    ) {
        match value {
            Ok(value) => self.put(segments, serde_json::to_vec_pretty(&value)),
            Err(error) => self.miss(&segments.join("/"), &in_one_line(&error)),
        }
    }

    /// Records a missing part.
    pub(super) fn miss(&mut self, what: &str, why: &str) {
        self.missing += 1;
        self.errors.push_str(&format!("{what}: {why}\n"));
    }

    /// The file.
    ///
    /// # Errors
    /// The archive cannot be completed.
    pub fn finish(mut self) -> io::Result<Vec<u8>> {
        let errors = match self.errors.as_str() {
            "" => "Nothing is missing.\n".to_owned(),
            errors => format!("Missing parts, each with the reason:\n\n{errors}"),
        };
        self.left = usize::MAX;
        self.add(&["errors.txt"], errors.as_bytes());
        self.archive.into_inner()?.finish()
    }
}

/// Makes a name safe as one segment of a path.
fn plain(segment: &str) -> String {
    let known = |c: char| c.is_ascii_alphanumeric() || "._-+@".contains(c);
    let text: String = segment
        .chars()
        .map(|c| if known(c) { c } else { '_' })
        .collect();
    if text.starts_with('.') || text.is_empty() {
        format!("_{text}")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_bundle() {
        assert_eq!(plain("web-1"), "web-1");
        assert_eq!(plain("../../etc"), "_.._.._etc");
        assert_eq!(plain(".."), "_..");
        assert_eq!(plain(""), "_");
        assert_eq!(plain("a\n\0ö"), "a___");
    }

    #[test]
    fn oversized_and_duplicate_files_are_left_out() {
        let mut bundle = Bundle::new(0);
        bundle.left = 3;
        bundle.add(&["a"], b"12");
        bundle.add(&["b"], b"12");
        bundle.add(&["a"], b"");
        assert_eq!((bundle.missing(), bundle.names.len()), (2, 1));
        assert!(bundle.errors.contains("b: the report would be too large"));
        assert!(bundle.errors.contains("a: a part with this name"));
    }
}
