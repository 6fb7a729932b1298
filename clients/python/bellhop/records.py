"""Records of the node's API. Generated from its description.

Do not edit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union

if TYPE_CHECKING:
    from typing_extensions import NotRequired

AfterGrace = Literal["fail", "hard"]

AlarmKind = Literal["Stuck", "DriverStalled", "Inconsistent", "Refused", "DeviceError"]

Applied = Literal["now", "next_start"]

CpuBaseline = Literal["x86-64-v2", "x86-64-v3", "x86-64-v4", "host"]

DeviceClass = Union["str", "int"]

Direction = Literal["Send", "Receive"]

DirtyTracking = Literal["Mappings", "ShadowQueues", "AllMemory"]

Doorbell = Literal["mapped", "not_mapped", "unknown"]

EndReason = Literal[
    "PoweredOff",
    "Stopped",
    "Moved",
    "Indeterminate",
    "Crashed",
    "Killed",
    "HostRebooted",
    "Failed",
]

ErrorCode = Literal[
    "arriving",
    "bad_answer",
    "bad_descriptor",
    "bad_name",
    "bad_parameter",
    "bad_tls",
    "body_too_large",
    "body_too_slow",
    "browser_refused",
    "busy",
    "cannot_announce",
    "cannot_be_saved",
    "cannot_cancel",
    "cannot_follow_writes",
    "cannot_hand_over",
    "cannot_listen",
    "cannot_move",
    "console_in_use",
    "contradiction",
    "cordoned",
    "crashed",
    "deleting",
    "device_taken",
    "differs",
    "ended",
    "ending",
    "expired_token",
    "generation_conflict",
    "has_come",
    "host_failed",
    "id_in_use",
    "in_use",
    "incompatible",
    "incomplete_body",
    "internal",
    "interrupted",
    "invalid_body",
    "malformed_body",
    "migration_unknown",
    "method_not_allowed",
    "migrating",
    "name_taken",
    "nic_lost",
    "no_answer",
    "no_configuration",
    "no_destination",
    "no_devlink",
    "no_migration",
    "no_migration_host",
    "no_room",
    "no_sriov",
    "no_such_device",
    "no_such_log",
    "no_such_operation",
    "no_such_path",
    "no_such_snapshot",
    "no_such_vm",
    "no_token",
    "no_vdpa",
    "not_a_disk",
    "not_a_nic",
    "not_a_vfio_device",
    "not_arrived",
    "not_found",
    "not_moved",
    "not_negotiated",
    "not_permitted",
    "not_running",
    "not_upgraded",
    "one_device",
    "operation_ended",
    "other_api_level",
    "other_vm_runs",
    "part_of_nic",
    "paused",
    "refused",
    "refused_there",
    "role_too_low",
    "saving",
    "resolved",
    "started_again",
    "starting",
    "still_runs",
    "store_failed",
    "too_many_readers",
    "too_many_watchers",
    "unknown_caller",
    "unknown_parameter",
    "unknown_token",
    "unsupported_condition",
    "unsupported_content_type",
    "unusable",
    "vm_exists",
    "vm_runs",
    "websocket_required",
    "wrong_scheme",
    "wrong_state",
]

EventChange = Literal[
    "served",
    "lost",
    "created",
    "replaced",
    "started",
    "adopted",
    "running",
    "paused",
    "stopping",
    "ended",
    "deleted",
    "migration_unknown",
    "migration_resolved",
    "awaited",
    "arrived",
    "not_arrived",
    "not_started",
    "nic_added",
    "nic_moved",
    "nic_failed_over",
    "nic_not_failed_over",
    "nic_device_removed",
    "nic_removed",
    "disk_added",
    "disk_removed",
    "alarm_raised",
    "alarm_cleared",
    "operation_started",
    "operation_ended",
    "added",
    "removed",
    "bound",
    "unbound",
    "changed",
    "parameter",
    "rate",
    "health",
]

FailoverPhase = Literal["UnderWay", "Done", "Failed"]

Kick = Literal["Exit", "Eventfd", "Doorbell"]

ManagementState = Literal["known", "absent", "other_namespace", "blocked"]

MigrationPhase = Literal[
    "Offer",
    "Join",
    "Copy",
    "Stop",
    "Ready",
    "Go",
    "Done",
    "Moved",
    "Stayed",
    "Indeterminate",
]

NicKind = Literal["auto", "vf", "sf"]

NodeMigrationRequest = Union["NodeMigrationRequestSend", "NodeMigrationRequestReceive"]

OperationKind = Literal["migration", "snapshot", "upgrade", "create"]

OperationPhase = Literal["running", "done", "failed", "cancelled"]

Place = Literal["Here", "There"]

PlugPhase = Literal["Configured", "Plugged", "UnplugRequested", "DeviceRemoved"]

PostedInterrupt = Literal["no", "unknown"]

PostingObstacle = Literal["software", "kvm", "iommu", "command_line"]

StopMode = Literal["graceful", "hard"]

VmPhase = Literal[
    "Creating",
    "Starting",
    "Receiving",
    "Running",
    "Paused",
    "Stopping",
    "Stopped",
    "MigrationUnknown",
    "Deleting",
    "Unknown",
]

VmState = Literal["NotStarted", "Starting", "Running", "Paused", "Stopped"]

WantedState = Literal["Running", "Paused", "Stopped"]

WatchPhase = Literal[
    "NotRunning",
    "NotWatchedPacked",
    "Unreadable",
    "Idle",
    "Moving",
    "Waiting",
    "Stuck",
    "DriverStalled",
    "Inconsistent",
]


class AlarmInfo(TypedDict):
    """A queue with an alarm."""

    alarm: AlarmKind
    detail: NotRequired[str | None]
    device: str
    queue: int


class Awaited(TypedDict):
    """The address at which a node waits for a machine, and its terms."""

    certificate: NotRequired[str | None]
    listen: str
    secret: str


class BellhopRun(TypedDict):
    """The virtual machine of a `bellhop run`, by its command line."""

    api_socket: NotRequired[str | None]
    config: NotRequired[str | None]
    id: NotRequired[str | None]
    kernel: NotRequired[str | None]


class ConsolePaths(TypedDict):
    """The files of a virtual machine's console."""

    log: str
    socket: str


