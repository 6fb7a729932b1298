//! Compares this crate's numbers and layouts with the kernel's headers.
//!
//! [`table`] lists the crate's values, [`c_probe`] is a C program that prints the headers' values,
//! and [`compare`] compares the two. The caller runs the compiler.
//!
//! Macros younger than the headers print `missing` instead of failing to compile; the caller
//! decides whether that is acceptable.

use std::fmt::Write as _;
use std::mem::offset_of;

use super::vduse::{
    VDUSE_ACCESS_RO, VDUSE_ACCESS_RW, VDUSE_ACCESS_WO, VDUSE_API_VERSION, VDUSE_NAME_MAX,
    VDUSE_REQ_RESULT_FAILED, VDUSE_REQ_RESULT_OK, vduse_dev_config, vduse_dev_request,
    vduse_dev_response, vduse_iotlb_entry, vduse_vq_config, vduse_vq_eventfd, vduse_vq_info,
    vduse_vq_state_packed,
};
use super::{
    BackendFeatures, VHOST_ACCESS_RO, VHOST_ACCESS_RW, VHOST_ACCESS_WO, VHOST_FILE_UNBIND,
    VHOST_IOTLB_BATCH_BEGIN, VHOST_IOTLB_BATCH_END, VHOST_IOTLB_INVALIDATE, VHOST_IOTLB_MSG_V2,
    VHOST_IOTLB_UPDATE, VHOST_VIRTIO, ioctl_numbers, message, vhost_iotlb_msg, vhost_vdpa_config,
    vhost_vdpa_iova_range, vhost_vring_addr, vhost_vring_file, vhost_vring_state,
};

/// A value to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// A C expression over the kernel's headers: a macro, `sizeof` or `offsetof`.
    pub expression: &'static str,
    /// The crate's value.
    pub value: u64,
    /// Whether the expression is a macro, which older headers may lack.
    pub is_macro: bool,
}

macro_rules! structs {
    ($($rust:ident { $($field:ident => $c_field:literal),* $(,)? })+) => {
        vec![$(
            (concat!("sizeof(struct ", stringify!($rust), ")"), size_of::<$rust>()),
            $((
                concat!("offsetof(struct ", stringify!($rust), ", ", $c_field, ")"),
                offset_of!($rust, $field),
            ),)*
        )+]
    };
}

