//! The guest-visible state of a VM's file descriptor: the two PICs, the I/O APIC, and kvmclock. The
//! processors are separate ([`crate::vcpu::VcpuState`]).
//!
//! Owns the saved form and how the guest's clock continues after a restore. It must not know where
//! a state comes from: it trusts a state no more than a guest.
//!
//! **Order of a restore**, with vCPUs parked throughout:
//!
//! ```text
//!   guest memory ──> Vm::restore ──> Vcpus::restore ──> devices ──> vCPUs run
//!                      kvmclock ───────> TSC              interrupt lines
//! ```
//! kvmclock is set first, and each TSC follows from it. A saved TSC comes with the value of
//! kvmclock at that moment. The guest's two clocks keep that relation whether time stood still or
//! passed, and however long the steps of the restore take.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data,
    kvm_ioapic_state, kvm_irqchip, kvm_irqchip__bindgen_ty_1, kvm_pic_state,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::{Vm, irqchip, uapi_bytes};
use crate::Error;

/// Pins of the I/O APIC.
pub const IOAPIC_PINS: usize = 24;

/// No migration of a guest takes longer. If more time has passed by the hosts' clocks, they
/// disagree.
const LONGEST_ADVANCE: Duration = Duration::from_secs(3600);

/// Bits of IOREGSEL and of the identification register that a guest can set
/// (82093AA data sheet, 3.1.1 and 3.2.1).
const IOREGSEL_MASK: u32 = 0xff;
const IOAPIC_ID_MASK: u32 = 0xf;

/// How the guest's time continues after a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClockPolicy {
    /// From the time of the save: for a snapshot.
    StandStill,
    /// From the time of the save plus the time since then, measured with the hosts' real-time
    /// clocks: for a migration. Nothing is added if the destination's clock is behind the source's,
    /// or more than an hour ahead of it.
    Advance,
}

/// A saved VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmState {
    /// The master PIC, `struct kvm_pic_state`.
    pub pic_master: PicState,
    /// The slave PIC.
    pub pic_slave: PicState,
    /// The I/O APIC.
    pub ioapic: IoapicState,
    /// kvmclock.
    pub clock: KvmclockState,
}

/// A PIC (8259A): the 16 bytes of `struct kvm_pic_state`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PicState(#[serde(with = "uapi_bytes")] pub kvm_pic_state);

impl Eq for PicState {}

/// The I/O APIC's registers. Its address is not included: a guest cannot move it. Neither are the
/// levels of its inputs: the restored device sets its line again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoapicState {
    /// The index register; bits 7:0.
    pub ioregsel: u32,
    /// The identification; bits 3:0.
    pub id: u32,
    /// The redirection table, remote IRR and masks included.
    pub redirection: [u64; IOAPIC_PINS],
}

/// kvmclock at a moment, and the time of that moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmclockState {
    /// The guest's kvmclock in nanoseconds.
    pub kvmclock_ns: u64,
    /// The host's CLOCK_REALTIME at the same moment, in nanoseconds since 1970.
    pub realtime_ns: u64,
}

impl KvmclockState {
    /// Time since it was read, by this host's CLOCK_REALTIME; zero if that was set back since.
    pub(crate) fn age(self) -> Duration {
        Duration::from_nanos(realtime_ns().saturating_sub(self.realtime_ns))
    }

    /// The value for kvmclock when the host's real-time clock is at `realtime_ns`.
    fn at(self, policy: ClockPolicy, realtime_ns: u64) -> u64 {
        let elapsed = match policy {
            ClockPolicy::StandStill => 0,
            ClockPolicy::Advance => realtime_ns.saturating_sub(self.realtime_ns),
        };
        if Duration::from_nanos(elapsed) > LONGEST_ADVANCE {
            tracing::warn!(
                seconds = elapsed / 1_000_000_000,
                "the real-time clocks of the two hosts disagree (is NTP running on both?): the \
                 guest's time continues from the saved value"
            );
            return self.kvmclock_ns;
        }
        self.kvmclock_ns.saturating_add(elapsed)
    }
}

/// The guest's kvmclock now, in nanoseconds.
pub(crate) fn kvmclock_ns(fd: &VmFd) -> Result<u64, Error> {
    fd.get_clock()
        .map(|clock| clock.clock)
        .map_err(Error::failed("KVM_GET_CLOCK"))
}

/// CLOCK_REALTIME in nanoseconds; 0 for a clock before 1970.
fn realtime_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