class DeviceHolder(TypedDict):
    """A process that has a device open."""

    bellhop: NotRequired[BellhopRun | None]
    command: str
    executable: NotRequired[str | None]
    pid: int


class DeviceInfo(TypedDict):
    """A virtio device as the guest's driver has set it up."""

    broken: bool
    dirty_tracking: DirtyTracking | None
    driver_ok: bool
    features_negotiated: list[str] | None
    features_offered: list[str]
    io_errors: int | None
    queues: list[QueueInfo]
    status: int


class DiskConfig(TypedDict):
    """A raw image that the guest sees as a virtio-blk disk."""

    bps: NotRequired[str | None]
    burst: NotRequired[int | None]
    id: NotRequired[str | None]
    iommu: NotRequired[bool]
    iops: NotRequired[int | None]
    path: str
    readonly: NotRequired[bool]
    stall_kick: NotRequired[bool]


class DiskSummary(TypedDict):
    """A disk in a list."""

    address: str | None
    bps: NotRequired[str | None]
    burst: NotRequired[int | None]
    id: str
    iommu: bool
    iops: NotRequired[int | None]
    path: str
    readonly: bool
    stall_kick: bool
    state: PlugPhase


class DoctorFinding(TypedDict):
    """A finding about a host."""

    found: str
    group: str
    name: str
    remedy: list[str]
    state: str


class DoctorReport(TypedDict):
    """Whether a host is ready for virtual machines on vDPA NICs."""

    findings: list[DoctorFinding]
    fit: bool
    next: list[str]


class DowntimeParts(TypedDict):
    """Parts of the downtime, in milliseconds; null for a part that has not ended."""

    go: float | None
    memory: float | None
    ready: float | None
    state: float | None
    stop: float | None


class End(TypedDict):
    """Why a machine ended."""

    detail: str
    reason: EndReason


class ErrorBody(TypedDict):
    """An error: problem details (RFC 9457), with a code, causes, a hint and the ID of the
    request."""

    causes: list[str]
    code: ErrorCode
    detail: str
    errors: NotRequired[list[FieldError]]
    hint: NotRequired[str | None]
    instance: str
    message: str
    request_id: str
    status: int
    title: str
    type: str


