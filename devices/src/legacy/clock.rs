//! The PC's clock at ports 0x70 and 0x71 (MC146818): time of day from the host, in UTC.
//!
//! Owns the address register, registers A and B and the alarm registers. It raises no interrupts.
//! The guest cannot set the host's time: writes to the time registers are dropped. The other bytes
//! of the CMOS memory (memory sizes, shutdown code) read as 0; a kernel takes the memory map from
//! its boot protocol.

mod saved;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::bus::BusDevice;

pub use saved::ClockState;

/// Number of bytes that [`Clock`] occupies.
pub const CLOCK_LEN: u64 = 2;

const INDEX: u64 = 0;
const DATA: u64 = 1;
/// Bit 7 of the index port is the NMI mask.
const INDEX_MASK: u8 = 0x7f;

const SECONDS: u8 = 0;
const SECONDS_ALARM: u8 = 1;
const MINUTES: u8 = 2;
const MINUTES_ALARM: u8 = 3;
const HOURS: u8 = 4;
const HOURS_ALARM: u8 = 5;
const DAY_OF_WEEK: u8 = 6;
const DAY: u8 = 7;
const MONTH: u8 = 8;
const YEAR: u8 = 9;
const REGISTER_A: u8 = 10;
const REGISTER_B: u8 = 11;
const REGISTER_C: u8 = 12;
const REGISTER_D: u8 = 13;
/// The FADT field CENTURY names this register.
const CENTURY: u8 = 0x32;

/// Register A: update in progress.
const UPDATE_IN_PROGRESS: u8 = 0x80;
/// Register A: 32,768 Hz time base, 1,024 Hz periodic rate.
const REGISTER_A_DEFAULT: u8 = 0x26;
/// Register B: no updates while the driver sets the time.
const SET: u8 = 0x80;
/// Register B: binary rather than BCD.
const BINARY: u8 = 0x04;
/// Register B: 24 rather than 12 hours.
const HOURS_24: u8 = 0x02;
/// Register B: the bits that a write changes. Interrupts cannot be enabled.
const REGISTER_B_MASK: u8 = SET | BINARY | HOURS_24 | 0x01;
/// Register D: the battery is good.
const VALID: u8 = 0x80;
/// In 12-hour mode, bit 7 of the hours.
const PM: u8 = 0x80;

/// How long before the second changes the update is announced (tBUC of the MC146818). A driver that
/// sees no update in progress has at least that long to read.
const UPDATE_NOTICE: Duration = Duration::from_micros(244);

#[derive(Debug)]
struct Registers {
    index: u8,
    a: u8,
    b: u8,
    alarm: [u8; 3],
    /// The time at which the driver stopped updates.
    held: Option<Duration>,
}

type Now = Box<dyn Fn() -> Duration + Send + Sync>;

/// The clock device.
pub struct Clock {
    now: Now,
    registers: Mutex<Registers>,
}

vdpa::opaque_debug!(Clock, this => registers: this.registers);

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock {
    /// Creates a clock that shows the host's time.
    #[must_use]
    pub fn new() -> Self {
        Self::with_time(Box::new(|| {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
        }))
    }

    /// Creates a clock that shows the time of `now`, the time since 1970 in UTC.
    fn with_time(now: Now) -> Self {
        Self {
            now,
            registers: Mutex::new(Registers {
                index: 0,
                a: REGISTER_A_DEFAULT,
                b: HOURS_24,
                alarm: [0; 3],
                held: None,
            }),
        }
    }

    fn read_register(&self, registers: &Registers) -> u8 {
        let time = registers.held.unwrap_or_else(|| (self.now)());
        let date = Date::from_unix(time.as_secs());
        let number = |value| encode(value, registers.b);
        match registers.index {
            SECONDS => number(date.second),
            MINUTES => number(date.minute),
            HOURS => hours(date.hour, registers.b),
            DAY_OF_WEEK => number(date.day_of_week),
            DAY => number(date.day),
            MONTH => number(date.month),
            YEAR => number(date.year_of_century),
            CENTURY => number(date.century),
            SECONDS_ALARM => registers.alarm[0],
            MINUTES_ALARM => registers.alarm[1],
            HOURS_ALARM => registers.alarm[2],
            REGISTER_A => {
                let left = Duration::from_secs(1)
                    .saturating_sub(Duration::from_nanos(time.subsec_nanos().into()));
                if registers.held.is_none() && left <= UPDATE_NOTICE {
                    registers.a | UPDATE_IN_PROGRESS
                } else {
                    registers.a
                }
            }
            REGISTER_B => registers.b,
            // No interrupt is ever pending.
            REGISTER_C => 0,
            REGISTER_D => VALID,
            _ => 0,
        }
    }

    fn write_register(&self, registers: &mut Registers, value: u8) {
        match registers.index {
            SECONDS_ALARM => registers.alarm[0] = value,
            MINUTES_ALARM => registers.alarm[1] = value,
            HOURS_ALARM => registers.alarm[2] = value,
            REGISTER_A => registers.a = value & !UPDATE_IN_PROGRESS,
            REGISTER_B => {
                registers.b = value & REGISTER_B_MASK;
                registers.held = if value & SET == 0 {
                    None
                } else {
                    registers.held.or_else(|| Some((self.now)()))
                };
            }
            _ => {}
        }
    }
}

