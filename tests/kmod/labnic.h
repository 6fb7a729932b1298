/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * labnic: a vDPA network device that can behave like any vendor's card.
 *
 * Every ability is a module parameter (params.c), read when a device is added.
 * Devices of the management device "labnic" are the ports of one learning
 * switch inside the module (switch.c). Devices of subfunctions are not: each
 * has a representor in the host (sf.h has that half of the NIC and its locks).
 * vringh accesses the rings. The device reaches memory through its own IOTLB
 * in physical addresses, so vhost pins mapped memory.
 *
 * Locking
 * -------
 * One mutex, labnic_plane, protects everything of all devices that is not
 * listed below. The queue work of all devices runs on one ordered workqueue
 * and holds it; so does every operation that changes a device. Hence after
 * reset, suspend or an IOTLB change returns, nothing that began before it
 * still reads or writes the driver's memory, and a frame can pass from one
 * device's ring to another's without a second lock.
 *
 *   labnic_plane (mutex)
 *     -> iotlb_lock (spinlock, per device): vringh takes it to translate;
 *        never contended, since maps change under the mutex
 *
 * Outside of it:
 *   kicked, kicks, doorbells   atomic; set by kicks in any context
 *   drop_kicks                 atomic; taken from by kicks in any context
 *   doorbell pages             written by the driver, read by the poller
 *   can, offered, vqs, nvqs    constant once the device is registered
 *
 * Callbacks to vhost (eventfd signals) are made with the mutex held; they do
 * not come back. The mutex is never held across a call into the vdpa core,
 * which has locks of its own around the operations here. Frames of a
 * subfunction are given to the network stack with it held (netif_rx()): what
 * comes back from there through a representor only queues.
 *
 * States of a device:
 *
 *            DRIVER_OK            suspend
 *   reset ------------> running <----------> suspended
 *     ^                    |      resume         |
 *     |                    | needs_reset         |
 *     |                    v                     |
 *     +----- reset --- needs reset               |
 *     +------------------------------------------+
 */
#ifndef LABNIC_H
#define LABNIC_H

#include <linux/atomic.h>
#include <linux/bitmap.h>
#include <linux/if_ether.h>
#include <linux/if_vlan.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/vdpa.h>
#include <linux/vhost_iotlb.h>
#include <linux/vringh.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <uapi/linux/virtio_config.h>
#include <uapi/linux/virtio_net.h>
#include <uapi/linux/virtio_ring.h>

#define LABNIC_PAIRS_MAX	8
#define LABNIC_QUEUES_MAX	(2 * LABNIC_PAIRS_MAX + 1)
#define LABNIC_QUEUE_SIZE_MAX	1024
#define LABNIC_SPACES_MAX	4
#define LABNIC_GROUPS_MAX	3
#define LABNIC_PORTS_MAX	32

/* Receive buffers that a queue can hold at a time; also per merged frame. */
#define LABNIC_HELD_MAX		64
/* Pieces of a chain that need no allocation. */
#define LABNIC_PIECES		4

#define LABNIC_HEADER		sizeof(struct virtio_net_hdr_v1)
/* The longest frame of the largest MTU, with a VLAN tag and virtio's header. */
#define LABNIC_FRAME_MAX	(LABNIC_HEADER + VLAN_ETH_HLEN + ETH_MAX_MTU)

enum labnic_ring_state {
	LABNIC_RING_STATE_AVAIL,	/* base is the available index */
	LABNIC_RING_STATE_USED,		/* base is the used index */
	LABNIC_RING_STATE_NONE,		/* there is no base but 0 */
};

enum labnic_apply {
	LABNIC_APPLY_ENABLE,		/* a changed ring is taken at enable */
	LABNIC_APPLY_RESUME,		/* a changed ring is taken at resume */
};

enum labnic_completion {
	LABNIC_COMPLETION_IMMEDIATE,
	LABNIC_COMPLETION_DELAYED,
	LABNIC_COMPLETION_REORDERED,
};

enum labnic_cvq {
	LABNIC_CVQ_FULL,
	LABNIC_CVQ_POOR,		/* refuses everything but MAC_ADDR_SET */
	LABNIC_CVQ_NONE,
};