class Event(TypedDict):
    """Something happened."""

    alarm: NotRequired[AlarmKind | None]
    change: EventChange
    detail: NotRequired[str | None]
    disk: NotRequired[str | None]
    driver: NotRequired[str | None]
    end: NotRequired[EndReason | None]
    generation: int
    healthy: NotRequired[bool | None]
    kind: NotRequired[OperationKind | None]
    listen: NotRequired[str | None]
    nic: NotRequired[str | None]
    operation: NotRequired[str | None]
    parameter: NotRequired[str | None]
    phase: NotRequired[OperationPhase | None]
    place: NotRequired[Place | None]
    queue: NotRequired[int | None]
    reason: NotRequired[str | None]
    reporter: NotRequired[str | None]
    subject: str
    time_ms: int


FailoverInfo = TypedDict(
    "FailoverInfo",
    {
        "error": "str | None",
        "from": "str",
        "gap_us": "int | None",
        "state": "FailoverPhase",
        "to": "str",
    },
)


class FieldError(TypedDict):
    """An invalid member of a body."""

    detail: str
    pointer: str


class Forecast(TypedDict):
    """The expected cost of a migration."""

    bytes_per_second: int | None
    copy_ms: int | None
    data_bytes: int
    downtime_max_ms: int
    downtime_min_ms: int
    prepare_ms: int | None
    ram_bytes: int


class FunctionChange(TypedDict):
    """A change of a PCI function."""

    vfs: int


class FunctionInfo(TypedDict):
    """A PCI function; `total_vfs` is of physical ones, `pf` and its settings are of virtual
    ones."""

    driver: NotRequired[str | None]
    driver_override: NotRequired[str | None]
    iommu_group: NotRequired[int | None]
    link_state: NotRequired[str | None]
    mac: NotRequired[str | None]
    max_tx_rate: NotRequired[int | None]
    min_tx_rate: NotRequired[int | None]
    netdev: NotRequired[str | None]
    numa_node: NotRequired[int | None]
    pf: NotRequired[str | None]
    proto: NotRequired[str | None]
    qos: NotRequired[int | None]
    query_rss_en: NotRequired[bool | None]
    shares_group_with: NotRequired[str | None]
    spoofchk: NotRequired[bool | None]
    total_vfs: NotRequired[int | None]
    trust: NotRequired[bool | None]
    vdpa: NotRequired[str | None]
    vf: NotRequired[int | None]
    vfs: NotRequired[int | None]
    vlan: NotRequired[int | None]


class FunctionListing(TypedDict):
    """PCI functions with SR-IOV, and virtual functions."""

    vf: dict[str, FunctionInfo]


HostNicInfo = TypedDict(
    "HostNicInfo",
    {
        "bus_driver": "NotRequired[str | None]",
        "driver": "NotRequired[str | None]",
        "exists": "NotRequired[bool | None]",
        "from": "str",
        "function": "NotRequired[str | None]",
        "mac": "NotRequired[str | None]",
        "max_vq_pairs": "NotRequired[int | None]",
        "mgmtdev": "NotRequired[str | None]",
        "mtu": "NotRequired[int | None]",
        "owner": "NotRequired[str | None]",
        "path": "NotRequired[str | None]",
        "pf": "NotRequired[str | None]",
        "poll": "NotRequired[int | None]",
        "port": "NotRequired[str | None]",
        "queue": "NotRequired[int | None]",
        "representor": "NotRequired[str | None]",
        "sfnum": "NotRequired[int | None]",
        "state": "str",
        "vf": "NotRequired[int | None]",
        "vfs": "NotRequired[int | None]",
    },
)


class HostNicListing(TypedDict):
    """NICs of the host."""

    nic: dict[str, HostNicInfo]


HostNicSpec = TypedDict(
    "HostNicSpec",
    {
        "bridge": "NotRequired[str | None]",
        "device_features": "NotRequired[int | None]",
        "from": "str",
        "kind": "NotRequired[NicKind]",
        "mac": "NotRequired[str | None]",
        "max_tx_rate": "NotRequired[int | None]",
        "min_tx_rate": "NotRequired[int | None]",
        "mtu": "NotRequired[int | None]",
        "name": "str",
        "poll": "NotRequired[int | None]",
        "port": "NotRequired[str | None]",
        "queue": "NotRequired[int | None]",
        "queue_pairs": "NotRequired[int | None]",
        "virtual_functions": "NotRequired[int | None]",
        "vlan": "NotRequired[int | None]",
    },
)


class InFlight(TypedDict):
    """Buffers that NICs held when the guest was stopped, by kind of queue."""

    cvq: int
    rx: int
    tx: int


class IommuConfig(TypedDict):
    """A virtio-iommu for the guest, in front of vDPA devices and disks with `iommu`."""

    boot_bypass: NotRequired[bool]
    mappings: NotRequired[int]
    rng: NotRequired[bool]


