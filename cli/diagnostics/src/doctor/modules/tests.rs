//! Modules of fake kernels.

use flate2::Compression;
use flate2::read::GzEncoder;

use super::super::fake::Tree;
use super::super::finding::State;
use super::*;

const RELEASE: &str = "6.12.1-test";

fn tree() -> Tree {
    let tree = Tree::new();
    tree.file("/proc/sys/kernel/osrelease", format!("{RELEASE}\n"));
    tree
}

fn lib(name: &str) -> String {
    format!("/lib/modules/{RELEASE}/{name}")
}

fn state(tree: &Tree, name: &str) -> Finding {
    let found = check(&tree.host());
    found
        .into_iter()
        .find(|finding| finding.name == name)
        .unwrap()
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = GzEncoder::new(content, Compression::default());
    encoder.read_to_end(&mut file).unwrap();
    file
}

#[test]
fn loaded_loadable_built_in_and_absent() {
    let tree = tree();
    tree.file("/sys/module/vdpa/initstate", "live\n");
    // Not a module: it has only parameters.
    tree.file("/sys/module/vduse/parameters/max_iotlb_entries", "2048\n");
    tree.file(
        &lib("modules.dep"),
        "kernel/drivers/vhost/vhost-vdpa.ko.xz: kernel/drivers/vdpa/vdpa.ko.xz\ngarbage\n\0\n",
    );
    tree.file(
        &lib("modules.builtin"),
        b"\xff\xff\nkernel/drivers/vfio/pci/vfio-pci.ko\n",
    );
    assert_eq!(state(&tree, "vdpa").state, State::Ok);
    let vhost = state(&tree, "vhost_vdpa");
    assert_eq!(vhost.state, State::Missing);
    assert_eq!(vhost.remedy[0], "modprobe vhost_vdpa");
    assert!(state(&tree, "vfio_pci").found.contains("built into"));
    assert!(state(&tree, "vduse").found.contains("not in this kernel"));
}

#[test]
fn software_nics_need_vduse_and_tun_with_their_files() {
    let tree = tree();
    let names = ["vduse", "tun"];
    let files = ["/dev/vduse/control", "/dev/net/tun"];
    tree.file(&lib("modules.dep"), "a/vduse.ko: b\na/tun.ko.xz:\n");
    for name in names {
        let finding = state(&tree, name);
        let wanted = format!("`modprobe {name}` where needed");
        assert_eq!(finding.state, State::Ok);
        assert!(finding.found.contains(&wanted), "{finding:?}");
        tree.file(&format!("/sys/module/{name}/initstate"), "live\n");
    }
    for (name, file) in names.into_iter().zip(files) {
        let finding = state(&tree, name);
        assert_eq!(finding.state, State::Warning);
        assert!(finding.found.contains(file), "{finding:?}");
        let wanted = format!("in a container: start it with --device {file}");
        assert_eq!(finding.remedy[0], wanted);
        tree.file(file, "");
        assert_eq!(state(&tree, name).state, State::Ok);
    }
    tree.file(&lib("modules.dep"), "");
    assert!(state(&tree, "tun").found.starts_with("loaded"));
}

#[test]
fn a_kernel_without_vdpa() {
    let tree = tree();
    tree.file(&lib("modules.dep"), "");
    let vdpa = state(&tree, "vdpa");
    assert_eq!(vdpa.state, State::Missing);
    assert!(vdpa.remedy[0].contains("CONFIG_VDPA=m"));
    assert_eq!(state(&tree, "virtio_vdpa").state, State::Ok);
}

#[test]
fn without_module_files_the_configuration_decides() {
    let tree = tree();
    let config = b"CONFIG_VDPA=y\nCONFIG_VHOST_VDPA=m\n# CONFIG_VDPA_USER is not set\n";
    tree.file("/proc/config.gz", gzip(config));
    assert_eq!(state(&tree, "vdpa").state, State::Ok);
    assert_eq!(state(&tree, "vhost_vdpa").state, State::Unknown);
    assert!(state(&tree, "vduse").found.contains("not in this kernel"));

    let nothing = Tree::new();
    assert!(
        check(&nothing.host())
            .iter()
            .all(|finding| finding.state == State::Unknown)
    );
}

#[test]
fn only_a_whole_gzip_file_is_unpacked() {
    let text = b"CONFIG_VDPA=y";
    let file = gzip(text);
    assert_eq!(gunzip(&file).unwrap(), text);
    for length in 0..file.len() {
        assert_eq!(gunzip(&file[..length]), None, "{length}");
    }
    assert_eq!(gunzip(&[0xff; 64]), None);
}

#[test]
fn a_configuration_that_unpacks_without_end_is_refused() {
    let zeros = vec![0; usize::try_from(CONFIG_MAX).unwrap() + 1];
    let file = gzip(&zeros);
    assert!(file.len() < 10_000);
    assert_eq!(gunzip(&file), None);
    let tree = tree();
    tree.file("/proc/config.gz", file);
    let host = tree.host();
    let modules = Modules::of(&host);
    let error = modules.config_source().unwrap_err().to_string();
    assert!(error.contains("unexpected content"), "{error}");
}
