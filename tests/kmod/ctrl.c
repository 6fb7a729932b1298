// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: the control queue (virtio 1.3, 5.1.6.5). Called under labnic_plane.
 *
 * A command without its feature, with the wrong length or with an invalid
 * value is answered with VIRTIO_NET_ERR and changes nothing.
 */
#include <linux/etherdevice.h>
#include <linux/mm.h>

#include "labnic.h"

/* Longer than the longest command: a MAC table of this module's size. */
#define LABNIC_COMMAND_MAX	SZ_4K

static u8 *labnic_command;

int labnic_ctrl_init(void)
{
	labnic_command = kvmalloc(LABNIC_COMMAND_MAX, GFP_KERNEL);
	return labnic_command ? 0 : -ENOMEM;
}

void labnic_ctrl_exit(void)
{
	kvfree(labnic_command);
}

/* As after a reset: all frames are received until the driver sets a filter. */
void labnic_filter_reset(struct labnic_filter *filter)
{
	memset(filter, 0, sizeof(*filter));
	filter->promiscuous = true;
}

static bool rx_mode(struct labnic *nic, u8 command, const u8 *data, size_t length)
{
	struct labnic_filter *filter = &nic->filter;
	unsigned int feature = VIRTIO_NET_F_CTRL_RX;
	bool *mode;

	switch (command) {
	case VIRTIO_NET_CTRL_RX_PROMISC:
		mode = &filter->promiscuous;
		break;
	case VIRTIO_NET_CTRL_RX_ALLMULTI:
		mode = &filter->all_multicast;
		break;
	case VIRTIO_NET_CTRL_RX_ALLUNI:
		mode = &filter->all_unicast;
		feature = VIRTIO_NET_F_CTRL_RX_EXTRA;
		break;
	case VIRTIO_NET_CTRL_RX_NOMULTI:
		mode = &filter->no_multicast;
		feature = VIRTIO_NET_F_CTRL_RX_EXTRA;
		break;
	case VIRTIO_NET_CTRL_RX_NOUNI:
		mode = &filter->no_unicast;
		feature = VIRTIO_NET_F_CTRL_RX_EXTRA;
		break;
	case VIRTIO_NET_CTRL_RX_NOBCAST:
		mode = &filter->no_broadcast;
		feature = VIRTIO_NET_F_CTRL_RX_EXTRA;
		break;
	default:
		return false;
	}
	if (!labnic_has(nic, feature) || length != 1 || data[0] > 1)
		return false;
	*mode = data[0];
	return true;
}

/* One list of a MAC table: a little-endian count, then the addresses. */
static bool take_list(const u8 **data, size_t *length, const u8 **macs, u32 *count)
{
	if (*length < sizeof(__le32))
		return false;
	*count = get_unaligned_le32(*data);
	*data += sizeof(__le32);
	*length -= sizeof(__le32);
	if (*count > *length / ETH_ALEN)
		return false;
	*macs = *data;
	*data += *count * ETH_ALEN;
	*length -= *count * ETH_ALEN;
	return true;
}

static bool mac_table(struct labnic *nic, const u8 *data, size_t length)
{
	struct labnic_filter *filter = &nic->filter;
	const u8 *unicast, *multicast;
	u32 nunicast, nmulticast;

	if (!labnic_has(nic, VIRTIO_NET_F_CTRL_RX) ||
	    !take_list(&data, &length, &unicast, &nunicast) ||
	    !take_list(&data, &length, &multicast, &nmulticast) || length)
		return false;
	if (nunicast + nmulticast > ARRAY_SIZE(filter->macs))
		return false;
	memcpy(filter->macs, unicast, nunicast * ETH_ALEN);
	memcpy(filter->macs + nunicast, multicast, nmulticast * ETH_ALEN);
	filter->unicast = nunicast;
	filter->multicast = nmulticast;
	return true;
}

static bool mac_address(struct labnic *nic, const u8 *data, size_t length)
{
	if (!labnic_has(nic, VIRTIO_NET_F_CTRL_MAC_ADDR) || length != ETH_ALEN ||
	    !is_valid_ether_addr(data))
		return false;
	ether_addr_copy(nic->mac, data);
	nic->generation++;
	return true;
}