class IommuInfo(TypedDict):
    """The state of the guest's IOMMU."""

    change_sets: int
    kicks: int
    last_refusal: IommuRefusal | None
    mappings: int
    maps: int
    refused: int
    unmaps: int


class IommuRefusal(TypedDict):
    """A request to the guest's IOMMU that was refused."""

    cause: str
    device: str
    iova: int | None
    size: int | None


class ItemsDiskInfo(TypedDict):
    """A list, in an object so that a later version can add members beside it."""

    items: list[DiskInfo]


class ItemsNicSummary(TypedDict):
    """A list, in an object so that a later version can add members beside it."""

    items: list[NicSummary]


class ItemsOperation(TypedDict):
    """A list, in an object so that a later version can add members beside it."""

    items: list[Operation]


class ItemsSnapshot(TypedDict):
    """A list, in an object so that a later version can add members beside it."""

    items: list[Snapshot]


class ItemsVfioInfo(TypedDict):
    """A list, in an object so that a later version can add members beside it."""

    items: list[VfioInfo]


class ItemsVm(TypedDict):
    """A list, in an object so that a later version can add members beside it."""

    items: list[Vm]


class ManagementDevice(TypedDict):
    """A management device."""

    max_supported_vqs: NotRequired[int | None]
    name: str
    supported_classes: list[DeviceClass]
    vdpa_devices: list[TopologyDevice]


class MgmtdevInfo(TypedDict):
    """A management device: a function of a NIC, or a simulator, on which vDPA devices are
    created."""

    dev_features: NotRequired[list[str | int]]
    max_supported_vqs: NotRequired[int | None]
    supported_classes: list[str]


class MgmtdevListing(TypedDict):
    """Management devices."""

    mgmtdev: dict[str, MgmtdevInfo]


class MigrationObstacle(TypedDict):
    """A reason against a migration."""

    reason: str
    remedy: str | None


class MigrationStatus(TypedDict):
    """The state of a migration."""

    bytes_per_second: int
    direction: Direction
    dirty_bytes_per_second: int
    downtime_ms: float | None
    downtime_parts_ms: DowntimeParts
    elapsed_ms: int
    error: str | None
    forecast_downtime_ms: int | None
    forecast_rounds: int | None
    in_flight: InFlight | None
    left_bytes: int
    log_start_ms: float | None
    pages: int
    peer: str
    phase: MigrationPhase
    ram_bytes: int
    rounds: int
    sent_bytes: int
    throttle_percent: int
    zero_pages: int


class MigrationUnknown(TypedDict):
    """Why the location of a virtual machine is unknown."""

    destination: str
    reason: str
    remedy: str


class NestedDevlinkInfo(TypedDict):
    """A devlink instance of a function."""

    netnsid: NotRequired[int | str]


NicBackup = TypedDict(
    "NicBackup",
    {
        "device": "NotRequired[str | None]",
        "from": "NotRequired[str | None]",
        "path": "NotRequired[str | None]",
    },
)


class NicMove(TypedDict):
    """The new vDPA device of a NIC: `path` or `device`."""

    device: NotRequired[str | None]
    path: NotRequired[str | None]


NicSpec = TypedDict(
    "NicSpec",
    {
        "backup": "NotRequired[NicBackup | None]",
        "bridge": "NotRequired[str | None]",
        "device": "NotRequired[str | None]",
        "device_features": "NotRequired[int | None]",
        "doorbell": "NotRequired[Literal[\"auto\", \"on\", \"off\"]]",
        "from": "NotRequired[str | None]",
        "id": "str",
        "iommu": "NotRequired[bool]",
        "kind": "NotRequired[NicKind]",
        "mac": "NotRequired[str | None]",
        "mac_lock": "NotRequired[bool]",
        "max_tx_rate": "NotRequired[int | None]",
        "min_tx_rate": "NotRequired[int | None]",
        "mtu": "NotRequired[int | None]",
        "path": "NotRequired[str | None]",
        "poll": "NotRequired[int | None]",
        "port": "NotRequired[str | None]",
        "queue": "NotRequired[int | None]",
        "queue_pairs": "NotRequired[int | None]",
        "stall_kick": "NotRequired[bool]",
        "standby": "NotRequired[bool]",
        "virtual_functions": "NotRequired[int | None]",
        "vlan": "NotRequired[int | None]",
    },
)


