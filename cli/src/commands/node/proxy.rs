//! `bellhop node proxy`: standard input and output as a connection to the daemon's socket, for
//! clients that come by ssh.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use bellhop_common::client::Address;
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;

/// Copies until the daemon or the client closes the connection.
pub(super) fn execute(address: &Address) -> Result<Code, Error> {
    let Address::Socket(path) = address else {
        return Err(Error::wrong(
            "give the path of a socket of this host with --node",
        ));
    };
    copy(path, &unbuffered(io::stdin())?, &unbuffered(io::stdout())?)
}

/// Standard output of Rust would wait for the ends of lines.
fn unbuffered(stream: impl AsFd) -> Result<File, Error> {
    let copy = stream.as_fd().try_clone_to_owned();
    copy.map(File::from)
        .map_err(Error::context("cannot use the standard streams"))
}

fn copy(path: &Path, input: &File, mut output: &File) -> Result<Code, Error> {
    let shown = path.display();
    let failed = |source| {
        let message = format!("cannot reach the node daemon at {shown}");
        Error::new(ErrorKind::NoDaemon, message).because(source)
    };
    let daemon = UnixStream::connect(path).map_err(failed)?;
    let mut to = daemon.try_clone().map_err(failed)?;
    let mut input = input.try_clone().map_err(failed)?;
    // The process may end before it does.
    thread::spawn(move || {
        let _ = io::copy(&mut input, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let copied = io::copy(&mut &daemon, &mut output);
    copied.map_err(Error::context("the connection to the node daemon broke"))?;
    Ok(Code::Success)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn both_directions_are_copied_to_their_ends() {
        let name = format!("bellhop-proxy-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let daemon = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            stream.write_all(format!("got {text}").as_bytes()).unwrap();
        });
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let theirs = File::from(OwnedFd::from(theirs));
        let proxy = {
            let path = path.clone();
            thread::spawn(move || copy(&path, &theirs, &theirs).unwrap())
        };
        ours.write_all(b"a").unwrap();
        ours.shutdown(Shutdown::Write).unwrap();
        let mut text = [0; 5];
        ours.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"got a");
        assert_eq!(proxy.join().unwrap(), Code::Success);
        daemon.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        let stdin = unbuffered(io::stdin()).unwrap();
        let error = copy(&path, &stdin, &stdin).unwrap_err();
        assert_eq!(error.code(), Code::NoDaemon);
        let far = "https://node2:8443".parse().unwrap();
        assert_eq!(execute(&far).unwrap_err().code(), Code::WrongCommandLine);
    }
}
