// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: receive queues. Everything here is called under labnic_plane.
 *
 *   available --fetch--> held --deliver--> used
 *       ^                  |
 *       +-----release------+   the newest first, down to rx_prefetch
 *
 * Held buffers are in flight: they stay over a suspend, where the vring base
 * is the available index. With out-of-order completion they are used in
 * another order than they were taken, and so never given back.
 */
#include "labnic.h"

/* The least number of buffers to hold, if available, to have a choice. */
#define LABNIC_REORDER_DEPTH	4

static bool reorders(const struct labnic_vq *vq)
{
	return vq->nic->can.completion == LABNIC_COMPLETION_REORDERED;
}

static struct labnic_buffer *held(struct labnic_vq *vq, unsigned int position)
{
	return &vq->slots[vq->held[position]];
}

static void free_slot(struct labnic_vq *vq, unsigned int slot)
{
	struct labnic_buffer *buffer = &vq->slots[slot];

	vringh_kiov_cleanup(&buffer->iov);
	vringh_kiov_init(&buffer->iov, buffer->pieces, LABNIC_PIECES);
	clear_bit(slot, vq->slots_taken);
}

static void remove_first(struct labnic_vq *vq, unsigned int n)
{
	unsigned int i;

	for (i = 0; i < n; i++)
		free_slot(vq, vq->held[i]);
	vq->nheld -= n;
	memmove(vq->held, vq->held + n, vq->nheld);
}

static void remove_last(struct labnic_vq *vq)
{
	vq->nheld--;
	free_slot(vq, vq->held[vq->nheld]);
}

/*
 * Forgets all held buffers; give_back: they become available again, which
 * requires that they were taken in order.
 */
void labnic_rx_drop_held(struct labnic_vq *vq, bool give_back)
{
	if (give_back)
		vringh_abandon_iotlb(&vq->vring, vq->nheld);
	while (vq->nheld)
		remove_last(vq);
}

/* Takes one more buffer. An invalid chain counts as one without room. */
static bool fetch(struct labnic_vq *vq)
{
	unsigned int slot = find_first_zero_bit(vq->slots_taken, LABNIC_HELD_MAX);
	struct labnic_buffer *buffer;

	if (slot >= LABNIC_HELD_MAX)
		return false;
	buffer = &vq->slots[slot];
	switch (labnic_ring_fetch(vq, NULL, &buffer->iov, &buffer->head)) {
	case LABNIC_FETCH_CHAIN:
		buffer->capacity = vringh_kiov_length(&buffer->iov);
		break;
	case LABNIC_FETCH_BAD:
		buffer->capacity = 0;
		break;
	default:
		free_slot(vq, slot);
		return false;
	}
	set_bit(slot, vq->slots_taken);
	vq->held[vq->nheld++] = slot;
	return true;
}

/* Like fetch; if there is none, the driver will kick for the next one. */
static bool fetch_or_arm(struct labnic_vq *vq)
{
	if (fetch(vq))
		return true;
	/* false: something became available just now */
	return !vringh_notify_enable_iotlb(&vq->vring) && fetch(vq);
}

/* Completes a buffer without room, unused. False: the first one has room. */
static bool use_up_empty(struct labnic_vq *vq)
{
	struct labnic_element element;

	if (!vq->nheld || held(vq, 0)->capacity)
		return false;
	element = (struct labnic_element) { .id = held(vq, 0)->head };
	labnic_ring_publish(vq, &element, 1);
	remove_first(vq, 1);
	labnic_ring_signal(vq);
	return true;
}

static size_t capacity(struct labnic_vq *vq)
{
	size_t sum = 0;
	unsigned int i;

	if (!vq->nheld)
		return 0;
	if (!labnic_has(vq->nic, VIRTIO_NET_F_MRG_RXBUF))
		return held(vq, 0)->capacity;
	for (i = 0; i < vq->nheld; i++)
		sum += held(vq, i)->capacity;
	return sum;
}

/*
 * Holds buffers for a frame of length bytes, including virtio's header. Call
 * labnic_rx_deliver() or labnic_rx_release() afterwards.
 */
enum labnic_credit labnic_rx_reserve(struct labnic_vq *vq, size_t length)
{
	bool merges = labnic_has(vq->nic, VIRTIO_NET_F_MRG_RXBUF);
	unsigned int empty = 0;

	if (!labnic_running(vq->nic) || !vq->live)
		return LABNIC_CREDIT_NONE;
	if (reorders(vq)) {
		while (vq->nheld < LABNIC_REORDER_DEPTH && fetch(vq))
			;
		vq->flip = !vq->flip;
		if (vq->flip && vq->nheld > 1)
			swap(vq->held[0], vq->held[1]);
	}
	for (;;) {
		/* A driver could post empty ones faster than this uses them. */
		while (use_up_empty(vq))
			if (++empty == LABNIC_QUEUE_SIZE_MAX)
				return LABNIC_CREDIT_SMALL;
		if (vq->nheld && capacity(vq) >= length)
			return LABNIC_CREDIT;
		if (vq->nheld && (!merges || vq->nheld == LABNIC_HELD_MAX))
			return LABNIC_CREDIT_SMALL;
		if (!fetch_or_arm(vq))
			return LABNIC_CREDIT_NONE;
	}
}

/* Writes a reserved frame; fills in virtio's header at its beginning. */
void labnic_rx_deliver(struct labnic_vq *vq, void *frame, size_t length)
{
	struct labnic_element elements[LABNIC_HELD_MAX];
	struct virtio_net_hdr_v1 *header = frame;
	size_t done = 0, total = 0;
	unsigned int i, n = 0;
	bool failed = false;

	while (n < vq->nheld && total < length)
		total += held(vq, n++)->capacity;
	memset(header, 0, sizeof(*header));
	header->num_buffers = cpu_to_le16(n);
	for (i = 0; i < n; i++) {
		struct labnic_buffer *buffer = held(vq, i);
		size_t part = min(buffer->capacity, length - done);
		ssize_t written;

		written = vringh_iov_push_iotlb(&vq->buffers, &buffer->iov,
						frame + done, part);
		if (written < 0 || (size_t)written != part)
			failed = true;
		elements[i].id = buffer->head;
		elements[i].length = part;
		done += part;
	}
	if (failed) {
		/* A buffer is not mapped: it is returned, the frame is lost. */
		for (i = 0; i < n; i++)
			elements[i].length = 0;
		vq->stats.errors++;
	} else {
		vq->stats.packets++;
		vq->stats.bytes += length;
	}
	labnic_ring_publish(vq, elements, n);
	remove_first(vq, n);
	labnic_rx_release(vq);
	labnic_ring_signal(vq);
}

/* Releases the buffers of a frame that does not come. */
void labnic_rx_release(struct labnic_vq *vq)
{
	if (reorders(vq))
		return;
	while (vq->nheld > vq->nic->can.rx_prefetch) {
		remove_last(vq);
		vringh_abandon_iotlb(&vq->vring, 1);
	}
}

/* Prefetches buffers. */
void labnic_rx_prefetch(struct labnic_vq *vq)
{
	while (vq->nheld < vq->nic->can.rx_prefetch && fetch(vq))
		;
}