class NicSummary(TypedDict):
    """A NIC in a list."""

    address: str | None
    id: str
    path: str
    state: PlugPhase


class NodeMigrationRequestSend(TypedDict):
    """Send it to another node."""

    send: SendToNode


class NodeMigrationRequestReceive(TypedDict):
    """Wait for it: the request of another node's daemon."""

    receive: ReceiveFromNode


class Operation(TypedDict):
    """A request that takes long."""

    created_ms: int
    ended_ms: int | None
    error: ErrorBody | None
    id: str
    kind: OperationKind
    phase: OperationPhase
    progress: OperationProgress | None
    request_id: str
    requested_by: str
    result: OperationResult | None
    target: str


class OperationProgress(TypedDict):
    """Progress of an operation."""

    done: int
    forecast_downtime_ms: int | None
    total: int
    unit: str


class OperationResult(TypedDict):
    """The result of an operation, in the member of its kind."""

    migration: NotRequired[MigrationStatus | None]
    snapshot: NotRequired[SnapshotInfo | None]
    upgrade: NotRequired[UpgradeInfo | None]


class PciFunction(TypedDict):
    """A function of the PCI bus with the devices on it."""

    driver: NotRequired[str | None]
    function: str
    iommu_group: NotRequired[int | None]
    mgmtdevs: list[ManagementDevice]
    netdevs: list[str]
    numa_node: NotRequired[int | None]
    vdpa_devices: list[TopologyDevice]
    vfio: NotRequired[VfioGroup | None]


class Plan(TypedDict):
    """The steps that a request would take."""

    steps: list[str]


class PortFunctionInfo(TypedDict):
    """The function behind a port."""

    hw_addr: NotRequired[str | None]
    ipsec_crypto: NotRequired[str | None]
    ipsec_packet: NotRequired[str | None]
    max_io_eqs: NotRequired[int | None]
    migratable: NotRequired[str | None]
    nested_devlink: NotRequired[dict[str, NestedDevlinkInfo] | None]
    opstate: NotRequired[str | None]
    roce: NotRequired[str | None]
    state: NotRequired[str | None]


class PortInfo(TypedDict):
    """A port, with the members of its flavour."""

    controller: NotRequired[int | None]
    des_type: NotRequired[str | None]
    external: NotRequired[bool | None]
    flavour: NotRequired[str | None]
    function: NotRequired[PortFunctionInfo | None]
    ibdev: NotRequired[str | None]
    lanes: NotRequired[int | None]
    netdev: NotRequired[str | None]
    pfnum: NotRequired[int | None]
    port: NotRequired[int | None]
    sfnum: NotRequired[int | None]
    split_group: NotRequired[int | None]
    splittable: NotRequired[bool | None]
    type: NotRequired[str | None]
    vfnum: NotRequired[int | None]


class PortListing(TypedDict):
    """Ports of NICs."""

    port: dict[str, PortInfo]


class QueueInfo(TypedDict):
    """A virtqueue."""

    enabled: bool
    index: int
    kick: Kick
    max_size: int
    size: int
    vector: int | None
    watch: WatchInfo | None


class ReceiveFromNode(TypedDict):
    """The VM for this node."""

    certificate: NotRequired[str | None]
    running: NotRequired[VmConfig | None]
    vm: VmBody


class Representor(TypedDict):
    """A network interface that is the port of a virtual function or subfunction on a NIC's
    switch."""

    master: NotRequired[str | None]
    netdev: str
    port_name: str
    state: NotRequired[str | None]


class ResolveRequest(TypedDict):
    """The resolution of an indeterminate migration."""

    resolve: Place


SendToNode = TypedDict(
    "SendToNode",
    {
        "connections": "NotRequired[int]",
        "destination": "str",
        "downtime_ms": "NotRequired[int]",
        "dry_run": "NotRequired[bool]",
        "from": "NotRequired[str | None]",
        "name": "NotRequired[str | None]",
        "timeout_s": "NotRequired[int]",
        "verify_memory": "NotRequired[bool]",
        "vfio": "NotRequired[dict[str, str]]",
    },
)


class Snapshot(TypedDict):
    """A snapshot in the daemon's store."""

    bytes: int
    created_ms: int | None
    format: int | None
    name: str
    path: str
    vm: str | None


class SnapshotInfo(TypedDict):
    """A complete snapshot."""

    memory_bytes: int
    path: str
    paused_ms: int


