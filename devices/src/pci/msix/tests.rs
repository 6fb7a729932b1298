//! MSI-X against fake vectors: masks, pending bits, run-time routes, widths.

use proptest::prelude::*;

use super::*;
use crate::saved::through_a_file;
use crate::testing::FakeVector;

const ENABLE: u16 = 1 << 15;
const FUNCTION_MASK: u16 = 1 << 14;

fn msix(count: usize) -> (Msix, Vec<Arc<FakeVector>>) {
    let fakes: Vec<_> = (0..count).map(|_| FakeVector::new()).collect();
    let mut vectors: Vec<Arc<dyn MsiVector>> = Vec::new();
    for fake in &fakes {
        vectors.push(fake.clone());
    }
    (Msix::new(vectors).unwrap(), fakes)
}

fn program(msix: &mut Msix, vector: u64, address: u64, data: u32, mask: u32) {
    msix.write_table(vector * 16, &address.to_le_bytes());
    msix.write_table(vector * 16 + 8, &data.to_le_bytes());
    msix.write_table(vector * 16 + 12, &mask.to_le_bytes());
}

fn pending_word(msix: &Msix, word: u64) -> u64 {
    let mut data = [0; 8];
    msix.read_pending(word * 8, &mut data);
    u64::from_le_bytes(data)
}

