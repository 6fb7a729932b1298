use serde_json::{Value, json};

use super::*;
use crate::node::NicSettings;

fn message<T: fmt::Debug>(result: Result<T, KeyValueError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn vdpa_options_as_people_type_them() {
    let vdpa: VdpaConfig = "path=/dev/vhost-vdpa-0,num_queues=3,mac=52:54:00:12:34:56"
        .parse()
        .unwrap();
    assert_eq!(vdpa.source, DeviceSource::Path("/dev/vhost-vdpa-0".into()));
    assert_eq!(vdpa.num_queues, Some(3));
    assert_eq!(vdpa.doorbell, DoorbellMode::Auto);
    assert_eq!(vdpa.mac.unwrap().to_string(), "52:54:00:12:34:56");
    assert_eq!(vdpa.id, None);
    let vdpa: VdpaConfig = "path=a,doorbell=on".parse().unwrap();
    assert_eq!(vdpa.doorbell, DoorbellMode::On);
}

#[test]
fn both_spellings_of_a_backup_are_refused() {
    let both = "path=/a,backup=/b,failover=/c".parse::<crate::node::NicSettings>();
    let error = both.unwrap_err().to_string();
    assert_eq!(error, "backup or failover is given twice");
    assert!(
        "path=/a,failover=/c"
            .parse::<crate::node::NicSettings>()
            .is_ok()
    );
}

#[test]
fn a_mask_of_features_is_a_number_or_hexadecimal() {
    let nic = |mask: Value| -> Result<NicSettings, _> {
        serde_json::from_value(json!({ "from": "software", "device_features": mask }))
    };
    let all = "from=software,device_features=0xffffffffffffffff";
    let parsed = |text: &str| text.parse::<NicSettings>().unwrap();
    for (nic, wanted) in [
        (parsed(all), u64::MAX),
        (parsed("from=a,device_features=2F"), 0x2f),
        (nic(json!(47)).unwrap(), 47),
        (nic(json!(u64::MAX)).unwrap(), u64::MAX),
        (nic(json!("0x2f")).unwrap(), 0x2f),
    ] {
        assert_eq!(nic.device_features, Some(FeatureMask(wanted)));
        // A client gets a number.
        let json = serde_json::to_value(&nic).unwrap();
        assert_eq!(json["device_features"], wanted);
    }
    for wrong in ["", "0x", "+1", "0x10000000000000000", "all"] {
        let text = format!("from=software,device_features={wrong}");
        let error = text.parse::<NicSettings>().unwrap_err().to_string();
        let wanted = format!("device_features: {wrong:?} is not a mask of up to 64 bits");
        assert!(error.starts_with(&wanted), "{error}");
        nic(json!(wrong)).unwrap_err();
    }
    nic(json!(-1)).unwrap_err();
}

#[test]
fn option_errors_name_the_option() {
    for (text, expected) in [
        ("", "not of the form key=value"),
        ("path=a,mac", "not of the form key=value"),
        ("mac,path=a", "path is given twice"),
        ("path=a,path=b", "path is given twice"),
        ("path=a,colour=red", "unknown field `colour`"),
        ("id=a", "missing field `path`"),
        ("path=a,doorbell=maybe", "`maybe`"),
        ("path=a,num_queues=many", "num_queues=\"many\""),
        ("path=a,num_queues=65536", "num_queues=\"65536\""),
        ("path=a,num_queues=-1", "num_queues=\"-1\""),
        ("path=a,mac=01:00:00:00:00:00", "not a unicast address"),
        ("path=a,mac=52:54:00:12:34", "not a MAC address"),
        ("path=a,mac=52:54:00:12:34:56:78", "not a MAC address"),
        ("path=a,mac=52:54:00:12:34:+5", "not a MAC address"),
    ] {
        let got = message(text.parse::<VdpaConfig>());
        assert!(got.contains(expected), "{text}: {got}");
    }
    let got = message("path=a,readonly=maybe".parse::<DiskConfig>());
    assert!(
        got.contains("readonly=\"maybe\": expected on or off"),
        "{got}"
    );
}

#[test]
fn a_path_may_come_first_without_its_key() {
    let vdpa: VdpaConfig = "/dev/vhost-vdpa-0".parse().unwrap();
    assert_eq!(vdpa, "path=/dev/vhost-vdpa-0".parse().unwrap());
    let disk: DiskConfig = "/a=b.img,readonly=on".parse().unwrap();
    assert_eq!(disk, "path=/a=b.img,readonly=on".parse().unwrap());
    let disk: DiskConfig = "d,,e.img".parse().unwrap();
    assert_eq!(disk.path, PathBuf::from("d,e.img"));
}

#[test]
fn doubled_commas_are_literal() {
    let disk: DiskConfig = "a/b,bps=100M,iops=500,burst=3".parse().unwrap();
    assert_eq!(disk.bps.map(MemorySize::bytes), Some(100 << 20));
    let json = serde_json::json!({
        "path": "a/b", "readonly": false, "stall_kick": false,
        "bps": "100M", "iops": 500, "burst": 3,
    });
    assert_eq!(serde_json::to_value(&disk).unwrap(), json);
    for wrong in ["bps=100", "iops=0", "iops=-1", "burst=0", "burst=65536"] {
        let parsed = format!("path=a,{wrong}").parse::<DiskConfig>();
        assert!(parsed.is_err(), "{wrong}");
    }
    let disk: DiskConfig = "path=a,,b.img,readonly=on".parse().unwrap();
    assert_eq!(disk.path, PathBuf::from("a,b.img"));
    assert!(disk.readonly);
}

#[test]
fn memory_sizes_carry_a_unit_and_never_wrap() {
    for (text, bytes) in [
        ("512M", 512 << 20),
        ("4G", 4 << 30),
        ("1T", 1 << 40),
        ("16384K", 16 << 20),
        ("512MiB", 512 << 20),
        ("0M", 0),
    ] {
        let size = text.parse::<MemorySize>().unwrap();
        assert_eq!(size.bytes(), bytes, "{text}");
        assert_eq!(size.to_string().parse(), Ok(size), "{text}");
    }
    for text in [
        "", "M", "512", "-1M", "+1M", "1.5G", "12 M", "1X", "ЖM", "1Ж",
    ] {
        assert!(
            matches!(
                text.parse::<MemorySize>(),
                Err(MemorySizeError::Malformed(_))
            ),
            "{text}"
        );
    }
    for text in ["17592186044416M", "99999999999999999999G"] {
        assert!(
            matches!(
                text.parse::<MemorySize>(),
                Err(MemorySizeError::TooLarge(_))
            ),
            "{text}"
        );
    }
}

#[test]
fn memory_is_a_size_or_a_table() {
    let plain: MemoryConfig = "1G".parse().unwrap();
    assert_eq!(plain.size.bytes(), 1 << 30);
    let full: MemoryConfig = "size=1G,hugepages=2M".parse().unwrap();
    assert_eq!(full.hugepages, Some(HugePageSize::Size2M));
    assert_eq!(full.size, plain.size);
    assert_eq!("1G".parse(), Ok(HugePageSize::Size1G));
    assert_eq!("2m".parse(), Ok(HugePageSize::Size2M));
    assert!("4M".parse::<HugePageSize>().is_err());
    let placed: MemoryConfig = "size=1G,host_numa_node=1".parse().unwrap();
    assert_eq!(placed.host_numa_node, Some(1));
    assert!(
        message("size=1G,host_numa_node=-1".parse::<MemoryConfig>()).contains("host_numa_node")
    );
    assert!(message("size=1G,hugepages=4M".parse::<MemoryConfig>()).contains("hugepages"));
    assert!(
        message("size=1G,shared=on".parse::<MemoryConfig>()).contains("unknown field `shared`")
    );
}

#[test]
fn cpu_counts_are_bounded() {
    assert_eq!("32".parse::<CpuCount>().unwrap().get(), 32);
    for (text, expected) in [
        ("0", "0 vCPUs: a machine has 1 to 32"),
        ("33", "33 vCPUs: a machine has 1 to 32"),
        ("100000", "100000 vCPUs: a machine has 1 to 32"),
        ("-1", "\"-1\" is not a number of vCPUs"),
        ("two", "\"two\" is not a number of vCPUs"),
    ] {
        assert_eq!(text.parse::<CpuCount>().unwrap_err().to_string(), expected);
    }
}

#[test]
fn a_whole_configuration_round_trips() {
    let text = r#"{
        "kernel": "vmlinux", "initramfs": "initrd", "cpus": 4, "cpu": "x86-64-v3",
        "cpu_affinity": [[0], [1], [0, 1], [2]],
        "memory": {"size": "2G", "hugepages": "1G", "host_numa_node": 1},
        "vdpa": [{"path": "/dev/vhost-vdpa-0", "mac": "52:54:00:12:34:56"}],
        "disks": [{"path": "a.img", "readonly": true}]
    }"#;
    let config: VmConfig = serde_json::from_str(text).unwrap();
    assert_eq!(config.cmdline, DEFAULT_CMDLINE);
    assert_eq!(config.cpus.get(), 4);
    assert_eq!(config.cpu, CpuBaseline::V3);
    assert_eq!(config.cpu_affinity.lists().len(), 4);
    let again: VmConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);
}