/// Every ioctl, constant, struct size and field offset that this crate uses.
#[must_use]
pub fn table() -> Vec<Entry> {
    let constants = [
        ("VHOST_VIRTIO", u64::from(VHOST_VIRTIO)),
        ("VHOST_ACCESS_RO", u64::from(VHOST_ACCESS_RO)),
        ("VHOST_ACCESS_WO", u64::from(VHOST_ACCESS_WO)),
        ("VHOST_ACCESS_RW", u64::from(VHOST_ACCESS_RW)),
        ("VHOST_IOTLB_UPDATE", u64::from(VHOST_IOTLB_UPDATE)),
        ("VHOST_IOTLB_INVALIDATE", u64::from(VHOST_IOTLB_INVALIDATE)),
        (
            "VHOST_IOTLB_BATCH_BEGIN",
            u64::from(VHOST_IOTLB_BATCH_BEGIN),
        ),
        ("VHOST_IOTLB_BATCH_END", u64::from(VHOST_IOTLB_BATCH_END)),
        ("VHOST_IOTLB_MSG_V2", u64::from(VHOST_IOTLB_MSG_V2)),
        (
            "VHOST_FILE_UNBIND",
            i64::from(VHOST_FILE_UNBIND).cast_unsigned(),
        ),
        ("VDUSE_API_VERSION", VDUSE_API_VERSION),
        ("VDUSE_NAME_MAX", VDUSE_NAME_MAX as u64),
        ("VDUSE_ACCESS_RO", u64::from(VDUSE_ACCESS_RO)),
        ("VDUSE_ACCESS_WO", u64::from(VDUSE_ACCESS_WO)),
        ("VDUSE_ACCESS_RW", u64::from(VDUSE_ACCESS_RW)),
        ("VDUSE_REQ_RESULT_OK", u64::from(VDUSE_REQ_RESULT_OK)),
        (
            "VDUSE_REQ_RESULT_FAILED",
            u64::from(VDUSE_REQ_RESULT_FAILED),
        ),
    ];
    // The header has bit numbers where the crate has masks.
    let backend_features = [
        (
            "VHOST_BACKEND_F_IOTLB_MSG_V2",
            BackendFeatures::IOTLB_MSG_V2,
        ),
        ("VHOST_BACKEND_F_IOTLB_BATCH", BackendFeatures::IOTLB_BATCH),
        ("VHOST_BACKEND_F_IOTLB_ASID", BackendFeatures::IOTLB_ASID),
        ("VHOST_BACKEND_F_SUSPEND", BackendFeatures::SUSPEND),
        ("VHOST_BACKEND_F_RESUME", BackendFeatures::RESUME),
        (
            "VHOST_BACKEND_F_ENABLE_AFTER_DRIVER_OK",
            BackendFeatures::ENABLE_AFTER_DRIVER_OK,
        ),
        ("VHOST_BACKEND_F_DESC_ASID", BackendFeatures::DESC_ASID),
        (
            "VHOST_BACKEND_F_IOTLB_PERSIST",
            BackendFeatures::IOTLB_PERSIST,
        ),
    ]
    .map(|(name, mask)| (name, u64::from(mask.bits().trailing_zeros())));
    let mut layouts = structs! {
        vhost_vring_state { index => "index", num => "num" }
        vhost_vring_file { index => "index", fd => "fd" }
        vhost_vring_addr {
            index => "index", flags => "flags", desc_user_addr => "desc_user_addr",
            used_user_addr => "used_user_addr", avail_user_addr => "avail_user_addr",
            log_guest_addr => "log_guest_addr",
        }
        vhost_vdpa_config { off => "off", len => "len", buf => "buf" }
        vhost_vdpa_iova_range { first => "first", last => "last" }
        vhost_iotlb_msg {
            iova => "iova", size => "size", uaddr => "uaddr", perm => "perm", type_ => "type",
        }
        vduse_dev_config {
            name => "name", vendor_id => "vendor_id", device_id => "device_id",
            features => "features", vq_num => "vq_num", vq_align => "vq_align",
            config_size => "config_size",
        }
        vduse_iotlb_entry { offset => "offset", start => "start", last => "last", perm => "perm" }
        vduse_vq_config { index => "index", max_size => "max_size" }
        vduse_vq_state_packed {
            last_avail_counter => "last_avail_counter", last_avail_idx => "last_avail_idx",
            last_used_counter => "last_used_counter", last_used_idx => "last_used_idx",
        }
        vduse_vq_info {
            index => "index", num => "num", desc_addr => "desc_addr",
            driver_addr => "driver_addr", device_addr => "device_addr", packed => "packed",
            ready => "ready",
        }
        vduse_vq_eventfd { index => "index", fd => "fd" }
        vduse_dev_request {
            type_ => "type", request_id => "request_id", padding => "vq_state",
            padding => "s.status", padding => "iova.start",
        }
        vduse_dev_response {
            request_id => "request_id", result => "result", index => "vq_state.index",
            packed => "vq_state.packed",
        }
    };
    layouts.extend([
        ("sizeof(struct vhost_msg_v2)", message::MESSAGE_SIZE),
        ("offsetof(struct vhost_msg_v2, type)", 0),
        ("offsetof(struct vhost_msg_v2, asid)", message::ASID_OFFSET),
        (
            "offsetof(struct vhost_msg_v2, iotlb)",
            message::IOTLB_OFFSET,
        ),
    ]);

    let macros = ioctl_numbers()
        .into_iter()
        .chain(super::vduse::ioctl_numbers())
        .chain(constants)
        .chain(backend_features)
        .map(|(expression, value)| Entry {
            expression,
            value,
            is_macro: true,
        });
    let layouts = layouts.into_iter().map(|(expression, value)| Entry {
        expression,
        value: u64::try_from(value).unwrap_or(u64::MAX),
        is_macro: false,
    });
    macros.chain(layouts).collect()
}

