// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: an active subfunction: its auxiliary device and that device's driver.
 *
 *   devlink dev param set auxiliary/labnic.sf.M name enable_vnet value true \
 *           cmode driverinit
 *   devlink dev reload auxiliary/labnic.sf.M
 *   vdpa dev add name NAME mgmtdev auxiliary/labnic.sf.M
 *
 * M is never the sfnum, so that a mix-up of the two shows. The device's
 * attribute sfnum has the number, as with mlx5. The management device exists
 * while the driver runs with enable_vnet, and accepts one vDPA device. There is
 * no netdev on this side, so enable_eth can only be false.
 */
#include <linux/idr.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/wait.h>
#include <uapi/linux/vdpa.h>
#include <uapi/linux/virtio_ids.h>

#include "sf.h"

#define LABNIC_SF_DEVICE_NAME	"sf"
/* Real ones do not begin at 0 either: other auxiliary devices come first. */
#define LABNIC_SF_DEVICE_FIRST	2

struct labnic_sf_device {
	struct auxiliary_device auxiliary;
	struct labnic_sf *sf;
	u32 sfnum;
	struct devlink *devlink;	/* while the driver is bound */
	struct vdpa_mgmt_dev mgmtdev;
	bool has_mgmtdev;		/* under the devl_lock of devlink */
};

static DEFINE_IDA(labnic_sf_ids);
/* Devices that are not released yet: devlink keeps them for a while. */
static atomic_t labnic_sf_devices;
static DECLARE_WAIT_QUEUE_HEAD(labnic_sf_released);

static struct labnic_sf_device *of_auxiliary(struct auxiliary_device *auxiliary)
{
	return container_of(auxiliary, struct labnic_sf_device, auxiliary);
}

/* The private part of the instance is one pointer. */
static struct labnic_sf_device *of_devlink(struct devlink *devlink)
{
	struct labnic_sf_device **device = devlink_priv(devlink);

	return *device;
}

static struct labnic_sf_device *of_mgmtdev(struct vdpa_mgmt_dev *mdev)
{
	return container_of(mdev, struct labnic_sf_device, mgmtdev);
}

static int mgmtdev_add(struct vdpa_mgmt_dev *mdev, const char *name,
		       const struct vdpa_dev_set_config *config)
{
	return labnic_device_add(mdev, name, config, of_mgmtdev(mdev)->sf);
}

static const struct vdpa_mgmtdev_ops mgmtdev_ops = {
	.dev_add = mgmtdev_add,
	.dev_del = labnic_device_del,
	.dev_set_attr = labnic_device_set_attr,
};

static struct virtio_device_id ids[] = {
	{ VIRTIO_ID_NET, VIRTIO_DEV_ANY_ID },
	{ 0 },
};

/* Under devl_lock of the function, like all below that change has_mgmtdev. */
static int open_mgmtdev(struct labnic_sf_device *device)
{
	int ret;

	device->mgmtdev = (struct vdpa_mgmt_dev) {
		.device = &device->auxiliary.dev,
		.id_table = ids,
		.ops = &mgmtdev_ops,
		.config_attr_mask = BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MACADDR) |
				    BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MTU) |
				    BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MAX_VQP) |
				    BIT_ULL(VDPA_ATTR_DEV_FEATURES),
		.max_supported_vqs = LABNIC_QUEUES_MAX,
		.supported_features = labnic_features,
	};
	ret = vdpa_mgmtdev_register(&device->mgmtdev);
	device->has_mgmtdev = !ret;
	return ret;
}

static void close_mgmtdev(struct labnic_sf_device *device)
{
	if (device->has_mgmtdev)
		vdpa_mgmtdev_unregister(&device->mgmtdev);
	device->has_mgmtdev = false;
}

static int reload_down(struct devlink *devlink, bool netns_change,
		       enum devlink_reload_action action,
		       enum devlink_reload_limit limit,
		       struct netlink_ext_ack *extack)
{
	struct labnic_sf_device *device = of_devlink(devlink);
	int ret;

