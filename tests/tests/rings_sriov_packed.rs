//! Shadows of packed rings on virtual functions behind vp_vdpa, which can neither suspend nor
//! report or accept a ring's position. So every change is a reset, and rings begin at their start.
//! The position of a direct ring is read from its own memory.
//!
//! ```text
//!           any time              any time
//!   direct ----------> shadowed ----------> shadowed, ...
//! ```

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings/mod.rs"]
mod rings;

use lab::rig::FIRST_PACKED_FUNCTION;
use lab::sriov::{SriovNic, VfDevice};
use vdpa::causes::in_one_line;
use vdpa::device::VringBase;
use vdpa::netdev::{Chains, Options};
use vdpa::relay::{Reason, Strategy, choose};

use self::rings::frame::Mac;
use self::rings::netdev::Relayed;
use self::rings::scene::{Loss, Scene, options, play};

use Strategy::{Direct, FullShadow, UsedShadow};

const EVENT_IDX: u64 = 1 << 29;

/// Rounds of restarts, for the devices in turn.
const ROUNDS: u32 = 16;
/// Restarts within the shadow in each round.
const RESTARTS: u32 = 2;

/// The state at the cuts.
#[derive(Debug, Default)]
struct Cuts {
    /// To shadowed from direct, and from shadowed.
    shadowed: u32,
    again: u32,
    /// Cuts of shadowed rings with frames in a transmit ring.
    transmit: u32,
    /// Cuts with frames in flight to the device that was reset.
    inward: u32,
    /// Direct was refused away from the ring's start.
    refused: u32,
}

impl Cuts {
    #[track_caller]
    fn restart(
        &mut self,
        scene: &mut Scene<'_>,
        which: usize,
        how: Strategy,
    ) -> Result<(), vdpa::Error> {
        let before = scene.machines[which].strategies()[0];
        let transmit = u32::from(scene.flows[which][0].in_ring() > 0);
        let inward = &scene.flows[1 - which][0];
        let inward = u32::from(inward.sent() > inward.received());
        scene.machines[which].set().can_restart().unwrap();
        scene.restart(which, &[how])?;
        self.inward += inward;
        if before == Direct {
            self.shadowed += 1;
        } else {
            self.again += 1;
            self.transmit += transmit;
        }
        Ok(())
    }

    /// Impossible changes are refused, and traffic continues as before.
    fn refusals(&mut self, scene: &mut Scene<'_>, which: usize) {
        let device = scene.machines[which].device();
        let chosen = choose(device.info(), device.backend_features(), device.features());
        assert_eq!(chosen, (FullShadow, Reason::NoSuspend));
        let error = self.restart(scene, which, UsedShadow).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("cannot shadow the used ring of queue"),
            "{error}"
        );
        scene.frames(50);
        if let Err(error) = self.restart(scene, which, Direct) {
            let text = error.to_string();
            assert!(text.ends_with("shadow it"), "{text}");
            let start = format!("at {}: shadow", VringBase::initial(true));
            assert!(
                text.contains("refuses to begin queue ") && !text.contains(&start),
                "{text}"
            );
            self.refused += 1;
        }
        scene.frames(50);
    }

    /// Shadows the rings, then repeatedly restarts them shadowed.
    fn round(&mut self, scene: &mut Scene<'_>, which: usize) {
        self.restart(scene, which, FullShadow).unwrap();
        for _ in 0..RESTARTS {
            let frames = scene.below(200) + 1;
            scene.frames(frames);
            self.restart(scene, which, FullShadow).unwrap();
        }
        scene.frames(50);
        self.refusals(scene, which);
        let frames = scene.below(300) + 1;
        scene.frames(frames);
    }
}

fn mac(device: &VfDevice<'_>) -> Mac {
    let text = device.function().mac();
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    [(); 6].map(|()| bytes.next().unwrap().unwrap())
}

fn many_transitions(options: &Options) {
    let nic = SriovNic::enable(4).unwrap();
    let [one, other] =
        [0, 1].map(|index| VfDevice::add(nic.vf(FIRST_PACKED_FUNCTION + index).unwrap()).unwrap());
    let devices = [&one, &other].map(|device| (device.path(), mac(device)));
    play(devices, options, Loss::OneFrame, |scene| {
        for machine in &scene.machines {
            assert!(machine.device().is_packed());
        }
        let mut cuts = Cuts::default();
        for which in [0, 1].into_iter().cycle().take(ROUNDS as usize) {
            cuts.round(scene, which);
        }
        println!("{cuts:?}");
        assert!(cuts.shadowed >= 2);
        assert!(cuts.shadowed + cuts.again >= ROUNDS * (RESTARTS + 1));
        assert!(cuts.inward > 0 && cuts.transmit > 0);
        assert!(cuts.refused > 0);
    });
}

#[test]
fn one_descriptor_with_event_idx() {
    many_transitions(&options(1, 0, Chains::Single));
}

#[test]
fn indirect_chains_without_event_idx() {
    many_transitions(&options(1, EVENT_IDX, Chains::Indirect));
}

/// Such rings do not reveal their position, which is known before the device is reset.
#[test]
fn two_descriptors_to_a_frame() {
    let nic = SriovNic::enable(4).unwrap();
    let device = VfDevice::add(nic.vf(FIRST_PACKED_FUNCTION).unwrap()).unwrap();
    let options = options(1, 0, Chains::Pair);
    let (mut machine, _pairs) = Relayed::start("a", device.path(), &options, &[]);
    let error = machine.set().can_restart().unwrap_err();
    let text = in_one_line(&error);
    assert!(
        text.contains("belongs to a chain of several descriptors"),
        "{text}"
    );
}
