"""Operations of the node's API. Generated from its description.

Do not edit.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any, Iterator, Literal

from .records import *  # noqa: F403
from .transport import Transport


class Operations(Transport):
    """A method for each operation. A refusal raises `Problem`."""

    def delete_cordon(self) -> None:
        """Accept new virtual machines again."""
        return self._call("DELETE", ["v1", "cordon"])

    def put_cordon(self) -> None:
        """Stop accepting new virtual machines."""
        return self._call("PUT", ["v1", "cordon"])

    def get_doctor(self) -> DoctorReport:
        """Check the host."""
        return self._call("GET", ["v1", "doctor"])

    def watch_events(
        self,
        *,
        vm: str | None = None,
        type: EventChange | None = None,
        since: int | None = None,
        follow: bool | None = None,
        last_event_id: int | None = None,
    ) -> Iterator[Event]:
        """Watch events."""
        return self._stream(
            "GET",
            ["v1", "events"],
            query={"vm": vm, "type": type, "since": since, "follow": follow},
            headers={"Last-Event-ID": last_event_id},
        )

    def list_functions(self) -> FunctionListing:
        """List PCI functions."""
        return self._call("GET", ["v1", "functions"])

    def get_function(self, address: str) -> FunctionListing:
        """Read a PCI function."""
        return self._call("GET", ["v1", "functions", address])

    def patch_function(self, address: str, body: FunctionChange) -> FunctionListing:
        """Set the number of virtual functions."""
        return self._call("PATCH", ["v1", "functions", address], body=body)

    def get_node_metrics(self) -> str:
        """Read metrics of the node."""
        return self._call("GET", ["v1", "metrics"])

    def list_mgmtdevs(self) -> MgmtdevListing:
        """List management devices."""
        return self._call("GET", ["v1", "mgmtdevs"])

    def list_nics(self) -> HostNicListing:
        """List NICs."""
        return self._call("GET", ["v1", "nics"])

    def create_nic(self, body: HostNicSpec) -> HostNicListing:
        """Create a NIC."""
        return self._call("POST", ["v1", "nics"], body=body)

    def delete_nic(self, name: str) -> None:
        """Delete a NIC."""
        return self._call("DELETE", ["v1", "nics", name])

    def get_nic(self, name: str) -> HostNicListing:
        """Read a NIC."""
        return self._call("GET", ["v1", "nics", name])

    def get_openapi(self) -> dict[str, Any]:
        """Read this description."""
        return self._call("GET", ["v1", "openapi.json"])

    def list_operations(
        self,
        *,
        kind: OperationKind | None = None,
        target: str | None = None,
        phase: OperationPhase | None = None,
    ) -> ItemsOperation:
        """List operations."""
        return self._call(
            "GET",
            ["v1", "operations"],
            query={"kind": kind, "target": target, "phase": phase},
        )

    def cancel_operation(self, id: str) -> Operation:
        """Cancel an operation."""
        return self._call("DELETE", ["v1", "operations", id])

    def get_operation(self, id: str, *, wait: int | None = None) -> Operation:
        """Read an operation."""
        return self._call("GET", ["v1", "operations", id], query={"wait": wait})

    def list_ports(self) -> PortListing:
        """List ports."""
        return self._call("GET", ["v1", "ports"])

    def list_device_ports(self, bus: str, device: str) -> PortListing:
        """List the ports of a devlink instance."""
        return self._call("GET", ["v1", "ports", bus, device])

    def get_port(self, bus: str, device: str, index: int) -> PortListing:
        """Read a port."""
        return self._call("GET", ["v1", "ports", bus, device, index])

    def list_snapshots(self) -> ItemsSnapshot:
        """List snapshots."""
        return self._call("GET", ["v1", "snapshots"])

    def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot."""
        return self._call("DELETE", ["v1", "snapshots", name])

    def get_snapshot(self, name: str) -> Snapshot:
        """Read a snapshot."""
        return self._call("GET", ["v1", "snapshots", name])

    def get_snapshot_spec(self, name: str) -> VmBody:
        """Read the configuration of the virtual machine of a snapshot."""
        return self._call("GET", ["v1", "snapshots", name, "spec"])

    def get_topology(self, *, function: str | None = None) -> TopologyListing:
        """Read the topology."""
        return self._call("GET", ["v1", "topology"], query={"function": function})

    def list_vdpa_devices(self) -> VdpaDeviceListing:
        """List vDPA devices."""
        return self._call("GET", ["v1", "vdpa-devices"])

    def delete_vdpa_device(self, name: str) -> None:
        """Delete a vDPA device."""
        return self._call("DELETE", ["v1", "vdpa-devices", name])

    def get_vdpa_device(self, name: str) -> VdpaDeviceDetails:
        """Read a vDPA device."""
        return self._call("GET", ["v1", "vdpa-devices", name])

    def patch_vdpa_device(self, name: str, body: VdpaDeviceChange) -> VdpaDeviceDetails:
        """Set the MAC address of a vDPA device."""
        return self._call("PATCH", ["v1", "vdpa-devices", name], body=body)

    def put_vdpa_device(self, name: str, body: VdpaDeviceSpec) -> VdpaDeviceDetails:
        """Create a vDPA device."""
        return self._call("PUT", ["v1", "vdpa-devices", name], body=body)

    def get_version(self) -> Version:
        """Read the version of the daemon."""
        return self._call("GET", ["v1", "version"])

    def list_vms(self, *, label: str | None = None, phase: VmPhase | None = None) -> ItemsVm:
        """List virtual machines."""
        return self._call("GET", ["v1", "vms"], query={"label": label, "phase": phase})

    def delete_vm(
        self,
        name: str,
        *,
        force: bool | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> None:
        """Delete a virtual machine."""
        return self._call(
            "DELETE",
            ["v1", "vms", name],
            query={"force": force},
            headers={"If-Match": if_match, "If-None-Match": if_none_match},
        )

    def get_vm(self, name: str) -> Vm:
        """Read a virtual machine."""
        return self._call("GET", ["v1", "vms", name])

    def patch_vm(
        self,
        name: str,
        body: VmPatch,
        *,
        dry_run: bool | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> VmChanges:
        """Change a virtual machine."""
        return self._call(
            "PATCH",
            ["v1", "vms", name],
            query={"dry_run": dry_run},
            headers={"If-Match": if_match, "If-None-Match": if_none_match},
            body=body,
            media_type="application/merge-patch+json",
        )

    def put_vm(
        self,
        name: str,
        body: VmBody,
        *,
        wait: bool | None = None,
        restore_from: str | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> Operation | Vm:
        """Create or replace a virtual machine with its NICs."""
        return self._call(
            "PUT",
            ["v1", "vms", name],
            query={"wait": wait, "restore_from": restore_from},
            headers={"If-Match": if_match, "If-None-Match": if_none_match},
            body=body,
        )

    def get_vm_config(self, name: str) -> VmConfig:
        """Read the configuration."""
        return self._call("GET", ["v1", "vms", name, "config"])

    def get_vm_console(
        self,
        name: str,
        *,
        read_only: bool | None = None,
        take: bool | None = None,
        history: bool | None = None,
    ) -> None:
        """Use the console of a virtual machine."""
        return self._call(
            "GET",
            ["v1", "vms", name, "console"],
            query={"read_only": read_only, "take": take, "history": history},
        )

    def list_vm_disks(self, name: str) -> ItemsDiskInfo:
        """List disks of a virtual machine."""
        return self._call("GET", ["v1", "vms", name, "disks"])

    def delete_vm_disk(self, name: str, id: str) -> DiskInfo | None:
        """Remove a disk from a virtual machine."""
        return self._call("DELETE", ["v1", "vms", name, "disks", id])

    def get_vm_disk(self, name: str, id: str) -> DiskInfo:
        """Read the state of a disk of a virtual machine."""
        return self._call("GET", ["v1", "vms", name, "disks", id])

    def put_vm_disk(self, name: str, id: str, body: DiskConfig) -> DiskInfo:
        """Add a disk to a virtual machine."""
        return self._call("PUT", ["v1", "vms", name, "disks", id], body=body)

    def get_vm_iommu(self, name: str) -> IommuInfo:
        """Read the state of the guest's IOMMU."""
        return self._call("GET", ["v1", "vms", name, "iommu"])

    def get_vm_log(
        self,
        name: str,
        log: Literal["vmm", "console"],
        *,
        tail: int | None = None,
        after: str | None = None,
    ) -> str:
        """Read a log of a virtual machine."""
        return self._call(
            "GET",
            ["v1", "vms", name, "logs", log],
            query={"tail": tail, "after": after},
        )

    def get_vm_metrics(self, name: str) -> str:
        """Read metrics."""
        return self._call("GET", ["v1", "vms", name, "metrics"])

    def cancel_vm_migration(self, name: str) -> None:
        """Cancel a migration."""
        return self._call("DELETE", ["v1", "vms", name, "migration"])

    def get_vm_migration(self, name: str) -> MigrationStatus:
        """Read the state of the last migration."""
        return self._call("GET", ["v1", "vms", name, "migration"])

    def resolve_vm_migration(self, name: str, body: ResolveRequest) -> None:
        """Resolve an indeterminate migration."""
        return self._call("PATCH", ["v1", "vms", name, "migration"], body=body)

    def start_vm_migration(
        self,
        name: str,
        body: NodeMigrationRequest,
    ) -> Awaited | MigrationTrial | Operation:
        """Migrate a virtual machine to another node."""
        return self._call("POST", ["v1", "vms", name, "migration"], body=body)

    def list_vm_nics(self, name: str) -> ItemsNicSummary:
        """List NICs."""
        return self._call("GET", ["v1", "vms", name, "nics"])

    def delete_vm_nic(self, name: str, id: str) -> None | Vm:
        """Remove a NIC from a virtual machine."""
        return self._call("DELETE", ["v1", "vms", name, "nics", id])

    def get_vm_nic(self, name: str, id: str) -> NicInfo:
        """Read a NIC of a virtual machine."""
        return self._call("GET", ["v1", "vms", name, "nics", id])

    def patch_vm_nic(self, name: str, id: str, body: NicMove) -> Vm:
        """Move a NIC to another vDPA device."""
        return self._call("PATCH", ["v1", "vms", name, "nics", id], body=body)

    def put_vm_nic(self, name: str, id: str, body: NicSpec) -> Vm:
        """Add a NIC to a virtual machine."""
        return self._call("PUT", ["v1", "vms", name, "nics", id], body=body)

    def announce_vm_nic(self, name: str, id: str) -> None:
        """Announce a NIC."""
        return self._call("POST", ["v1", "vms", name, "nics", id, "announce"])

    def send_vm_nmi(self, name: str) -> None:
        """Send a non-maskable interrupt."""
        return self._call("POST", ["v1", "vms", name, "nmi"])

    def get_vm_openapi(self, name: str) -> dict[str, Any]:
        """Read this description."""
        return self._call("GET", ["v1", "vms", name, "openapi.json"])

    def create_vm_plan(self, name: str, body: VmBody) -> Plan:
        """Plan a virtual machine."""
        return self._call("POST", ["v1", "vms", name, "plan"], body=body)

    def press_vm_power_button(self, name: str) -> None:
        """Press the power button."""
        return self._call("POST", ["v1", "vms", name, "power-button"])

    def reset_vm(self, name: str) -> None:
        """Reset the machine."""
        return self._call("POST", ["v1", "vms", name, "reset"])

    def create_vm_snapshot(
        self,
        name: str,
        body: VmSnapshotRequest,
        *,
        wait: bool | None = None,
    ) -> Operation | SnapshotInfo:
        """Create a snapshot."""
        return self._call("POST", ["v1", "vms", name, "snapshot"], query={"wait": wait}, body=body)

    def put_vm_state(
        self,
        name: str,
        body: VmStateChange,
        *,
        wait: bool | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> Vm:
        """Start, pause, resume or stop a virtual machine."""
        return self._call(
            "PUT",
            ["v1", "vms", name, "state"],
            query={"wait": wait},
            headers={"If-Match": if_match, "If-None-Match": if_none_match},
            body=body,
        )

    def upgrade_vm(self, name: str, body: UpgradeRequest) -> Operation:
        """Upgrade the program of a virtual machine in place."""
        return self._call("POST", ["v1", "vms", name, "upgrade"], body=body)

    def list_vm_vfio(self, name: str) -> ItemsVfioInfo:
        """List PCI functions of a virtual machine."""
        return self._call("GET", ["v1", "vms", name, "vfio"])

    def delete_vm_vfio(self, name: str, id: str) -> None | VfioInfo:
        """Remove a PCI function from a virtual machine."""
        return self._call("DELETE", ["v1", "vms", name, "vfio", id])

    def get_vm_vfio(self, name: str, id: str) -> VfioInfo:
        """Read the state of a PCI function of a virtual machine."""
        return self._call("GET", ["v1", "vms", name, "vfio", id])

    def put_vm_vfio(self, name: str, id: str, body: VfioConfig) -> VfioInfo:
        """Add a PCI function to a virtual machine."""
        return self._call("PUT", ["v1", "vms", name, "vfio", id], body=body)

    def watch_vm(
        self,
        name: str,
        *,
        since: int | None = None,
        timeout_s: int | None = None,
    ) -> VmStatus:
        """Wait for a change."""
        return self._call(
            "GET",
            ["v1", "vms", name, "watch"],
            query={"since": since, "timeout_s": timeout_s},
        )
