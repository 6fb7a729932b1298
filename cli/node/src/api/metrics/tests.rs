//! Metrics of fake VMs and processes.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use bellhop_api::merge_patch;
use serde_json::{Value, json};

use super::*;

fn vm(name: &str, other: &Value) -> Vm {
    let mut vm = json!({
        "name": name, "spec": {"state": "Running"}, "status": {
            "phase": "Running", "pid": 7, "uptime_s": 60,
            "nic_devices": [{"id": "net0", "failed_over": true}],
            "console": {"socket": "/c", "log": "/l"}, "log": "/v",
        },
    });
    merge_patch::apply(&mut vm, other);
    serde_json::from_value(vm).unwrap()
}

fn nic() -> Value {
    json!({
        "id": "another", "state": "Plugged", "path": "/dev/vhost-vdpa-0", "doorbell": "auto",
        "device": {
            "status": 15, "driver_ok": true, "broken": false, "features_offered": [],
            "queues": [queue(0, 3), queue(1, 4), queue(1, 5), queue(2, 6)],
        },
    })
}

fn queue(index: u16, posted: u64) -> Value {
    json!({
        "index": index, "size": 256, "max_size": 256, "enabled": index < 2, "kick": "Doorbell",
        "watch": {
            "state": "Moving", "in_flight": 1, "posted_per_s": 0, "completed_per_s": 0,
            "stuck_for_s": 0, "stall_kicks": 0, "posted": posted, "completed": 2,
        },
    })
}

fn text(samples: &[Sample]) -> String {
    let mut text = Text::default();
    write(&mut text, samples);
    // Each sample occurs once.
    let mut seen = BTreeSet::new();
    for line in text.as_str().lines().filter(|line| !line.starts_with('#')) {
        let (name, _) = line.rsplit_once(' ').unwrap();
        assert!(seen.insert(name), "twice: {line}");
    }
    text.as_str().to_owned()
}

#[test]
fn each_machine_has_samples_and_a_stopped_one_its_phase() {
    let alarm = |queue| json!({"device": "net0", "queue": queue, "alarm": "Stuck"});
    let nic: NicInfo = serde_json::from_value(nic()).unwrap();
    let samples = [
        Sample {
            info: vm("web", &json!({"status": {"alarms": [alarm(1), alarm(1)]}})),
            boots: Some(2),
            memory: Some(Memory {
                resident: 4096,
                pinned: 8192,
            }),
            nics: Some(BTreeMap::from([("net0".parse().unwrap(), nic.into())])),
        },
        Sample {
            info: vm(
                "old",
                &json!({
                    "spec": {"state": "Stopped"},
                    "status": {"phase": "Stopped", "uptime_s": null},
                }),
            ),
            boots: None,
            memory: None,
            nics: None,
        },
        Sample {
            info: vm(
                "hung",
                &json!({
                    "status": {"alarms": [
                        {"device": "a\"b", "queue": 0, "alarm": "New"},
                        {"device": "iommu", "queue": 0, "alarm": "Refused"},
                    ]},
                }),
            ),
            boots: Some(1),
            memory: None,
            nics: None,
        },
    ];
    let text = text(&samples);
    for line in [
        "bellhop_build_info{version=\"0.1.0\",api=\"1\"} 1",
        "bellhop_node_vms{phase=\"Running\"} 2",
        "bellhop_node_vms{phase=\"Paused\"} 0",
        "bellhop_node_pinned_bytes 8192",
        "bellhop_vm_phase{vm=\"old\",phase=\"Stopped\"} 1",
        "bellhop_vm_phase{vm=\"old\",phase=\"Running\"} 0",
        "bellhop_vm_wanted{vm=\"old\"} 0",
        "bellhop_vm_answers{vm=\"web\"} 1",
        "bellhop_vm_answers{vm=\"hung\"} 0",
        "bellhop_vm_boots_total{vm=\"web\"} 2",
        "bellhop_nic_failed_over{vm=\"web\",nic=\"net0\"} 1",
        "bellhop_nic_driver_ok{vm=\"web\",nic=\"net0\"} 1",
        "bellhop_nic_queues{vm=\"web\",nic=\"net0\",kick=\"doorbell\"} 2",
        "bellhop_queue_alarm{vm=\"web\",nic=\"net0\",queue=\"1\",alarm=\"Stuck\"} 1",
        "bellhop_queue_alarm{vm=\"hung\",disk=\"a\\\"b\",queue=\"0\",alarm=\"Unknown\"} 1",
        "bellhop_queue_alarm{vm=\"hung\",device=\"iommu\",queue=\"0\",alarm=\"Refused\"} 1",
        "bellhop_queue_posted_total{vm=\"web\",nic=\"net0\",queue=\"0\"} 3",
        "bellhop_queue_posted_total{vm=\"web\",nic=\"net0\",queue=\"1\"} 5",
    ] {
        assert!(text.lines().any(|one| one == line), "{line} in\n{text}");
    }
    assert!(!text.contains("bellhop_vm_answers{vm=\"old\"}"), "{text}");
    assert!(!text.contains("queue=\"2\""), "{text}");
}

#[test]
fn all_phases_are_counted() {
    let document: Value = serde_json::from_str(crate::api::DOCUMENT).unwrap();
    let schema = &document["components"]["schemas"]["VmPhase"];
    let values = schema["enum"].as_array().or(schema["oneOf"].as_array());
    assert_eq!(values.unwrap().len(), VmPhase::ALL.len(), "{schema}");
}

/// A process with its own socket, which sends these answers or none.
struct Process {
    name: String,
    socket: PathBuf,
}

impl Process {
    fn start(name: &str, answer: Option<Value>) -> Self {
        let file = format!("bellhop-metrics-{name}-{}", std::process::id());
        let socket = std::env::temp_dir().join(file);
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            let mut held = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
                match &answer {
                    Some(body) => {
                        let body = body.to_string();
                        let length = body.len();
                        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}");
                        let answer = format!("{head}\r\nconnection: close\r\n\r\n{body}");
                        stream.write_all(answer.as_bytes()).unwrap();
                    }
                    None => held.push(stream),
                }
            }
        });
        let name = name.to_owned();
        Self { name, socket }
    }

    fn asked(&self) -> (String, Vmm, Vec<NicId>) {
        let nics = vec!["net0".parse().unwrap()];
        (self.name.clone(), Vmm::new(&self.socket), nics)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[tokio::test]
async fn a_machine_that_hangs_holds_no_other_up() {
    let mut processes = vec![Process::start("good", Some(nic()))];
    for number in 0..8 {
        processes.push(Process::start(&format!("hung{number}"), None));
    }
    processes.push(Process::start("rubbish", Some(json!("no NIC"))));
    let mut asked: Vec<_> = processes.iter().map(Process::asked).collect();
    let gone = std::env::temp_dir().join("bellhop-metrics-gone");
    let nics = vec!["net0".parse().unwrap()];
    asked.push(("gone".to_owned(), Vmm::new(&gone), nics));
    let before = std::time::Instant::now();
    let answers = ask_all(asked, Role::Read, Duration::from_secs(2)).await;
    assert!(
        before.elapsed() < Duration::from_secs(9),
        "as long as a request may take"
    );
    assert_eq!(answers.keys().collect::<Vec<_>>(), ["good"]);
    // The NIC has the name in the request.
    let nics: Vec<&str> = answers["good"].keys().map(NicId::as_str).collect();
    assert_eq!(nics, ["net0"]);
}
