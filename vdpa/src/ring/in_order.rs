//! Used elements of a device that works in order (VIRTIO_F_IN_ORDER).
//!
//! Such a device may write one used element for several chains, that of the last (virtio 1.3, 2.7.9
//! and 2.8.9). This module splits such a batch:
//!
//! ```text
//!   available, oldest first:   7  3  5  2        element: id 5
//!                              `--batch--'  2    gives 7, 3, 5, one by one
//! ```
//! It tracks the order; the queue owns the chains and checks the element.

use std::collections::VecDeque;

/// The order of outstanding chains, and the batch in progress.
#[derive(Debug, Default)]
pub(super) struct InOrder {
    /// Chains that the device has, oldest first.
    order: VecDeque<u16>,
    /// The batch's last chain and the bytes written to it.
    batch: Option<(u16, u32)>,
}

impl InOrder {
    /// Records a new available chain.
    pub(super) fn made_available(&mut self, chain: u16) {
        self.order.push_back(chain);
    }

    /// Number of chains that an element of `chain` completes; `None`: it is not outstanding. Each
    /// step of the search removes one chain, so the total cost is linear.
    pub(super) fn batch_len(&self, chain: u16) -> Option<usize> {
        let before = self.order.iter().position(|&other| other == chain)?;
        Some(before + 1)
    }

    /// Begins a batch for `last`, an outstanding chain whose element was read.
    pub(super) fn begin(&mut self, last: u16, written: u32) {
        self.batch = Some((last, written));
    }

    /// Whether the batch has chains left.
    pub(super) fn is_pending(&self) -> bool {
        self.batch.is_some()
    }

    /// The batch's next chain, with the length if the element was its own. The others count as used
    /// completely.
    pub(super) fn take(&mut self) -> Option<(u16, Option<u32>)> {
        let (last, written) = self.batch?;
        let chain = self.order.pop_front()?;
        if chain != last {
            return Some((chain, None));
        }
        self.batch = None;
        Some((chain, Some(written)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_element_completes_all_before_it() {
        let mut order = InOrder::default();
        [7, 3, 5, 2]
            .iter()
            .for_each(|&chain| order.made_available(chain));
        assert_eq!(order.take(), None);
        assert_eq!((order.batch_len(5), order.batch_len(6)), (Some(3), None));
        order.begin(5, 40);
        assert!(order.is_pending());
        assert_eq!(order.take(), Some((7, None)));
        assert_eq!(order.take(), Some((3, None)));
        assert_eq!(order.take(), Some((5, Some(40))));
        assert!(!order.is_pending());
        assert_eq!((order.take(), order.batch_len(2)), (None, Some(1)));
    }
}
