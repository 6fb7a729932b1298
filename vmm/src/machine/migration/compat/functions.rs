//! The functions by VFIO in the document of a machine: described by the source, placed and compared
//! by the destination.

use devices::vfio::VfioPciDevice;
use vdpa::causes::in_one_line;

use super::{Document, refusal};
use crate::config::VfioConfig;
use crate::machine::device_manager::DeviceManager;
use crate::machine::saved::{GuestFunction, SavedFunction};
use crate::migration::protocol::Refusal;
use crate::snapshot::format::Saved as _;

/// The section of a state that has those of functions.
type Section = Vec<SavedFunction>;

impl Document {
    /// Announces that the state will hold those of functions, if it will.
    pub(in super::super) fn announce_functions(&mut self) {
        if !self.functions.is_empty() {
            let name = Section::NAME.to_owned();
            self.state_versions.insert(name, Section::VERSION);
        }
    }

    /// This host decides which of its functions a guest gets.
    pub(super) fn place_functions(&mut self, ours: &[VfioConfig], refusals: &mut Vec<Refusal>) {
        let version = self.state_versions.get(Section::NAME).copied();
        if !self.functions.is_empty() && version != Some(Section::VERSION) {
            refusals.push(refusal(
                "the states of VFIO devices",
                format!("version {}", version.unwrap_or_default()),
                format!("version {}", Section::VERSION),
                "run the same version of Bellhop on both hosts",
            ));
        }
        for id in self.config.place_functions(ours) {
            refusals.push(refusal(
                &format!("the VFIO device {id}"),
                "there".to_owned(),
                "given no function".to_owned(),
                &format!("name one where the destination waits: --vfio host=ADDRESS,id={id}"),
            ));
        }
    }

    /// Compares the functions, each with the one of this host.
    pub(super) fn compare_functions(&self, here: &DeviceManager, refusals: &mut Vec<Refusal>) {
        let ours = here.function_views();
        let undescribed = ours.iter().filter(|ours| {
            let mut described = self.functions.iter();
            described.all(|function| function.id != ours.id)
        });
        refusals.extend(undescribed.map(|GuestFunction { id, .. }| {
            let what = format!("the VFIO device {id}");
            refusal(&what, "not described".to_owned(), "there".to_owned(), "")
        }));
        for GuestFunction { id, view, .. } in &self.functions {
            let why = match here.adopt_function(id, view, VfioPciDevice::ensure_movable) {
                Some(Ok(())) => continue,
                Some(Err(error)) => format!("incompatible ({})", in_one_line(&error)),
                None => "absent".to_owned(),
            };
            refusals.push(refusal(
                &format!("the VFIO device {id}"),
                "as the guest sees it".to_owned(),
                why,
                "give the destination a function of the same model and driver",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use devices::vfio::FunctionView;

    use super::super::tests::{document, what};
    use super::*;

    #[test]
    fn a_destination_names_the_functions_of_its_own() {
        let vfio = r#"{"host": "0000:03:10.1", "id": "vf"}"#;
        let config = format!(r#"{{"kernel": "k", "vfio": [{vfio}]}}"#);
        let ours: VfioConfig = "host=0000:04:00.2,id=vf".parse().unwrap();
        let mut machine = document(&config);
        machine.functions.push(GuestFunction {
            id: "vf".to_owned(),
            slot: 3,
            view: FunctionView {
                config: vec![0; 256],
                sizes: vec![0; 6],
            },
        });
        assert_eq!(machine.slots().len(), 1);
        // A source that does not announce their states.
        let mut refusals = Vec::new();
        machine.place_functions(std::slice::from_ref(&ours), &mut refusals);
        assert_eq!(what(&refusals), ["the states of VFIO devices"]);
        machine.announce_functions();
        let other: VfioConfig = "host=0000:04:00.2,id=other".parse().unwrap();
        for here in [&[][..], &[other][..]] {
            let (mut moves, mut refusals) = (document(&config), Vec::new());
            moves.place_functions(here, &mut refusals);
            assert_eq!(what(&refusals), ["the VFIO device vf"]);
            assert!(refusals[0].remedy.contains("--vfio host=ADDRESS,id=vf"));
        }
        let mut refusals = Vec::new();
        machine.place_functions(std::slice::from_ref(&ours), &mut refusals);
        assert!(refusals.is_empty(), "{refusals:?}");
        assert_eq!(machine.config.vfio, [ours]);
    }
}