#[test]
fn table_sizes() {
    Msix::new(Vec::new()).unwrap_err();
    let (msix, _) = msix(3);
    let (body, mask) = msix.capability((0, 0x8000), (3, 0xc000));
    assert_eq!(body, [2, 0, 0, 0x80, 0, 0, 3, 0xc0, 0, 0]);
    assert_eq!(mask, [0, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn routes_follow_all_three_masks() {
    let (mut msix, fakes) = msix(2);
    let message = MsiMessage {
        address: 0x1_fee0_1000,
        data: 0x4021,
    };
    program(&mut msix, 1, message.address, message.data, 0);
    assert_eq!(fakes[1].route(), None);
    msix.set_control(ENABLE | FUNCTION_MASK);
    assert_eq!(fakes[1].route(), None);
    msix.set_control(ENABLE);
    assert_eq!(fakes[1].route(), Some(message));
    assert_eq!(fakes[0].route(), None);

    // A new message while routed.
    msix.write_table(24, &0x4022u32.to_le_bytes());
    assert_eq!(fakes[1].route().unwrap().data, 0x4022);

    msix.write_table(28, &1u32.to_le_bytes());
    assert_eq!(fakes[1].route(), None);
    msix.write_table(28, &0u32.to_le_bytes());
    msix.set_control(0);
    assert_eq!(fakes[1].route(), None);
}

#[test]
fn a_masked_trigger_waits() {
    let (mut msix, fakes) = msix(70);
    msix.set_control(ENABLE);
    program(&mut msix, 69, 0xfee0_0000, 7, 0);
    msix.signal(69);
    assert_eq!(fakes[69].delivered().unwrap().data, 7);
    assert_eq!(pending_word(&msix, 1), 0);

    msix.write_table(69 * 16 + 12, &1u32.to_le_bytes());
    msix.signal(69);
    msix.signal(70);
    msix.signal(0xffff);
    assert_eq!(pending_word(&msix, 0), 0);
    assert_eq!(pending_word(&msix, 1), 1 << 5);
    let mut half = [0; 4];
    msix.read_pending(8, &mut half);
    assert_eq!(half, [1 << 5, 0, 0, 0]);
    msix.read_pending(12, &mut half);
    assert_eq!(half, [0; 4]);
    assert_eq!(fakes[69].delivered(), None);

    msix.write_table(69 * 16 + 12, &0u32.to_le_bytes());
    assert_eq!(fakes[69].delivered().unwrap().data, 7);
    assert_eq!(pending_word(&msix, 1), 0);
}

#[test]
fn reset_masks_and_forgets() {
    let (mut msix, fakes) = msix(2);
    msix.set_control(ENABLE);
    program(&mut msix, 0, 0xfee0_0000, 7, 0);
    program(&mut msix, 1, 0xfee0_0000, 8, 1);
    msix.signal(1);
    msix.reset();
    assert_eq!(fakes[0].route(), None);
    assert_eq!(pending_word(&msix, 0), 0);
    let mut entry = [0xaa; 8];
    msix.read_table(8, &mut entry);
    assert_eq!(entry, [0, 0, 0, 0, 1, 0, 0, 0]);
    msix.set_control(ENABLE);
    assert_eq!(fakes[0].route(), None);
}

#[test]
fn a_failed_route_is_tried_again() {
    let (mut msix, fakes) = msix(1);
    program(&mut msix, 0, 0xfee0_0000, 7, 0);
    *fakes[0].fail.lock() = true;
    msix.set_control(ENABLE);
    assert_eq!(fakes[0].route(), None);
    msix.set_control(ENABLE);
    assert!(fakes[0].route().is_some());
}

#[test]
fn a_pending_vector_is_pending_after_a_restore() {
    let (mut source, _) = msix(3);
    source.set_control(ENABLE);
    program(&mut source, 0, 0xfee0_0000, 7, 1);
    program(&mut source, 1, 0xfee0_0000, 8, 1);
    source.signal(1);
    let state = through_a_file(&source.save());
    assert!(!state.entries[0].pending && state.entries[1].pending);
    let (mut destination, fakes) = msix(3);
    destination.restore(&state, ENABLE).unwrap();
    assert_eq!(pending_word(&destination, 0), 0b10);
    assert_eq!(fakes[1].delivered(), None);
    destination.write_table(16 + 12, &0u32.to_le_bytes());
    assert_eq!(fakes[1].delivered().unwrap().data, 8);
    assert_eq!(pending_word(&destination, 0), 0);
}

#[test]
fn a_state_of_another_size_is_refused() {
    let (mut msix, fakes) = msix(2);
    program(&mut msix, 0, 0xfee0_0000, 7, 0);
    let mut state = msix.save();
    msix.reset();
    msix.restore(&state, ENABLE).unwrap();
    assert_eq!(fakes[0].route().unwrap().data, 7);
    assert_eq!(msix.save(), state);
    state.entries.pop();
    let refused = msix.restore(&state, ENABLE).unwrap_err();
    assert!(refused.to_string().ends_with("has 1 entries instead of 2"));
}

proptest! {
    /// For all writes of any width: the route follows the table.
    #[test]
    fn routes_follow_the_table(
        writes in prop::collection::vec(
            (0u64..80, 0usize..10, any::<u64>(), any::<Option<u16>>()), 0..80),
    ) {
        let (mut msix, fakes) = msix(4);
        let mut control = 0;
        for (offset, width, value, new_control) in writes {
            let bytes = [value.to_le_bytes(), value.to_le_bytes()].concat();
            msix.write_table(offset, &bytes[..width]);
            msix.write_table(offset & !3, &bytes[..4]);
            msix.write_table(u64::MAX - offset, &bytes[..width]);
            let mut back = vec![0; width];
            msix.read_table(offset, &mut back);
            msix.read_pending(value, &mut back);
            msix.read_pending(u64::MAX - offset, &mut back);
            if let Some(new) = new_control {
                control = new;
                msix.set_control(control);
            }
            for (fake, entry) in fakes.iter().zip(msix.save().entries) {
                let deliver = control & (ENABLE | FUNCTION_MASK) == ENABLE && !entry.masked;
                let message = MsiMessage { address: entry.address, data: entry.data };
                prop_assert_eq!(fake.route(), deliver.then_some(message));
            }
        }
    }
}

#[test]
fn a_saved_table_has_at_most_as_many_entries_as_a_table() {
    let read = |count| {
        let entry = MsixEntryState {
            address: 0,
            data: 0,
            masked: true,
            pending: false,
        };
        let state = MsixState {
            entries: vec![entry; count],
        };
        let read = postcard::from_bytes(&postcard::to_allocvec(&state).unwrap());
        read.map(|read: MsixState| assert_eq!(read, state))
    };
    read(MAX_VECTORS).unwrap();
    read(MAX_VECTORS + 1).unwrap_err();
}