	if (netns_change) {
		NL_SET_ERR_MSG_MOD(extack, "an SF can't change its network namespace");
		return -EOPNOTSUPP;
	}
	ret = labnic_sf_leave(device->sf, extack);
	if (ret)
		return ret;
	close_mgmtdev(device);
	return 0;
}

static int reload_up(struct devlink *devlink, enum devlink_reload_action action,
		     enum devlink_reload_limit limit, u32 *performed,
		     struct netlink_ext_ack *extack)
{
	struct labnic_sf_device *device = of_devlink(devlink);
	union devlink_param_value vnet;
	int ret;

	ret = devl_param_driverinit_value_get(devlink,
					      DEVLINK_PARAM_GENERIC_ID_ENABLE_VNET,
					      &vnet);
	if (ret)
		return ret;
	labnic_sf_stay(device->sf);
	*performed = BIT(DEVLINK_RELOAD_ACTION_DRIVER_REINIT);
	return vnet.vbool ? open_mgmtdev(device) : 0;
}

static int info_get(struct devlink *devlink, struct devlink_info_req *request,
		    struct netlink_ext_ack *extack)
{
	return devlink_info_version_running_put(request,
						DEVLINK_INFO_VERSION_GENERIC_FW,
						"1.0.0");
}

static const struct devlink_ops sf_devlink_ops = {
	.reload_actions	= BIT(DEVLINK_RELOAD_ACTION_DRIVER_REINIT),
	.reload_down	= reload_down,
	.reload_up	= reload_up,
	.info_get	= info_get,
};

static int enable_eth_validate(struct devlink *devlink, u32 id,
			       union devlink_param_value value,
			       struct netlink_ext_ack *extack)
{
	if (!value.vbool)
		return 0;
	NL_SET_ERR_MSG_MOD(extack, "an SF of the lab NIC has no netdev, only a vDPA device");
	return -EOPNOTSUPP;
}

static const struct devlink_param sf_params[] = {
	DEVLINK_PARAM_GENERIC(ENABLE_ETH, BIT(DEVLINK_PARAM_CMODE_DRIVERINIT),
			      NULL, NULL, enable_eth_validate),
	DEVLINK_PARAM_GENERIC(ENABLE_VNET, BIT(DEVLINK_PARAM_CMODE_DRIVERINIT),
			      NULL, NULL, NULL),
};

static int probe(struct auxiliary_device *auxiliary,
		 const struct auxiliary_device_id *id)
{
	struct labnic_sf_device *device = of_auxiliary(auxiliary);
	const union devlink_param_value off = { .vbool = false };
	struct labnic_sf_device **priv;
	struct devlink *devlink;
	int ret;

	devlink = devlink_alloc(&sf_devlink_ops, sizeof(*priv), &auxiliary->dev);
	if (!devlink)
		return -ENOMEM;
	priv = devlink_priv(devlink);
	*priv = device;
	device->devlink = devlink;
	/* Only an instance that is not registered yet can be nested. */
	ret = devl_port_fn_devlink_set(&device->sf->port, devlink);
	if (ret)
		goto err_free;
	devl_lock(devlink);
	ret = devl_params_register(devlink, sf_params, ARRAY_SIZE(sf_params));
	if (ret) {
		devl_unlock(devlink);
		goto err_free;
	}
	devl_param_driverinit_value_set(devlink,
					DEVLINK_PARAM_GENERIC_ID_ENABLE_ETH, off);
	devl_param_driverinit_value_set(devlink,
					DEVLINK_PARAM_GENERIC_ID_ENABLE_VNET, off);
	/* Before the notification: its receivers find the function attached. */
	labnic_sf_bound(device->sf, true);
	devl_register(devlink);
	devl_unlock(devlink);
	return 0;

err_free:
	devlink_free(devlink);
	device->devlink = NULL;
	return ret;
}