/* Deliberate faults; bit numbers, in the order of labnic_fault_names. */
enum labnic_fault {
	LABNIC_FAULT_WRONG_BASE,	/* GET_VRING_BASE is one too high */
	LABNIC_FAULT_SILENT_MAP,	/* maps are acknowledged and ignored */
	LABNIC_FAULT_LARGE_CONFIG,	/* config space is reported larger */
	LABNIC_FAULT_SUSPEND_RUNS_ON,	/* suspend succeeds and does nothing */
	LABNIC_FAULT_USED_ID,		/* used elements name no descriptor */
	LABNIC_FAULT_USED_LENGTH,	/* used elements are too long */
	LABNIC_FAULT_LOST_CALL,		/* no queue ever interrupts */
	LABNIC_FAULTS,
};

/* A device's abilities: a copy of the parameters at its creation. */
struct labnic_abilities {
	bool suspend;
	bool resume;
	bool cvq_group;
	bool desc_group;
	bool iotlb_persist;
	bool enable_after_driver_ok;
	bool set_map;
	bool event_idx;
	bool indirect;
	bool in_order;
	bool mq;
	bool mrg_rxbuf;
	bool notification_data;
	bool doorbell;
	bool config_interrupt;
	enum labnic_ring_state ring_state;
	enum labnic_apply apply;
	enum labnic_completion completion;
	enum labnic_cvq cvq;
	unsigned int completion_ms;
	unsigned int address_spaces;
	unsigned int rx_prefetch;
	unsigned int queue_size;
	unsigned int credit_wait_ms;
	unsigned int iova_bits;
	unsigned long faults;
};

struct labnic;
struct labnic_sf;

/* A receive buffer that the device has taken and not used yet. */
struct labnic_buffer {
	struct vringh_kiov iov;
	struct kvec pieces[LABNIC_PIECES];
	size_t capacity;
	u16 head;
};

/* A transmitted chain that is not yet returned to the driver. */
struct labnic_pending {
	unsigned long due;		/* jiffies */
	u16 head;
};

struct labnic_element {
	u32 id;
	u32 length;
};

struct labnic_queue_stats {
	u64 packets;
	u64 bytes;
	u64 errors;
	u64 drops;
	u64 overruns;
	u64 waits;
	u64 successes;			/* control queue only */
};

struct labnic_vq {
	struct labnic *nic;
	u16 index;

	/* As the driver programmed it. */
	u64 desc;
	u64 driver;
	u64 device;
	u32 num;
	u16 base;
	bool base_set;
	bool modified;
	bool ready;
	struct vdpa_callback cb;

	/* As latched: see labnic_ring_latch(). */
	bool live;
	struct vringh vring;		/* translates by the rings' space */
	struct vringh buffers;		/* translates by the buffers' space */

	/* Receive: slots, and the order in which the used ones were taken. */
	struct labnic_buffer *slots;
	DECLARE_BITMAP(slots_taken, LABNIC_HELD_MAX);
	u8 held[LABNIC_HELD_MAX];
	unsigned int nheld;
	bool flip;
	bool starved;
	unsigned long starved_until;	/* jiffies */

	/* Transmit. */
	struct vringh_kiov read_iov;
	struct vringh_kiov write_iov;
	struct labnic_pending *pending;
	unsigned int npending;
	bool waiting;

	void *doorbell;			/* one page, mapped by the driver */
	atomic64_t kicks;
	atomic64_t doorbells;
	struct labnic_queue_stats stats;
};

/* What the control queue set: virtio 1.3, 5.1.6.5. */
struct labnic_filter {
	bool promiscuous;
	bool all_multicast;
	bool all_unicast;
	bool no_multicast;
	bool no_unicast;
	bool no_broadcast;
	unsigned int unicast;		/* entries, first in macs */
	unsigned int multicast;		/* entries, behind them */
	u8 macs[64][ETH_ALEN];
	DECLARE_BITMAP(vlans, VLAN_N_VID);
};

