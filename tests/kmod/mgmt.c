// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: the management device, and the life of the devices it creates.
 *
 *   vdpa dev add name NAME mgmtdev labnic [mac M] [mtu N] [max_vqp N]
 *                                         [device_features F]
 *
 * Management devices of subfunctions (sf_device.c) create theirs here, too.
 *
 * Adding: read the parameters, allocate, join the switch, register. Deleting:
 * unregister, which waits until the driver has let go, leave the switch, free.
 */
#include <linux/dma-mapping.h>
#include <linux/etherdevice.h>
#include <linux/module.h>
#include <uapi/linux/vdpa.h>
#include <uapi/linux/virtio_ids.h>

#include "sf.h"

DEFINE_MUTEX(labnic_plane);
struct workqueue_struct *labnic_workqueue;

#define LABNIC_FEATURES		(BIT_ULL(VIRTIO_F_VERSION_1) |		\
				 BIT_ULL(VIRTIO_F_ACCESS_PLATFORM) |	\
				 BIT_ULL(VIRTIO_F_IN_ORDER) |		\
				 BIT_ULL(VIRTIO_F_NOTIFICATION_DATA) |	\
				 BIT_ULL(VIRTIO_RING_F_EVENT_IDX) |	\
				 BIT_ULL(VIRTIO_RING_F_INDIRECT_DESC) |	\
				 BIT_ULL(VIRTIO_NET_F_MAC) |		\
				 BIT_ULL(VIRTIO_NET_F_MTU) |		\
				 BIT_ULL(VIRTIO_NET_F_STATUS) |		\
				 BIT_ULL(VIRTIO_NET_F_MRG_RXBUF) |	\
				 LABNIC_CVQ_FEATURES)

#define LABNIC_CVQ_FEATURES	(BIT_ULL(VIRTIO_NET_F_CTRL_VQ) |	\
				 BIT_ULL(VIRTIO_NET_F_CTRL_RX) |	\
				 BIT_ULL(VIRTIO_NET_F_CTRL_RX_EXTRA) |	\
				 BIT_ULL(VIRTIO_NET_F_CTRL_VLAN) |	\
				 BIT_ULL(VIRTIO_NET_F_CTRL_MAC_ADDR) |	\
				 BIT_ULL(VIRTIO_NET_F_MQ))

const u64 labnic_features = LABNIC_FEATURES;

static u64 able_features(const struct labnic_abilities *can)
{
	u64 features = LABNIC_FEATURES;

	if (!can->event_idx)
		features &= ~BIT_ULL(VIRTIO_RING_F_EVENT_IDX);
	if (!can->indirect)
		features &= ~BIT_ULL(VIRTIO_RING_F_INDIRECT_DESC);
	if (!can->in_order || can->completion == LABNIC_COMPLETION_REORDERED)
		features &= ~BIT_ULL(VIRTIO_F_IN_ORDER);
	if (!can->mq)
		features &= ~BIT_ULL(VIRTIO_NET_F_MQ);
	if (!can->mrg_rxbuf)
		features &= ~BIT_ULL(VIRTIO_NET_F_MRG_RXBUF);
	if (!can->notification_data)
		features &= ~BIT_ULL(VIRTIO_F_NOTIFICATION_DATA);
	if (can->cvq == LABNIC_CVQ_NONE)
		features &= ~LABNIC_CVQ_FEATURES;
	return features;
}

static int refuse(const char *why)
{
	pr_err("labnic: device refused: %s\n", why);
	return -EINVAL;
}

/* A subfunction's address, if it is set; else a random one. */
static void default_mac(u8 *mac, struct labnic_sf *sf)
{
	bool given = false;

	if (sf) {
		mutex_lock(&labnic_plane);
		ether_addr_copy(mac, sf->hw_addr);
		mutex_unlock(&labnic_plane);
		given = is_valid_ether_addr(mac);
	}
	if (!given)
		eth_random_addr(mac);
}

/* Checks the request against the parameters. */
static int configure(struct labnic *nic, const struct vdpa_dev_set_config *config,
		     struct labnic_sf *sf)
{
	const u64 needed = BIT_ULL(VIRTIO_F_VERSION_1) |
			   BIT_ULL(VIRTIO_F_ACCESS_PLATFORM);

