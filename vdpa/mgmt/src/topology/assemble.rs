//! Assembles the tree: the base of each device, and its place.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::directory::{identity, whole};
use super::interrupts;
use super::management::Management;
use super::ports::{Ports, Target};
use super::processes::{self, Processes, Wanted};
use super::tree::{
    Class, Device, Doorbell, ManagementDevice, PciFunction, PhysicalFunction, PostedInterrupt,
    PostingObstacle, Queue, Representor, Subfunction, Tap, Topology, VfioGroup, VirtualFunction,
};
use crate::bus::{Bus, BusDevice};
use crate::error::{Error, ErrorKind, existing};
use crate::name::MgmtDeviceName;
use crate::pci::{Address, Pci, no_function};
use crate::sysfs::{attribute, link_name, names, number};

/// More queues than a device can have.
const QUEUES_MAX: u32 = 1 << 16;

/// Classes of PCI functions: network controllers (drivers/pci, `PCI_BASE_CLASS_NETWORK`).
const NETWORK_CLASS: &str = "0x02";

/// The parent of an object in the tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Place {
    Function(Address),
    /// A device of the auxiliary bus that is on a PCI function.
    Auxiliary(String),
    Root,
}

/// A device of the bus, with its place.
struct Found {
    device: BusDevice,
    /// Its directory, without links.
    location: PathBuf,
    /// The character device's number (`st_rdev`).
    number: Option<u64>,
    /// That of the file by which a process serves the device (VDUSE).
    server: Option<u64>,
    netdevs: Vec<String>,
}

/// A device of the auxiliary bus that is on a PCI function.
struct Auxiliary {
    name: String,
    function: Address,
}

/// The data read from a machine, by place.
pub(super) struct Assembly<'a> {
    management: &'a Management,
    sysfs: PathBuf,
    pci: Pci,
    ports: Ports,
    processes: Processes,
    /// VFIO's files, by IOMMU group.
    groups: HashMap<u32, Vec<VfioFile>>,
    auxiliaries: Vec<Auxiliary>,
    managed: HashMap<MgmtDeviceName, Vec<Device>>,
    unmanaged: HashMap<Place, Vec<Device>>,
}

impl<'a> Assembly<'a> {
    /// Reads the data that does not belong to one function.
    pub(super) fn new(management: &'a Management, root: &Path) -> Result<Self, Error> {
        let sysfs = root.join("sys");
        let pci = Pci::at(&sysfs);
        let proc = root.join("proc");
        let found = devices(&Bus::at(&sysfs), &sysfs, management)?;
        let groups = groups(&sysfs)?;
        let files = groups.values().flatten();
        let vfio_files = files.map(|file| (file.number, file.name.clone()));
        let wanted: Wanted = found
            .iter()
            .filter_map(|one| {
                let path = one.device.path()?;
                Some((
                    one.number?,
                    path.file_name()?.to_string_lossy().into_owned(),
                ))
            })
            .chain(vfio_files)
            .chain(
                found
                    .iter()
                    .filter_map(|one| Some((one.server?, one.device.name.clone()))),
            )
            .collect();
        let processes = Processes::look(&proc, &wanted);
        let obstacle = interrupts::obstacle(root);
        let ports = Ports::read(&sysfs, &pci)?;
        let mut assembly = Self {
            management,
            auxiliaries: auxiliaries(&sysfs, management)?,
            pci,
            ports,
            processes,
            groups,
            managed: HashMap::new(),
            unmanaged: HashMap::new(),
            sysfs,
        };
        for one in found {
            let on_pci = address_in(&one.location).is_some();
            let obstacle = if on_pci {
                obstacle
            } else {
                Some(PostingObstacle::Software)
            };
            let place = assembly.place_of(&one.location);
            let mgmtdev = management.devices.get(&one.device.name);
            let mgmtdev = mgmtdev.map(|device| device.mgmtdev.clone());
            let servers = one
                .server
                .map_or(&[][..], |number| assembly.processes.openers(number));
            let mut taps = servers
                .iter()
                .filter_map(|one| processes::tap(&proc, one.holder.pid));
            let tap = taps.next().map(|tap| describe_tap(&assembly.sysfs, tap));
            let device = Device {
                tap,
                ..describe(one, management, &assembly.processes, obstacle)
            };
            match mgmtdev {
                Some(mgmtdev) => assembly.managed.entry(mgmtdev).or_default().push(device),
                None => assembly.unmanaged.entry(place).or_default().push(device),
            }
        }
        Ok(assembly)
    }

