#![allow(clippy::unwrap_used, reason = "tests")]
use std::os::unix::fs::symlink;

use super::*;
use crate::nic::{Settings, State, Step};

/// A directory for one test.
struct Directory(PathBuf);

impl Directory {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("bellhop-nics-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn store(&self) -> Store {
        Store::open(&self.0.join("nics")).unwrap()
    }

    fn put(&self, file: &str, text: &str) {
        fs::write(self.0.join("nics").join(file), text).unwrap();
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn nic(name: &str) -> MadeNic {
    let mut nic = MadeNic::new(name, "enp1s0", None);
    nic.steps_mut().push(Step::CountVirtualFunctions {
        physical: "0000:01:00.0".parse().unwrap(),
        count: 4,
    });
    nic.steps_mut().push(Step::SetVirtualFunction {
        physical: "0000:01:00.0".parse().unwrap(),
        virtual_function: 1,
        settings: Settings {
            mac: Some([2, 0, 0, 0, 0, 1]),
            rates: Some((0, 1000)),
        },
        former: Settings::default(),
    });
    nic.steps_mut().push(Step::BindFunction {
        function: "0000:01:00.2".parse().unwrap(),
        driver: "vp-vdpa".to_owned(),
        former_driver: Some("virtio-pci".to_owned()),
        former_override: None,
    });
    nic.steps_mut().push(Step::AddPort {
        handle: "pci/0000:01:00.0".parse().unwrap(),
        pfnum: 0,
        sfnum: 88,
        port: Some("pci/0000:01:00.0/32768".parse().unwrap()),
    });
    nic.steps_mut().push(Step::ActivatePort {
        port: "pci/0000:01:00.0/32768".parse().unwrap(),
    });
    nic.steps_mut().push(Step::AddDevice {
        mgmtdev: "pci/0000:01:00.2".parse().unwrap(),
    });
    nic.set_state(State::Made);
    nic
}

#[test]
fn records_are_read_until_none_is_left() {
    let directory = Directory::new("kept");
    let mut store = directory.store().lock().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&directory.0.join("nics")), 0o700);
    for name in ["b", "a.json", "a"] {
        store.keep(&nic(name)).unwrap();
    }
    assert_eq!(mode(&directory.0.join("nics/b.json")), 0o600);
    assert_eq!(store.nics().unwrap(), ["a", "a.json", "b"].map(nic));
    let mut one = nic("b");
    assert_eq!(store.nic("b").unwrap(), one);
    one.steps_mut().pop();
    one.set_state(State::Removing);
    store.keep(&one).unwrap();
    assert_eq!(store.nic("b").unwrap(), one);
    one.steps_mut().clear();
    store.keep(&one).unwrap();
    store.keep(&one).unwrap();
    let gone = store.nic("b").unwrap_err();
    assert!(matches!(gone, StoreError::NoNic(_)), "{gone}");
}

#[test]
fn records_that_make_no_sense_are_refused() {
    let directory = Directory::new("refused");
    let store = directory.store();
    let good = serde_json::to_string(&nic("x")).unwrap();
    directory.put("x.json", &good);
    assert_eq!(store.nic("x").unwrap(), nic("x"));
    for end in 0..good.len() {
        directory.put("x.json", &good[..end]);
        assert!(store.nic("x").is_err(), "{end}");
    }
    let steps = good.replace("\"steps\":[", &format!("\"steps\":[{}", step().repeat(40)));
    for (bad, why) in [
        (good.replace("\"name\":\"x\"", "\"name\":\"y\""), "another"),
        (
            good.replace("\"name\":\"x\"", "\"name\":\"a b\""),
            "63 bytes",
        ),
        (
            good.replace("\"mgmtdev\":\"pci/", "\"mgmtdev\":\"pci//"),
            "management device",
        ),
        (good.replace("32768", "-1"), "port"),
        (good.replace("0000:01:00.0", "0000:01:0.0"), "PCI function"),
        (good.replace("\"count\":4", "\"count\":-4"), "-4"),
        (
            good.replace("count-virtual", "do-virtual"),
            "unknown variant",
        ),
        (good.replace("\"count\"", "\"other\""), "other"),
        (steps, "steps"),
        ("x".repeat(70_000), ""),
    ] {
        directory.put("x.json", &bad);
        let error = store.nic("x").unwrap_err();
        let StoreError::Malformed { source, .. } = &error else {
            panic!("{error}: {bad}")
        };
        assert!(source.to_string().contains(why), "{source}");
    }
    // Another version, with any content.
    directory.put("x.json", "{\"version\":2,\"more\":[]}");
    let error = store.nic("x").unwrap_err();
    assert!(matches!(error, StoreError::Version { version: 2, .. }));
    assert!(store.nics().is_err());
}

