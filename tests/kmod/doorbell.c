// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: doorbell pages, one per queue, and the thread that polls them.
 *
 * A driver stores its queue's number at the beginning of the page. The thread
 * exchanges it for a value that no store can have, and kicks the queue: either
 * the exchange or the next poll sees a store.
 *
 * vhost maps the pages uncached, but for memory x86 takes the cache attribute
 * that the page already has (track_pfn_insert()), so both sides see the same
 * lines. Which queue is the control queue changes with the features, so every
 * queue has a page. The page of the control queue is reported as empty and
 * therefore cannot be mapped.
 */
#include <linux/delay.h>
#include <linux/gfp.h>
#include <linux/io.h>
#include <linux/kthread.h>

#include "labnic.h"

#define LABNIC_DOORBELL_IDLE	U32_MAX
/* Polls without a store before the thread polls less often. */
#define LABNIC_PATIENCE		2000
#define LABNIC_REST_US		1000

/* Polls one page once. */
static bool look(struct labnic_vq *vq)
{
	u32 *doorbell = vq->doorbell;
	u32 value;

	if (READ_ONCE(*doorbell) == LABNIC_DOORBELL_IDLE)
		return false;
	value = xchg(doorbell, LABNIC_DOORBELL_IDLE);
	/* The upper half is NOTIFICATION_DATA, or was never written. */
	if ((u16)value != vq->index) {
		atomic64_inc(&vq->nic->counters.bad_doorbells);
		return true;
	}
	atomic64_inc(&vq->doorbells);
	labnic_kicked(vq);
	return true;
}

static int poll_doorbells(void *data)
{
	struct labnic *nic = data;
	unsigned int i, idle = 0, us;
	bool seen;

	while (!kthread_should_stop()) {
		if (!READ_ONCE(nic->polling)) {
			wait_event_interruptible(nic->poller_wait,
						 READ_ONCE(nic->polling) ||
						 kthread_should_stop());
			idle = 0;
			continue;
		}
		seen = false;
		for (i = 0; i < nic->nvqs; i++)
			seen |= look(&nic->vqs[i]);
		idle = seen ? 0 : idle + 1;
		us = labnic_doorbell_poll_us();
		if (idle > LABNIC_PATIENCE) {
			idle = LABNIC_PATIENCE + 1;
			us = max_t(unsigned int, us, LABNIC_REST_US);
		}
		usleep_range_state(us, us + us / 4, TASK_IDLE);
	}
	return 0;
}

static void clear_doorbells(struct labnic *nic)
{
	unsigned int i;

	for (i = 0; i < nic->nvqs; i++)
		xchg((u32 *)nic->vqs[i].doorbell, LABNIC_DOORBELL_IDLE);
}

int labnic_doorbell_alloc(struct labnic *nic)
{
	struct task_struct *poller;
	unsigned int i;

	init_waitqueue_head(&nic->poller_wait);
	if (!nic->can.doorbell)
		return 0;
	/* Single pages: KVM takes a reference to the one that it maps. */
	for (i = 0; i < nic->nvqs; i++) {
		nic->vqs[i].doorbell = (void *)get_zeroed_page(GFP_KERNEL);
		if (!nic->vqs[i].doorbell)
			return -ENOMEM;
	}
	clear_doorbells(nic);
	poller = kthread_run(poll_doorbells, nic, "labnic-%s",
			     dev_name(&nic->vdpa.dev));
	if (IS_ERR(poller))
		return PTR_ERR(poller);
	nic->poller = poller;
	return 0;
}

/* May be called twice; no process has a page mapped any more. */
void labnic_doorbell_free(struct labnic *nic)
{
	unsigned int i;

	if (nic->poller)
		kthread_stop(nic->poller);
	nic->poller = NULL;
	for (i = 0; nic->vqs && i < nic->nvqs; i++) {
		free_page((unsigned long)nic->vqs[i].doorbell);
		nic->vqs[i].doorbell = NULL;
	}
}

void labnic_doorbell_start(struct labnic *nic)
{
	if (!nic->poller)
		return;
	WRITE_ONCE(nic->polling, true);
	wake_up(&nic->poller_wait);
}

/* Under labnic_plane; stores from before the reset are void. */
void labnic_doorbell_stop(struct labnic *nic)
{
	if (!nic->poller)
		return;
	WRITE_ONCE(nic->polling, false);
	clear_doorbells(nic);
}

struct vdpa_notification_area labnic_get_vq_notification(struct vdpa_device *vdpa,
							 u16 index)
{
	struct labnic *nic = labnic_of(vdpa);
	struct vdpa_notification_area area = {
		/* Valid in any case: vhost's fault handler uses no other field. */
		.addr = virt_to_phys(nic->vqs[index].doorbell),
		.size = labnic_is_cvq(nic, index) ? 0 : PAGE_SIZE,
	};

	return area;
}
