//! The registers of the boot processor at the kernel's entry point.
//!
//! Owns the segment descriptors: the table in guest memory and the segment registers use the same
//! values. It must not know vCPUs; the owner of a vCPU applies [`BootRegisters`] to it. The other
//! processors wait for a start-up IPI and get only [`BootRegisters::MSRS`].

use kvm_bindings::{kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};

use crate::layout::{BOOT_GDT, BOOT_PAGE_TABLES, BOOT_STACK_TOP};

/// Entry point of the first processor, and the structure it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryPoint {
    /// 32-bit protected mode, paging off (the PVH boot protocol).
    Pvh {
        /// Guest-physical address of the first instruction.
        entry: u32,
        /// Guest-physical address of `struct hvm_start_info`.
        start_info: u64,
    },
    /// 64-bit mode (the Linux boot protocol, section "64-bit").
    Linux64 {
        /// Guest-physical address of the first instruction.
        entry: u64,
        /// Guest-physical address of `struct boot_params`.
        zero_page: u64,
    },
}

/// RFLAGS: the bit that is always set; interrupts are off.
const RFLAGS_RESERVED: u64 = 1 << 1;
/// CR0: protected mode.
const CR0_PE: u64 = 1 << 0;
/// CR0: the processor's bit for "x87 inside", always set on 64-bit processors.
const CR0_ET: u64 = 1 << 4;
/// CR0: paging.
const CR0_PG: u64 = 1 << 31;
/// CR4: physical address extension, needed for long mode.
const CR4_PAE: u64 = 1 << 5;
/// EFER: long mode enabled.
const EFER_LME: u64 = 1 << 8;
/// EFER: long mode active.
const EFER_LMA: u64 = 1 << 10;

/// Selector of the code segment (`__BOOT_CS` of the Linux boot protocol).
const CODE_SELECTOR: u16 = 0x10;
/// Selector of the data segments (`__BOOT_DS`).
const DATA_SELECTOR: u16 = 0x18;
/// Selector of the task state segment, which hardware virtualization requires to be valid.
const TASK_SELECTOR: u16 = 0x20;
/// Descriptors in the table; a 64-bit task descriptor needs two.
const GDT_LEN: usize = 6;

/// A segment descriptor as in a descriptor table (Intel SDM, volume 3, section 3.4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Descriptor(u64);

/// Code, 32 bits, flat 4 GiB.
const CODE32: Descriptor = Descriptor(0x00cf_9b00_0000_ffff);
/// Code, 64 bits.
const CODE64: Descriptor = Descriptor(0x00af_9b00_0000_ffff);
/// Data, flat 4 GiB, writable.
const DATA: Descriptor = Descriptor(0x00cf_9300_0000_ffff);
/// Busy task state segment at 0 with the shortest legal limit.
const TASK: Descriptor = Descriptor(0x0000_8b00_0000_0067);

impl Descriptor {
    /// `len` bits from bit `at` on, at most 8.
    fn bits(self, at: u32, len: u32) -> u8 {
        let [byte, ..] = ((self.0 >> at) & ((1 << len) - 1)).to_le_bytes();
        byte
    }

    /// The segment register that has loaded this descriptor.
    fn load(self, selector: u16) -> kvm_segment {
        let Self(raw) = self;
        let low = raw.to_le_bytes();
        let limit = u32::from_le_bytes([low[0], low[1], low[6] & 0xf, 0]);
        let granular = self.bits(55, 1);
        kvm_segment {
            base: u64::from(u32::from_le_bytes([low[2], low[3], low[4], low[7]])),
            limit: if granular == 1 {
                (limit << 12) | 0xfff
            } else {
                limit
            },
            selector,
            type_: self.bits(40, 4),
            s: self.bits(44, 1),
            dpl: self.bits(45, 2),
            present: self.bits(47, 1),
            avl: self.bits(52, 1),
            l: self.bits(53, 1),
            db: self.bits(54, 1),
            g: granular,
            unusable: 0,
            padding: 0,
        }
    }
}

/// Initial registers of the boot processor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BootRegisters {
    /// For `KVM_SET_REGS`.
    pub regs: kvm_regs,
    entry: EntryPoint,
}

impl BootRegisters {
    /// Model-specific registers for *every* processor before it first runs, as firmware leaves
    /// them. IA32_MISC_ENABLE enables fast strings. IA32_MTRR_DEF_TYPE enables MTRRs, with
    /// write-back as the default.
    pub const MSRS: [kvm_msr_entry; 2] = [
        kvm_msr_entry {
            index: 0x1a0,
            reserved: 0,
            data: 1,
        },
        kvm_msr_entry {
            index: 0x2ff,
            reserved: 0,
            data: (1 << 11) | 6,
        },
    ];

    /// The registers for `entry`.
    ///
    /// * PVH: EBX holds the address of the start info.
    /// * Linux64: RSI holds the address of the zero page.
    #[must_use]
    pub fn new(entry: EntryPoint) -> Self {
        let mut regs = kvm_regs {
            rflags: RFLAGS_RESERVED,
            rsp: BOOT_STACK_TOP,
            ..kvm_regs::default()
        };
        match entry {
            EntryPoint::Pvh { entry, start_info } => {
                regs.rip = u64::from(entry);
                regs.rbx = start_info;
            }
            EntryPoint::Linux64 { entry, zero_page } => {
                regs.rip = entry;
                regs.rsi = zero_page;
            }
        }
        Self { regs, entry }
    }

