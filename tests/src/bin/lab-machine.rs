//! A machine whose NICs a test plugs and unplugs: `bellhop run` with a control socket.
//!
//! ```text
//!   lab-machine run --kernel K … [--vdpa OPTIONS]… --control SOCKET
//! ```
//! Standard input and output are the guest's console. On the socket, each request is one line, and
//! each answer is one line of JSON. An error has the whole chain of causes, `{"error": …}`:
//!
//! ```text
//!   plug path=/dev/vhost-vdpa-0[,id=…]    {"id","path","address","state","serial"}
//!   unplug ID                             the same
//!   wait-unplugged SERIAL MILLISECONDS    {"unplugged": true|false}
//!   announce ID                           {}
//!   dirty-log on|off                      {}
//!   nics                                  {"generation","nics":[…],"ended"}
//!   resources                             {"memory_slots","doorbells","mapped_doorbells",
//!                                          "vectors","routes","irqfds"}
//! ```
//! It uses only the machine's [`Handle`], from its own thread, as an API server does.

use std::error::Error;
use std::io::{BufRead as _, BufReader, Stdin, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};
use vdpa::causes::in_one_line;
use vmm::config::{
    CpuAffinity, CpuBaseline, CpuCount, DiskConfig, MemoryConfig, RingWatch, VdpaConfig, VmConfig,
};
use vmm::console::{Console, ConsoleInput, ConsoleRead, TerminalConsole};
use vmm::machine::{
    Exit, Handle, Machine, NicStatus, PlugPhase, RequestError, RunState, StopHandle,
};

/// The exit code of a guest that crashed, the same as Bellhop's.
const CRASHED: u8 = 3;

/// As `bellhop run`, with a control socket.
#[derive(Debug, Parser)]
enum Arguments {
    /// Runs a machine
    Run {
        #[arg(long)]
        kernel: PathBuf,
        #[arg(long)]
        initramfs: Option<PathBuf>,
        #[arg(long)]
        cmdline: String,
        #[arg(long)]
        cpus: CpuCount,
        #[arg(long)]
        memory: MemoryConfig,
        #[arg(long)]
        vdpa: Vec<VdpaConfig>,
        #[arg(long = "disk")]
        disks: Vec<DiskConfig>,
        /// Where to listen
        #[arg(long)]
        control: PathBuf,
    },
}

struct Keyboard(Stdin);

impl AsFd for Keyboard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ConsoleInput for Keyboard {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<ConsoleRead> {
        // Not through the standard library's buffer, which the event loop cannot see.
        let count = rustix::io::read(&self.0, buffer)?;
        Ok(match count {
            0 => ConsoleRead::Closed,
            count => ConsoleRead::Bytes(count),
        })
    }
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::INFO)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", in_one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let Arguments::Run {
        kernel,
        initramfs,
        cmdline,
        cpus,
        memory,
        vdpa,
        disks,
        control,
    } = arguments;
    let config = VmConfig {
        kernel,
        initramfs,
        cmdline,
        cpus,
        cpu: CpuBaseline::default(),
        cpu_affinity: CpuAffinity::default(),
        memory,
        vdpa,
        disks,
        ring_watch: RingWatch::default(),
        vfio: Vec::new(),
        iommu: None,
    };
    let console = Console::Terminal(TerminalConsole {
        input: Some(Box::new(Keyboard(std::io::stdin()))),
        output: std::io::stdout().as_fd().try_clone_to_owned()?,
    });
    let stop = StopHandle::new()?;
    let mut machine = Machine::new(&config, console, &stop)?;
    let handle = machine.handle();
    // A boot that is retried finds the socket of the previous attempt.
    let _ = std::fs::remove_file(&control);
    let listener = UnixListener::bind(&control)?;
    std::thread::Builder::new()
        .name("control".into())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                // The client has gone.
                let _ = serve(&stream, &handle);
            }
        })?;
    Ok(match machine.run()? {
        Exit::PoweredOff | Exit::Stopped | Exit::HandedOver | Exit::Moved => ExitCode::SUCCESS,
        // It never migrates a machine.
        Exit::Indeterminate => ExitCode::FAILURE,
        Exit::Crashed(report) => {
            eprintln!("error: the guest crashed: {report}");
            ExitCode::from(CRASHED)
        }
    })
}

fn serve(stream: &UnixStream, handle: &Handle) -> std::io::Result<()> {
    for line in BufReader::new(stream).lines() {
        let answer = obey(&line?, handle).unwrap_or_else(|error| json!({ "error": error }));
        let mut stream = stream;
        stream.write_all(format!("{answer}\n").as_bytes())?;
    }
    Ok(())
}

fn obey(line: &str, handle: &Handle) -> Result<Value, String> {
    let refused = |error: RequestError| in_one_line(&error);
    let words: Vec<&str> = line.split_whitespace().collect();
    match words.as_slice() {
        ["plug", options] => {
            let config: VdpaConfig = options.parse().map_err(|error| in_one_line(&error))?;
            handle
                .plug_nic(&config)
                .map(|nic| show(&nic))
                .map_err(refused)
        }
        ["unplug", id] => handle.unplug_nic(id).map(|nic| show(&nic)).map_err(refused),
        ["wait-unplugged", serial, milliseconds] => {
            let number = |word: &str| word.parse::<u64>().map_err(|error| error.to_string());
            let (serial, limit) = (number(serial)?, number(milliseconds)?);
            let (start, limit) = (Instant::now(), Duration::from_millis(limit));
            let is_there = || handle.status().nics.iter().any(|nic| nic.serial == serial);
            let mut unplugged = !is_there();
            while !unplugged && start.elapsed() < limit {
                std::thread::sleep(Duration::from_millis(1));
                unplugged = !is_there();
            }
            Ok(json!({ "unplugged": unplugged }))
        }
        ["announce", id] => handle.announce(id).map(|()| json!({})).map_err(refused),
        ["dirty-log", switch @ ("on" | "off")] => handle
            .dirty_log(*switch == "on")
            .map(|()| json!({}))
            .map_err(refused),
        ["nics"] => {
            let status = handle.status();
            let nics: Vec<Value> = status.nics.iter().map(show).collect();
            let ended = status.run == RunState::Ended;
            Ok(json!({ "generation": status.generation, "nics": nics, "ended": ended }))
        }
        ["resources"] => {
            let has = handle.resources().map_err(refused)?;
            Ok(json!({
                "memory_slots": has.memory_slots,
                "doorbells": has.doorbells,
                "mapped_doorbells": has.mapped_doorbells,
                "vectors": has.msi.vectors,
                "routes": has.msi.routes,
                "irqfds": has.msi.irqfds,
            }))
        }
        _ => Err(format!("unknown request {line:?}")),
    }
}

fn show(nic: &NicStatus) -> Value {
    json!({
        "id": nic.id,
        "path": nic.config.shown_path(),
        "address": nic.address.to_string(),
        "state": match nic.state {
            PlugPhase::UnplugRequested => "unplug-requested",
            PlugPhase::DeviceRemoved => "device-removed",
            _ => "plugged",
        },
        "serial": nic.serial,
    })
}
