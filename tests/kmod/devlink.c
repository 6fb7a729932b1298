// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: the NIC's devlink instance, platform/labnic.0, with its uplink.
 *
 *   devlink dev info platform/labnic.0
 *   devlink dev eswitch set platform/labnic.0 mode switchdev
 *
 * Its parent is a platform device because devlink names an instance by its
 * bus, and the device of the management device "labnic" (mgmt.c) has none.
 * The eswitch mode decides only whether subfunctions can exist: the devices of
 * "labnic" have their own switch in either mode.
 */
#include <linux/etherdevice.h>
#include <linux/platform_device.h>

#include "sf.h"

#define LABNIC_UPLINK_PORT_INDEX	0

static struct platform_device *labnic_platform_device;

/* The same for all ports of the NIC: they are on one switch. */
void labnic_switch_id(struct netdev_phys_item_id *id)
{
	static const u8 bytes[] = { 0x62, 0x65, 0x6c, 0x6c, 0x68, 0x6f, 0x70, 0x00 };

	memcpy(id->id, bytes, sizeof(bytes));
	id->id_len = sizeof(bytes);
}

static int info_get(struct devlink *devlink, struct devlink_info_req *request,
		    struct netlink_ext_ack *extack)
{
	int ret;

	ret = devlink_info_serial_number_put(request, "LABNIC-0000-0001");
	if (ret)
		return ret;
	ret = devlink_info_version_fixed_put(request,
					     DEVLINK_INFO_VERSION_GENERIC_BOARD_ID,
					     "LABNIC");
	if (ret)
		return ret;
	ret = devlink_info_version_running_put(request,
					       DEVLINK_INFO_VERSION_GENERIC_FW,
					       "1.0.0");
	if (ret)
		return ret;
	return devlink_info_version_stored_put(request,
					       DEVLINK_INFO_VERSION_GENERIC_FW,
					       "1.0.0");
}

static int eswitch_mode_get(struct devlink *devlink, u16 *mode)
{
	struct labnic_pf *pf = devlink_priv(devlink);

	*mode = pf->mode;
	return 0;
}

static int eswitch_mode_set(struct devlink *devlink, u16 mode,
			    struct netlink_ext_ack *extack)
{
	struct labnic_pf *pf = devlink_priv(devlink);

	if (mode != DEVLINK_ESWITCH_MODE_LEGACY &&
	    mode != DEVLINK_ESWITCH_MODE_SWITCHDEV) {
		NL_SET_ERR_MSG_MOD(extack, "the eswitch mode must be legacy or switchdev");
		return -EINVAL;
	}
	if (mode == DEVLINK_ESWITCH_MODE_LEGACY && labnic_sf_any(pf)) {
		NL_SET_ERR_MSG_MOD(extack, "there are SF ports; delete them first");
		return -EBUSY;
	}
	pf->mode = mode;
	return 0;
}

static const struct devlink_ops pf_devlink_ops = {
	.info_get		= info_get,
	.eswitch_mode_get	= eswitch_mode_get,
	.eswitch_mode_set	= eswitch_mode_set,
	.port_new		= labnic_sf_new,
	.rate_leaf_tx_share_set	= labnic_rate_set,
	.rate_leaf_tx_max_set	= labnic_rate_set,
};

static int uplink_add(struct labnic_pf *pf)
{
	struct devlink_port_attrs attrs = {
		.flavour = DEVLINK_PORT_FLAVOUR_PHYSICAL,
		.phys.port_number = 0,
	};
	int ret;

	labnic_switch_id(&attrs.switch_id);
	devlink_port_attrs_set(&pf->uplink_port, &attrs);
	ret = devl_port_register(pf->devlink, &pf->uplink_port,
				 LABNIC_UPLINK_PORT_INDEX);
	if (ret)
		return ret;
	pf->uplink = labnic_netdev_add(pf->dev, &pf->uplink_port, NULL, "uplink%d");
	if (IS_ERR(pf->uplink)) {
		devl_port_unregister(&pf->uplink_port);
		return PTR_ERR(pf->uplink);
	}
	return 0;
}

static void uplink_remove(struct labnic_pf *pf)
{
	labnic_netdev_remove(pf->uplink);
	devl_port_unregister(&pf->uplink_port);
}

static int probe(struct platform_device *device)
{
	struct devlink *devlink;
	struct labnic_pf *pf;
	int ret;

	devlink = devlink_alloc(&pf_devlink_ops, sizeof(*pf), &device->dev);
	if (!devlink)
		return -ENOMEM;
	pf = devlink_priv(devlink);
	pf->devlink = devlink;
	pf->dev = &device->dev;
	pf->mode = DEVLINK_ESWITCH_MODE_LEGACY;
	platform_set_drvdata(device, pf);
	devl_lock(devlink);
	ret = uplink_add(pf);
	if (ret)
		goto err_unlock;
	ret = labnic_health_add(pf);
	if (ret)
		goto err_uplink;
	devl_register(devlink);
	devl_unlock(devlink);
	return 0;

err_uplink:
	uplink_remove(pf);
err_unlock:
	devl_unlock(devlink);
	devlink_free(devlink);
	return ret;
}

static void remove(struct platform_device *device)
{
	struct labnic_pf *pf = platform_get_drvdata(device);
	struct devlink *devlink = pf->devlink;

	devl_lock(devlink);
	/* No more commands arrive. */
	devl_unregister(devlink);
	labnic_sf_remove_all(pf);
	uplink_remove(pf);
	devl_unlock(devlink);
	/* A report in progress takes devl_lock: wait for it without that. */
	labnic_health_remove(pf);
	devlink_free(devlink);
}

static struct platform_driver labnic_platform_driver = {
	.probe = probe,
	.remove = remove,
	.driver = {
		.name = "labnic",
		/* It lives as long as the module. */
		.suppress_bind_attrs = true,
	},
};

int labnic_pf_init(void)
{
	int ret;

	ret = labnic_sf_init();
	if (ret)
		return ret;
	ret = labnic_sf_driver_register();
	if (ret)
		goto err_sf;
	ret = platform_driver_register(&labnic_platform_driver);
	if (ret)
		goto err_sf_driver;
	labnic_platform_device = platform_device_register_simple("labnic", 0, NULL, 0);
	if (IS_ERR(labnic_platform_device)) {
		ret = PTR_ERR(labnic_platform_device);
		goto err_driver;
	}
	/* Without its driver, the device would be a NIC without an instance. */
	if (!platform_get_drvdata(labnic_platform_device)) {
		ret = -ENODEV;
		goto err_device;
	}
	return 0;

err_device:
	platform_device_unregister(labnic_platform_device);
err_driver:
	platform_driver_unregister(&labnic_platform_driver);
err_sf_driver:
	labnic_sf_driver_unregister();
err_sf:
	labnic_sf_exit();
	return ret;
}

/* Waits for vDPA devices of subfunctions that are in use. */
void labnic_pf_exit(void)
{
	platform_device_unregister(labnic_platform_device);
	platform_driver_unregister(&labnic_platform_driver);
	labnic_sf_driver_unregister();
	labnic_sf_exit();
}
