#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::unix::fs::MetadataExt as _;

use serde_json::{Value, json};

use super::*;

struct Directory(PathBuf);

impl Directory {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("node-store-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("state/node.redb")
    }

    fn open(&self) -> Result<Store, Error> {
        Store::open(&self.file())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn records_are_there_after_a_restart() {
    let directory = Directory::new("restart");
    {
        let store = directory.open().unwrap();
        assert!(store.all::<Value>(VMS).unwrap().is_empty());
        store.put(VMS, "b", &json!({ "a": 1 })).unwrap();
        store.put(VMS, "a", &json!(2)).unwrap();
        store.put(VMS, "c", &json!(3)).unwrap();
        store.put(VMS, "a", &json!(4)).unwrap();
        store.remove(VMS, "c").unwrap();
        store.remove(VMS, "c").unwrap();
        store.put(OPERATIONS, "c", &json!(5)).unwrap();
    }
    let store = directory.open().unwrap();
    let all: Vec<(String, Value)> = store.all(VMS).unwrap();
    let expected = [("a", json!(4)), ("b", json!({ "a": 1 }))];
    assert_eq!(all, expected.map(|(name, value)| (name.to_owned(), value)));
    let all: Vec<(String, Value)> = store.all(OPERATIONS).unwrap();
    assert_eq!(all, [("c".to_owned(), json!(5))]);
    let mode = fs::metadata(directory.file()).unwrap().mode() & 0o777;
    assert_eq!(mode, 0o600);
}

#[test]
fn the_id_stays_and_another_file_has_another_one() {
    let directory = Directory::new("id");
    let id = directory.open().unwrap().id().unwrap();
    assert_eq!(id.len(), 36, "{id}");
    let store = directory.open().unwrap();
    assert_eq!(store.id().unwrap(), id);
    drop(store);
    fs::remove_file(directory.file()).unwrap();
    assert_ne!(directory.open().unwrap().id().unwrap(), id);
}

#[test]
fn one_daemon_at_a_time() {
    let directory = Directory::new("lock");
    let first = directory.open().unwrap();
    let second = directory.open().unwrap_err();
    assert!(second.to_string().contains("--state-dir"), "{second}");
    drop(first);
    directory.open().unwrap();
}

#[test]
fn a_newer_schema_is_refused_and_left_alone() {
    let directory = Directory::new("newer");
    drop(directory.open().unwrap());
    {
        let database = Database::create(directory.file()).unwrap();
        let transaction = database.begin_write().unwrap();
        let mut meta = transaction.open_table(META).unwrap();
        meta.insert(SCHEMA_KEY, SCHEMA + 1).unwrap();
        drop(meta);
        transaction.commit().unwrap();
    }
    for _ in 0..2 {
        let error = directory.open().unwrap_err();
        let schema = format!("has schema {}", SCHEMA + 1);
        assert!(error.to_string().contains(&schema), "{error}");
        assert!(error.to_string().contains("use the program that wrote it"));
    }
}

#[test]
fn an_older_schema_is_read_and_is_this_programs_from_then_on() {
    let directory = Directory::new("older");
    let schema = |new: Option<u64>| {
        let database = Database::create(directory.file()).unwrap();
        let transaction = database.begin_write().unwrap();
        let mut meta = transaction.open_table(META).unwrap();
        if let Some(new) = new {
            meta.insert(SCHEMA_KEY, new).unwrap();
        }
        let found = meta.get(SCHEMA_KEY).unwrap().unwrap().value();
        drop(meta);
        transaction.commit().unwrap();
        found
    };
    directory
        .open()
        .unwrap()
        .put(VMS, "web", &json!(1))
        .unwrap();
    assert_eq!(schema(Some(1)), 1);
    let all: Vec<(String, Value)> = directory.open().unwrap().all(VMS).unwrap();
    assert_eq!(all, [("web".to_owned(), json!(1))]);
    assert_eq!(schema(None), SCHEMA);
}

#[test]
fn rubbish_is_refused_with_the_remedy() {
    let directory = Directory::new("rubbish");
    drop(directory.open().unwrap());
    for rubbish in [
        vec![0_u8; 8192],
        b"not a database".to_vec(),
        vec![0xff; 100],
    ] {
        fs::write(directory.file(), &rubbish).unwrap();
        let error = directory.open().unwrap_err();
        assert!(
            error.to_string().contains("is damaged"),
            "{error}: {:?}",
            std::error::Error::source(&error)
        );
        assert!(error.to_string().contains("--end-orphans"), "{error}");
        assert_eq!(fs::read(directory.file()).unwrap(), rubbish);
    }
}

#[test]
fn a_record_that_cannot_be_read_is_named() {
    let directory = Directory::new("record");
    let store = directory.open().unwrap();
    store.put(VMS, "web", &json!({ "a": 1 })).unwrap();
    let error = store.all::<Vec<u8>>(VMS).unwrap_err();
    assert!(error.to_string().contains("the record of web"), "{error}");
}

#[test]
fn a_directory_that_cannot_be_is_an_error() {
    let directory = Directory::new("nowhere");
    fs::create_dir_all(&directory.0).unwrap();
    fs::write(directory.0.join("state"), "a file").unwrap();
    let error = directory.open().unwrap_err();
    assert!(
        error.to_string().contains("check the free space"),
        "{error}"
    );
}