    /// Sets the special registers in `initial`, the result of `KVM_GET_SREGS` for a fresh vCPU.
    /// Registers that boot does not define (the APIC base) stay.
    ///
    /// * PVH: 32-bit protected mode, paging off.
    /// * Linux64: long mode on the page tables at [`BOOT_PAGE_TABLES`].
    ///
    /// The interrupt descriptor table is empty. So a fault before the kernel has set up its own
    /// table shuts the machine down and causes no wild jump.
    #[must_use]
    pub fn special(&self, initial: kvm_sregs) -> kvm_sregs {
        let data = DATA.load(DATA_SELECTOR);
        let (code, cr0, cr3, cr4, efer) = match self.entry {
            EntryPoint::Pvh { .. } => (CODE32, CR0_PE | CR0_ET, 0, 0, 0),
            EntryPoint::Linux64 { .. } => (
                CODE64,
                CR0_PE | CR0_ET | CR0_PG,
                BOOT_PAGE_TABLES,
                CR4_PAE,
                EFER_LME | EFER_LMA,
            ),
        };
        kvm_sregs {
            cs: code.load(CODE_SELECTOR),
            ds: data,
            es: data,
            fs: data,
            gs: data,
            ss: data,
            tr: TASK.load(TASK_SELECTOR),
            ldt: kvm_segment {
                unusable: 1,
                ..kvm_segment::default()
            },
            gdt: kvm_dtable {
                base: BOOT_GDT,
                // 47: six descriptors of 8 bytes.
                limit: 47,
                padding: [0; 3],
            },
            idt: kvm_dtable::default(),
            cr0,
            cr2: 0,
            cr3,
            cr4,
            cr8: 0,
            efer,
            ..initial
        }
    }

    /// The descriptor table for [`BOOT_GDT`], little-endian.
    #[must_use]
    pub fn descriptor_table(&self) -> [u8; GDT_LEN * 8] {
        let code = match self.entry {
            EntryPoint::Pvh { .. } => CODE32,
            EntryPoint::Linux64 { .. } => CODE64,
        };
        let table = [0, 0, code.0, DATA.0, TASK.0, 0];
        let mut bytes = [0; GDT_LEN * 8];
        for (to, descriptor) in bytes.chunks_exact_mut(8).zip(table) {
            to.copy_from_slice(&u64::to_le_bytes(descriptor));
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{BOOT_PVH_START_INFO, BOOT_ZERO_PAGE};

    const PVH: EntryPoint = EntryPoint::Pvh {
        entry: 0x100_0450,
        start_info: BOOT_PVH_START_INFO,
    };
    const LINUX64: EntryPoint = EntryPoint::Linux64 {
        entry: 0x100_0200,
        zero_page: BOOT_ZERO_PAGE,
    };

    #[test]
    fn pvh_is_flat_32_bit_without_paging() {
        let registers = BootRegisters::new(PVH);
        assert_eq!(registers.regs.rip, 0x100_0450);
        assert_eq!(registers.regs.rbx, BOOT_PVH_START_INFO);
        assert_eq!(registers.regs.rflags, 2);
        let special = registers.special(kvm_sregs::default());
        assert_eq!(special.cr0 & CR0_PG, 0);
        assert_eq!(special.cr0 & CR0_PE, CR0_PE);
        assert_eq!((special.cr4, special.efer), (0, 0));
        let cs = special.cs;
        assert_eq!((cs.base, cs.limit, cs.selector), (0, u32::MAX, 0x10));
        assert_eq!(
            (cs.type_, cs.s, cs.present, cs.db, cs.l, cs.g),
            (0xb, 1, 1, 1, 0, 1)
        );
        let ds = special.ds;
        assert_eq!(
            (ds.base, ds.limit, ds.type_, ds.s, ds.db),
            (0, u32::MAX, 3, 1, 1)
        );
        let tr = special.tr;
        assert_eq!(
            (tr.base, tr.limit, tr.type_, tr.s, tr.present),
            (0, 0x67, 0xb, 0, 1)
        );
    }

    #[test]
    fn linux64_is_long_mode_on_our_page_tables() {
        let registers = BootRegisters::new(LINUX64);
        assert_eq!(registers.regs.rip, 0x100_0200);
        assert_eq!(registers.regs.rsi, BOOT_ZERO_PAGE);
        let special = registers.special(kvm_sregs::default());
        assert_ne!(special.cr0 & CR0_PG, 0);
        assert_eq!(special.cr3, BOOT_PAGE_TABLES);
        assert_eq!(special.cr4, CR4_PAE);
        assert_eq!(special.efer, EFER_LME | EFER_LMA);
        assert_eq!(
            (special.cs.l, special.cs.db, special.cs.selector),
            (1, 0, 0x10)
        );
        assert_eq!(special.ss.selector, 0x18);
    }

    #[test]
    fn keeps_bits_that_boot_does_not_define() {
        let initial = kvm_sregs {
            apic_base: 0xfee0_0900,
            cr2: 7,
            efer: 1,
            ..kvm_sregs::default()
        };
        for entry in [PVH, LINUX64] {
            let special = BootRegisters::new(entry).special(initial);
            assert_eq!(special.apic_base, 0xfee0_0900);
            assert_eq!(special.cr2, 0);
        }
    }

    #[test]
    fn table_and_registers_agree() {
        for entry in [PVH, LINUX64] {
            let registers = BootRegisters::new(entry);
            let special = registers.special(kvm_sregs::default());
            let table = registers.descriptor_table();
            assert_eq!(usize::from(special.gdt.limit) + 1, table.len());
            for segment in [special.cs, special.ds, special.es, special.tr] {
                let at = usize::from(segment.selector);
                let raw = u64::from_le_bytes(table[at..at + 8].try_into().unwrap());
                assert_eq!(Descriptor(raw).load(segment.selector), segment);
            }
        }
    }
}
