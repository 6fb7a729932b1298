//! Each operation of the node's API. Generated from its description; a test compares both.

operations! {
    /// Accept new virtual machines again.
    DELETE delete_cordon() ["v1", "cordon"]
        read ();

    /// Stop accepting new virtual machines.
    PUT put_cordon() ["v1", "cordon"]
        read ();

    /// Check the host.
    GET get_doctor() ["v1", "doctor"]
        read serde_json::Value;

    /// Watch events.
    ///
    /// [`Node::events`](super::super::Node::events) reads the stream.
    GET watch_events() ["v1", "events"]
        text String;

    /// List PCI functions.
    GET list_functions() ["v1", "functions"]
        read serde_json::Value;

    /// Read a PCI function.
    GET get_function(address) ["v1", "functions", address]
        read serde_json::Value;

    /// Set the number of virtual functions.
    PATCH patch_function(address; body) ["v1", "functions", address]
        read serde_json::Value;

    /// Read metrics of the node.
    GET get_node_metrics() ["v1", "metrics"]
        text String;

    /// List management devices.
    GET list_mgmtdevs() ["v1", "mgmtdevs"]
        read serde_json::Value;

    /// List NICs.
    GET list_nics() ["v1", "nics"]
        read serde_json::Value;

    /// Create a NIC.
    POST create_nic(; body) ["v1", "nics"]
        read serde_json::Value;

    /// Delete a NIC.
    DELETE delete_nic(name) ["v1", "nics", name]
        read ();

    /// Read a NIC.
    GET get_nic(name) ["v1", "nics", name]
        read serde_json::Value;

    /// Read this description.
    GET get_openapi() ["v1", "openapi.json"]
        read serde_json::Value;

    /// List operations.
    GET list_operations() ["v1", "operations"]
        read bellhop_api::Items<bellhop_api::node::Operation>;

    /// Cancel an operation.
    DELETE cancel_operation(id) ["v1", "operations", id]
        read bellhop_api::node::Operation;

    /// Read an operation.
    GET get_operation(id) ["v1", "operations", id]
        read bellhop_api::node::Operation;

    /// List ports.
    GET list_ports() ["v1", "ports"]
        read serde_json::Value;

    /// List the ports of a devlink instance.
    GET list_device_ports(bus, device) ["v1", "ports", bus, device]
        read serde_json::Value;

    /// Read a port.
    GET get_port(bus, device, index) ["v1", "ports", bus, device, index]
        read serde_json::Value;

    /// List snapshots.
    GET list_snapshots() ["v1", "snapshots"]
        read bellhop_api::Items<bellhop_api::node::Snapshot>;

    /// Delete a snapshot.
    DELETE delete_snapshot(name) ["v1", "snapshots", name]
        read ();

    /// Read a snapshot.
    GET get_snapshot(name) ["v1", "snapshots", name]
        read bellhop_api::node::Snapshot;

    /// Read the configuration of the virtual machine of a snapshot.
    GET get_snapshot_spec(name) ["v1", "snapshots", name, "spec"]
        read serde_json::Value;

    /// Read the topology.
    GET get_topology() ["v1", "topology"]
        read serde_json::Value;

    /// List vDPA devices.
    GET list_vdpa_devices() ["v1", "vdpa-devices"]
        read serde_json::Value;

    /// Delete a vDPA device.
    DELETE delete_vdpa_device(name) ["v1", "vdpa-devices", name]
        read ();

    /// Read a vDPA device.
    GET get_vdpa_device(name) ["v1", "vdpa-devices", name]
        read serde_json::Value;

    /// Set the MAC address of a vDPA device.
    PATCH patch_vdpa_device(name; body) ["v1", "vdpa-devices", name]
        read serde_json::Value;

    /// Create a vDPA device.
    PUT put_vdpa_device(name; body) ["v1", "vdpa-devices", name]
        read serde_json::Value;

    /// Read the version of the daemon.
    GET get_version() ["v1", "version"]
        read bellhop_api::node::Version;

    /// List virtual machines.
    GET list_vms() ["v1", "vms"]
        read bellhop_api::Items<bellhop_api::node::Vm>;

    /// Delete a virtual machine.
    DELETE delete_vm(name) ["v1", "vms", name]
        read ();

    /// Read a virtual machine.
    GET get_vm(name) ["v1", "vms", name]
        read bellhop_api::node::Vm;

    /// Change a virtual machine.
    PATCH patch_vm(name; body) ["v1", "vms", name]
        read bellhop_api::node::VmChanges;

    /// Create or replace a virtual machine with its NICs.
    PUT put_vm(name; body) ["v1", "vms", name]
        read serde_json::Value;

    /// Read the configuration.
    GET get_vm_config(name) ["v1", "vms", name, "config"]
        read bellhop_api::config::VmConfig;

    /// Use the console of a virtual machine.
    GET get_vm_console(name) ["v1", "vms", name, "console"]
        read ();

    /// List disks of a virtual machine.
    GET list_vm_disks(name) ["v1", "vms", name, "disks"]
        read bellhop_api::Items<bellhop_api::machine::DiskInfo>;

    /// Remove a disk from a virtual machine.
    DELETE delete_vm_disk(name, id) ["v1", "vms", name, "disks", id]
        read Option<bellhop_api::machine::DiskInfo>;

    /// Read the state of a disk of a virtual machine.
    GET get_vm_disk(name, id) ["v1", "vms", name, "disks", id]
        read bellhop_api::machine::DiskInfo;

    /// Add a disk to a virtual machine.
    PUT put_vm_disk(name, id; body) ["v1", "vms", name, "disks", id]
        read bellhop_api::machine::DiskInfo;

    /// Read the state of the guest's IOMMU.
    GET get_vm_iommu(name) ["v1", "vms", name, "iommu"]
        read bellhop_api::machine::IommuInfo;

    /// Read a log of a virtual machine.
    GET get_vm_log(name, log) ["v1", "vms", name, "logs", log]
        text String;

    /// Read metrics.
    GET get_vm_metrics(name) ["v1", "vms", name, "metrics"]
        text String;

    /// Cancel a migration.
    DELETE cancel_vm_migration(name) ["v1", "vms", name, "migration"]
        read ();

    /// Read the state of the last migration.
    GET get_vm_migration(name) ["v1", "vms", name, "migration"]
        read bellhop_api::machine::MigrationStatus;

    /// Resolve an indeterminate migration.
    PATCH resolve_vm_migration(name; body) ["v1", "vms", name, "migration"]
        read ();

    /// Migrate a virtual machine to another node.
    POST start_vm_migration(name; body) ["v1", "vms", name, "migration"]
        read serde_json::Value;

    /// List NICs.
    GET list_vm_nics(name) ["v1", "vms", name, "nics"]
        read bellhop_api::Items<bellhop_api::machine::NicSummary>;

    /// Remove a NIC from a virtual machine.
    DELETE delete_vm_nic(name, id) ["v1", "vms", name, "nics", id]
        read Option<bellhop_api::node::Vm>;

    /// Read a NIC of a virtual machine.
    GET get_vm_nic(name, id) ["v1", "vms", name, "nics", id]
        read bellhop_api::machine::NicInfo;

    /// Move a NIC to another vDPA device.
    PATCH patch_vm_nic(name, id; body) ["v1", "vms", name, "nics", id]
        read bellhop_api::node::Vm;

    /// Add a NIC to a virtual machine.
    PUT put_vm_nic(name, id; body) ["v1", "vms", name, "nics", id]
        read bellhop_api::node::Vm;

    /// Announce a NIC.
    POST announce_vm_nic(name, id) ["v1", "vms", name, "nics", id, "announce"]
        read ();

    /// Send a non-maskable interrupt.
    POST send_vm_nmi(name) ["v1", "vms", name, "nmi"]
        read ();

    /// Read this description.
    GET get_vm_openapi(name) ["v1", "vms", name, "openapi.json"]
        read serde_json::Value;

    /// Plan a virtual machine.
    POST create_vm_plan(name; body) ["v1", "vms", name, "plan"]
        read bellhop_api::node::Plan;

    /// Press the power button.
    POST press_vm_power_button(name) ["v1", "vms", name, "power-button"]
        read ();

    /// Reset the machine.
    POST reset_vm(name) ["v1", "vms", name, "reset"]
        read ();

    /// Create a snapshot.
    POST create_vm_snapshot(name; body) ["v1", "vms", name, "snapshot"]
        read serde_json::Value;

    /// Start, pause, resume or stop a virtual machine.
    PUT put_vm_state(name; body) ["v1", "vms", name, "state"]
        read bellhop_api::node::Vm;

    /// Upgrade the program of a virtual machine in place.
    POST upgrade_vm(name; body) ["v1", "vms", name, "upgrade"]
        read bellhop_api::node::Operation;

    /// List PCI functions of a virtual machine.
    GET list_vm_vfio(name) ["v1", "vms", name, "vfio"]
        read serde_json::Value;

    /// Remove a PCI function from a virtual machine.
    DELETE delete_vm_vfio(name, id) ["v1", "vms", name, "vfio", id]
        read serde_json::Value;

    /// Read the state of a PCI function of a virtual machine.
    GET get_vm_vfio(name, id) ["v1", "vms", name, "vfio", id]
        read serde_json::Value;

    /// Add a PCI function to a virtual machine.
    PUT put_vm_vfio(name, id; body) ["v1", "vms", name, "vfio", id]
        read serde_json::Value;

    /// Wait for a change.
    GET watch_vm(name) ["v1", "vms", name, "watch"]
        read bellhop_api::machine::VmStatus;
}
