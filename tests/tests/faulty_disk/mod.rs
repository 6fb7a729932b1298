//! A block device that fails on request: the kernel's device mapper over a loop device.
//!
//! ```text
//!   /dev/dm-N   0 ... good sectors: linear -> loop device -> file
//!               the rest:           linear, or `error`: EIO
//! ```
//! The lab host has no dmsetup, so this makes the four ioctls (linux/dm-ioctl.h) itself.

use lab::process::output;
use lab::temp_path::TempPath;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::Command;

const CREATE: u8 = 3;
const REMOVE: u8 = 4;
const SUSPEND: u8 = 6;
const LOAD: u8 = 9;
/// `struct dm_ioctl`, and the offsets of some members.
const HEADER: usize = 312;
const FLAGS: usize = 28;
const DEVICE: usize = 40;
const NAME: usize = 48;
/// `struct dm_target_spec`.
const TARGET: usize = 40;
/// DM_SUSPEND_FLAG, DM_NOFLUSH_FLAG.
const SUSPENDED: u32 = 1 << 1;
const NO_FLUSH: u32 = 1 << 11;

/// First sector, number of sectors, type, parameters.
type Target<'a> = (u64, u64, &'a str, &'a str);

/// The device. Dropping it removes it.
pub(crate) struct FaultyDisk {
    control: File,
    name: String,
    sectors: u64,
    minor: u32,
    storage: String,
    _file: TempPath,
}

impl FaultyDisk {
    /// A device without faults.
    pub(crate) fn new(sectors: u64) -> Self {
        for module in ["loop", "dm_mod"] {
            output(Command::new("modprobe").arg(module)).unwrap();
        }
        let file = TempPath::new("faulty-disk");
        let image = File::create(file.path()).unwrap();
        image.set_len(sectors * 512).unwrap();
        let arguments = ["--find", "--show", file.text()];
        let storage = output(Command::new("losetup").args(arguments)).unwrap();
        let mut control = File::options();
        let control = control.read(true).write(true);
        let mut disk = Self {
            control: control.open("/dev/mapper/control").unwrap(),
            name: format!("lab-faulty-{}", std::process::id()),
            sectors,
            minor: 0,
            storage: String::from_utf8(storage).unwrap().trim().to_owned(),
            _file: file,
        };
        let created = disk.request(CREATE, 0, &[]).unwrap();
        // The lower byte of the minor number (new_encode_dev).
        disk.minor = created[DEVICE].into();
        disk.good_below(sectors);
        disk
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/dm-{}", self.minor))
    }

    /// All sectors from this one on fail from now on.
    pub(crate) fn good_below(&self, good: u64) {
        let linear = format!("{} 0", self.storage);
        let mut targets = vec![(0, good, "linear", linear.as_str())];
        if good < self.sectors {
            targets.push((good, self.sectors - good, "error", ""));
        }
        self.request(LOAD, 0, &targets).unwrap();
        // The host's page cache must not answer for failing sectors.
        rustix::fs::sync();
        std::fs::write("/proc/sys/vm/drop_caches", "3\n").unwrap();
        // Requests that wait for the former table go to the new one.
        self.request(SUSPEND, SUSPENDED | NO_FLUSH, &[]).unwrap();
        self.request(SUSPEND, 0, &[]).unwrap();
    }

    fn request(&self, number: u8, flags: u32, targets: &[Target<'_>]) -> std::io::Result<Vec<u8>> {
        let mut body = Vec::new();
        for (start, length, kind, parameters) in targets {
            let size = (TARGET + parameters.len() + 1).next_multiple_of(8);
            let end = body.len() + size;
            body.write_all(&start.to_ne_bytes())?;
            body.write_all(&length.to_ne_bytes())?;
            body.write_all(&0_u32.to_ne_bytes())?;
            body.write_all(&u32::try_from(size).unwrap().to_ne_bytes())?;
            let mut name = [0; 16];
            name[..kind.len()].copy_from_slice(kind.as_bytes());
            body.write_all(&name)?;
            body.write_all(parameters.as_bytes())?;
            body.resize(end, 0);
        }
        let size = u32::try_from(HEADER + body.len()).unwrap();
        let count = u32::try_from(targets.len()).unwrap();
        let header = u32::try_from(HEADER).unwrap();
        let mut message = Vec::with_capacity(HEADER + body.len());
        // Version; size; where the targets begin; their number; open count; flags.
        for word in [4, 0, 0, size, header, count, 0, flags] {
            message.write_all(&word.to_ne_bytes())?;
        }
        assert_eq!(message.len(), FLAGS + 4);
        message.resize(NAME, 0);
        message.write_all(self.name.as_bytes())?;
        message.resize(HEADER, 0);
        message.append(&mut body);
        // `_IOWR(0xfd, number, struct dm_ioctl)`.
        let request = 0xc138_fd00 | libc::Ioctl::from(number);
        // SAFETY: there is no safe interface to this ioctl. The kernel reads and writes at most the
        // size that the message names, which is its length.
        let done = unsafe { libc::ioctl(self.control.as_raw_fd(), request, message.as_mut_ptr()) };
        if done < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(message)
    }
}

impl Drop for FaultyDisk {
    fn drop(&mut self) {
        lab::notice::left_behind(self.request(REMOVE, 0, &[]).map_err(|source| {
            lab::Error::system("remove the device of the device mapper")(source)
        }));
        let detach = ["--detach", &self.storage];
        lab::notice::left_behind(output(Command::new("losetup").args(detach)));
    }
}