impl Vm {
    /// Reads the interrupt controllers and the clock. No vCPU may be running.
    ///
    /// # Errors
    /// An ioctl failed.
    pub fn save(&self) -> Result<VmState, Error> {
        let ioapic = part::<kvm_ioapic_state>(&irqchip(&self.fd, KVM_IRQCHIP_IOAPIC)?)?;
        let mut redirection = [0; IOAPIC_PINS];
        for (saved, entry) in redirection.iter_mut().zip(&ioapic.redirtbl) {
            // SAFETY: needed to read a union. Both members have the same 64 bits, and any bits are
            // a valid integer.
            *saved = unsafe { entry.bits };
        }
        Ok(VmState {
            pic_master: PicState(part(&irqchip(&self.fd, KVM_IRQCHIP_PIC_MASTER)?)?),
            pic_slave: PicState(part(&irqchip(&self.fd, KVM_IRQCHIP_PIC_SLAVE)?)?),
            ioapic: IoapicState {
                ioregsel: ioapic.ioregsel,
                id: ioapic.id,
                redirection,
            },
            clock: KvmclockState {
                kvmclock_ns: kvmclock_ns(&self.fd)?,
                realtime_ns: realtime_ns(),
            },
        })
    }

    /// Restores interrupt controllers and kvmclock. Call it before the vCPUs and the devices are
    /// restored (see the [module](self)); no vCPU may be running.
    ///
    /// Drops register bits that no guest can set; a guest could have written all others itself.
    ///
    /// # Errors
    /// An ioctl failed.
    pub fn restore(&self, state: &VmState, policy: ClockPolicy) -> Result<(), Error> {
        let [_, _, initial] = &*self.initial_irqchips;
        let mut ioapic = part::<kvm_ioapic_state>(initial)?;
        ioapic.ioregsel = state.ioapic.ioregsel & IOREGSEL_MASK;
        ioapic.id = state.ioapic.id & IOAPIC_ID_MASK;
        // Levels of the inputs: KVM would deliver them at once, to local APICs that are not
        // restored yet, and wait for an end of interrupt that never comes.
        ioapic.irr = 0;
        for (entry, saved) in ioapic.redirtbl.iter_mut().zip(state.ioapic.redirection) {
            entry.bits = saved;
        }
        let pic = |PicState(pic)| kvm_irqchip__bindgen_ty_1 { pic };
        for (chip_id, chip) in [
            (KVM_IRQCHIP_PIC_MASTER, pic(state.pic_master)),
            (KVM_IRQCHIP_PIC_SLAVE, pic(state.pic_slave)),
            (KVM_IRQCHIP_IOAPIC, kvm_irqchip__bindgen_ty_1 { ioapic }),
        ] {
            let chip = kvm_irqchip {
                chip_id,
                pad: 0,
                chip,
            };
            self.fd
                .set_irqchip(&chip)
                .map_err(Error::failed("KVM_SET_IRQCHIP"))?;
        }
        // Last, and the time is read last: delays before it do not count twice.
        let clock = kvm_clock_data {
            clock: state.clock.at(policy, realtime_ns()),
            ..Default::default()
        };
        self.fd
            .set_clock(&clock)
            .map_err(Error::failed("KVM_SET_CLOCK"))
    }
}

/// The member of the union for the chip.
fn part<T: FromBytes>(chip: &kvm_irqchip) -> Result<T, Error> {
    T::read_from_prefix(chip.chip.as_bytes())
        .map(|(part, _)| part)
        .map_err(|_| Error::failed("KVM_GET_IRQCHIP")(std::io::ErrorKind::InvalidData))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: KvmclockState = KvmclockState {
        kvmclock_ns: 5_000,
        realtime_ns: 1_000_000,
    };

    #[test]
    fn the_clock_continues_by_its_policy() {
        assert_eq!(SAVED.at(ClockPolicy::StandStill, u64::MAX), 5_000);
        assert_eq!(SAVED.at(ClockPolicy::Advance, 1_000_300), 5_300);
        // The destination's clock is behind.
        assert_eq!(SAVED.at(ClockPolicy::Advance, 10), 5_000);
        // The destination's clock is on another day.
        let hour = 3_600_000_000_000;
        assert_eq!(
            SAVED.at(ClockPolicy::Advance, 1_000_000 + hour),
            5_000 + hour
        );
        assert_eq!(SAVED.at(ClockPolicy::Advance, 1_000_001 + hour), 5_000);
        let late = KvmclockState {
            kvmclock_ns: u64::MAX,
            ..SAVED
        };
        assert_eq!(late.at(ClockPolicy::Advance, 2_000_000), u64::MAX);
    }

    #[test]
    fn survives_the_way_through_a_file() {
        let state = VmState {
            pic_master: PicState(kvm_pic_state {
                imr: 0xfb,
                irq_base: 0x30,
                ..Default::default()
            }),
            pic_slave: PicState(kvm_pic_state::default()),
            ioapic: IoapicState {
                ioregsel: 0x10,
                id: 1,
                redirection: std::array::from_fn(|pin| u64::MAX - u64::try_from(pin).unwrap()),
            },
            clock: SAVED,
        };
        let bytes = postcard::to_stdvec(&state).unwrap();
        assert_eq!(postcard::from_bytes::<VmState>(&bytes).unwrap(), state);
        for length in 0..bytes.len() {
            assert!(postcard::from_bytes::<VmState>(&bytes[..length]).is_err());
        }
    }
}
