//! Finds the data in a file or a buffer of mostly zeros.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Bytes that are skipped or copied together: a page of the processor and of nearly all file
/// systems.
const PAGE: usize = 4096;
static ZEROS: [u8; PAGE] = [0; PAGE];

/// The first offset from `from` on where the file has data, or `end`. File systems without holes,
/// and huge pages, report everything as data.
pub(super) fn next_data(file: &File, from: u64, end: u64) -> io::Result<u64> {
    match rustix::fs::seek(file, SeekFrom::Data(from)) {
        // A file system in userspace may return anything.
        Ok(offset) => Ok(offset.clamp(from, end)),
        Err(Errno::NXIO) => Ok(end),
        Err(Errno::INVAL) => Ok(from),
        Err(error) => Err(error.into()),
    }
}

/// Fills `buffer` with the file's bytes from `start` on; those before `data` are zeros.
pub(super) fn read_block(file: &File, start: u64, data: u64, buffer: &mut [u8]) -> io::Result<()> {
    let zeros = usize::try_from(data - start).unwrap_or(usize::MAX);
    let (hole, rest) = buffer.split_at_mut(zeros.min(buffer.len()));
    hole.fill(0);
    file.read_exact_at(rest, data)
}

/// Whether all bytes are 0.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    // A comparison of slices is fast in a build without optimization, too.
    bytes.chunks(PAGE).all(|piece| ZEROS.starts_with(piece))
}

/// The runs of pages that are not all zeros.
pub(super) fn data_runs(block: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, page) in block.chunks(PAGE).enumerate() {
        if is_zero(page) {
            continue;
        }
        let start = index * PAGE;
        let end = start + page.len();
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_the_pages_that_are_not_zero() {
        assert_eq!(data_runs(&[]), vec![]);
        let mut block = vec![0; 10 * PAGE + 100];
        assert_eq!(data_runs(&block), vec![]);
        for index in [PAGE, 3 * PAGE - 1, 5 * PAGE + 7, 10 * PAGE + 99] {
            block[index] = 1;
        }
        assert_eq!(
            data_runs(&block),
            vec![
                PAGE..3 * PAGE,
                5 * PAGE..6 * PAGE,
                10 * PAGE..10 * PAGE + 100
            ]
        );
    }
}