    /// The whole tree.
    pub(super) fn all(mut self) -> Result<Topology, Error> {
        let mut physical_functions = Vec::new();
        for address in self.tops()? {
            physical_functions.extend(self.physical_function(address)?);
        }
        let mgmtdevs = self
            .management
            .mgmt_devices
            .iter()
            .filter(|one| self.is_at_root(&one.name))
            .map(|one| one.name.clone())
            .collect::<Vec<_>>();
        Ok(Topology {
            mgmtdevs: mgmtdevs
                .iter()
                .flat_map(|name| self.management_devices(name))
                .collect(),
            vdpa_devices: self.unmanaged.remove(&Place::Root).unwrap_or_default(),
            physical_functions,
            ..self.empty()
        })
    }

    /// The physical function at `address`, or that of the virtual one there.
    pub(super) fn one(mut self, address: Address) -> Result<Topology, Error> {
        let top = self.top_of(address)?;
        let function = self.physical_function(top)?;
        let function = function.ok_or_else(|| no_function(address))?;
        Ok(Topology {
            physical_functions: vec![function],
            ..self.empty()
        })
    }

    fn empty(&self) -> Topology {
        Topology {
            management: self.management.state,
            all_processes_seen: self.processes.all_seen,
            physical_functions: Vec::new(),
            mgmtdevs: Vec::new(),
            vdpa_devices: Vec::new(),
        }
    }

    /// The physical functions of the tree: NICs with SR-IOV, and functions related to vDPA or bound
    /// to VFIO.
    fn tops(&self) -> Result<BTreeSet<Address>, Error> {
        let mut tops = BTreeSet::new();
        for function in self.pci.physical_functions()? {
            let class = attribute(&self.pci.directory(function.address).join("class"))
                .ok()
                .flatten();
            if class.is_some_and(|class| class.starts_with(NETWORK_CLASS)) {
                tops.insert(function.address);
            }
        }
        let mgmtdevs = self.management.mgmt_devices.iter();
        let named = mgmtdevs.filter_map(|one| pci_address(&one.name));
        let found = self.unmanaged.keys().filter_map(|place| match place {
            Place::Function(address) => Some(*address),
            Place::Auxiliary(_) | Place::Root => None,
        });
        let auxiliaries = self.auxiliaries.iter().map(|one| one.function);
        let by_vfio = self.pci.bound_to_vfio()?;
        for address in named.chain(found).chain(auxiliaries).chain(by_vfio) {
            // `None` if it vanished meanwhile.
            tops.extend(existing(self.top_of(address))?);
        }
        Ok(tops)
    }

    /// The physical function of a virtual one; otherwise the function itself.
    fn top_of(&self, address: Address) -> Result<Address, Error> {
        let directory = self.pci.directory(address);
        if !directory.is_dir() {
            return Err(no_function(address));
        }
        let physical = link_name(&directory.join("physfn"))?;
        Ok(physical
            .and_then(|name| name.parse().ok())
            .unwrap_or(address))
    }

    fn physical_function(&mut self, address: Address) -> Result<Option<PhysicalFunction>, Error> {
        let directory = self.pci.directory(address);
        let read = whole(&directory, || self.pci.function(address))?;
        let Some(read) = read else {
            return Ok(None);
        };
        let switch_id = self.ports.switch_of(&read.netdevs).map(str::to_owned);
        let mut ports: Vec<(Option<Target>, Representor)> = self
            .ports
            .of(address, switch_id.as_deref())
            .into_iter()
            .map(|port| (port.target, port.representor.clone()))
            .collect();
        let mut take = |target| {
            let index = ports.iter().position(|port| port.0 == Some(target))?;
            Some(ports.remove(index).1)
        };
        let mut virtual_functions = Vec::new();
        for &(index, address) in &read.virtual_functions {
            let directory = self.pci.directory(address);
            let one = whole(&directory, || self.pci.function(address))?;
            if let Some(one) = one {
                virtual_functions.push(VirtualFunction {
                    index,
                    representor: take(Target::VirtualFunction(index)),
                    function: self.function(one),
                });
            }
        }
        let auxiliaries: Vec<String> = self
            .auxiliaries
            .iter()
            .filter(|one| one.function == address)
            .map(|one| one.name.clone())
            .collect();
        let mut subfunctions = Vec::new();
        for name in auxiliaries {
            if let Some(mut one) = self.subfunction(&name)? {
                let number = one.number.map(Target::Subfunction);
                one.representor = number.and_then(&mut take);
                subfunctions.push(one);
            }
        }
        Ok(Some(PhysicalFunction {
            total_vfs: read.total_vfs,
            switch_id,
            virtual_functions,
            subfunctions,
            representors: ports.into_iter().map(|port| port.1).collect(),
            function: self.function(read),
        }))
    }

