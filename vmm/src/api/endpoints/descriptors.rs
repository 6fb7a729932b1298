//! Assigns the descriptors of one request by their index.

use std::os::fd::OwnedFd;

use crate::api::error::ApiError;
use crate::config::VdpaConfig;
use crate::http::HttpError;
use crate::http::descriptors::Received;

/// Assigns each of `nics` the descriptor that it names, among those of the request. The request's
/// body must have arrived. The other descriptors are closed.
pub(super) fn give<'a>(
    received: &Received,
    nics: impl IntoIterator<Item = &'a mut VdpaConfig>,
) -> Result<(), ApiError> {
    let all = received.take();
    let all = all.map_err(|error| HttpError::Parameter(error.to_string()))?;
    let mut all: Vec<_> = all.into_iter().map(Some).collect();
    for nic in nics {
        nic.take_descriptor(|number| take(&mut all, number))?;
    }
    Ok(())
}

/// Takes the descriptor with this index, once.
fn take(all: &mut [Option<OwnedFd>], number: u32) -> Result<OwnedFd, String> {
    let came = all.len();
    let index = usize::try_from(number).unwrap_or(usize::MAX);
    match all.get_mut(index).map(Option::take) {
        Some(Some(descriptor)) => Ok(descriptor),
        Some(None) => Err("belongs to another NIC".to_owned()),
        None => Err(format!(
            "did not come with the request: {came} came, numbered from 0"
        )),
    }
}
