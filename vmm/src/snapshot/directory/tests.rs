//! A directory that is complete or absent, and directories from other programs.

use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

use super::*;
use crate::layout::RAM_MIN;

/// A directory of this test.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("snapshot-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self) -> PathBuf {
        self.0.join("vm1")
    }

    /// The names in it, sorted.
    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn write(path: &Path) -> NewSnapshot {
    let new = NewSnapshot::create(path).unwrap();
    new.state().write_all(b"sections").unwrap();
    new.memory().set_len(RAM_MIN).unwrap();
    new
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn it_is_there_when_it_is_whole() {
    let place = Place::new("whole");
    let path = place.path();
    assert!(!is_being_written(&path));
    let new = write(&path);
    assert!(is_being_written(&path));
    assert_eq!(place.names(), [".vm1.partial"]);
    assert!(matches!(Snapshot::open(&path), Err(OpenError::Io { .. })));
    new.commit().unwrap();
    assert_eq!(place.names(), ["vm1"]);
    assert!(!is_being_written(&path));
    assert_eq!(mode(&path), 0o700);
    assert_eq!(mode(&path.join(STATE_FILE)), 0o600);
    assert_eq!(mode(&path.join(MEMORY_FILE)), 0o600);

    let snapshot = Snapshot::open(&path).unwrap();
    let mut text = String::new();
    snapshot.state().read_to_string(&mut text).unwrap();
    assert_eq!(text, "sections");
    assert_eq!(snapshot.memory().metadata().unwrap().len(), RAM_MIN);
}

#[test]
fn nothing_is_left_of_one_that_failed() {
    let place = Place::new("failed");
    drop(write(&place.path()));
    assert_eq!(place.names(), [""; 0]);

    // The name comes into use while the snapshot is written.
    let new = write(&place.path());
    std::fs::create_dir(place.path()).unwrap();
    std::fs::write(place.path().join("x"), "").unwrap();
    assert!(matches!(new.commit(), Err(CreateError::Exists { .. })));
    assert_eq!(place.names(), ["vm1"]);
    assert!(place.path().join("x").exists());
}

#[test]
fn only_an_empty_directory_is_replaced() {
    let place = Place::new("exists");
    let path = place.path();
    std::fs::create_dir(&path).unwrap();
    write(&path).commit().unwrap();
    assert_eq!(mode(&path), 0o700);

    let error = NewSnapshot::create(&path).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{} exists and is not an empty directory; remove it or choose another name",
            path.display()
        )
    );
    for (name, make) in [
        (
            "file",
            &(|path: &Path| std::fs::write(path, "")) as &dyn Fn(&Path) -> io::Result<()>,
        ),
        ("link", &|path| symlink(path.with_file_name("empty"), path)),
        ("dangling", &|path| symlink("nowhere", path)),
    ] {
        std::fs::create_dir_all(place.0.join("empty")).unwrap();
        let path = place.0.join(name);
        make(&path).unwrap();
        assert!(
            matches!(NewSnapshot::create(&path), Err(CreateError::Exists { .. })),
            "{name}"
        );
    }
    for path in ["/", "..", "a/..", ""] {
        assert!(matches!(
            NewSnapshot::create(Path::new(path)),
            Err(CreateError::NoName { .. })
        ));
    }
    let nowhere = place.0.join("no/such");
    assert!(matches!(
        NewSnapshot::create(&nowhere),
        Err(CreateError::Io { .. })
    ));
}

#[test]
fn one_at_a_time_and_the_dead_are_cleared() {
    let place = Place::new("busy");
    let path = place.path();
    let first = write(&path);
    assert!(matches!(
        NewSnapshot::create(&path),
        Err(CreateError::Busy { .. })
    ));
    // As if its process had been killed: its descriptors are closed, its files remain.
    let temporary = place.0.join(".vm1.partial");
    let kept = place.0.join("kept");
    std::fs::rename(&temporary, &kept).unwrap();
    drop(first);
    std::fs::create_dir_all(&kept).unwrap();
    std::fs::rename(&kept, &temporary).unwrap();
    std::fs::write(temporary.join(STATE_FILE), "half").unwrap();
    std::fs::write(temporary.join(MEMORY_FILE), "half").unwrap();

    let new = NewSnapshot::create(&path).unwrap();
    assert_eq!(new.state().metadata().unwrap().len(), 0);
    new.commit().unwrap();
    assert_eq!(std::fs::read(path.join(MEMORY_FILE)).unwrap(), b"");
}

#[test]
fn a_temporary_directory_of_others_is_not_used() {
    let place = Place::new("others");
    let temporary = place.0.join(".vm1.partial");
    let refused = || {
        matches!(
            NewSnapshot::create(&place.path()),
            Err(CreateError::NotOurs { .. })
        )
    };
    symlink("/", &temporary).unwrap();
    assert!(refused());
    std::fs::remove_file(&temporary).unwrap();
    std::fs::create_dir(&temporary).unwrap();
    std::fs::set_permissions(&temporary, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(refused());
    std::fs::set_permissions(&temporary, PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::write(temporary.join("diary"), "").unwrap();
    assert!(refused());
    assert!(temporary.join("diary").exists());
}

#[test]
fn hostile_directories_are_refused() {
    let place = Place::new("hostile");
    let path = place.path();
    write(&path).commit().unwrap();

    let link = place.0.join("link");
    symlink(&path, &link).unwrap();
    let state = path.join(STATE_FILE);
    for not_a_directory in [&link, &state] {
        assert!(matches!(
            Snapshot::open(not_a_directory),
            Err(OpenError::NotADirectory { .. })
        ));
    }

    let replace = |make: &dyn Fn(&Path)| {
        let _ = std::fs::remove_file(&state);
        make(&state);
        Snapshot::open(&path).unwrap_err()
    };
    let error = replace(&|_| {});
    assert_eq!(
        error.to_string(),
        format!(
            "{} is not a snapshot: it has no file \"state\"",
            path.display()
        )
    );
    let error = replace(&|state| symlink("memory", state).unwrap());
    assert!(matches!(error, OpenError::NotRegular { .. }), "{error}");
    let error = replace(&|state| symlink("/dev/zero", state).unwrap());
    assert!(matches!(error, OpenError::NotRegular { .. }), "{error}");
    // Opening a pipe would wait for a writer.
    let error = replace(&|state| {
        rustix::fs::mkfifoat(CWD, state, Mode::RWXU).unwrap();
        assert!(
            std::fs::symlink_metadata(state)
                .unwrap()
                .file_type()
                .is_fifo()
        );
    });
    assert!(matches!(error, OpenError::NotRegular { .. }), "{error}");
    let error = replace(&|state| {
        drop(std::os::unix::net::UnixListener::bind(state).unwrap());
    });
    assert!(matches!(error, OpenError::NotRegular { .. }), "{error}");
    for len in [0, STATE_FILE_MAX + 1, 1 << 40] {
        let error = replace(&|state| File::create(state).unwrap().set_len(len).unwrap());
        assert!(
            matches!(error, OpenError::Length { len: found, .. } if found == len),
            "{error}"
        );
    }
    std::fs::remove_file(&state).unwrap();
    std::fs::create_dir(&state).unwrap();
    let error = Snapshot::open(&path).unwrap_err();
    assert!(matches!(error, OpenError::NotRegular { .. }), "{error}");
}