static void remove(struct auxiliary_device *auxiliary)
{
	struct labnic_sf_device *device = of_auxiliary(auxiliary);
	struct devlink *devlink = device->devlink;

	devl_lock(devlink);
	devl_unregister(devlink);
	close_mgmtdev(device);
	devl_params_unregister(devlink, sf_params, ARRAY_SIZE(sf_params));
	devl_unlock(devlink);
	devlink_free(devlink);
	device->devlink = NULL;
	labnic_sf_bound(device->sf, false);
}

static const struct auxiliary_device_id sf_device_ids[] = {
	{ .name = KBUILD_MODNAME "." LABNIC_SF_DEVICE_NAME },
	{ }
};

static struct auxiliary_driver sf_driver = {
	.name = LABNIC_SF_DEVICE_NAME,
	.probe = probe,
	.remove = remove,
	.id_table = sf_device_ids,
};

int labnic_sf_driver_register(void)
{
	return auxiliary_driver_register(&sf_driver);
}

/* No device is left, except where devlink still has a reference. */
void labnic_sf_driver_unregister(void)
{
	auxiliary_driver_unregister(&sf_driver);
	/* devlink drops its reference in a work, after a grace period. */
	wait_event(labnic_sf_released, !atomic_read(&labnic_sf_devices));
	/* And until the last release() has returned from this module's code. */
	synchronize_rcu_tasks();
	ida_destroy(&labnic_sf_ids);
}

static void release(struct device *dev)
{
	struct labnic_sf_device *device = of_auxiliary(to_auxiliary_dev(dev));

	ida_free(&labnic_sf_ids, device->auxiliary.id);
	kfree(device);
	if (atomic_dec_and_test(&labnic_sf_devices))
		wake_up(&labnic_sf_released);
}

static ssize_t sfnum_show(struct device *dev, struct device_attribute *attr,
			  char *text)
{
	return sysfs_emit(text, "%u\n", of_auxiliary(to_auxiliary_dev(dev))->sfnum);
}

static DEVICE_ATTR_RO(sfnum);

static struct attribute *sf_attrs[] = {
	&dev_attr_sfnum.attr,
	NULL,
};

ATTRIBUTE_GROUPS(sf);

/* An identifier that is not the sfnum. */
static int identifier(u32 sfnum)
{
	int id = ida_alloc_min(&labnic_sf_ids, LABNIC_SF_DEVICE_FIRST, GFP_KERNEL);
	int other;

	if (id < 0 || id != sfnum)
		return id;
	other = ida_alloc_min(&labnic_sf_ids, id + 1, GFP_KERNEL);
	ida_free(&labnic_sf_ids, id);
	return other;
}

/* On failure returns NULL and writes a line to the kernel's log. */
struct labnic_sf_device *labnic_sf_device_add(struct labnic_sf *sf)
{
	struct labnic_sf_device *device;
	int ret = -ENOMEM;

	device = kzalloc(sizeof(*device), GFP_KERNEL);
	if (!device)
		goto err;
	device->sf = sf;
	device->sfnum = sf->sfnum;
	ret = identifier(sf->sfnum);
	if (ret < 0)
		goto err_free;
	device->auxiliary.id = ret;
	device->auxiliary.name = LABNIC_SF_DEVICE_NAME;
	device->auxiliary.dev.parent = sf->pf->dev;
	device->auxiliary.dev.release = release;
	device->auxiliary.dev.groups = sf_groups;
	ret = auxiliary_device_init(&device->auxiliary);
	if (ret) {
		ida_free(&labnic_sf_ids, device->auxiliary.id);
		goto err_free;
	}
	/* From here on release() frees. */
	atomic_inc(&labnic_sf_devices);
	ret = auxiliary_device_add(&device->auxiliary);
	if (ret) {
		auxiliary_device_uninit(&device->auxiliary);
		goto err;
	}
	return device;

err_free:
	kfree(device);
err:
	pr_err("labnic: sfnum %u has no auxiliary device: error %d\n",
	       sf->sfnum, ret);
	return NULL;
}

/* Waits until the driver has let go. */
void labnic_sf_device_remove(struct labnic_sf_device *device)
{
	auxiliary_device_delete(&device->auxiliary);
	auxiliary_device_uninit(&device->auxiliary);
}
