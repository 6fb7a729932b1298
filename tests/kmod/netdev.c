// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: the netdevs of the NIC.
 *
 * A representor is the host's end of a subfunction: it receives the frames that
 * the function's vDPA device sends, and the device receives the frames sent
 * here, and no others. The link of the device follows the administrative state
 * of the representor, as with mlx5. Frames sent to the uplink are dropped and
 * counted: nothing is connected to the NIC.
 *
 *   device --tx queue--> labnic_netdev_receive() --> netif_rx()
 *   ndo_start_xmit --> queue --> work --credits--> device's rx queue
 *
 * ndo_start_xmit cannot sleep, so the work takes labnic_plane. A full queue
 * stops the netdev; the qdisc holds frames back then, and drops. Frames for a
 * device that has no buffers wait in the queue as long as they would in the
 * switch (switch.c). No offloads: the stack segments and computes checksums.
 */
#include <linux/etherdevice.h>
#include <linux/ethtool.h>

#include "sf.h"

#define LABNIC_NETDEV_QUEUE	512
/* Frames of one queue before others have their turn. */
#define LABNIC_NETDEV_BUDGET	64

static struct labnic_netdev *of_dev(struct net_device *dev)
{
	return netdev_priv(dev);
}

static int netdev_open(struct net_device *dev)
{
	struct labnic_netdev *netdev = of_dev(dev);

	mutex_lock(&labnic_plane);
	netdev->up = true;
	if (netdev->sf && netdev->sf->nic)
		labnic_config_changed(netdev->sf->nic);
	mutex_unlock(&labnic_plane);
	netif_carrier_on(dev);
	netif_start_queue(dev);
	return 0;
}

/* No frame is being sent: the core has stopped the queue. */
static int netdev_stop(struct net_device *dev)
{
	struct labnic_netdev *netdev = of_dev(dev);
	unsigned int left;

	netif_stop_queue(dev);
	netif_carrier_off(dev);
	mutex_lock(&labnic_plane);
	netdev->up = false;
	left = skb_queue_len(&netdev->queue);
	skb_queue_purge(&netdev->queue);
	if (netdev->sf && netdev->sf->nic)
		labnic_config_changed(netdev->sf->nic);
	mutex_unlock(&labnic_plane);
	while (left--)
		dev_core_stats_tx_dropped_inc(dev);
	cancel_delayed_work_sync(&netdev->work);
	return 0;
}

static netdev_tx_t netdev_xmit(struct sk_buff *skb, struct net_device *dev)
{
	struct labnic_netdev *netdev = of_dev(dev);

	if (!netdev->sf || skb->len < ETH_HLEN ||
	    skb->len > LABNIC_FRAME_MAX - LABNIC_HEADER ||
	    skb_queue_len_lockless(&netdev->queue) >= LABNIC_NETDEV_QUEUE) {
		dev_core_stats_tx_dropped_inc(dev);
		dev_kfree_skb_any(skb);
		return NETDEV_TX_OK;
	}
	/* A frame may lie here for long: its sender's socket is not charged. */
	skb_orphan(skb);
	skb_queue_tail(&netdev->queue, skb);
	if (skb_queue_len_lockless(&netdev->queue) >= LABNIC_NETDEV_QUEUE) {
		netif_stop_queue(dev);
		/* Pairs with the work, which takes frames and then checks. */
		smp_mb__after_atomic();
		if (skb_queue_len_lockless(&netdev->queue) < LABNIC_NETDEV_QUEUE)
			netif_start_queue(dev);
	}
	mod_delayed_work(labnic_workqueue, &netdev->work, 0);
	return NETDEV_TX_OK;
}

static void netdev_finish(struct labnic_netdev *netdev, struct sk_buff *skb,
			  bool delivered)
{
	skb_unlink(skb, &netdev->queue);
	if (delivered) {
		dev_sw_netstats_tx_add(netdev->dev, 1, skb->len);
		consume_skb(skb);
	} else {
		dev_core_stats_tx_dropped_inc(netdev->dev);
		kfree_skb(skb);
	}
	/* Pairs with netdev_xmit(). */
	smp_mb();
	if (netif_queue_stopped(netdev->dev) &&
	    skb_queue_len(&netdev->queue) <= LABNIC_NETDEV_QUEUE / 2)
		netif_wake_queue(netdev->dev);
}

