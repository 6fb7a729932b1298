use proptest::prelude::*;

use super::*;

const SIZE: u16 = 256;
const THRESHOLD: Duration = Duration::from_secs(5);

/// A queue that is sampled once a second.
struct Rig {
    watch: QueueWatch,
    now: Instant,
}

impl Rig {
    fn new(role: QueueRole) -> Self {
        let mut watch = QueueWatch::new(THRESHOLD);
        watch.start(role, SIZE);
        Self {
            watch,
            now: Instant::now(),
        }
    }

    fn sample(&mut self, avail: u16, used: u16) -> Option<Event> {
        self.now += Duration::from_secs(1);
        self.watch.sample(self.now, avail, used)
    }

    fn state(&self) -> WatchPhase {
        self.watch.status().state
    }
}

#[test]
fn a_request_queue_that_uses_nothing_is_stuck() {
    let mut rig = Rig::new(QueueRole::Request);
    assert_eq!(rig.sample(0, 0), None);
    assert_eq!(rig.state(), WatchPhase::Idle);
    assert_eq!(rig.sample(10, 10), None);
    assert_eq!(rig.state(), WatchPhase::Moving);
    // The driver may continue to post.
    for second in 0..5 {
        assert_eq!(rig.sample(20 + second, 10), None, "{second}");
        assert_eq!(rig.state(), WatchPhase::Waiting);
        assert_eq!(rig.watch.alarm(), None);
    }
    let began = rig.sample(25, 10);
    assert_eq!(began, Some(Event::Began(AlarmKind::Stuck)));
    assert_eq!(rig.state(), WatchPhase::Stuck);
    assert_eq!(rig.watch.alarm(), Some(AlarmKind::Stuck));
    // Announced only once.
    for _ in 0..20 {
        assert_eq!(rig.sample(25, 10), None);
    }
    let status = rig.watch.status();
    assert_eq!(status.in_flight, Some(15));
    assert_eq!(status.stuck_for_s, 25);
    // One used buffer ends the alarm.
    let ended = Event::Ended {
        alarm: AlarmKind::Stuck,
        lasted: Duration::from_secs(26),
    };
    assert_eq!(rig.sample(25, 11), Some(ended));
    assert_eq!(rig.watch.alarm(), None);
    assert_eq!(rig.watch.status().stuck_for_s, 0);
    // It hangs again: the clock restarts.
    for _ in 0..5 {
        assert_eq!(rig.sample(25, 11), None);
    }
    assert_eq!(rig.sample(25, 11), Some(Event::Began(AlarmKind::Stuck)));
}

#[test]
fn slow_is_not_stuck() {
    let mut rig = Rig::new(QueueRole::Request);
    // One used buffer in five seconds.
    for second in 0..100 {
        assert_eq!(rig.sample(200, second / 5), None, "{second}");
    }
}

#[test]
fn an_idle_receive_queue_is_well() {
    for role in [QueueRole::Receive, QueueRole::Other] {
        let mut rig = Rig::new(role);
        for _ in 0..100 {
            assert_eq!(rig.sample(SIZE, 0), None);
            assert_eq!(rig.state(), WatchPhase::Idle);
            assert_eq!(rig.watch.status().in_flight, Some(SIZE));
        }
    }
}

#[test]
fn a_receive_queue_that_never_had_buffers_is_well() {
    let mut rig = Rig::new(QueueRole::Receive);
    for _ in 0..100 {
        assert_eq!(rig.sample(0, 0), None);
        assert_eq!(rig.state(), WatchPhase::Idle);
    }
}

#[test]
fn a_driver_that_posts_no_receive_buffers_is_stalled() {
    let mut rig = Rig::new(QueueRole::Receive);
    assert_eq!(rig.sample(100, 0), None);
    // All buffers are used between two samples.
    for _ in 0..5 {
        assert_eq!(rig.sample(100, 100), None);
        assert_eq!(rig.state(), WatchPhase::Waiting);
    }
    let began = rig.sample(100, 100);
    assert_eq!(began, Some(Event::Began(AlarmKind::DriverStalled)));
    let ended = rig.sample(101, 100);
    assert!(matches!(ended, Some(Event::Ended { .. })), "{ended:?}");
}

