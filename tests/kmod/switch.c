// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: the switch, whose ports are all devices except those of
 * subfunctions, and pacing, which is the same for all. Under labnic_plane.
 *
 * It learns by source address, floods broadcast, multicast and unknown
 * addresses, and honours the receivers' filters. A frame is received on the
 * queue number that it was sent on, modulo the receiver's pairs, so that flows
 * stay in order.
 *
 * Pacing by credits: a frame leaves its transmit queue only when every receiver
 * has buffers for it. A receive queue without buffers starves:
 *
 *              no buffer               credit_wait_ms later
 *     fed ----------------> starving -----------------------> given up
 *      ^                       | frames wait                     | frames for it
 *      |                       |                                 | are dropped,
 *      +------- a buffer ------+---------------------------------+ and counted
 *
 * So a peer that never posts buffers delays others once, for a bounded time.
 * A port that is not started receives nothing and delays no other. A suspended
 * port counts as one without buffers.
 */
#include <linux/etherdevice.h>
#include <linux/hash.h>
#include <linux/jiffies.h>

#include "sf.h"

#define LABNIC_TABLE_BITS	8
#define LABNIC_AGE		(300 * HZ)

struct labnic_entry {
	struct labnic *nic;		/* NULL: unused */
	u8 mac[ETH_ALEN];
	unsigned long seen;		/* jiffies */
};

LIST_HEAD(labnic_ports);

/* One entry per hash: a newer address replaces an older one. */
static struct labnic_entry labnic_table[1 << LABNIC_TABLE_BITS];
static unsigned int labnic_nports;

static struct labnic_entry *entry_of(const u8 *mac)
{
	return &labnic_table[hash_64(ether_addr_to_u64(mac), LABNIC_TABLE_BITS)];
}

static void learn(struct labnic *nic, const u8 *mac)
{
	struct labnic_entry *entry = entry_of(mac);

	if (!is_valid_ether_addr(mac))
		return;
	entry->nic = nic;
	ether_addr_copy(entry->mac, mac);
	entry->seen = jiffies;
}

static struct labnic *find(const u8 *mac)
{
	const struct labnic_entry *entry = entry_of(mac);

	if (is_multicast_ether_addr(mac) || !entry->nic ||
	    !ether_addr_equal(entry->mac, mac) ||
	    time_after(jiffies, entry->seen + LABNIC_AGE))
		return NULL;
	return entry->nic;
}

/* Forgets the addresses that were learned from a port. */
void labnic_switch_forget(const struct labnic *nic)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(labnic_table); i++)
		if (labnic_table[i].nic == nic)
			labnic_table[i].nic = NULL;
}

/* Connects a device with its subfunction, which accepts only one. */
static int attach_to_sf(struct labnic *nic, struct labnic_sf *sf)
{
	if (sf->closing)
		return -EBUSY;
	if (sf->nic)
		return -ENOSPC;
	sf->nic = nic;
	nic->sf = sf;
	nic->attached = true;
	return 0;
}

/* sf: the device's subfunction, or NULL for a device on the switch. */
int labnic_switch_attach(struct labnic *nic, struct labnic_sf *sf)
{
	int ret = -ENOSPC;

	mutex_lock(&labnic_plane);
	if (sf) {
		ret = attach_to_sf(nic, sf);
	} else if (labnic_nports < LABNIC_PORTS_MAX) {
		list_add_tail(&nic->port, &labnic_ports);
		labnic_nports++;
		nic->attached = true;
		ret = 0;
	}
	mutex_unlock(&labnic_plane);
	return ret;
}

/* After this no work touches the device. */
void labnic_switch_detach(struct labnic *nic)
{
	mutex_lock(&labnic_plane);
	if (nic->sf) {
		labnic_switch_credit(nic);
		nic->sf->nic = NULL;
		nic->sf = NULL;
		nic->attached = false;
	} else if (nic->attached) {
		list_del(&nic->port);
		labnic_nports--;
		nic->attached = false;
		labnic_switch_forget(nic);
		labnic_switch_credit(nic);
	}
	mutex_unlock(&labnic_plane);
	cancel_delayed_work_sync(&nic->work);
}

/* A port has credit again, or is gone: waiting queues check again. */
void labnic_switch_credit(const struct labnic *port)
{
	struct labnic *nic;
	unsigned int i;

	if (port->sf) {
		labnic_netdev_credit(port->sf->representor);
		return;
	}
	list_for_each_entry(nic, &labnic_ports, port) {
		for (i = 0; i < nic->nvqs; i++) {
			if (nic->vqs[i].waiting) {
				labnic_schedule(nic);
				break;
			}
		}
	}
}

static bool in_list(const u8 (*macs)[ETH_ALEN], unsigned int n, const u8 *mac)
{
	unsigned int i;

	for (i = 0; i < n; i++)
		if (ether_addr_equal_unaligned(macs[i], mac))
			return true;
	return false;
}

static bool accepts_vlan(const struct labnic *nic, const struct vlan_ethhdr *eth,
			 size_t length)
{
	if (!labnic_has(nic, VIRTIO_NET_F_CTRL_VLAN) ||
	    length < VLAN_ETH_HLEN || eth->h_vlan_proto != htons(ETH_P_8021Q))
		return true;
	return test_bit(ntohs(eth->h_vlan_TCI) & VLAN_VID_MASK, nic->filter.vlans);
}