static bool vlan(struct labnic *nic, u8 command, const u8 *data, size_t length)
{
	u16 id;

	if (!labnic_has(nic, VIRTIO_NET_F_CTRL_VLAN) || length != sizeof(__le16))
		return false;
	id = get_unaligned_le16(data);
	if (id >= VLAN_N_VID)
		return false;
	switch (command) {
	case VIRTIO_NET_CTRL_VLAN_ADD:
		__set_bit(id, nic->filter.vlans);
		return true;
	case VIRTIO_NET_CTRL_VLAN_DEL:
		__clear_bit(id, nic->filter.vlans);
		return true;
	default:
		return false;
	}
}

static bool queue_pairs(struct labnic *nic, u8 command, const u8 *data, size_t length)
{
	u16 pairs;

	if (!labnic_has(nic, VIRTIO_NET_F_MQ) || length != sizeof(__le16) ||
	    command != VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET)
		return false;
	pairs = get_unaligned_le16(data);
	if (pairs < 1 || pairs > nic->max_pairs)
		return false;
	nic->pairs = pairs;
	return true;
}

static bool obey(struct labnic *nic, u8 class, u8 command, const u8 *data, size_t length)
{
	if (class == VIRTIO_NET_CTRL_MAC && command == VIRTIO_NET_CTRL_MAC_ADDR_SET)
		return mac_address(nic, data, length);
	if (nic->can.cvq != LABNIC_CVQ_FULL)
		return false;
	switch (class) {
	case VIRTIO_NET_CTRL_RX:
		return rx_mode(nic, command, data, length);
	case VIRTIO_NET_CTRL_MAC:
		return command == VIRTIO_NET_CTRL_MAC_TABLE_SET &&
		       mac_table(nic, data, length);
	case VIRTIO_NET_CTRL_VLAN:
		return vlan(nic, command, data, length);
	case VIRTIO_NET_CTRL_MQ:
		return queue_pairs(nic, command, data, length);
	default:
		return false;
	}
}

static void answer(struct labnic_vq *vq, u16 head, virtio_net_ctrl_ack ack)
{
	struct labnic_element element = { .id = head };
	ssize_t written;

	written = vringh_iov_push_iotlb(&vq->buffers, &vq->write_iov, &ack,
					sizeof(ack));
	if (written == sizeof(ack))
		element.length = sizeof(ack);
	else
		vq->stats.errors++;
	labnic_ring_publish(vq, &element, 1);
	labnic_ring_signal(vq);
}

static virtio_net_ctrl_ack execute(struct labnic_vq *vq)
{
	size_t length = vringh_kiov_length(&vq->read_iov);
	ssize_t read;

	if (length < sizeof(struct virtio_net_ctrl_hdr) ||
	    length > LABNIC_COMMAND_MAX)
		return VIRTIO_NET_ERR;
	read = vringh_iov_pull_iotlb(&vq->buffers, &vq->read_iov, labnic_command,
				     length);
	if (read < 0 || (size_t)read != length)
		return VIRTIO_NET_ERR;
	return obey(vq->nic, labnic_command[0], labnic_command[1],
		    labnic_command + 2, length - 2) ?
	       VIRTIO_NET_OK : VIRTIO_NET_ERR;
}

void labnic_ctrl(struct labnic_vq *vq)
{
	/* Commands beyond the size of the ring have a kick of their own. */
	unsigned int budget = vq->num;
	virtio_net_ctrl_ack ack;
	u16 head;

	while (budget--) {
		switch (labnic_ring_fetch(vq, &vq->read_iov, &vq->write_iov, &head)) {
		case LABNIC_FETCH_CHAIN:
			ack = execute(vq);
			break;
		case LABNIC_FETCH_BAD:
			labnic_ring_publish(vq, &(struct labnic_element) { .id = head }, 1);
			labnic_ring_signal(vq);
			continue;
		case LABNIC_FETCH_NONE:
			/* false: something became available just now */
			if (!vringh_notify_enable_iotlb(&vq->vring))
				continue;
			return;
		default:
			return;
		}
		vq->stats.packets++;
		if (ack == VIRTIO_NET_OK)
			vq->stats.successes++;
		else
			vq->stats.drops++;
		answer(vq, head, ack);
	}
	set_bit(vq->index, vq->nic->kicked);
	labnic_schedule(vq->nic);
}