    fn function(&mut self, function: crate::pci::Function) -> PciFunction {
        let address = function.address;
        let name = MgmtDeviceName::on("pci", &address.to_string());
        let group = function.iommu_group.filter(|_| function.has_vfio_driver());
        let vfio = group.map(|group| {
            let files = self.groups.get(&group).into_iter().flatten();
            let openers = files.flat_map(|file| self.processes.openers(file.number));
            let mut holders: Vec<_> = openers.map(|one| one.holder.clone()).collect();
            holders.sort_by_key(|holder| holder.pid);
            holders.dedup();
            VfioGroup {
                path: Path::new("/dev/vfio").join(group.to_string()),
                holders,
            }
        });
        PciFunction {
            address,
            driver: function.driver,
            netdevs: function.netdevs,
            numa_node: function.numa_node,
            iommu_group: function.iommu_group,
            vfio,
            mgmtdevs: self.management_devices(&name),
            vdpa_devices: self
                .unmanaged
                .remove(&Place::Function(address))
                .unwrap_or_default(),
        }
    }

    fn subfunction(&mut self, name: &str) -> Result<Option<Subfunction>, Error> {
        let directory = self.sysfs.join("bus/auxiliary/devices").join(name);
        let read = whole(&directory, || {
            let mut netdevs = names(&directory.join("net"))?;
            netdevs.sort();
            Ok(Subfunction {
                name: name.to_owned(),
                number: number(&directory.join("sfnum"))?,
                driver: link_name(&directory.join("driver"))?,
                netdevs,
                representor: None,
                mgmtdevs: Vec::new(),
                vdpa_devices: Vec::new(),
            })
        })?;
        let place = Place::Auxiliary(name.to_owned());
        Ok(read.map(|read| Subfunction {
            mgmtdevs: self.management_devices(&MgmtDeviceName::on("auxiliary", name)),
            vdpa_devices: self.unmanaged.remove(&place).unwrap_or_default(),
            ..read
        }))
    }

    /// The management device of that name with its devices, if there is one.
    fn management_devices(&mut self, name: &MgmtDeviceName) -> Vec<ManagementDevice> {
        let mut all = self.management.mgmt_devices.iter();
        let Some(one) = all.find(|one| one.name == *name) else {
            return Vec::new();
        };
        vec![ManagementDevice {
            name: name.clone(),
            supported_classes: Class::of_mask(one.supported_classes),
            max_supported_vqs: one.max_supported_vqs,
            vdpa_devices: self.managed.remove(name).unwrap_or_default(),
        }]
    }

    /// Whether a management device is on no PCI function.
    fn is_at_root(&self, name: &MgmtDeviceName) -> bool {
        match name.bus() {
            Some("pci") => false,
            Some("auxiliary") => self.auxiliaries.iter().all(|one| one.name != name.name()),
            _ => true,
        }
    }

    /// The nearest object above a directory that the tree has.
    fn place_of(&self, location: &Path) -> Place {
        for name in location
            .ancestors()
            .filter_map(|path| path.file_name()?.to_str())
        {
            if self.auxiliaries.iter().any(|one| one.name == name) {
                return Place::Auxiliary(name.to_owned());
            }
            if let Ok(address) = name.parse() {
                return Place::Function(address);
            }
        }
        Place::Root
    }
}

