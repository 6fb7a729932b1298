//! Assigns the descriptors of one request by their index.

use std::os::fd::OwnedFd;

use crate::api::error::ApiError;
use crate::config::{DescriptorError, VdpaConfig, VfioConfig};
use crate::http::HttpError;
use crate::http::descriptors::Received;

/// Assigns each device the descriptor that it names, among those of the request. The request's body
/// must have arrived. The other descriptors are closed.
pub(super) fn give<'a>(
    received: &Received,
    nics: impl IntoIterator<Item = &'a mut VdpaConfig>,
    functions: impl IntoIterator<Item = &'a mut VfioConfig>,
) -> Result<(), ApiError> {
    Descriptors::of(received)?.give(nics, functions)
}

/// The descriptors of a request whose body has arrived. Those that are not taken are closed.
pub(super) struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    pub(super) fn of(received: &Received) -> Result<Self, ApiError> {
        let all = received.take();
        let all = all.map_err(|error| HttpError::Parameter(error.to_string()))?;
        Ok(Self(all.into_iter().map(Some).collect()))
    }

    /// Assigns each device the descriptor that it names.
    pub(super) fn give<'a>(
        &mut self,
        nics: impl IntoIterator<Item = &'a mut VdpaConfig>,
        functions: impl IntoIterator<Item = &'a mut VfioConfig>,
    ) -> Result<(), ApiError> {
        for nic in nics {
            nic.take_descriptor(|number| self.with_index(number))?;
        }
        for function in functions {
            function.take_descriptor(|number| self.with_index(number))?;
        }
        Ok(())
    }

    /// Takes the descriptor of a migration, if its request names one.
    pub(super) fn take(&mut self, number: Option<u32>) -> Result<Option<OwnedFd>, ApiError> {
        let Some(number) = number else {
            return Ok(None);
        };
        let taken = self.with_index(number);
        Ok(Some(taken.map_err(|reason| {
            let user = "the migration".to_owned();
            DescriptorError::Missing {
                user,
                number,
                reason,
            }
        })?))
    }

    /// Takes the descriptor with this index, once.
    fn with_index(&mut self, number: u32) -> Result<OwnedFd, String> {
        let came = self.0.len();
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        match self.0.get_mut(index).map(Option::take) {
            Some(Some(descriptor)) => Ok(descriptor),
            Some(None) => Err("is named twice".to_owned()),
            None => Err(format!(
                "did not come with the request: {came} came, numbered from 0"
            )),
        }
    }
}