/* length: without virtio's header */
static bool accepts(const struct labnic *nic, const struct vlan_ethhdr *eth,
		    size_t length)
{
	const struct labnic_filter *filter = &nic->filter;

	if (filter->promiscuous)
		return true;
	if (!accepts_vlan(nic, eth, length))
		return false;
	if (is_broadcast_ether_addr(eth->h_dest))
		return !filter->no_broadcast;
	if (is_multicast_ether_addr(eth->h_dest))
		return !filter->no_multicast &&
		       (filter->all_multicast ||
			in_list(filter->macs + filter->unicast,
				filter->multicast, eth->h_dest));
	return !filter->no_unicast &&
	       (filter->all_unicast ||
		ether_addr_equal_unaligned(nic->mac, eth->h_dest) ||
		in_list(filter->macs, filter->unicast, eth->h_dest));
}

/* The queue that the port receives the frame on, or NULL. */
static struct labnic_vq *receiver(struct labnic *nic, unsigned int pair,
				  const struct vlan_ethhdr *eth, size_t length)
{
	struct labnic_vq *vq;

	if (!labnic_started(nic))
		return NULL;
	if (!labnic_link(nic)) {
		nic->counters.link_down++;
		return NULL;
	}
	vq = &nic->vqs[2 * (pair % nic->pairs)];
	/* Between two rings of a suspended port frames wait as well. */
	if ((!vq->live && !nic->suspended) || !accepts(nic, eth, length)) {
		nic->counters.filtered++;
		return NULL;
	}
	return vq;
}

static unsigned int receivers(struct labnic_vq **to, const struct labnic_vq *from,
			      const struct vlan_ethhdr *eth, size_t length)
{
	struct labnic *nic = find(eth->h_dest);
	unsigned int pair = from->index / 2;
	unsigned int n = 0;

	if (nic) {
		to[0] = nic == from->nic ? NULL : receiver(nic, pair, eth, length);
		return to[0] ? 1 : 0;
	}
	list_for_each_entry(nic, &labnic_ports, port) {
		if (nic == from->nic)
			continue;
		to[n] = receiver(nic, pair, eth, length);
		if (to[n])
			n++;
	}
	return n;
}

/* True while frames should wait for this queue's buffers. */
static bool worth_waiting(struct labnic_vq *vq)
{
	if (!vq->starved) {
		vq->starved = true;
		vq->starved_until = jiffies +
				    msecs_to_jiffies(vq->nic->can.credit_wait_ms);
	}
	return time_before(jiffies, vq->starved_until);
}

/*
 * Forwards a frame to its receivers. The frame begins with virtio's header,
 * which is overwritten. False: the frame must wait for buffers; retry it at
 * *retry_at at the latest.
 */
bool labnic_switch_forward(struct labnic_vq *from, void *frame, size_t length,
			   unsigned long *retry_at)
{
	const struct vlan_ethhdr *eth = frame + LABNIC_HEADER;
	struct labnic_vq *to[LABNIC_PORTS_MAX];
	enum labnic_credit credit[LABNIC_PORTS_MAX];
	unsigned int i, n;
	bool wait = false;

	learn(from->nic, eth->h_source);
	n = receivers(to, from, eth, length - LABNIC_HEADER);
	for (i = 0; i < n; i++) {
		credit[i] = labnic_rx_reserve(to[i], length);
		if (credit[i] != LABNIC_CREDIT_NONE) {
			to[i]->starved = false;
		} else if (worth_waiting(to[i])) {
			if (!wait || time_before(to[i]->starved_until, *retry_at))
				*retry_at = to[i]->starved_until;
			wait = true;
		}
	}
	for (i = 0; i < n; i++) {
		if (wait) {
			labnic_rx_release(to[i]);
			continue;
		}
		switch (credit[i]) {
		case LABNIC_CREDIT:
			labnic_rx_deliver(to[i], frame, length);
			continue;
		case LABNIC_CREDIT_NONE:
			to[i]->stats.overruns++;
			break;
		case LABNIC_CREDIT_SMALL:
			to[i]->stats.drops++;
			break;
		}
		labnic_rx_release(to[i]);
	}
	return !wait;
}

/*
 * Offers a frame to one device, which the caller has chosen: a subfunction's.
 * Like labnic_switch_forward(), but it reports frames without a receiver.
 */
enum labnic_offer labnic_switch_offer(struct labnic *nic, unsigned int pair,
				      void *frame, size_t length,
				      unsigned long *retry_at)
{
	struct labnic_vq *vq = receiver(nic, pair, frame + LABNIC_HEADER,
					length - LABNIC_HEADER);

	if (!vq)
		return LABNIC_OFFER_DROPPED;
	switch (labnic_rx_reserve(vq, length)) {
	case LABNIC_CREDIT:
		vq->starved = false;
		labnic_rx_deliver(vq, frame, length);
		return LABNIC_OFFER_TAKEN;
	case LABNIC_CREDIT_NONE:
		if (worth_waiting(vq)) {
			*retry_at = vq->starved_until;
			labnic_rx_release(vq);
			return LABNIC_OFFER_WAIT;
		}
		vq->stats.overruns++;
		break;
	case LABNIC_CREDIT_SMALL:
		vq->starved = false;
		vq->stats.drops++;
		break;
	}
	labnic_rx_release(vq);
	return LABNIC_OFFER_DROPPED;
}
