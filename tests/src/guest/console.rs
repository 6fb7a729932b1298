//! A guest's console: its end is remembered, and the lines of the guest's init are passed on.

use std::io::{BufRead as _, BufReader, Read};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// What the guest's init prefixes its lines with.
pub(super) const MARK: &str = "@lab ";

/// How much of a console is remembered, in bytes; the end matters.
pub(super) const REMEMBERED: usize = 1 << 20;
/// What the guest's console has of a line that has not ended.
#[derive(Debug, Default)]
pub(super) struct Begun {
    pub(super) line: Vec<u8>,
    /// The first line that ended here: it may have begun elsewhere.
    pub(super) first: Option<String>,
}

/// What the guest has printed, and the VMM's messages between it.
#[derive(Debug, Default)]
pub(super) struct Console {
    pub(super) text: String,
    /// When something was printed last.
    pub(super) last: Option<Instant>,
}

/// Remembers what comes, and passes the init's lines on.
pub(super) fn read_console(
    stream: impl Read + Send + 'static,
    console: Arc<Mutex<Console>>,
    said: Option<(Sender<String>, Arc<Mutex<Begun>>)>,
    show: Option<&'static str>,
) -> JoinHandle<()> {
    let (lines, begun) = said.unzip();
    let begun = begun.unwrap_or_default();
    std::thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        loop {
            // Whatever is there counts as a sign of life, also half a line.
            let (bytes, ended) = match stream.fill_buf() {
                Ok([]) | Err(_) => return,
                Ok(bytes) => match bytes.iter().position(|byte| *byte == b'\n') {
                    Some(end) => (bytes.get(..=end).unwrap_or_default(), true),
                    None => (bytes, false),
                },
            };
            let count = bytes.len();
            let (Ok(mut console), Ok(mut begun)) = (console.lock(), begun.lock()) else {
                return;
            };
            begun.line.extend_from_slice(bytes);
            stream.consume(count);
            console.last = Some(Instant::now());
            // A guest that never ends a line must not fill the memory.
            if !ended && begun.line.len() < REMEMBERED {
                continue;
            }
            let text = String::from_utf8_lossy(&begun.line).into_owned();
            begun.line.clear();
            if begun.first.is_none() {
                begun.first = Some(text.clone());
            }
            drop(begun);
            remember(&mut console.text, &text);
            drop(console);
            if let (Some(prefix), false) = (show, text.contains(MARK) || text.trim().is_empty()) {
                eprintln!("{prefix} {}", text.trim_end());
            }
            if let (Some(lines), Some(said)) = (&lines, said_in(&text)) {
                // Nobody may be listening any more.
                let _ = lines.send(said);
            }
        }
    })
}

/// What the guest's init says in a line.
pub(super) fn said_in(line: &str) -> Option<String> {
    let (_, said) = line.split_once(MARK)?;
    Some(said.trim_end().to_owned())
}

/// Appends, and forgets the beginning where it gets too much.
pub(super) fn remember(text: &mut String, more: &str) {
    text.push_str(more);
    if text.len() > 2 * REMEMBERED {
        let mut cut = text.len() - REMEMBERED;
        while !text.is_char_boundary(cut) {
            cut += 1;
        }
        text.drain(..cut);
    }
}
