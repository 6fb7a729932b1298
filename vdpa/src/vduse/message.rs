//! The kernel's messages and their answers.

use zerocopy::{FromBytes as _, FromZeros as _, IntoBytes as _};

use crate::device::VringBase;
use crate::uapi::vduse::{
    REQUEST_SIZE, VDUSE_GET_VQ_STATE, VDUSE_REQ_RESULT_FAILED, VDUSE_REQ_RESULT_OK,
    VDUSE_SET_STATUS, VDUSE_UPDATE_IOTLB, vduse_dev_request, vduse_dev_response,
    vduse_vq_state_packed,
};

/// A message from the kernel. It waits for the answer, and declares the device broken after 30 s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    id: u32,
    /// Its content.
    pub request: Request,
}

/// The content of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// The position of a queue.
    QueueState {
        /// The queue.
        index: u32,
    },
    /// The driver sets the status. 0 resets.
    SetStatus(u8),
    /// Mappings have changed. The kernel has the new ones already.
    UpdateIotlb,
    /// A message of a newer kernel.
    Unknown,
}

impl Message {
    pub(super) fn decode(bytes: &[u8; REQUEST_SIZE]) -> Self {
        // The sizes are the same, so a default is never used.
        let request = vduse_dev_request::read_from_bytes(bytes)
            .unwrap_or_else(|_| vduse_dev_request::new_zeroed());
        let [word, ..] = request.padding;
        let [status, ..] = word.to_ne_bytes();
        let content = match request.type_ {
            VDUSE_GET_VQ_STATE => Request::QueueState { index: word },
            VDUSE_SET_STATUS => Request::SetStatus(status),
            // 6.12 always gives the whole address space.
            VDUSE_UPDATE_IOTLB => Request::UpdateIotlb,
            _ => Request::Unknown,
        };
        Self {
            id: request.request_id,
            request: content,
        }
    }

    /// The answer. For [`Request::QueueState`] it has the position.
    pub(super) fn answer(&self, done: bool, base: Option<VringBase>) -> [u8; REQUEST_SIZE] {
        let mut response = vduse_dev_response::new_zeroed();
        response.request_id = self.id;
        response.result = if done {
            VDUSE_REQ_RESULT_OK
        } else {
            VDUSE_REQ_RESULT_FAILED
        };
        if let Request::QueueState { index } = self.request {
            response.index = index;
        }
        response.packed = base.map(to_kernel).unwrap_or_default();
        let mut bytes = [0; REQUEST_SIZE];
        bytes.copy_from_slice(response.as_bytes());
        bytes
    }
}

/// A split ring's avail index is the first field of the union.
fn to_kernel(base: VringBase) -> vduse_vq_state_packed {
    match base {
        VringBase::Split { index } => vduse_vq_state_packed {
            last_avail_counter: index,
            ..Default::default()
        },
        VringBase::Packed {
            available,
            available_wrap,
            used,
            used_wrap,
        } => vduse_vq_state_packed {
            last_avail_counter: available_wrap.into(),
            last_avail_idx: available,
            last_used_counter: used_wrap.into(),
            last_used_idx: used,
        },
    }
}

/// The position that the kernel gives.
pub(super) fn from_kernel(state: vduse_vq_state_packed, packed: bool) -> VringBase {
    if packed {
        VringBase::Packed {
            available: state.last_avail_idx,
            available_wrap: state.last_avail_counter & 1 == 1,
            used: state.last_used_idx,
            used_wrap: state.last_used_counter & 1 == 1,
        }
    } else {
        VringBase::Split {
            index: state.last_avail_counter,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(kind: u32, id: u32, words: &[u32]) -> [u8; REQUEST_SIZE] {
        let mut bytes = [0xa5; REQUEST_SIZE];
        bytes[..4].copy_from_slice(&kind.to_ne_bytes());
        bytes[4..8].copy_from_slice(&id.to_ne_bytes());
        for (number, word) in words.iter().enumerate() {
            bytes[24 + 4 * number..][..4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn messages_are_decoded() {
        for (bytes, request) in [
            (message(0, 1, &[7]), Request::QueueState { index: 7 }),
            (message(1, 2, &[0xffff_ff0f]), Request::SetStatus(15)),
            (message(2, 3, &[0, 0, 9, 0]), Request::UpdateIotlb),
            (message(3, 4, &[]), Request::Unknown),
        ] {
            assert_eq!(Message::decode(&bytes).request, request);
        }
    }

    #[test]
    fn an_answer_has_the_layout_of_the_header() {
        let asked = Message::decode(&message(0, 0x1234, &[1]));
        let base = VringBase::Packed {
            available: 3,
            available_wrap: true,
            used: 2,
            used_wrap: false,
        };
        let mut expected = [0; REQUEST_SIZE];
        expected[..4].copy_from_slice(&0x1234_u32.to_ne_bytes());
        expected[24] = 1;
        expected[28] = 1;
        expected[30] = 3;
        expected[34] = 2;
        assert_eq!(asked.answer(true, Some(base)), expected);
        expected[24..].fill(0);
        expected[24] = 1;
        expected[4] = 1;
        assert_eq!(asked.answer(false, None), expected);
        let split = asked.answer(true, Some(VringBase::Split { index: 0x102 }));
        assert_eq!(split[28..36], [2, 1, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn any_message_is_decoded_and_answered(bytes in any::<[u8; 32]>(), done: bool) {
            let mut request = [0; REQUEST_SIZE];
            request[..32].copy_from_slice(&bytes);
            let message = Message::decode(&request);
            let answer = message.answer(done, None);
            prop_assert_eq!(&answer[..4], &request[4..8]);
            prop_assert_eq!(answer[4], u8::from(!done));
        }

        #[test]
        fn positions_survive_the_kernel(packed: bool, words in any::<[u16; 4]>()) {
            let state = vduse_vq_state_packed {
                last_avail_counter: words[0],
                last_avail_idx: words[1],
                last_used_counter: words[2],
                last_used_idx: words[3],
            };
            let base = from_kernel(state, packed);
            prop_assert_eq!(from_kernel(to_kernel(base), packed), base);
        }
    }
}
