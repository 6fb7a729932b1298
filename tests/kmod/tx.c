// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: transmit queues, and the work that serves all queues of a device.
 *
 * A queue is served only after its own kick, so that another kick does not
 * hide one that a VMM loses. Work runs under labnic_plane.
 */
#include <linux/jiffies.h>
#include <linux/mm.h>

#include "sf.h"

/* Chains of one queue before others have their turn. */
#define LABNIC_BUDGET		64
/* Chains that out-of-order completion collects before it reverses them. */
#define LABNIC_REORDER_BATCH	8

/* The frame in flight; under labnic_plane. */
void *labnic_frame;

int labnic_tx_init(void)
{
	labnic_frame = kvmalloc(LABNIC_FRAME_MAX, GFP_KERNEL);
	return labnic_frame ? 0 : -ENOMEM;
}

void labnic_tx_exit(void)
{
	kvfree(labnic_frame);
}

/* Schedules the work again at that time, or earlier. */
static void look_again(struct labnic *nic, unsigned long at)
{
	if (!nic->again || time_before(at, nic->again_at))
		nic->again_at = at;
	nic->again = true;
}

static void publish_one(struct labnic_vq *vq, u16 head)
{
	struct labnic_element element = { .id = head };

	labnic_ring_publish(vq, &element, 1);
}

/* Returns transmitted chains that are due, or all. */
void labnic_tx_flush(struct labnic_vq *vq, bool all)
{
	bool reorder = vq->nic->can.completion == LABNIC_COMPLETION_REORDERED;
	unsigned int i, n = 0;

	while (n < vq->npending &&
	       (all || time_after_eq(jiffies, vq->pending[n].due)))
		n++;
	if (reorder && (n || vq->npending >= LABNIC_REORDER_BATCH))
		n = vq->npending;
	if (!n)
		return;
	if (labnic_has(vq->nic, VIRTIO_F_IN_ORDER)) {
		labnic_ring_publish_batch(vq, vq->pending[n - 1].head, n);
	} else {
		for (i = 0; i < n; i++)
			publish_one(vq, vq->pending[reorder ? n - 1 - i : i].head);
	}
	vq->npending -= n;
	memmove(vq->pending, vq->pending + n,
		vq->npending * sizeof(*vq->pending));
	labnic_ring_signal(vq);
}

static void complete_chain(struct labnic_vq *vq, u16 head)
{
	const struct labnic_abilities *can = &vq->nic->can;
	unsigned long delay = 0;

	if (can->completion != LABNIC_COMPLETION_IMMEDIATE)
		delay = msecs_to_jiffies(can->completion_ms);
	/* A driver may offer one chain many times, so there can be more. */
	if (vq->npending == can->queue_size)
		labnic_tx_flush(vq, true);
	vq->pending[vq->npending].head = head;
	vq->pending[vq->npending].due = jiffies + delay;
	vq->npending++;
}

/* Reads a frame; returns its length, or 0 for an invalid chain. */
static size_t read_frame(struct labnic_vq *vq)
{
	size_t length = vringh_kiov_length(&vq->read_iov);
	ssize_t read;

	if (length < LABNIC_HEADER + ETH_HLEN || length > LABNIC_FRAME_MAX)
		return 0;
	read = vringh_iov_pull_iotlb(&vq->buffers, &vq->read_iov, labnic_frame,
				     length);
	return read > 0 && (size_t)read == length ? length : 0;
}

/* Transmits one chain; false when there is no more to do now. */
static bool transmit_one(struct labnic_vq *vq)
{
	struct labnic *nic = vq->nic;
	unsigned long retry_at;
	size_t length;
	u16 head;

	switch (labnic_ring_fetch(vq, &vq->read_iov, NULL, &head)) {
	case LABNIC_FETCH_CHAIN:
		break;
	case LABNIC_FETCH_BAD:
		complete_chain(vq, head);
		return true;
	case LABNIC_FETCH_NONE:
		/* false: something became available just now */
		return !vringh_notify_enable_iotlb(&vq->vring);
	default:
		return false;
	}
	length = read_frame(vq);
	if (!length) {
		vq->stats.errors++;
	} else if (!labnic_link(nic)) {
		nic->counters.link_down++;
		vq->stats.drops++;
	} else if (nic->sf) {
		labnic_netdev_receive(nic->sf->representor,
				      labnic_frame + LABNIC_HEADER,
				      length - LABNIC_HEADER);
		vq->stats.packets++;
		vq->stats.bytes += length;
	} else if (labnic_switch_forward(vq, labnic_frame, length, &retry_at)) {
		vq->stats.packets++;
		vq->stats.bytes += length;
	} else {
		vringh_abandon_iotlb(&vq->vring, 1);
		vq->stats.waits += !vq->waiting;
		vq->waiting = true;
		look_again(nic, retry_at);
		return false;
	}
	complete_chain(vq, head);
	return true;
}

void labnic_tx(struct labnic_vq *vq)
{
	unsigned int budget = LABNIC_BUDGET;

	vq->waiting = false;
	vringh_notify_disable_iotlb(&vq->vring);
	while (transmit_one(vq)) {
		if (!--budget) {
			set_bit(vq->index, vq->nic->kicked);
			labnic_schedule(vq->nic);
			break;
		}
	}
}

static void serve_queue(struct labnic_vq *vq)
{
	struct labnic *nic = vq->nic;
	bool kicked = test_and_clear_bit(vq->index, nic->kicked);

	if (labnic_is_cvq(nic, vq->index)) {
		if (kicked)
			labnic_ctrl(vq);
	} else if (vq->slots) {
		if (kicked) {
			labnic_rx_prefetch(vq);
			labnic_switch_credit(nic);
		}
	} else if (vq->index & 1) {
		if (kicked || vq->waiting)
			labnic_tx(vq);
		labnic_tx_flush(vq, false);
		if (vq->npending)
			look_again(nic, vq->pending[0].due);
	}
}

void labnic_work(struct work_struct *work)
{
	struct labnic *nic = container_of(to_delayed_work(work), struct labnic,
					  work);
	unsigned int i;

	mutex_lock(&labnic_plane);
	nic->again = false;
	/* Kicks of a device that is not running are kept until it is. */
	if (nic->attached && labnic_running(nic))
		for (i = 0; i < nic->nvqs; i++)
			if (nic->vqs[i].live)
				serve_queue(&nic->vqs[i]);
	/* If it is already queued, it will find the time itself. */
	if (nic->again)
		queue_delayed_work(labnic_workqueue, &nic->work,
				   time_after(nic->again_at, jiffies) ?
				   nic->again_at - jiffies : 1);
	mutex_unlock(&labnic_plane);
}
