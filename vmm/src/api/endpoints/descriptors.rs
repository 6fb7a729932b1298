//! The descriptors of one request, by their index.

use std::os::fd::OwnedFd;

use crate::http::HttpError;
use crate::http::descriptors::Received;

/// What came with a request; the rest is closed with this.
#[derive(Debug)]
pub(super) struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    /// Takes all that came with the request, whose body is there.
    pub(super) fn of(received: &Received) -> Result<Self, HttpError> {
        let all = received.take();
        let all = all.map_err(|error| HttpError::Parameter(error.to_string()))?;
        Ok(Self(all.into_iter().map(Some).collect()))
    }

    /// The one with this index, once.
    pub(super) fn take(&mut self, number: u32) -> Result<OwnedFd, String> {
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        match self.0.get_mut(index).map(Option::take) {
            Some(Some(descriptor)) => Ok(descriptor),
            Some(None) => Err("is another NIC's already".to_owned()),
            None => Err(format!(
                "did not come with the request: {} came, counted from 0",
                self.0.len()
            )),
        }
    }
}
