//! A driver of `bellhop_vfio_mig` (`tests/kmod/vfio_mig.c`), the function whose state can move.
//!
//! ```text
//!   next page, acknowledgement ──> function ──> the whole page is its number ─┐
//!        ^                                      vector 0                      │
//!        └──────────── both have arrived ──────────────────────────────────────┘
//! ```
//! Its vector is one that the kernel only counts, another one for each function. A guest with one
//! processor has no other interrupts there. So a lost interrupt or write stops the loop, and a
//! wrong page is found at the end.

use super::access::Access;
use super::function::Registers;
use crate::notify::{PAGE, Part};
use lab::error::{Error, Result, report};
use lab::files;
use serde_json::{Value, json};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vm_memory::{Bytes as _, MmapRegion, VolatileMemory as _};

/// Vendor and device.
const IDENTITY: [u8; 4] = [0x34, 0x12, 0x11, 0xbe];

/// Offsets in configuration space: the command register, and the first capability.
const COMMAND: u64 = 4;
const CAPABILITIES: usize = 0x34;
/// Memory space and bus master; MSI-X enable.
const COMMAND_ON: [u8; 2] = [6, 0];
const MSIX_ON: [u8; 2] = [0, 0x80];

/// Offsets of registers in the first page of BAR 0.
const ID: usize = 0x00;
const RUN: usize = 0x04;
const INTERVAL_US: usize = 0x08;
const ACKED: usize = 0x0c;
const PAGE_LOW: usize = 0x10;
const PAGE_HIGH: usize = 0x14;
const DONE: usize = 0x18;
const RAISED: usize = 0x1c;
const FAILED: usize = 0x20;
const ID_VALUE: u32 = 0x4d56_4842;

/// Local APIC 0.
const MESSAGE_ADDRESS: u64 = 0xfee0_0000;
const INTERRUPTS: &str = "/proc/interrupts";

/// A vector that the kernel only counts (arch/x86/include/asm/irq_vectors.h).
#[derive(Clone, Copy)]
struct Vector {
    number: u32,
    /// Its line of [`INTERRUPTS`].
    line: &'static str,
}

/// Those of reschedule interrupts and of function calls: one for each function.
const VECTORS: [Vector; 2] = [
    Vector {
        number: 0xfd,
        line: "RES:",
    },
    Vector {
        number: 0xfb,
        line: "CAL:",
    },
];

/// Pages that the function writes in turn.
const PAGES: usize = 16;
/// 32-bit words in a page.
const WORDS: usize = 1024;

/// How long one write may take. A migration lies in between.
const LIMIT: Duration = Duration::from_secs(100);
const LOOK: Duration = Duration::from_micros(500);

static MOVER: Mutex<Option<Mover>> = Mutex::new(None);

struct Mover {
    stop: Arc<AtomicBool>,
    /// One for each function.
    threads: Vec<JoinHandle<Result<Value>>>,
}

fn mover() -> MutexGuard<'static, Option<Mover>> {
    MOVER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `mover-on`: has each function write a page each so many microseconds.
pub(crate) fn start(interval_us: u32) -> Result<Value> {
    let mut mover = mover();
    if mover.is_some() {
        return Err(Error::Usage("the function is in use already".into()));
    }
    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for (function, vector) in find()?.iter().zip(VECTORS) {
        let driver = Driver::new(function, vector, interval_us)?;
        let stopped = Arc::clone(&stop);
        threads.push(std::thread::spawn(move || driver.work(&stopped)));
    }
    let functions = threads.len();
    *mover = Some(Mover { stop, threads });
    Ok(json!({ "functions": functions }))
}

/// `mover-off`: ends that, checks all pages and prints the totals of each driver and function.
pub(crate) fn stop() -> Result<Value> {
    let Mover { stop, threads } = mover()
        .take()
        .ok_or_else(|| Error::Usage("there is no `mover-on` before this command".into()))?;
    stop.store(true, Ordering::Relaxed);
    let panicked = || Error::invalid("mover-off", "the driver's thread has panicked");
    let mut functions = Vec::new();
    for thread in threads {
        functions.push(thread.join().map_err(|_| panicked())??);
    }
    Ok(json!({ "functions": functions }))
}

/// The functions, by their identity, in the order of their addresses.
fn find() -> Result<Vec<PathBuf>> {
    let mut functions = Vec::new();
    for function in files::list(Path::new("/sys/bus/pci/devices"))? {
        if files::read(&function.join("config"))?.starts_with(&IDENTITY) {
            functions.push(function);
        }
    }
    if functions.is_empty() {
        return Err(Error::invalid("the function", "the guest has none"));
    }
    functions.sort();
    Ok(functions)
}

/// The interrupts of a vector on all processors.
fn interrupts(vector: Vector) -> Result<u64> {
    let text = files::read_text(Path::new(INTERRUPTS))?;
    let count = count(&text, vector.line);
    count.ok_or_else(|| Error::invalid(INTERRUPTS, format!("it has no line {}", vector.line)))
}

fn count(text: &str, line: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|found| found.trim().strip_prefix(line))?;
    let numbers = line.split_whitespace().map_while(|word| word.parse().ok());
    Some(numbers.fold(0, |sum: u64, number: u64| sum.saturating_add(number)))
}

struct Driver {
    registers: Registers,
    scratch: Registers,
    pages: Vec<(MmapRegion<()>, u64)>,
    vector: Vector,
    /// The writes of earlier drivers of the function.
    earlier: u32,
    /// The vector's interrupts before all of these writes.
    before: u64,
    // Dropped after the mappings.
    _access: Access,
}

