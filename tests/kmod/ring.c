// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: one split ring on vringh.
 *
 * A ring is programmed in pieces and taken over as a whole ("latched"). This
 * file adds to vringh: publishing several used elements with one index update,
 * which merged receive buffers need, and the batches of IN_ORDER. Both write
 * elements ahead of the index and then move vringh's own count before its last
 * completion, which writes the index atomically.
 */
#include <linux/bottom_half.h>
#include <linux/slab.h>

#include "labnic.h"

static bool is_rx(const struct labnic_vq *vq)
{
	return !(vq->index & 1) && vq->index < 2 * vq->nic->max_pairs;
}

int labnic_ring_alloc(struct labnic_vq *vq)
{
	unsigned int i;

	vq->pending = kcalloc(vq->nic->can.queue_size, sizeof(*vq->pending),
			      GFP_KERNEL);
	if (!vq->pending)
		return -ENOMEM;
	if (!is_rx(vq))
		return 0;
	vq->slots = kvcalloc(LABNIC_HELD_MAX, sizeof(*vq->slots), GFP_KERNEL);
	if (!vq->slots)
		return -ENOMEM;
	for (i = 0; i < LABNIC_HELD_MAX; i++)
		vringh_kiov_init(&vq->slots[i].iov, vq->slots[i].pieces,
				 LABNIC_PIECES);
	return 0;
}

void labnic_ring_free(struct labnic_vq *vq)
{
	if (vq->slots)
		labnic_rx_drop_held(vq, false);
	vringh_kiov_cleanup(&vq->read_iov);
	vringh_kiov_cleanup(&vq->write_iov);
	kvfree(vq->slots);
	kfree(vq->pending);
}

/* Under labnic_plane. Statistics and the doorbell page stay. */
void labnic_ring_reset(struct labnic_vq *vq)
{
	if (vq->slots)
		labnic_rx_drop_held(vq, false);
	vq->desc = 0;
	vq->driver = 0;
	vq->device = 0;
	vq->num = vq->nic->can.queue_size;
	vq->base = 0;
	vq->base_set = false;
	vq->modified = false;
	vq->ready = false;
	vq->cb = (struct vdpa_callback) {};
	vq->live = false;
	vq->flip = false;
	vq->starved = false;
	vq->npending = 0;
	vq->waiting = false;
	vringh_init_iotlb(&vq->vring, 0, vq->num, true, NULL, NULL, NULL);
	vringh_init_iotlb(&vq->buffers, 0, vq->num, true, NULL, NULL, NULL);
}

u16 labnic_ring_used(const struct labnic_vq *vq)
{
	return vq->vring.last_used_idx + vq->vring.completed;
}

/*
 * Takes the programmed ring over, under labnic_plane. Buffers in flight stay
 * in flight, unless the driver sets another position.
 */
void labnic_ring_latch(struct labnic_vq *vq)
{
	u16 avail = vq->vring.last_avail_idx;
	u16 used = labnic_ring_used(vq);

	if (vq->base_set && vq->base != avail) {
		if (vq->slots)
			labnic_rx_drop_held(vq, false);
		avail = vq->base;
		used = vq->base;
	}
	vq->live = !vringh_init_iotlb(&vq->vring, vq->nic->features, vq->num, true,
				      (struct vring_desc *)(uintptr_t)vq->desc,
				      (struct vring_avail *)(uintptr_t)vq->driver,
				      (struct vring_used *)(uintptr_t)vq->device);
	vq->vring.last_avail_idx = avail;
	vq->vring.last_used_idx = used;
	vq->base_set = false;
	vq->modified = false;
	vq->starved = false;
}

/* Under labnic_plane: leaves the ring in a state that its base describes. */
void labnic_ring_suspend(struct labnic_vq *vq)
{
	if (!vq->live)
		return;
	labnic_tx_flush(vq, true);
	/* Waiting work resumes with kicks, maybe on another device. */
	if (vq->waiting)
		vringh_notify_enable_iotlb(&vq->vring);
	if (vq->slots && vq->nic->can.ring_state == LABNIC_RING_STATE_USED)
		labnic_rx_drop_held(vq, true);
}