SpecChange = TypedDict(
    "SpecChange",
    {
        "applied": "Applied",
        "field": "str",
        "from": "Any",
        "to": "Any",
    },
)


class Subfunction(TypedDict):
    """A subfunction, or another device of the auxiliary bus with vDPA devices on it."""

    auxiliary: str
    driver: NotRequired[str | None]
    mgmtdevs: list[ManagementDevice]
    netdevs: list[str]
    representor: NotRequired[Representor | None]
    sf: NotRequired[int | None]
    vdpa_devices: list[TopologyDevice]


class Tap(TypedDict):
    """The tap of a software NIC."""

    master: NotRequired[str | None]
    netdev: str
    state: NotRequired[str | None]


class Topology(TypedDict):
    """The vDPA topology of a machine."""

    all_processes_seen: bool
    management: ManagementState
    mgmtdevs: list[ManagementDevice]
    physical_functions: list[PhysicalFunction]
    vdpa_devices: list[TopologyDevice]


class TopologyDevice(TypedDict):
    """A vDPA device."""

    driver: NotRequired[str | None]
    holders: list[DeviceHolder]
    mac: NotRequired[str | None]
    max_vq_size: NotRequired[int | None]
    max_vqs: NotRequired[int | None]
    mtu: NotRequired[int | None]
    name: str
    netdevs: list[str]
    path: NotRequired[str | None]
    posting_obstacle: NotRequired[PostingObstacle | None]
    queues: list[TopologyQueue]
    tap: NotRequired[Tap | None]
    type: NotRequired[DeviceClass | None]


class TopologyListing(TypedDict):
    """The topology, as `bellhop topology -j`."""

    topology: Topology


class TopologyQueue(TypedDict):
    """A virtqueue."""

    doorbell: Doorbell
    index: int
    posted_interrupt: PostedInterrupt


class UpgradeInfo(TypedDict):
    """A completed upgrade."""

    after: str
    before: str
    downtime_ms: float | None


class UpgradeRequest(TypedDict):
    """The new program."""

    program: str


class VdpaConfig(TypedDict):
    """The serialized form: a vDPA device for the guest, by `path` or by `fd`."""

    backup: NotRequired[str | None]
    doorbell: NotRequired[Literal["auto", "on", "off"]]
    fd: NotRequired[int | None]
    id: NotRequired[str | None]
    iommu: NotRequired[bool]
    mac: NotRequired[str | None]
    mac_lock: NotRequired[bool]
    num_queues: NotRequired[int | None]
    path: NotRequired[str | None]
    stall_kick: NotRequired[bool]
    standby: NotRequired[bool]


class VdpaDeviceChange(TypedDict):
    """A change of a vDPA device."""

    mac: str


class VdpaDeviceConfig(TypedDict):
    """The configuration of a vDPA device: members of a network device, or of a block device."""

    alignment_offset: NotRequired[int | None]
    blk_size: NotRequired[int | None]
    capacity: NotRequired[int | None]
    discard_sector_alignment: NotRequired[int | None]
    flush: NotRequired[bool | None]
    link: NotRequired[str | None]
    link_announce: NotRequired[bool | None]
    mac: NotRequired[str | None]
    max_discard_sectors: NotRequired[int | None]
    max_discard_seg: NotRequired[int | None]
    max_vq_pairs: NotRequired[int | None]
    max_write_zeroes_sectors: NotRequired[int | None]
    max_write_zeroes_seg: NotRequired[int | None]
    min_io_size: NotRequired[int | None]
    mtu: NotRequired[int | None]
    negotiated_features: NotRequired[list[str | int]]
    num_queues: NotRequired[int | None]
    opt_io_size: NotRequired[int | None]
    physical_block_exp: NotRequired[int | None]
    read_only: NotRequired[bool | None]
    seg_max: NotRequired[int | None]
    size_max: NotRequired[int | None]


class VdpaDeviceDetails(TypedDict):
    """A vDPA device with its configuration."""

    config: dict[str, VdpaDeviceConfig]
    dev: dict[str, VdpaDeviceInfo]


class VdpaDeviceInfo(TypedDict):
    """A vDPA device."""

    max_vq_size: NotRequired[int | None]
    max_vqs: NotRequired[int | None]
    mgmtdev: str
    type: str
    vendor_id: NotRequired[int | None]


class VdpaDeviceListing(TypedDict):
    """vDPA devices."""

    dev: dict[str, VdpaDeviceInfo]