/// A C program that prints `expression=value` for every entry of [`table`], or `expression=missing`
/// for a macro that the headers do not define.
#[must_use]
pub fn c_probe() -> String {
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/vhost.h>\n\
         #include <linux/vhost_types.h>\n#include <linux/vduse.h>\nint main(void)\n{\n",
    );
    for Entry {
        expression,
        is_macro,
        ..
    } in table()
    {
        let print = format!(
            "\tprintf(\"%s=%llu\\n\", \"{expression}\", (unsigned long long)({expression}));"
        );
        // Writing to a String cannot fail.
        let _ = if is_macro {
            writeln!(
                program,
                "#ifdef {expression}\n{print}\n#else\n\tputs(\"{expression}=missing\");\n#endif"
            )
        } else {
            writeln!(program, "{print}")
        };
    }
    program.push_str("\treturn 0;\n}\n");
    program
}

/// Compares the output of the probe with [`table`]. Returns the macros that the headers are too old
/// for.
///
/// # Errors
/// All expressions whose value differs or was not printed.
pub fn compare(probe_output: &str) -> Result<Vec<&'static str>, Vec<String>> {
    let printed: std::collections::HashMap<&str, &str> = probe_output
        .lines()
        .filter_map(|line| line.rsplit_once('='))
        .collect();
    let (mut missing, mut mismatches) = (Vec::new(), Vec::new());
    for entry in table() {
        match printed.get(entry.expression) {
            Some(&"missing") if entry.is_macro => missing.push(entry.expression),
            Some(theirs) if theirs.parse() == Ok(entry.value) => {}
            theirs => mismatches.push(format!(
                "{} is {} here but {} in the kernel's headers",
                entry.expression,
                entry.value,
                theirs.unwrap_or(&"nothing")
            )),
        }
    }
    if mismatches.is_empty() {
        Ok(missing)
    } else {
        Err(mismatches)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn as_printed(entries: &[Entry]) -> String {
        entries
            .iter()
            .map(|entry| format!("{}={}\n", entry.expression, entry.value))
            .collect()
    }

    #[test]
    fn comparison_sees_every_difference() {
        let entries = table();
        assert_eq!(compare(&as_printed(&entries)), Ok(vec![]));
        for index in 0..entries.len() {
            let mut changed = entries.clone();
            changed[index].value ^= 1;
            assert_eq!(compare(&as_printed(&changed)).unwrap_err().len(), 1);
            changed.remove(index);
            let mismatches = compare(&as_printed(&changed)).unwrap_err();
            assert!(mismatches[0].contains("but nothing in"), "{mismatches:?}");
        }
    }

    #[test]
    fn the_number_of_an_ioctl_encodes_the_size_of_its_argument() {
        fn size(number: u64) -> usize {
            usize::try_from(number >> 16 & 0x3fff).unwrap()
        }
        assert_eq!(
            size(crate::uapi::get_vring_size().number()),
            size_of::<vhost_vring_state>()
        );
        assert_eq!(
            size(crate::uapi::set_vring_addr().number()),
            size_of::<vhost_vring_addr>()
        );
        assert_eq!(
            size(crate::uapi::get_config().number()),
            size_of::<vhost_vdpa_config>()
        );
    }

    /// The headers of the build machine may be older than the crate, so macros may be missing here;
    /// the lab's test allows none.
    #[test]
    fn agrees_with_the_headers_of_this_machine() {
        let directory = std::env::temp_dir().join(format!("vdpa-uapi-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (source, program) = (directory.join("probe.c"), directory.join("probe"));
        std::fs::write(&source, c_probe()).unwrap();
        let compiled = Command::new("cc")
            .arg(&source)
            .arg("-o")
            .arg(&program)
            .status();
        let output = compiled.map(|status| {
            assert!(
                status.success(),
                "the probe does not compile: install linux-libc-dev"
            );
            Command::new(&program).output().unwrap()
        });
        std::fs::remove_dir_all(&directory).unwrap();
        let output = output.expect("no C compiler: install gcc");
        let missing = compare(std::str::from_utf8(&output.stdout).unwrap()).unwrap();
        assert!(
            missing.iter().all(|name| name.starts_with("VHOST_BACKEND_F_")
                || name.starts_with("VHOST_VDPA_")),
            "{missing:?}"
        );
    }
}
