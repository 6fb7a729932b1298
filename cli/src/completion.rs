//! Completion of a command line for a shell: words of this command, and names of existing objects.
//!
//! ```text
//!   TAB ──> BELLHOP_COMPLETE=bash bellhop -- WORDS ──> the command tree ──> subcommands, options
//!                                                  └──> [`ARGUMENTS`] ──> names: host, daemon
//! ```
//! Owns the mapping of arguments to names. Names that do not arrive in time are left out, and
//! failures are silent: a shell shows errors in the middle of the user's line.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bellhop_common::client::{Address, Node, NodeArguments, Remotes};
use clap::{Args as _, Command, FromArgMatches as _};
use clap_complete::{ArgValueCandidates, CompleteEnv, CompletionCandidate};
use serde_json::Value;
use vdpa_mgmt::Connection;
use vdpa_mgmt::bus::Bus;
use vdpa_mgmt::nic::Store;
use vdpa_mgmt::pci::Pci;

/// The environment variable by which a shell requests a completion.
pub(crate) const VARIABLE: &str = "BELLHOP_COMPLETE";

/// The time limit for names.
const LIMIT: Duration = Duration::from_millis(200);

/// The kinds of names that an argument can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    /// VMs of the daemon.
    Vms,
    /// NICs of the VMs in the line, else of all VMs.
    VmNics,
    /// vDPA devices of the daemon's host.
    NodeDevices,
    /// vDPA devices of this host.
    Devices,
    /// Management devices.
    Mgmtdevs,
    /// Physical PCI functions.
    Functions,
    /// vDPA devices and physical functions.
    Bindable,
    /// Physical functions and management devices.
    NicSources,
    /// NICs that Bellhop has created.
    Nics,
    /// The user's named daemons.
    Remotes,
}

/// The names for an argument: subcommands that it is below, its value's name, the names. The first
/// row counts.
const ARGUMENTS: &[(&[&str], &str, Option<Names>)] = &[
    // A new name.
    (&["vm", "create"], "NAME", None),
    (&["vm", "restore"], "NAME", None),
    (&["vm", "nic"], "ID", Some(Names::VmNics)),
    (&["vm"], "NAME", Some(Names::Vms)),
    (&["vm"], "VM", Some(Names::Vms)),
    (&["vm"], "DEVICE", Some(Names::NodeDevices)),
    (&["vm", "migrate"], "DESTINATION", Some(Names::Remotes)),
    (&["node", "drain"], "NODE", Some(Names::Remotes)),
    (&["remote", "add"], "NAME", None),
    (&["remote"], "NAME", Some(Names::Remotes)),
    (&["dev", "add"], "WORD VALUE", Some(Names::Mgmtdevs)),
    (&["dev", "set"], "WORD VALUE", Some(Names::Devices)),
    (&["dev"], "DEV", Some(Names::Devices)),
    (&["mgmtdev"], "DEV", Some(Names::Mgmtdevs)),
    (&["bind"], "DEV", Some(Names::Bindable)),
    (&["vf"], "PF", Some(Names::Functions)),
    (&["topology"], "PF", Some(Names::Functions)),
    (&["nic", "create"], "NIC", Some(Names::NicSources)),
    (&["nic", "show"], "NAME", Some(Names::Nics)),
    (&["nic", "delete"], "NAME", Some(Names::Nics)),
];

/// The names for the argument of a subcommand.
fn names_for(path: &[String], value: &str, long: Option<&str>) -> Option<Names> {
    match long {
        Some("vm") => return Some(Names::Vms),
        Some("remote") => return Some(Names::Remotes),
        _ => {}
    }
    let is_under = |prefix: &[&str]| {
        path.len() >= prefix.len() && prefix.iter().zip(path).all(|(name, own)| name == own)
    };
    let mut rows = ARGUMENTS.iter();
    let row = rows.find(|(prefix, name, _)| is_under(prefix) && *name == value);
    // `--as NAME` is a new name on another node.
    let names = row.and_then(|row| row.2)?;
    (long.is_none() || names != Names::Vms).then_some(names)
}

