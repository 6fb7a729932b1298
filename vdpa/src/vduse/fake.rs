//! The kernel's answers to the ioctls of a device that has no kernel, for tests. Its messages come
//! from a socket.

use std::fs::File;

use vmm_sys_util::eventfd::EventFd;

use super::QueueInfo;
use crate::Error;
use crate::uapi::vduse::vduse_iotlb_entry;

/// A queue pair of the driver, and the process that maps its memory.
#[derive(Debug)]
pub(super) struct Fake {
    pub(super) features: u64,
    pub(super) queues: [QueueInfo; 2],
    /// By address, in this file.
    pub(super) mappings: Vec<vduse_iotlb_entry>,
    pub(super) file: File,
    pub(super) kicks: [Option<EventFd>; 2],
    /// Kicks before the device has set an eventfd for them.
    pub(super) kicked: [bool; 2],
}

impl Fake {
    /// The queue with this number.
    pub(super) fn queue(&self, index: u32) -> Result<QueueInfo, Error> {
        let queue = self.queues.get(index as usize).copied();
        queue.ok_or_else(|| Error::other("there is no such queue"))
    }

    pub(super) fn set_kick(&mut self, index: u32, kick: &EventFd) -> Result<(), Error> {
        self.queue(index)?;
        let kick = kick.try_clone().map_err(Error::context("cannot clone"))?;
        self.kicks[index as usize] = Some(kick);
        if self.kicked[index as usize] {
            self.kick(index as usize);
        }
        Ok(())
    }

    /// The driver kicks a queue.
    pub(super) fn kick(&mut self, index: usize) {
        let written = self.kicks[index].as_ref().map(|kick| kick.write(1));
        self.kicked[index] = !matches!(written, Some(Ok(())));
    }

    /// The driver resets the device.
    pub(super) fn reset(&mut self) {
        for queue in &mut self.queues {
            queue.ready = false;
        }
        self.kicks = [None, None];
        self.kicked = [false; 2];
    }

    pub(super) fn mapping(&self, from: u64) -> Result<Option<(vduse_iotlb_entry, File)>, Error> {
        let Some(entry) = self.mappings.iter().find(|entry| entry.last >= from) else {
            return Ok(None);
        };
        let file = self.file.try_clone();
        Ok(Some((
            *entry,
            file.map_err(Error::context("cannot clone"))?,
        )))
    }
}