class VdpaDeviceSpec(TypedDict):
    """The settings of a vDPA device."""

    device_features: NotRequired[int | None]
    mac: NotRequired[str | None]
    max_vqp: NotRequired[int | None]
    mgmtdev: str
    mtu: NotRequired[int | None]


class Version(TypedDict):
    """The daemon."""

    api: int
    cordoned: bool
    pid: int
    socket: str
    version: str


class VfioArea(TypedDict):
    """A part of a BAR that the guest can reach without a VM exit."""

    address: int | None
    bar: int
    offset: int
    size: int


class VfioConfig(TypedDict):
    """A PCI function of the host for the guest, by `host`, by `path` or by `fd`."""

    allow_pf: NotRequired[bool]
    fd: NotRequired[int | None]
    host: NotRequired[str | None]
    id: NotRequired[str | None]
    iommu: NotRequired[bool]
    iommufd: NotRequired[bool]
    path: NotRequired[str | None]
    standby: NotRequired[str | None]


class VfioFunctionInfo(TypedDict):
    """A PCI function of the host as the guest has set it up."""

    areas: list[VfioArea]
    connected_vectors: int
    driver: str
    errors: int
    failed: bool
    failures: int
    faults: int
    host_requests: int
    resets: int
    trapped_reads: int
    trapped_writes: int
    vectors: int


class VfioGroup(TypedDict):
    """The file by which a program uses a function through VFIO."""

    holders: list[DeviceHolder]
    path: str


class VfioSummary(TypedDict):
    """A PCI function of the host in a list."""

    address: str | None
    allow_pf: bool
    id: str
    path: str
    standby: str | None
    state: PlugPhase


class Vm(TypedDict):
    """A virtual machine: its desired configuration (`labels`, `annotations`, `spec`) and its
    observed state (`status`)."""

    annotations: dict[str, str]
    generation: int
    labels: dict[str, str]
    name: str
    spec: VmSpec
    status: VmObserved


class VmBody(TypedDict):
    """A virtual machine in a request."""

    annotations: NotRequired[dict[str, str]]
    generation: NotRequired[int | None]
    labels: NotRequired[dict[str, str]]
    name: NotRequired[str | None]
    spec: VmSpec
    status: NotRequired[dict[str, Any] | None]


class VmChanges(TypedDict):
    """The result of a merge patch."""

    changes: list[SpecChange]
    vm: Vm


class VmConfigMemory(TypedDict):
    """One of several forms."""

    host_numa_node: NotRequired[int]
    hugepages: NotRequired[Literal["2M", "1G"]]
    size: NotRequired[str]


class VmConfig(TypedDict):
    """The complete configuration of a VM."""

    cmdline: NotRequired[str]
    cpu: NotRequired[CpuBaseline]
    cpu_affinity: NotRequired[list[list[int]]]
    cpus: NotRequired[int]
    disks: NotRequired[list[DiskConfig]]
    initramfs: NotRequired[str | None]
    iommu: NotRequired[IommuConfig | None]
    kernel: str
    memory: NotRequired[str | VmConfigMemory]
    ring_watch: NotRequired[Literal["off"] | int]
    vdpa: NotRequired[list[VdpaConfig]]
    vfio: NotRequired[list[VfioConfig]]


class VmNicDevice(TypedDict):
    """The devices of a virtual machine's NIC."""

    backup_device: str | None
    character_device: str | None
    failed_over: bool
    id: str
    vdpa_device: str | None


class VmObserved(TypedDict):
    """The observed state of a virtual machine."""

    adopted: bool
    alarms: list[AlarmInfo]
    api: int | None
    console: ConsolePaths
    last_end: End | None
    log: str
    migration_unknown: MigrationUnknown | None
    nic_devices: list[VmNicDevice]
    not_ended: str | None
    pending: list[str]
    phase: VmPhase
    pid: int | None
    restarts: int
    uptime_s: int | None
    version: str | None


class VmPatchSpecMemory(TypedDict):
    """One of several forms."""

    host_numa_node: NotRequired[int]
    hugepages: NotRequired[Literal["2M", "1G"]]
    size: NotRequired[str]