struct labnic_counters {
	u64 link_down;			/* sent or received with the link down */
	u64 filtered;			/* the receiver's filter or no receiver */
	u64 ignored_enables;		/* queues enabled at a forbidden time */
	atomic64_t bad_doorbells;	/* stores of another queue's number */
};

struct labnic {
	struct vdpa_device vdpa;	/* first: see vdpa_alloc_device() */
	struct vdpa_config_ops ops;
	struct labnic_abilities can;
	u64 offered;
	u64 features;
	u8 status;
	bool suspended;
	bool link;
	u32 generation;
	struct vdpa_callback config_cb;

	u8 permanent_mac[ETH_ALEN];
	u8 mac[ETH_ALEN];
	u16 mtu;
	u16 max_pairs;
	u16 pairs;
	struct labnic_filter filter;
	struct labnic_counters counters;

	struct labnic_vq *vqs;
	unsigned int nvqs;

	struct vhost_iotlb spaces[LABNIC_SPACES_MAX];
	unsigned int group_asid[LABNIC_GROUPS_MAX];
	spinlock_t iotlb_lock;

	struct labnic_sf *sf;		/* NULL: a port of the switch */
	struct list_head port;
	bool attached;
	struct delayed_work work;
	bool again;
	unsigned long again_at;		/* jiffies */
	DECLARE_BITMAP(kicked, LABNIC_QUEUES_MAX);
	atomic_t drop_kicks;		/* of transmit queues, still to be lost */

	struct task_struct *poller;
	wait_queue_head_t poller_wait;
	bool polling;
};

extern struct mutex labnic_plane;
extern struct workqueue_struct *labnic_workqueue;
extern struct list_head labnic_ports;
extern void *labnic_frame;
extern const char *const labnic_fault_names[LABNIC_FAULTS];
extern const struct attribute_group *labnic_attribute_groups[];

static inline struct labnic *labnic_of(struct vdpa_device *vdpa)
{
	return container_of(vdpa, struct labnic, vdpa);
}

static inline bool labnic_has(const struct labnic *nic, unsigned int bit)
{
	return nic->features & BIT_ULL(bit);
}

static inline bool labnic_fault(const struct labnic *nic, enum labnic_fault fault)
{
	return nic->can.faults & BIT(fault);
}

/* Started by the driver and not broken; it may be suspended. */
static inline bool labnic_started(const struct labnic *nic)
{
	return (nic->status & VIRTIO_CONFIG_S_DRIVER_OK) &&
	       !(nic->status & VIRTIO_CONFIG_S_NEEDS_RESET);
}

static inline bool labnic_running(const struct labnic *nic)
{
	return labnic_started(nic) && !nic->suspended;
}

static inline void labnic_schedule(struct labnic *nic)
{
	mod_delayed_work(labnic_workqueue, &nic->work, 0);
}

/* Records a kick or a doorbell, unless it is one of those to be lost. */
static inline void labnic_kicked(struct labnic_vq *vq)
{
	struct labnic *nic = vq->nic;

	if (vq->index & 1 && atomic_dec_if_positive(&nic->drop_kicks) >= 0)
		return;
	set_bit(vq->index, nic->kicked);
	labnic_schedule(nic);
}

/* params.c */
int labnic_abilities_read(struct labnic_abilities *can);
unsigned int labnic_doorbell_poll_us(void);

/* ops.c */
extern const struct vdpa_config_ops labnic_ops;
void labnic_ops_adapt(struct labnic *nic);
bool labnic_is_cvq(const struct labnic *nic, u16 index);
bool labnic_link(const struct labnic *nic);
void labnic_config_changed(struct labnic *nic);
void labnic_free(struct vdpa_device *vdpa);

/* iotlb.c */
unsigned int labnic_group(const struct labnic *nic, u16 index);
unsigned int labnic_desc_group(const struct labnic *nic, u16 index);
void labnic_iotlb_init(struct labnic *nic);
void labnic_iotlb_clear(struct labnic *nic);
void labnic_iotlb_bind(struct labnic *nic);
int labnic_set_map(struct vdpa_device *vdpa, unsigned int asid,
		   struct vhost_iotlb *iotlb);