#[test]
fn unknown_and_impossible_fields_are_refused() {
    for (text, expected) in [
        (r#"{"kernel": "k", "colour": 1}"#, "unknown field `colour`"),
        (r#"{"kernel": "k", "cpus": 0}"#, "0 vCPUs"),
        (r#"{"kernel": "k", "cpus": -1}"#, "-1"),
        (r#"{"kernel": "k", "cpu": "core2duo"}"#, "`core2duo`"),
        (
            r#"{"kernel": "k", "memory": "1"}"#,
            "give a number and a unit",
        ),
        (
            r#"{"kernel": "k", "memory": {"sise": "1G"}}"#,
            "unknown field `sise`",
        ),
        (
            r#"{"kernel": "k", "cpu_affinity": [[0], []]}"#,
            "at least one CPU",
        ),
        (r#"{"cpus": 1}"#, "missing field `kernel`"),
    ] {
        let got = serde_json::from_str::<VmConfig>(text)
            .unwrap_err()
            .to_string();
        assert!(got.contains(expected), "{text}: {got}");
    }
}

#[test]
fn ring_watch_is_off_or_seconds() {
    assert_eq!("5s".parse::<RingWatch>(), Ok(RingWatch::default()));
    for (text, seconds) in [("off", None), ("1", Some(1)), ("3600", Some(3600))] {
        let watch: RingWatch = text.parse().unwrap();
        assert_eq!(watch.threshold().map(|time| time.as_secs()), seconds);
        assert_eq!(watch.to_string(), text);
        let json = serde_json::to_string(&watch).unwrap();
        assert_eq!(serde_json::from_str::<RingWatch>(&json).unwrap(), watch);
    }
    for text in ["", "on", "0", "3601", "-1", "1.5", "5m"] {
        let error = text.parse::<RingWatch>().unwrap_err().to_string();
        assert!(error.contains("give off, or 1 to 3600 seconds"), "{error}");
    }
    for json in ["0", "3601", "-1", "1.5", "true", "null", "\"on\""] {
        let text = format!(r#"{{"kernel": "k", "ring_watch": {json}}}"#);
        let error = serde_json::from_str::<VmConfig>(&text).unwrap_err();
        assert!(error.to_string().contains("seconds"), "{json}: {error}");
    }
    let config: VmConfig = serde_json::from_str(r#"{"kernel": "k"}"#).unwrap();
    assert_eq!(config.ring_watch, "5".parse().unwrap());
    assert_eq!("OFF".parse::<RingWatch>(), Ok(RingWatch::Off));
    let vdpa: VdpaConfig = "path=a,stall_kick=on".parse().unwrap();
    assert!(vdpa.stall_kick);
    let vdpa: VdpaConfig = "path=a,backup=/dev/vhost-vdpa-1".parse().unwrap();
    assert_eq!(
        vdpa.backup.as_deref(),
        Some(std::path::Path::new("/dev/vhost-vdpa-1"))
    );
    let error = "path=/a,backup=/a".parse::<VdpaConfig>().unwrap_err();
    assert!(error.to_string().contains("itself"), "{error}");
}