/// All devices of the bus, except those that appeared after the query of its management.
fn devices(bus: &Bus, sysfs: &Path, management: &Management) -> Result<Vec<Found>, Error> {
    let names_on_bus = match bus.names() {
        Ok(names) => names,
        Err(error) if error.kind() == ErrorKind::NoVdpa => Vec::new(),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for name in names_on_bus {
        let directory = sysfs.join("bus/vdpa/devices").join(&name);
        let known = management.devices.contains_key(&name)
            || management.unmanaged.as_ref().is_none_or(|unmanaged| {
                let earlier = unmanaged.get(&name);
                earlier.is_some() && earlier == identity(&directory).as_ref()
            });
        if !known || !crate::name::is_name(&name) {
            continue;
        }
        found.extend(whole(&directory, || {
            let device = bus.device(&name)?;
            let location = fs::canonicalize(&directory).map_err(Error::read(&directory))?;
            let number = match device.path().as_deref().and_then(Path::file_name) {
                Some(file) => attribute(&directory.join(file).join("dev"))?,
                None => None,
            };
            let mut netdevs = Vec::new();
            for entry in names(&directory)? {
                if entry.starts_with("virtio") {
                    netdevs.extend(names(&directory.join(entry).join("net"))?);
                }
            }
            netdevs.sort();
            let server = sysfs.join("class/vduse").join(&name).join("dev");
            // Most devices are not served by a process.
            let server = attribute(&server).ok().flatten();
            Ok(Found {
                number: number.as_deref().and_then(device_number),
                server: server.as_deref().and_then(device_number),
                device,
                location,
                netdevs,
            })
        })?);
    }
    Ok(found)
}

/// A file through which programs use functions: of an IOMMU group, or of one function.
struct VfioFile {
    number: u64,
    name: String,
}

/// VFIO's files, by IOMMU group.
fn groups(sysfs: &Path) -> Result<HashMap<u32, Vec<VfioFile>>, Error> {
    let mut groups: HashMap<u32, Vec<VfioFile>> = HashMap::new();
    for class in ["class/vfio", "class/vfio-dev"] {
        let directory = sysfs.join(class);
        for name in names(&directory)? {
            let file = directory.join(&name);
            // A function's own file has the group of the function.
            let of_function = link_name(&file.join("device/iommu_group")).ok().flatten();
            // The file vanished meanwhile, or has no group: without an IOMMU.
            let number = attribute(&file.join("dev")).ok().flatten();
            let group = of_function.as_ref().unwrap_or(&name).parse();
            if let (Ok(group), Some(number)) = (group, number.as_deref().and_then(device_number)) {
                groups
                    .entry(group)
                    .or_default()
                    .push(VfioFile { number, name });
            }
        }
    }
    Ok(groups)
}

/// Devices of the auxiliary bus on PCI functions: subfunctions, and those of management devices; by
/// name.
fn auxiliaries(sysfs: &Path, management: &Management) -> Result<Vec<Auxiliary>, Error> {
    let directory = sysfs.join("bus/auxiliary/devices");
    let named: HashSet<&str> = management
        .mgmt_devices
        .iter()
        .filter(|one| one.name.bus() == Some("auxiliary"))
        .map(|one| one.name.name())
        .collect();
    let mut found: Vec<Auxiliary> = names(&directory)?
        .into_iter()
        .filter(|name| name.contains(".sf.") || named.contains(name.as_str()))
        .filter_map(|name| {
            let location = fs::canonicalize(directory.join(&name)).ok()?;
            Some(Auxiliary {
                function: address_in(&location)?,
                name,
            })
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// The nearest PCI function above a directory.
fn address_in(location: &Path) -> Option<Address> {
    location
        .ancestors()
        .find_map(|path| path.file_name()?.to_str()?.parse().ok())
}

fn pci_address(name: &MgmtDeviceName) -> Option<Address> {
    match name.bus() {
        Some("pci") => name.name().parse().ok(),
        _ => None,
    }
}

/// A device number in sysfs's form: `MAJOR:MINOR`.
fn device_number(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(rustix::fs::makedev(
        major.parse().ok()?,
        minor.parse().ok()?,
    ))
}

fn describe_tap(sysfs: &Path, netdev: String) -> Tap {
    let directory = sysfs.join("class/net").join(&netdev);
    Tap {
        state: attribute(&directory.join("operstate")).ok().flatten(),
        master: link_name(&directory.join("master")).ok().flatten(),
        netdev,
    }
}

fn describe(
    found: Found,
    management: &Management,
    processes: &Processes,
    obstacle: Option<PostingObstacle>,
) -> Device {
    let name = found.device.name.clone();
    let path = found.device.path();
    let about = management.devices.get(&name);
    let net = management.net.get(&name);
    let openers = found
        .number
        .map_or(&[][..], |number| processes.openers(number));
    let mapped: BTreeSet<u32> = openers
        .iter()
        .filter_map(|opener| opener.doorbells.as_ref())
        .flatten()
        .copied()
        .collect();
    let all_maps_read = !openers.is_empty()
        && processes.all_seen
        && openers.iter().all(|opener| opener.doorbells.is_some());
    let max_vqs = about.and_then(|device| device.max_vqs);
    let indices: BTreeSet<u32> = (0..max_vqs.unwrap_or_default().min(QUEUES_MAX))
        .chain(mapped.iter().copied())
        .collect();
    let queue = |index| Queue {
        index,
        doorbell: match (mapped.contains(&index), all_maps_read) {
            (true, _) => Doorbell::Mapped,
            (false, true) => Doorbell::NotMapped,
            (false, false) => Doorbell::Unknown,
        },
        posted_interrupt: match obstacle {
            Some(_) => PostedInterrupt::No,
            None => PostedInterrupt::Unknown,
        },
    };
    Device {
        class: about.map(|device| Class::of(device.device_id)),
        max_vqs,
        max_vq_size: about.and_then(|device| device.max_vq_size),
        mac: net.and_then(|net| net.mac),
        mtu: net.and_then(|net| net.mtu),
        driver: found.device.driver,
        path,
        netdevs: found.netdevs,
        tap: None,
        holders: openers.iter().map(|opener| opener.holder.clone()).collect(),
        posting_obstacle: obstacle,
        queues: indices.into_iter().map(queue).collect(),
        name,
    }
}