impl BusDevice for Clock {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let registers = self.registers.lock();
        for (port, byte) in (offset..=u64::MAX).zip(data) {
            *byte = match port {
                DATA => self.read_register(&registers),
                // The index port cannot be read back.
                _ => 0xff,
            };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut registers = self.registers.lock();
        for (port, &value) in (offset..=u64::MAX).zip(data) {
            match port {
                INDEX => registers.index = value & INDEX_MASK,
                DATA => self.write_register(&mut registers, value),
                _ => {}
            }
        }
    }
}

/// Encodes a number below 100 in the driver's format.
fn encode(value: u8, register_b: u8) -> u8 {
    if register_b & BINARY != 0 {
        value
    } else {
        ((value / 10) << 4) | (value % 10)
    }
}

fn hours(hour: u8, register_b: u8) -> u8 {
    if register_b & HOURS_24 != 0 {
        return encode(hour, register_b);
    }
    let afternoon = if hour >= 12 { PM } else { 0 };
    let twelfth = match hour % 12 {
        0 => 12,
        other => other,
    };
    encode(twelfth, register_b) | afternoon
}

/// A moment in the proleptic Gregorian calendar, UTC.
#[derive(Debug, PartialEq, Eq)]
struct Date {
    century: u8,
    year_of_century: u8,
    month: u8,
    day: u8,
    /// 1 is Sunday.
    day_of_week: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

impl Date {
    fn from_unix(seconds: u64) -> Self {
        let days = seconds / 86_400;
        let of_day = seconds % 86_400;
        // Years begin in March, so that the leap day is the last day. The epoch moves to the first
        // of March of the year 0.
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let of_era = shifted % 146_097;
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let day = of_year - (153 * from_march + 2) / 5 + 1;
        let month = if from_march < 10 {
            from_march + 3
        } else {
            from_march - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        // Every field is below 256, except the century of a host in the year 25,600 or later.
        let narrow = |value: u64| u8::try_from(value).unwrap_or(u8::MAX);
        Self {
            century: narrow(year / 100 % 100),
            year_of_century: narrow(year % 100),
            month: narrow(month),
            day: narrow(day),
            // The first of January 1970 was a Thursday.
            day_of_week: narrow((days + 4) % 7 + 1),
            hour: narrow(of_day / 3_600),
            minute: narrow(of_day / 60 % 60),
            second: narrow(of_day % 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// 2024-02-29 23:59:58 UTC, a Thursday.
    const LEAP_DAY: u64 = 1_709_251_198;

    fn clock() -> (Clock, Arc<AtomicU64>) {
        let nanos = Arc::new(AtomicU64::new(LEAP_DAY * 1_000_000_000));
        let shared = Arc::clone(&nanos);
        let now = move || Duration::from_nanos(shared.load(Ordering::Relaxed));
        (Clock::with_time(Box::new(now)), nanos)
    }

    fn get(clock: &Clock, register: u8) -> u8 {
        // The NMI mask must have no effect.
        clock.write(INDEX, &[register | 0x80]);
        let mut data = [0];
        clock.read(DATA, &mut data);
        data[0]
    }

    fn set(clock: &Clock, register: u8, value: u8) {
        clock.write(INDEX, &[register]);
        clock.write(DATA, &[value]);
    }

    fn date(clock: &Clock) -> [u8; 8] {
        [
            CENTURY,
            YEAR,
            MONTH,
            DAY,
            DAY_OF_WEEK,
            HOURS,
            MINUTES,
            SECONDS,
        ]
        .map(|register| get(clock, register))
    }

    #[test]
    fn reads_the_time_in_every_format() {
        let (clock, nanos) = clock();
        assert_eq!(
            date(&clock),
            [0x20, 0x24, 0x02, 0x29, 0x05, 0x23, 0x59, 0x58]
        );
        set(&clock, REGISTER_B, BINARY | HOURS_24);
        assert_eq!(date(&clock), [20, 24, 2, 29, 5, 23, 59, 58]);
        set(&clock, REGISTER_B, 0);
        assert_eq!(get(&clock, HOURS), 0x11 | PM);
        for (hour, shown) in [(0, 0x12), (1, 0x01), (12, 0x12 | PM), (13, 0x01 | PM)] {
            nanos.store(hour * 3_600_000_000_000, Ordering::Relaxed);
            assert_eq!(get(&clock, HOURS), shown);
        }
    }

    #[test]
    fn knows_the_calendar() {
        for (seconds, expected) in [
            (0, (19, 70, 1, 1, 5)),
            (951_782_400, (20, 0, 2, 29, 3)),
            (LEAP_DAY + 2, (20, 24, 3, 1, 6)),
            (4_102_444_799, (20, 99, 12, 31, 5)),
            (4_107_542_400, (21, 0, 3, 1, 2)),
        ] {
            let date = Date::from_unix(seconds);
            let Date {
                century,
                year_of_century,
                month,
                day,
                day_of_week,
                ..
            } = date;
            assert_eq!(
                (century, year_of_century, month, day, day_of_week),
                expected
            );
        }
        // A host with an absurd clock must not cause a panic.
        Date::from_unix(u64::MAX / 2);
    }

    #[test]
    fn announces_the_update() {
        let (clock, nanos) = clock();
        assert_eq!(get(&clock, REGISTER_A), REGISTER_A_DEFAULT);
        nanos.store(LEAP_DAY * 1_000_000_000 + 999_800_000, Ordering::Relaxed);
        assert_ne!(get(&clock, REGISTER_A) & UPDATE_IN_PROGRESS, 0);
        // Not while the driver holds updates; the time then stops.
        set(&clock, REGISTER_B, SET | HOURS_24);
        assert_eq!(get(&clock, REGISTER_A) & UPDATE_IN_PROGRESS, 0);
        nanos.fetch_add(1_000_000_000, Ordering::Relaxed);
        assert_eq!(get(&clock, SECONDS), 0x58);
        set(&clock, REGISTER_B, HOURS_24);
        assert_eq!(get(&clock, SECONDS), 0x59);
    }

    #[test]
    fn the_rest_is_quiet() {
        let (clock, _) = clock();
        let before = date(&clock);
        for register in 0..=0x7f {
            if register != REGISTER_B {
                set(&clock, register, 0x55);
            }
        }
        assert_eq!(date(&clock), before);
        assert_eq!(get(&clock, SECONDS_ALARM), 0x55);
        assert_eq!(get(&clock, REGISTER_C), 0);
        assert_eq!(get(&clock, REGISTER_D), VALID);
        // Memory sizes and shutdown code.
        for register in [0x0f, 0x15, 0x16, 0x17, 0x18, 0x30, 0x31, 0x34, 0x35, 0x5b] {
            assert_eq!(get(&clock, register), 0);
        }
        // Interrupts cannot be enabled.
        set(&clock, REGISTER_B, 0x72);
        assert_eq!(get(&clock, REGISTER_B), HOURS_24);
        // Any length, any offset.
        clock.write(u64::MAX - 8, &[0; 8]);
        let mut wide = [0; 8];
        clock.read(0, &mut wide);
        assert_eq!(wide[0], 0xff);
        clock.read(1, &mut []);
    }
}
