//! A model of the host's function, which panics where the real one would be misused, and a device
//! in front of it.

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::host::{BARS, CONFIG, Description, Host, Region};
use super::migration::{Abilities, MigrationHost};
use super::{HostFunction, VfioPciDevice};
use crate::Error;
use crate::hypervisor::DevicePages;
use crate::pci::PciFunction as _;
use crate::testing::{FakeDeviceMappings, FakePage, FakeVectors, Reached};

/// A step that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Read,
    /// Any write, which changes nothing.
    Write,
    SetVectors,
    /// The host has only so many vectors.
    Vectors(usize),
    DisableVectors,
    SetError,
    Reset,
    /// A reset while another task of the host has the device.
    Busy,
    /// So many resets.
    Busier(u32),
    /// The mapping with this number.
    Map(usize),
    /// The change to this state of a migration.
    Enter(u32),
    ReadData,
    WriteData,
    StartLog,
    StopLog,
    TakeLog,
}

#[derive(Debug, Default)]
pub(super) struct ModelState {
    pub(super) config: Vec<u8>,
    pub(super) command: u16,
    /// The last write of `command` has failed.
    pub(super) stale: bool,
    /// All writes: region, offset, data.
    pub(super) writes: Vec<(u8, u64, Vec<u8>)>,
    pub(super) connected: usize,
    pub(super) request: Option<RawFd>,
    pub(super) error: Option<RawFd>,
    pub(super) resets: usize,
    /// The last reset has failed.
    pub(super) unreset: bool,
    pub(super) maps: usize,
    pub(super) fault: Option<Fault>,
    pub(super) abilities: Abilities,
    /// The state of a migration; 0 stands for RUNNING.
    pub(super) migration: u32,
    /// The data that is left to read, or was written.
    pub(super) data: Vec<u8>,
    /// The beginning of it that it hands out early.
    pub(super) early: usize,
    /// The written pages, while there is a log.
    pub(super) log: Option<Vec<(u64, u64)>>,
}

/// States of a migration.
pub(super) const STOP: u32 = 1;
pub(super) const RUNNING: u32 = 2;
pub(super) const STOP_COPY: u32 = 3;
pub(super) const RESUMING: u32 = 4;
pub(super) const PRE_COPY: u32 = 6;

/// The first bytes of data that the model accepts.
pub(super) const DATA: &[u8] = b"model";

/// A device of the host. It panics where the real one would be misused.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) state: Mutex<ModelState>,
    regions: [Region; BARS],
    mappings: Arc<FakeDeviceMappings>,
}

impl Model {
    pub(super) fn fails(&self, fault: Fault) -> io::Result<()> {
        if self.state.lock().fault == Some(fault) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    pub(super) fn set_fault(&self, fault: Option<Fault>) {
        self.state.lock().fault = fault;
    }

    pub(super) fn resets(&self) -> usize {
        self.state.lock().resets
    }

    pub(super) fn connected(&self) -> usize {
        self.state.lock().connected
    }

    pub(super) fn command(&self) -> u16 {
        self.state.lock().command
    }
}

impl Host for Arc<Model> {
    fn read(&self, region: u8, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.fails(Fault::Read)?;
        let state = self.state.lock();
        if region == CONFIG {
            let start = usize::try_from(offset).unwrap();
            data.copy_from_slice(&state.config[start..start + data.len()]);
        } else {
            let end = offset + u64::try_from(data.len()).unwrap();
            assert!(end <= self.regions[usize::from(region)].size);
            data.fill(0x5a);
        }
        Ok(())
    }

    fn write(&self, region: u8, offset: u64, data: &[u8]) -> io::Result<()> {
        let failed = self.fails(Fault::Write);
        let mut state = self.state.lock();
        state.writes.push((region, offset, data.to_vec()));
        if region == CONFIG {
            let command = u16::from_le_bytes(data.try_into().unwrap());
            assert_eq!((offset, command & !6), (4, 0), "not in the allowlist");
            assert!(!state.unreset || command & 4 == 0, "DMA before a reset");
            let mapped = self.mappings.all();
            assert!(command & 2 != 0 || mapped.is_empty(), "{mapped:?}");
            state.stale = failed.is_err();
            if failed.is_ok() {
                state.command = command;
            }
        } else {
            let end = offset + u64::try_from(data.len()).unwrap();
            assert!(end <= self.regions[usize::from(region)].size);
        }
        failed
    }

    fn map(&self, bar: u8, offset: u64, size: u64) -> io::Result<Arc<dyn DevicePages>> {
        let number = self.state.lock().maps;
        self.state.lock().maps += 1;
        self.fails(Fault::Map(number))?;
        assert!(offset + size <= self.regions[usize::from(bar)].size);
        Ok(Arc::new(FakePage(u16::from(bar) << 8)))
    }