int labnic_dma_map(struct vdpa_device *vdpa, unsigned int asid, u64 iova,
		   u64 size, u64 pa, u32 perm, void *opaque);
int labnic_dma_unmap(struct vdpa_device *vdpa, unsigned int asid, u64 iova,
		     u64 size);
int labnic_reset_map(struct vdpa_device *vdpa, unsigned int asid);
int labnic_set_group_asid(struct vdpa_device *vdpa, unsigned int group,
			  unsigned int asid);

/* ring.c */
enum labnic_fetch {
	LABNIC_FETCH_NONE,		/* nothing is available */
	LABNIC_FETCH_CHAIN,
	LABNIC_FETCH_BAD,		/* a chain that breaks the rules */
	LABNIC_FETCH_BROKEN,		/* the ring itself cannot be read */
};

int labnic_ring_alloc(struct labnic_vq *vq);
void labnic_ring_free(struct labnic_vq *vq);
void labnic_ring_reset(struct labnic_vq *vq);
void labnic_ring_latch(struct labnic_vq *vq);
void labnic_ring_suspend(struct labnic_vq *vq);
u16 labnic_ring_used(const struct labnic_vq *vq);
enum labnic_fetch labnic_ring_fetch(struct labnic_vq *vq,
				    struct vringh_kiov *readable,
				    struct vringh_kiov *writable, u16 *head);
void labnic_ring_publish(struct labnic_vq *vq,
			 const struct labnic_element *elements, unsigned int n);
void labnic_ring_publish_batch(struct labnic_vq *vq, u16 last, unsigned int n);
void labnic_ring_signal(struct labnic_vq *vq);

/* rx.c */
enum labnic_credit {
	LABNIC_CREDIT,			/* there is room for the frame */
	LABNIC_CREDIT_NONE,		/* buffers are missing */
	LABNIC_CREDIT_SMALL,		/* the buffers cannot take the frame */
};

enum labnic_credit labnic_rx_reserve(struct labnic_vq *vq, size_t length);
void labnic_rx_deliver(struct labnic_vq *vq, void *frame, size_t length);
void labnic_rx_release(struct labnic_vq *vq);
void labnic_rx_prefetch(struct labnic_vq *vq);
void labnic_rx_drop_held(struct labnic_vq *vq, bool give_back);

/* tx.c */
int labnic_tx_init(void);
void labnic_tx_exit(void);
void labnic_tx(struct labnic_vq *vq);
void labnic_tx_flush(struct labnic_vq *vq, bool all);
void labnic_work(struct work_struct *work);

/* ctrl.c */
int labnic_ctrl_init(void);
void labnic_ctrl_exit(void);
void labnic_ctrl(struct labnic_vq *vq);
void labnic_filter_reset(struct labnic_filter *filter);

/* switch.c */
int labnic_switch_attach(struct labnic *nic, struct labnic_sf *sf);
void labnic_switch_detach(struct labnic *nic);
void labnic_switch_forget(const struct labnic *nic);
enum labnic_offer {
	LABNIC_OFFER_TAKEN,
	LABNIC_OFFER_DROPPED,
	LABNIC_OFFER_WAIT,		/* for buffers */
};

bool labnic_switch_forward(struct labnic_vq *from, void *frame, size_t length,
			   unsigned long *retry_at);
enum labnic_offer labnic_switch_offer(struct labnic *nic, unsigned int pair,
				      void *frame, size_t length,
				      unsigned long *retry_at);
void labnic_switch_credit(const struct labnic *nic);

/* doorbell.c */
int labnic_doorbell_alloc(struct labnic *nic);
void labnic_doorbell_free(struct labnic *nic);
void labnic_doorbell_start(struct labnic *nic);
void labnic_doorbell_stop(struct labnic *nic);
struct vdpa_notification_area labnic_get_vq_notification(struct vdpa_device *vdpa,
							 u16 index);

/* stats.c */
int labnic_get_vendor_vq_stats(struct vdpa_device *vdpa, u16 index,
			       struct sk_buff *msg,
			       struct netlink_ext_ack *extack);

#endif /* LABNIC_H */