/*
 * Takes the next chain. For LABNIC_FETCH_BAD the head is valid and the chain
 * counts as taken.
 */
enum labnic_fetch labnic_ring_fetch(struct labnic_vq *vq,
				    struct vringh_kiov *readable,
				    struct vringh_kiov *writable, u16 *head)
{
	u16 none = vq->vring.vring.num;
	int ret;

	*head = none;
	/*
	 * No warning: an indirect table of the driver may need more
	 * pieces than can be allocated, and that is the driver's fault.
	 */
	ret = vringh_getdesc_iotlb(&vq->vring, readable, writable, head,
				   GFP_KERNEL | __GFP_NOWARN);
	if (ret > 0)
		return LABNIC_FETCH_CHAIN;
	if (!ret)
		return LABNIC_FETCH_NONE;
	vq->stats.errors++;
	return *head == none ? LABNIC_FETCH_BROKEN : LABNIC_FETCH_BAD;
}

static int write_element(struct labnic_vq *vq, u16 position,
			 const struct labnic_element *element)
{
	struct vring *vring = &vq->vring.vring;
	struct vring_used_elem used = {
		.id = cpu_to_vringh32(&vq->vring, element->id),
		.len = cpu_to_vringh32(&vq->vring, element->length),
	};
	struct kvec piece = {
		.iov_base = &vring->used->ring[position & (vring->num - 1)],
		.iov_len = sizeof(used),
	};
	struct vringh_kiov iov;
	ssize_t written;

	vringh_kiov_init(&iov, &piece, 1);
	iov.used = 1;
	written = vringh_iov_push_iotlb(&vq->vring, &iov, &used, sizeof(used));
	return written == sizeof(used) ? 0 : -EFAULT;
}

static void distort(struct labnic_vq *vq, struct labnic_element *element)
{
	if (labnic_fault(vq->nic, LABNIC_FAULT_USED_ID))
		element->id = vq->vring.vring.num;
	if (labnic_fault(vq->nic, LABNIC_FAULT_USED_LENGTH))
		element->length += SZ_64K;
}

static void complete_last(struct labnic_vq *vq, struct labnic_element element,
			  unsigned int before)
{
	distort(vq, &element);
	vq->vring.completed += before;
	if (vringh_complete_iotlb(&vq->vring, element.id, element.length)) {
		vq->vring.completed -= before;
		vq->stats.errors++;
	}
}

/* Returns chains to the driver, all with one change of the used index. */
void labnic_ring_publish(struct labnic_vq *vq,
			 const struct labnic_element *elements, unsigned int n)
{
	u16 used = labnic_ring_used(vq);
	unsigned int i;

	for (i = 0; i + 1 < n; i++) {
		struct labnic_element element = elements[i];

		distort(vq, &element);
		if (write_element(vq, used + i, &element)) {
			vq->stats.errors++;
			return;
		}
	}
	if (n)
		complete_last(vq, elements[n - 1], n - 1);
}

/*
 * IN_ORDER (virtio 1.3, 2.7.9): one element, at the first place of the batch,
 * names the last of n chains; the index moves by n. vringh's own element goes
 * to the last place, which the driver skips.
 */
void labnic_ring_publish_batch(struct labnic_vq *vq, u16 last, unsigned int n)
{
	struct labnic_element element = { .id = last };
	struct labnic_element first = element;

	distort(vq, &first);
	if (n > 1 && write_element(vq, labnic_ring_used(vq), &first)) {
		vq->stats.errors++;
		return;
	}
	complete_last(vq, element, n - 1);
}

/* Interrupts the driver if it has requested so since the last call. */
void labnic_ring_signal(struct labnic_vq *vq)
{
	if (vringh_need_notify_iotlb(&vq->vring) <= 0)
		return;
	if (!vq->cb.callback || labnic_fault(vq->nic, LABNIC_FAULT_LOST_CALL))
		return;
	/* A driver in this kernel expects the context of an interrupt. */
	local_bh_disable();
	vq->cb.callback(vq->cb.private);
	local_bh_enable();
}
