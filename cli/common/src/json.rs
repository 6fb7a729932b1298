//! JSON on one line, or on many in the form of iproute2's `vdpa` and `devlink`.

use std::io::{self, Write};

use serde::Serialize;

use crate::error::Error;

/// A value as JSON with a line break at its end.
pub(crate) fn json(value: &impl Serialize, pretty: bool) -> Result<String, Error> {
    let mut bytes = Vec::new();
    let written = if pretty {
        let formatter = Pretty::default();
        value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut bytes, formatter,
        ))
    } else {
        value.serialize(&mut serde_json::Serializer::new(&mut bytes))
    };
    let written = written.map_err(io::Error::other).and_then(|()| {
        bytes.push(b'\n');
        String::from_utf8(bytes).map_err(io::Error::other)
    });
    written.map_err(Error::unwritten)
}

/// iproute2's JSON on many lines: objects indented by four spaces, lists on one line.
#[derive(Default)]
struct Pretty {
    depth: usize,
    filled: bool,
}

impl Pretty {
    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        write!(writer, "\n{:1$}", "", 4 * self.depth)
    }
}

impl serde_json::ser::Formatter for Pretty {
    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b" " } else { b"," })
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b" ]")
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        writer.write_all(b"{")
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if !first {
            writer.write_all(b",")?;
        }
        self.new_line(writer)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth = self.depth.saturating_sub(1);
        if self.filled {
            self.new_line(writer)?;
        }
        writer.write_all(b"}")
    }
}