#[test]
fn indices_that_cannot_be_are_reported_and_not_used() {
    for role in [QueueRole::Request, QueueRole::Receive, QueueRole::Other] {
        let mut rig = Rig::new(role);
        rig.sample(10, 10);
        // Beyond the ring's end, and behind the device.
        for (avail, used) in [(10 + SIZE + 1, 10), (9, 10)] {
            for second in 0..10 {
                let event = rig.sample(avail, used);
                let began = second == 5 && avail > 10;
                assert_eq!(event.is_some(), began, "{second}: {event:?}");
                let status = rig.watch.status();
                assert_eq!(status.state, WatchPhase::Inconsistent);
                assert_eq!((status.in_flight, status.posted), (None, 0));
                assert_eq!((status.posted_per_s, status.completed_per_s), (0, 0));
            }
            assert_eq!(rig.watch.alarm(), Some(AlarmKind::Inconsistent));
        }
        let ended = rig.sample(20, 20);
        assert!(matches!(ended, Some(Event::Ended { .. })), "{ended:?}");
        // The jump was not counted.
        assert_eq!(rig.watch.status().posted, 0);
    }
}

#[test]
fn indices_wrap() {
    let mut rig = Rig::new(QueueRole::Request);
    rig.sample(65_500, 65_400);
    assert_eq!(rig.sample(40, 65_530), None);
    let status = rig.watch.status();
    assert_eq!(status.in_flight, Some(46));
    assert_eq!((status.posted_per_s, status.completed_per_s), (76, 130));
    assert_eq!((status.posted, status.completed), (76, 130));
}

#[test]
fn rates_are_per_second_whenever_samples_come() {
    let mut rig = Rig::new(QueueRole::Request);
    rig.sample(0, 0);
    for (millis, posted_per_s) in [(500, 200), (2000, 50), (3, 33_333), (0, 0)] {
        rig.now += Duration::from_millis(millis);
        let before = rig.watch.last.unwrap().avail;
        rig.watch.sample(rig.now, before + 100, before + 100);
        assert_eq!(rig.watch.status().posted_per_s, posted_per_s, "{millis}");
    }
    assert_eq!(rig.watch.status().posted, 400);
}

#[test]
fn the_time_of_a_pause_does_not_count() {
    let mut rig = Rig::new(QueueRole::Request);
    rig.sample(5, 0);
    rig.sample(5, 0);
    rig.now += Duration::from_secs(3600);
    rig.watch.resume(rig.now);
    for _ in 0..4 {
        assert_eq!(rig.sample(5, 0), None);
    }
    assert_eq!(rig.sample(5, 0), Some(Event::Began(AlarmKind::Stuck)));
    // An announced alarm stays.
    rig.now += Duration::from_secs(3600);
    rig.watch.resume(rig.now);
    assert_eq!(rig.sample(5, 0), None);
    assert_eq!(rig.watch.alarm(), Some(AlarmKind::Stuck));
}

#[test]
fn a_queue_that_stops_has_no_alarm() {
    for state in [
        WatchPhase::NotRunning,
        WatchPhase::NotWatchedPacked,
        WatchPhase::Unreadable,
    ] {
        let mut rig = Rig::new(QueueRole::Request);
        for _ in 0..7 {
            rig.sample(5, 0);
        }
        rig.watch.count_stall_kick();
        assert_eq!(rig.watch.alarm(), Some(AlarmKind::Stuck));
        let ended = rig.watch.stop(rig.now, state);
        assert!(matches!(ended, Some(Event::Ended { .. })), "{ended:?}");
        assert_eq!(rig.watch.stop(rig.now, state), None);
        let status = rig.watch.status();
        assert_eq!((status.state, status.in_flight), (state, None));
        // These counters last for the device's life.
        assert_eq!(status.stall_kicks, 1);
    }
}