/* Delivers the first frame; false when there is no more to do now. */
static bool deliver_one(struct labnic_netdev *netdev)
{
	struct sk_buff *skb = skb_peek(&netdev->queue);
	struct labnic *nic = netdev->sf->nic;
	unsigned long retry_at;
	size_t length;

	if (!skb)
		return false;
	if (!nic || skb_copy_bits(skb, 0, labnic_frame + LABNIC_HEADER, skb->len)) {
		netdev_finish(netdev, skb, false);
		return true;
	}
	length = LABNIC_HEADER + skb->len;
	switch (labnic_switch_offer(nic, skb_get_hash(skb), labnic_frame, length,
				    &retry_at)) {
	case LABNIC_OFFER_TAKEN:
		netdev_finish(netdev, skb, true);
		return true;
	case LABNIC_OFFER_DROPPED:
		netdev_finish(netdev, skb, false);
		return true;
	case LABNIC_OFFER_WAIT:
		break;
	}
	/* Earlier, if the device gets buffers: labnic_netdev_credit(). */
	queue_delayed_work(labnic_workqueue, &netdev->work,
			   time_after(retry_at, jiffies) ? retry_at - jiffies : 1);
	return false;
}

static void netdev_work(struct work_struct *work)
{
	struct labnic_netdev *netdev = container_of(to_delayed_work(work),
						    struct labnic_netdev, work);
	unsigned int budget = LABNIC_NETDEV_BUDGET;

	mutex_lock(&labnic_plane);
	while (netdev->up && deliver_one(netdev)) {
		if (!--budget) {
			mod_delayed_work(labnic_workqueue, &netdev->work, 0);
			break;
		}
	}
	mutex_unlock(&labnic_plane);
}

/* Under labnic_plane: the function's device may have buffers again. */
void labnic_netdev_credit(struct labnic_netdev *netdev)
{
	if (netdev->up && !skb_queue_empty(&netdev->queue))
		mod_delayed_work(labnic_workqueue, &netdev->work, 0);
}

/* Under labnic_plane: a frame of the function, without virtio's header. */
void labnic_netdev_receive(struct labnic_netdev *netdev, const void *frame,
			   size_t length)
{
	struct net_device *dev = netdev->dev;
	struct sk_buff *skb;

	if (!netdev->up) {
		dev_core_stats_rx_dropped_inc(dev);
		return;
	}
	skb = netdev_alloc_skb_ip_align(dev, length);
	if (!skb) {
		dev_core_stats_rx_dropped_inc(dev);
		return;
	}
	skb_put_data(skb, frame, length);
	skb->protocol = eth_type_trans(skb, dev);
	dev_sw_netstats_rx_add(dev, length);
	/* Counts frames itself that the backlog has no room for. */
	netif_rx(skb);
}

static const struct net_device_ops netdev_ops = {
	.ndo_open		= netdev_open,
	.ndo_stop		= netdev_stop,
	.ndo_start_xmit		= netdev_xmit,
	.ndo_get_stats64	= dev_get_tstats64,
	.ndo_validate_addr	= eth_validate_addr,
	.ndo_set_mac_address	= eth_mac_addr,
};

static void netdev_drvinfo(struct net_device *dev, struct ethtool_drvinfo *info)
{
	strscpy(info->driver, "labnic", sizeof(info->driver));
	strscpy(info->bus_info, dev_name(dev->dev.parent), sizeof(info->bus_info));
}

static const struct ethtool_ops netdev_ethtool_ops = {
	.get_drvinfo	= netdev_drvinfo,
	.get_link	= ethtool_op_get_link,
};

static void netdev_setup(struct net_device *dev)
{
	ether_setup(dev);
	dev->netdev_ops = &netdev_ops;
	dev->ethtool_ops = &netdev_ethtool_ops;
	dev->pcpu_stat_type = NETDEV_PCPU_STAT_TSTATS;
	dev->min_mtu = ETH_MIN_MTU;
	dev->max_mtu = ETH_MAX_MTU;
	eth_hw_addr_random(dev);
}

/*
 * Registers a netdev; sf: its subfunction, or NULL for the uplink. The port is
 * already registered. Takes rtnl.
 */
struct labnic_netdev *labnic_netdev_add(struct device *parent,
					struct devlink_port *port,
					struct labnic_sf *sf, const char *name)
{
	struct labnic_netdev *netdev;
	struct net_device *dev;
	int ret;

	dev = alloc_netdev(sizeof(*netdev), name, NET_NAME_ENUM, netdev_setup);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	netdev = of_dev(dev);
	netdev->dev = dev;
	netdev->sf = sf;
	skb_queue_head_init(&netdev->queue);
	INIT_DELAYED_WORK(&netdev->work, netdev_work);
	SET_NETDEV_DEV(dev, parent);
	SET_NETDEV_DEVLINK_PORT(dev, port);
	netif_carrier_off(dev);
	ret = register_netdev(dev);
	if (ret) {
		free_netdev(dev);
		return ERR_PTR(ret);
	}
	return netdev;
}

/* Takes rtnl. The function has no vDPA device any more. */
void labnic_netdev_remove(struct labnic_netdev *netdev)
{
	unregister_netdev(netdev->dev);
	free_netdev(netdev->dev);
}