	nic->offered = able_features(&nic->can);
	if (config->mask & BIT_ULL(VDPA_ATTR_DEV_FEATURES)) {
		if (config->device_features & ~nic->offered)
			return refuse("a feature that the parameters switch off");
		if ((config->device_features & needed) != needed)
			return refuse("no VERSION_1 or no ACCESS_PLATFORM");
		nic->offered = config->device_features;
	}
	/* Commands of the control queue need one (virtio 1.3, 5.1.3.1). */
	if (!(nic->offered & BIT_ULL(VIRTIO_NET_F_CTRL_VQ)))
		nic->offered &= ~LABNIC_CVQ_FEATURES;

	nic->max_pairs = 1;
	if (config->mask & BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MAX_VQP))
		nic->max_pairs = config->net.max_vq_pairs;
	if (nic->max_pairs < 1 || nic->max_pairs > LABNIC_PAIRS_MAX)
		return refuse("max_vqp is not 1 to 8");
	if (nic->max_pairs == 1)
		nic->offered &= ~BIT_ULL(VIRTIO_NET_F_MQ);
	else if (!(nic->offered & BIT_ULL(VIRTIO_NET_F_MQ)))
		return refuse("max_vqp without the feature MQ");

	nic->mtu = ETH_DATA_LEN;
	if (config->mask & BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MTU))
		nic->mtu = config->net.mtu;
	if (nic->mtu < ETH_MIN_MTU)
		return refuse("mtu below 68");

	default_mac(nic->permanent_mac, sf);
	if (config->mask & BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MACADDR)) {
		if (!is_valid_ether_addr(config->net.mac))
			return refuse("mac is no unicast address");
		ether_addr_copy(nic->permanent_mac, config->net.mac);
	}
	return 0;
}

static int allocate_queues(struct labnic *nic)
{
	unsigned int i;
	int ret;

	nic->nvqs = 2 * nic->max_pairs;
	if (nic->offered & BIT_ULL(VIRTIO_NET_F_CTRL_VQ))
		nic->nvqs++;
	nic->vqs = kvcalloc(nic->nvqs, sizeof(*nic->vqs), GFP_KERNEL);
	if (!nic->vqs)
		return -ENOMEM;
	for (i = 0; i < nic->nvqs; i++) {
		nic->vqs[i].nic = nic;
		nic->vqs[i].index = i;
		ret = labnic_ring_alloc(&nic->vqs[i]);
		if (ret)
			return ret;
	}
	return labnic_doorbell_alloc(nic);
}

/* sf: the device's subfunction, or NULL for a device on the switch. */
int labnic_device_add(struct vdpa_mgmt_dev *mdev, const char *name,
		      const struct vdpa_dev_set_config *config,
		      struct labnic_sf *sf)
{
	struct labnic_abilities can;
	unsigned int ngroups;
	struct labnic *nic;
	int ret;

	ret = labnic_abilities_read(&can);
	if (ret)
		return ret;
	ngroups = 1 + can.cvq_group + can.desc_group;
	nic = vdpa_alloc_device(struct labnic, vdpa, sf ? mdev->device : NULL,
				&labnic_ops, ngroups,
				can.address_spaces, name, false);
	if (IS_ERR(nic))
		return PTR_ERR(nic);
	/* From here on an error ends in put_device(), which frees. */
	nic->can = can;
	labnic_iotlb_init(nic);
	INIT_DELAYED_WORK(&nic->work, labnic_work);
	nic->link = true;
	nic->vdpa.mdev = mdev;
	nic->vdpa.dma_dev = &nic->vdpa.dev;
	nic->vdpa.dev.groups = labnic_attribute_groups;
	labnic_ops_adapt(nic);

	nic->vdpa.dev.dma_mask = &nic->vdpa.dev.coherent_dma_mask;
	ret = dma_set_mask_and_coherent(&nic->vdpa.dev, DMA_BIT_MASK(64));
	if (ret)
		goto err_put;
	ret = configure(nic, config, sf);
	if (ret)
		goto err_put;
	ret = allocate_queues(nic);
	if (ret)
		goto err_put;
	nic->ops.reset(&nic->vdpa);
	ret = labnic_switch_attach(nic, sf);
	if (ret)
		goto err_put;
	ret = _vdpa_register_device(&nic->vdpa, nic->nvqs);
	if (ret)
		goto err_detach;
	return 0;

err_detach:
	labnic_doorbell_free(nic);
	labnic_switch_detach(nic);
err_put:
	put_device(&nic->vdpa.dev);
	return ret;
}