class VmPatchSpec(TypedDict):
    """Its desired configuration: null restores a default."""

    cmdline: NotRequired[str | None]
    cpu: NotRequired[CpuBaseline | None]
    cpu_affinity: NotRequired[list[list[int]] | None]
    cpus: NotRequired[int | None]
    disks: NotRequired[list[DiskConfig] | None]
    initramfs: NotRequired[str | None | None]
    iommu: NotRequired[IommuConfig | None | None]
    kernel: NotRequired[str]
    memory: NotRequired[str | VmPatchSpecMemory | None]
    nics: NotRequired[list[NicSpec] | None]
    restart: NotRequired[Literal["Never", "OnFailure", "Always"] | None]
    ring_watch: NotRequired[Literal["off"] | int | None]
    state: NotRequired[Literal["Running", "Stopped"] | None]
    vfio: NotRequired[list[VfioConfig] | None]


class VmPatch(TypedDict):
    """A merge patch (RFC 7396) for a `VmBody`."""

    annotations: NotRequired[dict[str, str | None] | None]
    generation: NotRequired[int | None]
    labels: NotRequired[dict[str, str | None] | None]
    name: NotRequired[str | None]
    spec: NotRequired[VmPatchSpec]
    status: NotRequired[dict[str, Any] | None]


class VmSnapshotRequest(TypedDict):
    """Where to write a snapshot: exactly one of `name` and `path`."""

    name: NotRequired[str | None]
    path: NotRequired[str | None]


class VmSpecMemory(TypedDict):
    """One of several forms."""

    host_numa_node: NotRequired[int]
    hugepages: NotRequired[Literal["2M", "1G"]]
    size: NotRequired[str]


class VmSpec(TypedDict):
    """The configuration of a virtual machine."""

    cmdline: NotRequired[str]
    cpu: NotRequired[CpuBaseline]
    cpu_affinity: NotRequired[list[list[int]]]
    cpus: NotRequired[int]
    disks: NotRequired[list[DiskConfig]]
    initramfs: NotRequired[str | None]
    iommu: NotRequired[IommuConfig | None]
    kernel: str
    memory: NotRequired[str | VmSpecMemory]
    nics: NotRequired[list[NicSpec]]
    restart: NotRequired[Literal["Never", "OnFailure", "Always"]]
    ring_watch: NotRequired[Literal["off"] | int]
    state: NotRequired[Literal["Running", "Stopped"]]
    vfio: NotRequired[list[VfioConfig]]


class VmStateChange(TypedDict):
    """A state for a virtual machine."""

    grace_period_s: NotRequired[int | None]
    mode: NotRequired[StopMode | None]
    state: WantedState
    then: NotRequired[AfterGrace | None]
    until_reboot: NotRequired[bool]


class VmStatus(TypedDict):
    """The state of the machine."""

    alarms: list[AlarmInfo]
    api: int
    boots: int
    disks: list[DiskSummary]
    end: End | None
    generation: int
    nics: list[NicSummary]
    pid: int
    state: VmState
    upgrade_downtime_ms: float | None
    upgrade_error: str | None
    upgrades: int
    version: str
    vfio: list[VfioSummary]


class WatchInfo(TypedDict):
    """The ring of a queue, from its indices in guest memory, which the VMM reads once a second."""

    completed: int
    completed_per_s: int
    in_flight: int | None
    posted: int
    posted_per_s: int
    stall_kicks: int
    state: WatchPhase
    stuck_for_s: int


class DiskInfo(DiskSummary):
    """A disk in detail."""

    device: DeviceInfo | None


class MigrationTrial(Forecast):
    """Whether the machine could be sent, and the expected cost."""

    destination: str
    movable: bool
    obstacles: list[MigrationObstacle]


class NicInfo(NicSummary):
    """A NIC in detail."""

    backup: str | None
    device: DeviceInfo | None
    doorbell: Literal["auto", "on", "off"]
    iommu: bool
    last_failover: FailoverInfo | None
    mac: str | None
    mac_lock: bool
    num_queues: int | None
    numa_node: int | None
    numa_warning: str | None
    stall_kick: bool
    standby: bool


class PhysicalFunction(PciFunction):
    """A physical function with its virtual functions and subfunctions."""

    representors: list[Representor]
    subfunctions: list[Subfunction]
    switch_id: NotRequired[str | None]
    total_vfs: NotRequired[int | None]
    virtual_functions: list[VirtualFunction]


class VfioInfo(VfioSummary):
    """A PCI function of the host in detail."""

    function: VfioFunctionInfo | None


class VirtualFunction(PciFunction):
    """A virtual function."""

    representor: NotRequired[Representor | None]
    vf: int