    fn set_vectors(&self, first: u32, eventfds: &[RawFd]) -> io::Result<()> {
        self.fails(Fault::SetVectors)?;
        let mut state = self.state.lock();
        let first = usize::try_from(first).unwrap();
        if let Some(Fault::Vectors(left)) = state.fault
            && first + eventfds.len() > left
        {
            return Err(io::ErrorKind::Other.into());
        }
        // New ones follow the old ones, or there were none.
        assert_eq!(first, state.connected);
        state.connected = first + eventfds.len();
        Ok(())
    }

    fn disable_vectors(&self) -> io::Result<()> {
        self.state.lock().connected = 0;
        self.fails(Fault::DisableVectors)
    }

    fn set_request(&self, eventfd: RawFd) -> io::Result<()> {
        self.state.lock().request = Some(eventfd);
        Ok(())
    }

    fn set_error(&self, eventfd: RawFd) -> io::Result<()> {
        self.fails(Fault::SetError)?;
        self.state.lock().error = Some(eventfd);
        Ok(())
    }

    fn reset(&self) -> io::Result<()> {
        assert!(self.mappings.all().is_empty());
        {
            let state = self.state.lock();
            assert!(state.command == 0 || state.stale);
        }
        let mut state = self.state.lock();
        state.unreset = true;
        match &mut state.fault {
            Some(Fault::Busy) => return Err(io::ErrorKind::WouldBlock.into()),
            Some(Fault::Busier(0)) => state.fault = None,
            Some(Fault::Busier(more)) => {
                *more -= 1;
                return Err(io::ErrorKind::WouldBlock.into());
            }
            _ => {}
        }
        state.resets += 1;
        state.migration = RUNNING;
        if state.fault == Some(Fault::Reset) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        state.unreset = false;
        Ok(())
    }
}

impl MigrationHost for Arc<Model> {
    fn own_file(&self) -> Option<PathBuf> {
        None
    }

    fn abilities(&self) -> io::Result<Abilities> {
        Ok(self.state.lock().abilities)
    }

    fn set_state(&self, to: u32) -> io::Result<()> {
        self.fails(Fault::Enter(to))?;
        let mut state = self.state.lock();
        let from = match state.migration {
            0 => RUNNING,
            other => other,
        };
        match (from, to) {
            (RESUMING, STOP) if !state.data.starts_with(DATA) => {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            (RUNNING, RESUMING) => state.data.clear(),
            (RUNNING, PRE_COPY | STOP_COPY)
            | (PRE_COPY, STOP_COPY)
            | (STOP_COPY | RESUMING, STOP)
            | (PRE_COPY | STOP | STOP_COPY, RUNNING) => {}
            // As the kernel has it: nothing to do.
            (RUNNING, RUNNING) => {}
            other => panic!("no step of this module: {other:?}"),
        }
        state.migration = to;
        Ok(())
    }

    fn early_left(&self) -> io::Result<u64> {
        let state = self.state.lock();
        assert_eq!(state.migration, PRE_COPY);
        // An estimate may be too high.
        Ok(u64::try_from(state.early).unwrap() + u64::from(state.data.len() > state.early))
    }

    fn read_data(&self, data: &mut [u8]) -> io::Result<usize> {
        self.fails(Fault::ReadData)?;
        let mut state = self.state.lock();
        // Less than there is room for, as the kernel may.
        let mut len = state.data.len().min(data.len()).min(3);
        if state.migration == PRE_COPY {
            if state.early == 0 {
                return Err(io::Error::from_raw_os_error(libc::ENOMSG));
            }
            len = len.min(state.early);
            state.early -= len;
        } else {
            assert_eq!(state.migration, STOP_COPY);
        }
        for (to, byte) in data.iter_mut().zip(state.data.drain(..len)) {
            *to = byte;
        }
        Ok(len)
    }

    fn write_data(&self, data: &[u8]) -> io::Result<()> {
        self.fails(Fault::WriteData)?;
        let mut state = self.state.lock();
        assert_eq!(state.migration, RESUMING);
        state.data.extend(data);
        Ok(())
    }

    fn start_log(&self) -> io::Result<()> {
        self.fails(Fault::StartLog)?;
        let former = self.state.lock().log.replace(Vec::new());
        assert_eq!(former, None);
        Ok(())
    }

    fn stop_log(&self) -> io::Result<()> {
        self.fails(Fault::StopLog)?;
        assert!(self.state.lock().log.take().is_some());
        Ok(())
    }

    fn take_log(&self) -> io::Result<Vec<(u64, u64)>> {
        self.fails(Fault::TakeLog)?;
        let mut state = self.state.lock();
        let log = state.log.as_mut();
        Ok(std::mem::take(log.ok_or(io::ErrorKind::InvalidInput)?))
    }
}

pub(super) struct Rig {
    pub(super) model: Arc<Model>,
    pub(super) vectors: Arc<FakeVectors>,
    pub(super) mappings: Arc<FakeDeviceMappings>,
    pub(super) description: Description,
}

pub(super) fn region(size: u64) -> Region {
    Region {
        size,
        areas: vec![(0, size)],
    }
}

impl Rig {
    pub(super) fn new(config: &[u8; 256], regions: [Region; BARS]) -> Self {
        let mappings = Arc::new(FakeDeviceMappings::default());
        let model = Arc::new(Model {
            state: Mutex::new(ModelState {
                config: config.to_vec(),
                ..ModelState::default()
            }),
            regions: regions.clone(),
            mappings: Arc::clone(&mappings),
        });
        Self {
            model,
            vectors: Arc::new(FakeVectors::new(2048)),
            mappings,
            description: Description {
                driver: "vfio-pci".to_owned(),
                regions,
                vectors: 2048,
                resizable: true,
            },
        }
    }

