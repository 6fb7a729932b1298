//! Lists the management devices and the vDPA devices of this host, by netlink and sysfs. It opens
//! no device and needs no privileges.

use std::error::Error;

use vdpa_mgmt::bus::Bus;
use vdpa_mgmt::{ClassConfig, Connection};

fn main() -> Result<(), Box<dyn Error>> {
    let connection = Connection::open()?;
    for mgmt in connection.mgmt_devices()? {
        let queues = mgmt.max_supported_vqs.unwrap_or_default();
        println!("management device {}: up to {queues} queues", mgmt.name);
    }
    let bus = Bus::default();
    for device in connection.devices()? {
        print!(
            "{} on {}: type {}",
            device.name, device.mgmtdev, device.device_id
        );
        if let ClassConfig::Net(net) = connection.config(&device.name)?.class {
            print!(", MAC {:02x?}, MTU {:?}", net.mac, net.mtu);
        }
        match bus.device(&device.name)?.path() {
            Some(path) => println!(", {}", path.display()),
            None => println!(", not bound to vhost_vdpa"),
        }
    }
    Ok(())
}
