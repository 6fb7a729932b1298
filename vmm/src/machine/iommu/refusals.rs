//! The alarm for refused requests to the guest's IOMMU.
//!
//! Linux ignores the status of a MAP. Without the alarm, the guest has a silent NIC and neither log
//! has the cause. The alarm ends after a minute without a refusal. So it is raised at most once per
//! minute between resets of the VM.

use std::time::{Duration, Instant};

use bellhop_api::machine::{AlarmInfo, AlarmKind, IommuRefusal};

use super::IOMMU;

/// How long the alarm lasts after the last refusal.
const QUIET: Duration = Duration::from_secs(60);
/// The index of the request queue.
const REQUEST_QUEUE: u16 = 0;

/// Whether there is an alarm; see the module.
#[derive(Debug, Default)]
pub(in super::super) struct RefusalWatch {
    /// Refusals at the last sample.
    seen: u64,
    /// The alarm, and when it ends.
    alarm: Option<(AlarmInfo, Instant)>,
}

impl RefusalWatch {
    /// Compares the number of refusals with the last one. Returns `true` if the alarm began or
    /// ended.
    pub(in super::super) fn sample(
        &mut self,
        refused: u64,
        last: Option<IommuRefusal>,
        now: Instant,
    ) -> bool {
        let is_new = std::mem::replace(&mut self.seen, refused) != refused;
        match &mut self.alarm {
            Some((_, end)) if is_new => *end = now + QUIET,
            Some((_, end)) if now >= *end => {
                self.alarm = None;
                tracing::info!("the guest's IOMMU refuses no more requests");
                return true;
            }
            None if is_new => {
                let detail = last.map(|last| last.to_string());
                tracing::warn!(
                    refused,
                    detail,
                    "the guest's IOMMU refuses requests, which Linux ignores: a device may fail"
                );
                let alarm = AlarmInfo {
                    device: IOMMU.to_owned(),
                    queue: REQUEST_QUEUE,
                    alarm: AlarmKind::Refused,
                    detail,
                };
                self.alarm = Some((alarm, now + QUIET));
                return true;
            }
            _ => {}
        }
        false
    }

    /// The machine resets: the next sample ends the alarm.
    pub(in super::super) fn reset(&mut self, now: Instant) {
        if let Some((_, end)) = &mut self.alarm {
            *end = now;
        }
    }

    pub(in super::super) fn alarm(&self) -> Option<&AlarmInfo> {
        Some(&self.alarm.as_ref()?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(iova: u64) -> Option<IommuRefusal> {
        Some(IommuRefusal {
            device: "net0".to_owned(),
            iova: Some(iova),
            size: Some(0x1000),
            cause: "No space left".to_owned(),
        })
    }

    #[test]
    fn an_alarm_lasts_until_a_minute_without_a_refusal() {
        let mut watch = RefusalWatch::default();
        let start = Instant::now();
        let mut sample = |refused, second| {
            let now = start + Duration::from_secs(second);
            let changed = watch.sample(refused, refusal(refused << 12), now);
            (changed, watch.alarm().cloned())
        };
        assert_eq!(sample(0, 0), (false, None));
        let (began, alarm) = sample(3, 1);
        let alarm = alarm.unwrap();
        assert!(began);
        assert_eq!((alarm.device.as_str(), alarm.queue), ("iommu", 0));
        assert_eq!(
            alarm.detail.as_deref(),
            Some("net0: cannot change 4096 bytes at 0x3000: No space left")
        );
        // The alarm stays the same: no event for each refusal.
        assert_eq!(sample(900, 50), (false, Some(alarm.clone())));
        assert_eq!(sample(900, 109), (false, Some(alarm)));
        assert_eq!(sample(900, 110), (true, None));
        assert_eq!(sample(900, 111), (false, None));
        assert!(sample(901, 112).0);
    }

    #[test]
    fn a_reset_of_the_machine_ends_the_alarm() {
        let mut watch = RefusalWatch::default();
        let now = Instant::now();
        watch.reset(now);
        assert!(watch.sample(1, None, now) && watch.alarm().is_some());
        watch.reset(now);
        assert!(watch.sample(1, None, now) && watch.alarm().is_none());
    }
}