    /// A virtual function with a 32-bit BAR for MSI-X in BAR 1 and a 64-bit BAR in BAR 4.
    pub(super) fn virtio() -> Self {
        let mut regions: [Region; BARS] = Default::default();
        regions[1] = region(0x1000);
        regions[4] = region(0x4000);
        // An I/O BAR.
        regions[0] = region(0x20);
        Self::new(&virtio_config(), regions)
    }

    pub(super) fn open(&self) -> Result<Arc<VfioPciDevice>, Error> {
        let host = Box::new(Arc::clone(&self.model));
        let function = HostFunction::new("vf", host, self.description.clone())?;
        VfioPciDevice::new(function, &*self.vectors, self.mappings.clone()).map(Arc::new)
    }

    pub(super) fn mapped(&self) -> Vec<u64> {
        let all = self.mappings.all().into_iter();
        all.map(|reached| match reached {
            Reached::Page(address, _) => address,
            Reached::Eventfd(_) => panic!("a VFIO device has no kicks"),
        })
        .collect()
    }
}

pub(super) fn virtio_config() -> [u8; 256] {
    let mut bytes = [0; 256];
    let mut put = |offset: usize, value: &[u8]| {
        bytes[offset..offset + value.len()].copy_from_slice(value);
    };
    put(0x00, &[0xf4, 0x1a, 0x41, 0x10, 0x00, 0x00, 0x10, 0x00]);
    put(0x08, &[1, 0, 0, 2]);
    put(0x10, &[1]);
    put(0x20, &[0x0c]);
    put(0x2c, &[0xf4, 0x1a, 0x00, 0x11]);
    put(0x34, &[0x40]);
    put(0x3c, &[11, 1]);
    // Power management, MSI, MSI-X of 3 vectors in BAR 1, PCI Express, common and window of virtio.
    put(0x40, &[0x01, 0x48, 0xff, 0xff, 8, 0]);
    put(0x48, &[0x05, 0x60, 0x80, 0]);
    put(0x60, &[0x11, 0x70, 2, 0, 1, 0, 0, 0, 1, 8, 0, 0]);
    put(
        0x70,
        &[0x10, 0xb0, 0x02, 0, 0xff, 0xff, 0xff, 0xef, 0xff, 0x7f],
    );
    put(
        0xb0,
        &[0x09, 0xc0, 16, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0x38, 0, 0, 0],
    );
    put(0xc0, &[0x09, 0x40, 20, 5, 4, 9, 9, 9]);
    bytes
}

pub(super) fn config_u32(device: &VfioPciDevice, offset: u16) -> u32 {
    let mut data = [0; 4];
    device.read_config(offset, &mut data);
    u32::from_le_bytes(data)
}

/// The IDs and offsets of the capabilities that the guest sees.
pub(super) fn shown(device: &VfioPciDevice) -> Vec<(u8, u16)> {
    let mut chain = Vec::new();
    let mut next = config_u32(device, 0x34) & 0xff;
    while next != 0 {
        assert!(chain.len() < 48, "a cycle");
        let offset = u16::try_from(next).unwrap();
        let [id, link, ..] = config_u32(device, offset).to_le_bytes();
        chain.push((id, offset));
        next = link.into();
    }
    chain
}