impl Driver {
    fn new(function: &Path, vector: Vector, interval_us: u32) -> Result<Self> {
        let access = Access::open(function)?;
        let (file, space) = access.config()?;
        let mut config = [0; 256];
        let failed = || Error::file("access the configuration space of", access.function());
        file.read_exact_at(&mut config, space).map_err(failed())?;
        file.write_all_at(&COMMAND_ON, space + COMMAND)
            .map_err(failed())?;
        let part = |offset: u64| Part {
            bar: 0,
            offset: u32::try_from(offset).unwrap_or_default(),
            length: u32::try_from(PAGE).unwrap_or_default(),
            multiplier: 0,
        };
        let registers = Registers::map(&access, &part(0))?;
        let table = Registers::map(&access, &part(PAGE))?;
        let scratch = Registers::map(&access, &part(3 * PAGE))?;
        if registers.load::<u32>(ID)? != ID_VALUE {
            return Err(Error::invalid(
                "the function",
                "its registers do not answer",
            ));
        }
        table.store(MESSAGE_ADDRESS, 0)?;
        table.store(vector.number, 8)?;
        table.store(0_u32, 12)?;
        // MSI-X is the first capability.
        let msix = u64::from(config[CAPABILITIES]) + 2;
        file.write_all_at(&MSIX_ON, space + msix)
            .map_err(failed())?;
        for word in 0..WORDS {
            scratch.store(scratch_word(word), 4 * word)?;
        }
        registers.store(interval_us, INTERVAL_US)?;
        let mut pages = Vec::new();
        for _ in 0..PAGES {
            pages.push(page(&access)?);
        }
        let earlier = registers.load(DONE)?;
        Ok(Self {
            vector,
            earlier,
            before: interrupts(vector)?.saturating_sub(earlier.into()),
            registers,
            scratch,
            pages,
            _access: access,
        })
    }

    /// Whether all words of a page are this number.
    fn holds(&self, page: usize, number: u32) -> bool {
        let Some((region, _)) = self.pages.get(page) else {
            return false;
        };
        let slice = region.as_volatile_slice();
        let same = |word: usize| {
            let read = slice.load::<u32>(4 * word, Ordering::Acquire);
            read.is_ok_and(|read| read == number)
        };
        (0..WORDS).all(same)
    }

    fn work(self, stop: &AtomicBool) -> Result<Value> {
        let mut number = self.earlier;
        let mut seen = interrupts(self.vector)?;
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            let page = usize::try_from(number).unwrap_or_default() % PAGES;
            let (_, address) = self.pages.get(page).ok_or_else(missing)?;
            let low = u32::try_from(address & u64::from(u32::MAX)).unwrap_or_default();
            let high = u32::try_from(address >> 32).unwrap_or_default();
            self.registers.store(low, PAGE_LOW)?;
            self.registers.store(high, PAGE_HIGH)?;
            self.registers.store(number - 1, ACKED)?;
            self.registers.store(1_u32, RUN)?;
            let begin = Instant::now();
            loop {
                let now = interrupts(self.vector)?;
                if self.holds(page, number) && now > seen {
                    seen = now;
                    break;
                }
                if begin.elapsed() > LIMIT {
                    return Err(Error::invalid(
                        "the function",
                        format!(
                            "write {number} did not arrive: {} interrupts, {}",
                            now - self.before,
                            self.totals(number)?
                        ),
                    ));
                }
                std::thread::sleep(LOOK);
            }
        }
        self.registers.store(0_u32, RUN)?;
        self.totals(number)
    }

    fn totals(&self, number: u32) -> Result<Value> {
        let mut wrong = 0;
        for number in number.saturating_sub(15).max(self.earlier + 1)..=number {
            let page = usize::try_from(number).unwrap_or_default() % PAGES;
            wrong += u32::from(!self.holds(page, number));
        }
        let mut scratch = 0;
        for word in 0..WORDS {
            scratch += u32::from(self.scratch.load::<u32>(4 * word)? != scratch_word(word));
        }
        Ok(json!({
            "writes": number,
            "interrupts": interrupts(self.vector)? - self.before,
            "wrong_pages": wrong,
            "wrong_scratch": scratch,
            "done": self.registers.load::<u32>(DONE)?,
            "raised": self.registers.load::<u32>(RAISED)?,
            "failed": self.registers.load::<u32>(FAILED)?,
        }))
    }
}

fn missing() -> Error {
    Error::invalid("a page", "there is none")
}

fn scratch_word(word: usize) -> u32 {
    u32::try_from(word)
        .unwrap_or_default()
        .wrapping_mul(0x9e37_79b9)
}

/// A page that the function can write, and its address.
fn page(access: &Access) -> Result<(MmapRegion<()>, u64)> {
    let failed = |error| Error::invalid("a page", report(&error));
    let len = usize::try_from(PAGE).unwrap_or_default();
    let region: MmapRegion<()> = MmapRegion::new(len).map_err(failed)?;
    let host = u64::try_from(region.as_ptr().addr()).unwrap_or_default();
    // SAFETY: the page is accessed as volatile. The driver stops the function before it drops it.
    let address = unsafe { access.map(host, PAGE, host) }?;
    Ok((region, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_interrupts_of_a_vector_count() {
        let text = "           CPU0       CPU1\n  4:  7  9  IO-APIC\nRES:  3  4  Rescheduling\n";
        assert_eq!(count(text, "RES:"), Some(7));
        assert_eq!(count(text, "CAL:"), None);
    }
}