void labnic_device_del(struct vdpa_mgmt_dev *mdev, struct vdpa_device *vdpa)
{
	struct labnic *nic = labnic_of(vdpa);

	/* Unregistering would free the device before it has left the switch. */
	get_device(&vdpa->dev);
	_vdpa_unregister_device(vdpa);
	/* First who schedules work, then the work. */
	labnic_doorbell_free(nic);
	labnic_switch_detach(nic);
	put_device(&vdpa->dev);
}

int labnic_device_set_attr(struct vdpa_mgmt_dev *mdev, struct vdpa_device *vdpa,
			   const struct vdpa_dev_set_config *config)
{
	struct labnic *nic = labnic_of(vdpa);

	if (!(config->mask & BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MACADDR)))
		return -EOPNOTSUPP;
	if (!is_valid_ether_addr(config->net.mac))
		return -EINVAL;
	mutex_lock(&labnic_plane);
	ether_addr_copy(nic->permanent_mac, config->net.mac);
	ether_addr_copy(nic->mac, config->net.mac);
	labnic_config_changed(nic);
	mutex_unlock(&labnic_plane);
	return 0;
}

static int dev_add(struct vdpa_mgmt_dev *mdev, const char *name,
		   const struct vdpa_dev_set_config *config)
{
	return labnic_device_add(mdev, name, config, NULL);
}

static const struct vdpa_mgmtdev_ops labnic_mgmtdev_ops = {
	.dev_add = dev_add,
	.dev_del = labnic_device_del,
	.dev_set_attr = labnic_device_set_attr,
};

static void labnic_parent_release(struct device *dev)
{
}

static struct device labnic_parent = {
	.init_name = "labnic",
	.release = labnic_parent_release,
};

static struct virtio_device_id labnic_ids[] = {
	{ VIRTIO_ID_NET, VIRTIO_DEV_ANY_ID },
	{ 0 },
};

static struct vdpa_mgmt_dev labnic_mgmtdev = {
	.device = &labnic_parent,
	.id_table = labnic_ids,
	.ops = &labnic_mgmtdev_ops,
	.config_attr_mask = BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MACADDR) |
			    BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MTU) |
			    BIT_ULL(VDPA_ATTR_DEV_NET_CFG_MAX_VQP) |
			    BIT_ULL(VDPA_ATTR_DEV_FEATURES),
	.max_supported_vqs = LABNIC_QUEUES_MAX,
	.supported_features = LABNIC_FEATURES,
};

static int __init labnic_init(void)
{
	int ret;

	labnic_workqueue = alloc_ordered_workqueue("labnic", 0);
	if (!labnic_workqueue)
		return -ENOMEM;
	ret = labnic_tx_init();
	if (ret)
		goto err_workqueue;
	ret = labnic_ctrl_init();
	if (ret)
		goto err_tx;
	ret = device_register(&labnic_parent);
	if (ret) {
		put_device(&labnic_parent);
		goto err_ctrl;
	}
	ret = vdpa_mgmtdev_register(&labnic_mgmtdev);
	if (ret)
		goto err_parent;
	ret = labnic_pf_init();
	if (ret)
		goto err_mgmtdev;
	return 0;

err_mgmtdev:
	vdpa_mgmtdev_unregister(&labnic_mgmtdev);
err_parent:
	device_unregister(&labnic_parent);
err_ctrl:
	labnic_ctrl_exit();
err_tx:
	labnic_tx_exit();
err_workqueue:
	destroy_workqueue(labnic_workqueue);
	return ret;
}

static void __exit labnic_exit(void)
{
	labnic_pf_exit();
	vdpa_mgmtdev_unregister(&labnic_mgmtdev);
	device_unregister(&labnic_parent);
	labnic_ctrl_exit();
	labnic_tx_exit();
	destroy_workqueue(labnic_workqueue);
}

module_init(labnic_init);
module_exit(labnic_exit);

MODULE_LICENSE("GPL");
MODULE_AUTHOR("The Bellhop authors");
MODULE_DESCRIPTION("vDPA network device with every ability, for the lab");