fn roles() -> impl Strategy<Value = QueueRole> {
    prop_oneof![
        Just(QueueRole::Request),
        Just(QueueRole::Receive),
        Just(QueueRole::Other)
    ]
}

proptest! {
    /// For all guest input: no panic, events in pairs, no impossible status, and no second event of
    /// a kind within the threshold.
    #[test]
    fn any_indices_at_any_time(
        role in roles(),
        size in 1u16..=32768,
        samples in prop::collection::vec((any::<u16>(), any::<u16>(), 0u64..4000, 0..12), 1..200),
    ) {
        let mut watch = QueueWatch::new(THRESHOLD);
        watch.start(role, size);
        let mut now = Instant::now();
        let mut announced = None;
        let mut last_began = None;
        let (mut avail, mut used) = (0u16, 0u16);
        for (a, u, millis, what) in samples {
            now += Duration::from_millis(millis);
            // Mostly nothing moves, sometimes a little, rarely at random.
            match what {
                0 => (avail, used) = (a, u),
                1 => avail = avail.wrapping_add(a % 8),
                2 => used = used.wrapping_add(u % 8),
                3 => used = avail,
                _ => {}
            }
            let event = if what == 11 {
                let event = watch.stop(now, WatchPhase::NotRunning);
                watch.start(role, size);
                event
            } else {
                watch.sample(now, avail, used)
            };
            match event {
                Some(Event::Began(alarm)) => {
                    prop_assert_eq!(announced.replace(alarm), None);
                    let since = last_began.replace(now).map(|last| now - last);
                    prop_assert!(since.is_none_or(|since| since >= THRESHOLD));
                    prop_assert!(watch.status().stuck_for_s >= THRESHOLD.as_secs());
                }
                Some(Event::Ended { alarm, lasted }) => {
                    prop_assert_eq!(announced.take(), Some(alarm));
                    prop_assert!(lasted >= THRESHOLD);
                }
                None => {}
            }
            prop_assert_eq!(watch.alarm(), announced);
            let status = watch.status();
            prop_assert!(status.in_flight.is_none_or(|count| count <= size));
            prop_assert!(announced != Some(AlarmKind::Stuck) || role == QueueRole::Request);
            prop_assert!(announced != Some(AlarmKind::DriverStalled) || role == QueueRole::Receive);
        }
    }

    /// For a conforming device and driver at any speed, the counters match their actions. An alarm
    /// is raised exactly if nothing was used for the threshold.
    #[test]
    fn honest_queues_are_judged_right(
        start in any::<u16>(),
        steps in prop::collection::vec((0u16..=SIZE, 0u16..=SIZE), 1..100),
    ) {
        let mut rig = Rig::new(QueueRole::Request);
        let (mut avail, mut used) = (start, start);
        rig.sample(avail, used);
        let (mut posted, mut completed) = (0u64, 0u64);
        let mut idle_for = 0u64;
        for (post, complete) in steps {
            // In two of three steps, one side does nothing.
            let post = if post % 3 == 0 { post } else { 0 };
            let complete = if complete % 3 == 0 { complete } else { 0 };
            let post = post.min(SIZE - avail.wrapping_sub(used));
            avail = avail.wrapping_add(post);
            let complete = complete.min(avail.wrapping_sub(used));
            used = used.wrapping_add(complete);
            posted += u64::from(post);
            completed += u64::from(complete);
            rig.sample(avail, used);
            let hangs = complete == 0 && avail != used;
            idle_for = if hangs { idle_for + 1 } else { 0 };
            let status = rig.watch.status();
            prop_assert_eq!((status.posted, status.completed), (posted, completed));
            prop_assert_eq!(u64::from(status.in_flight.unwrap()), posted - completed);
            // The first sample that shows the complaint starts the clock.
            prop_assert_eq!(rig.watch.alarm().is_some(), idle_for > THRESHOLD.as_secs());
        }
    }
}