fn step() -> String {
    "{\"step\":\"add-device\",\"mgmtdev\":\"a\"},".to_owned()
}

#[test]
fn names_do_not_leave_the_directory() {
    let directory = Directory::new("names");
    let store = directory.store();
    for name in ["", "..", "../x", "/etc/x", "a b", "a\0b", &"x".repeat(64)] {
        assert!(
            matches!(store.nic(name), Err(StoreError::Name(_))),
            "{name:?}"
        );
        assert!(store.keep(&nic(name)).is_err());
    }
    // Links are not followed either.
    directory.put("target", &serde_json::to_string(&nic("x")).unwrap());
    symlink("target", directory.0.join("nics/x.json")).unwrap();
    assert!(matches!(store.nic("x"), Err(StoreError::File { .. })));
    symlink("target", directory.0.join("nics/y.json.new")).unwrap();
    store.keep(&nic("y")).unwrap();
    assert_eq!(store.nic("y").unwrap(), nic("y"));
}

#[test]
fn a_directory_of_others_is_refused() {
    let directory = Directory::new("others");
    drop(directory.store());
    let path = directory.0.join("nics");
    fs::set_permissions(&path, Permissions::from_mode(0o770)).unwrap();
    let refused = Store::open(&path).unwrap_err();
    assert!(matches!(refused, StoreError::NotOwn(_)), "{refused}");
    let link = directory.0.join("link");
    fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
    symlink(&path, &link).unwrap();
    assert!(matches!(Store::open(&link), Err(StoreError::NotOwn(_))));
}

#[test]
fn two_at_once_wait_for_each_other() {
    let directory = Directory::new("lock");
    let first = directory.store().lock().unwrap();
    let second = std::thread::spawn({
        let store = directory.store();
        move || store.lock().map(|_| Instant::now()).unwrap()
    });
    std::thread::sleep(Duration::from_millis(200));
    let freed = Instant::now();
    drop(first);
    assert!(second.join().unwrap() >= freed);
}

#[test]
fn an_owner_is_kept_and_checked() {
    let directory = Directory::new("owner");
    let mut store = directory.store().lock().unwrap();
    let mut owned = MadeNic::new("a", "enp1s0", Some("node:vm/net0"));
    *owned.steps_mut() = nic("a").steps().to_vec();
    store.keep(&owned).unwrap();
    assert_eq!(store.nic("a").unwrap().owner(), Some("node:vm/net0"));
    let bad = serde_json::to_string(&owned)
        .unwrap()
        .replace("node:vm/net0", "a\\nb");
    directory.put("a.json", &bad);
    assert!(matches!(
        store.nic("a").unwrap_err(),
        StoreError::Malformed { .. }
    ));
}

#[test]
fn leftovers_of_a_killed_writer_are_deleted_with_the_next_lock() {
    let directory = Directory::new("leftover");
    let mut store = directory.store().lock().unwrap();
    store.keep(&nic("nic0")).unwrap();
    drop(store);
    directory.put("gone.json.new", "{\"half");
    directory.put("nic0.json.new", "");
    directory.put("others.new", "");
    let store = directory.store().lock().unwrap();
    assert_eq!(store.nics().unwrap().len(), 1);
    let mut left: Vec<String> = fs::read_dir(directory.0.join("nics"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["lock", "nic0.json", "others.new"]);
}

#[test]
fn a_later_nic_of_the_same_name_is_another_one() {
    let directory = Directory::new("identity");
    let mut store = directory.store().lock().unwrap();
    let mut first = nic("a");
    // As records of older programs are.
    assert!(first.is_same(&nic("a")) && !first.is_same(&nic("b")));
    first.identify();
    store.keep(&first).unwrap();
    first.set_state(State::Removing);
    assert!(store.nic("a").unwrap().is_same(&first));
    let mut second = nic("a");
    assert!(!second.is_same(&first));
    second.identify();
    assert!(!second.is_same(&first));
}