/// The names of a kind; in tests others than those of this host.
type Lookup = fn(Names) -> Vec<String>;

/// Adds the names to the arguments of a command and of its subcommands.
fn with_names(command: Command, path: &[String], look_up: Lookup) -> Command {
    let command = command.mut_args(|argument| {
        let value = argument.get_value_names().and_then(<[_]>::first);
        let names = value.and_then(|value| names_for(path, value, argument.get_long()));
        let Some(names) = names else { return argument };
        argument.add(ArgValueCandidates::new(move || {
            let found = look_up(names).into_iter();
            // Names of another host must not control the terminal.
            let plain = found.filter(|name| !name.contains(char::is_control));
            plain.map(CompletionCandidate::new).collect()
        }))
    });
    command.mut_subcommands(|subcommand| {
        let path = [path, &[subcommand.get_name().to_owned()]].concat();
        with_names(subcommand, &path, look_up)
    })
}

/// Answers a shell and ends the process, if a shell requests it.
pub(crate) fn answer_shell(command: fn() -> Command) {
    let command = || with_names(command(), &[], |names| in_time(move || look_up(names)));
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// The names, if they are known within [`LIMIT`].
fn in_time(names: impl FnOnce() -> Option<Vec<String>> + Send + 'static) -> Vec<String> {
    let (sender, found) = mpsc::channel();
    thread::spawn(move || {
        // Too late if it fails.
        let _ = sender.send(names());
    });
    let found = found.recv_timeout(LIMIT).ok().flatten();
    found.unwrap_or_default()
}

/// The names of a kind; none if they are unknown.
fn look_up(names: Names) -> Option<Vec<String>> {
    let devices = || Bus::default().names().ok();
    let mgmtdevs = || {
        let all = Connection::open().ok()?.mgmt_devices().ok()?.into_iter();
        Some(
            all.map(|device| device.name.to_string())
                .collect::<Vec<_>>(),
        )
    };
    let functions = || {
        let all = Pci::default().physical_functions().ok()?.into_iter();
        let names = all.map(|function| format!("pci/{}", function.address));
        Some(names.collect::<Vec<_>>())
    };
    match names {
        Names::Vms => vms(&node(&line())?),
        Names::VmNics => {
            let line = line();
            vm_nics(&node(&line)?, &line)
        }
        Names::NodeDevices => node_devices(&node(&line())?),
        Names::Devices => devices(),
        Names::Mgmtdevs => mgmtdevs(),
        Names::Functions => functions(),
        Names::Bindable => Some(both(devices(), functions())),
        Names::NicSources => Some(both(functions(), mgmtdevs())),
        Names::Nics => {
            let all = Store::open_default().ok()?.nics().ok()?;
            Some(all.iter().map(|nic| nic.name().to_owned()).collect())
        }
        Names::Remotes => {
            let remotes = Remotes::of_user().ok()?;
            Some(remotes.iter().map(|(name, _)| name.to_owned()).collect())
        }
    }
}

fn both(one: Option<Vec<String>>, other: Option<Vec<String>>) -> Vec<String> {
    [one, other].into_iter().flatten().flatten().collect()
}

/// The words of the user's line, after `--`.
fn line() -> Vec<String> {
    let words = std::env::args_os().skip_while(|word| word != "--").skip(1);
    words.filter_map(|word| word.into_string().ok()).collect()
}

/// A client of the daemon that the line or the environment names.
fn node(line: &[String]) -> Option<Node> {
    let command = NodeArguments::augment_args(Command::new("bellhop").no_binary_name(true));
    let is_known = |word: &str| {
        let name = word.strip_prefix("--");
        let mut known = command.get_arguments().filter_map(clap::Arg::get_long);
        name.is_some_and(|name| known.any(|known| known == name))
    };
    let mut options: Vec<&String> = Vec::new();
    let mut words = line.iter();
    while let Some(word) = words.next() {
        match word.split_once('=') {
            Some((name, _)) if is_known(name) => options.push(word),
            None if is_known(word) => options.extend(std::iter::once(word).chain(words.next())),
            _ => {}
        }
    }
    let matches = command.clone().try_get_matches_from(options).ok()?;
    let which = NodeArguments::from_arg_matches(&matches).ok()?;
    let which = which.resolved().ok()?;
    // ssh may ask for a password on the terminal.
    match which.address() {
        Address::Ssh { .. } => None,
        Address::Socket(_) | Address::Https { .. } => which.connect().ok(),
    }
}

fn items(node: &Node) -> Option<Vec<Value>> {
    match node.get::<Value>("/v1/vms").ok()?.get_mut("items")?.take() {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

fn vms(node: &Node) -> Option<Vec<String>> {
    let vms = items(node)?;
    Some(vms.iter().filter_map(|vm| text(vm, "name")).collect())
}

fn vm_nics(node: &Node, line: &[String]) -> Option<Vec<String>> {
    let vms = items(node)?;
    let is_named = |vm: &&Value| text(vm, "name").is_some_and(|name| line.contains(&name));
    let nics = |vm: &Value| {
        let nics = vm.pointer("/spec/nics").and_then(Value::as_array);
        let nics = nics.into_iter().flatten();
        nics.filter_map(|nic| text(nic, "id")).collect::<Vec<_>>()
    };
    let named: Vec<String> = vms.iter().filter(is_named).flat_map(nics).collect();
    if named.is_empty() {
        return Some(vms.iter().flat_map(nics).collect());
    }
    Some(named)
}

fn node_devices(node: &Node) -> Option<Vec<String>> {
    let listing: Value = node.get("/v1/vdpa-devices").ok()?;
    let devices = listing.get("dev")?.as_object()?;
    Some(devices.keys().cloned().collect())
}

fn text(value: &Value, field: &str) -> Option<String> {
    value.get(field)?.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use bellhop_common::client::fake::{self, FakeDaemon};
    use clap::CommandFactory as _;
    use serde_json::json;

    use super::*;

    /// The completions of the last word.
    fn complete(line: &str, look_up: Lookup) -> Vec<String> {
        let mut command = with_names(crate::Arguments::command(), &[], look_up);
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let last = words.len() - 1;
        let found = clap_complete::engine::complete(&mut command, words, last, None).unwrap();
        let names = found.iter().map(CompletionCandidate::get_value);
        names
            .map(|name| name.to_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn arguments_have_their_names() {
        let debug: Lookup = |names| vec![format!("x{names:?}"), "x\x1b".to_owned()];
        for (line, wanted) in [
            ("bellhop vm show x", &["xVms"][..]),
            ("bellhop vm stop a x", &["xVms"]),
            ("bellhop vm create x", &[]),
            ("bellhop vm apply x", &["xVms"]),
            ("bellhop vm migration show x", &["xVms"]),
            ("bellhop vm migrate web --as x", &[]),
            ("bellhop vm nic swap x", &["xVms"]),
            ("bellhop vm nic swap web x", &["xVmNics"]),
            ("bellhop vm nic swap web net0 --device x", &["xNodeDevices"]),
            ("bellhop vm disk remove web x", &[]),
            ("bellhop events --vm x", &["xVms"]),
            ("bellhop dev show x", &["xDevices"]),
            ("bellhop dev add name nic0 mgmtdev x", &["xMgmtdevs"]),
            ("bellhop mgmtdev show x", &["xMgmtdevs"]),
            ("bellhop vf count x", &["xFunctions"]),
            ("bellhop bind x", &["xBindable"]),
            ("bellhop nic create nic0 --from x", &["xNicSources"]),
            ("bellhop nic create x", &[]),
            ("bellhop nic delete x", &["xNics"]),
            ("bellhop vm migrate web x", &["xRemotes"]),
            ("bellhop node drain --to x", &["xRemotes"]),
            ("bellhop vm show --remote x", &["xRemotes"]),
            ("bellhop remote use x", &["xRemotes"]),
            ("bellhop remote remove x", &["xRemotes"]),
            ("bellhop remote add x", &[]),
            ("bellhop vm sh", &["show"]),
        ] {
            assert_eq!(complete(line, debug), wanted, "{line}");
        }
    }

    #[test]
    fn each_row_is_about_an_argument() {
        fn values(command: &Command, path: &[String], all: &mut Vec<(Vec<String>, String)>) {
            for argument in command.get_arguments() {
                let value = argument.get_value_names().and_then(<[_]>::first);
                all.extend(value.map(|value| (path.to_vec(), value.to_string())));
            }
            for subcommand in command.get_subcommands() {
                let path = [path, &[subcommand.get_name().to_owned()]].concat();
                values(subcommand, &path, all);
            }
        }
        let mut all = Vec::new();
        values(&crate::Arguments::command(), &[], &mut all);
        for (prefix, value, names) in ARGUMENTS {
            let found = all.iter().any(|(path, name)| {
                name == value && path.len() >= prefix.len() && path[..prefix.len()] == **prefix
            });
            assert!(found || names.is_none(), "{prefix:?} {value}");
        }
    }

    #[test]
    fn names_come_from_the_daemon() {
        let vms_there = json!({"items": [
            fake::vm(&json!({"spec": {"nics": [{"id": "net0"}]}})),
            fake::vm(&json!({"name": "db", "spec": {"nics": [{"id": "net7"}]}})),
        ]});
        let fake = FakeDaemon::default().answer(200, &vms_there);
        assert_eq!(vms(&fake.node()).unwrap(), ["web", "db"]);
        for (line, wanted) in [("vm nic swap db", &["net7"][..]), ("", &["net0", "net7"])] {
            let line: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let fake = FakeDaemon::default().answer(200, &vms_there);
            assert_eq!(vm_nics(&fake.node(), &line).unwrap(), wanted);
        }
        let devices = json!({"dev": {"nic0": {}, "nic1": {}}});
        let fake = FakeDaemon::default().answer(200, &devices);
        assert_eq!(node_devices(&fake.node()).unwrap(), ["nic0", "nic1"]);
        for hostile in [
            json!([]),
            json!({"items": 1}),
            json!({"items": [7, {"name": 1}]}),
        ] {
            let fake = FakeDaemon::default().answer(200, &hostile);
            assert!(vms(&fake.node()).unwrap_or_default().is_empty());
        }
        let refused = json!({"code": "not_allowed", "message": "no"});
        assert_eq!(
            vms(&FakeDaemon::default().answer(403, &refused).node()),
            None
        );
    }

    #[test]
    fn the_daemon_is_that_of_the_line_and_need_not_answer() {
        let words = |line: &str| -> Vec<String> { line.split(' ').map(str::to_owned).collect() };
        let silent = std::env::temp_dir().join(format!("bellhop-silent-{}", std::process::id()));
        let listener = std::os::unix::net::UnixListener::bind(&silent).unwrap();
        let line = format!("bellhop vm --node {} show", silent.display());
        let line = words(&line);
        thread::spawn(move || vms(&node(&line).unwrap()));
        listener.accept().unwrap();
        std::fs::remove_file(&silent).unwrap();
        // Without a certificate no client can ask it.
        assert!(node(&words("bellhop vm show --node=https://node1:7443")).is_none());
        // Completion may start no ssh, which uses the terminal.
        assert!(node(&words("bellhop vm show --node=ssh://node1")).is_none());
        let (end, never) = mpsc::channel::<()>();
        let late = move || {
            never.recv().ok();
            Some(vec!["late".to_owned()])
        };
        assert_eq!(in_time(late), Vec::<String>::new());
        drop(end);
    }
}
