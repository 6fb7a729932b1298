// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: a vDPA driver's operations on the device, except for memory
 * (iotlb.c), doorbells (doorbell.c) and statistics (stats.c).
 *
 * For an ability that is off, the operation is missing, as with a vendor's
 * driver that never had it: each device has its own table.
 */
#include <linux/etherdevice.h>
#include <uapi/linux/vhost_types.h>
#include <uapi/linux/virtio_ids.h>

#include "sf.h"

/* By how much LABNIC_FAULT_LARGE_CONFIG overstates the config space. */
#define LABNIC_CONFIG_EXCESS	64

static struct labnic_vq *queue(struct vdpa_device *vdpa, u16 index)
{
	return &labnic_of(vdpa)->vqs[index];
}

/*
 * With MQ the control queue is the last one, without it the third one. Before
 * the features are fixed, its place is that of a driver that accepts all.
 */
bool labnic_is_cvq(const struct labnic *nic, u16 index)
{
	u64 features = nic->offered;

	if (READ_ONCE(nic->status) & VIRTIO_CONFIG_S_FEATURES_OK)
		features = nic->features;
	if (!(features & BIT_ULL(VIRTIO_NET_F_CTRL_VQ)))
		return false;
	if (features & BIT_ULL(VIRTIO_NET_F_MQ))
		return index == 2 * nic->max_pairs;
	return index == 2;
}

/* Both the device's own link and that to the host. Under labnic_plane. */
bool labnic_link(const struct labnic *nic)
{
	return nic->link && (!nic->sf || nic->sf->representor->up);
}

/* Under labnic_plane. */
void labnic_config_changed(struct labnic *nic)
{
	nic->generation++;
	if (nic->can.config_interrupt && nic->config_cb.callback)
		nic->config_cb.callback(nic->config_cb.private);
}

static int set_vq_address(struct vdpa_device *vdpa, u16 index, u64 desc,
			  u64 driver, u64 device)
{
	struct labnic_vq *vq = queue(vdpa, index);

	mutex_lock(&labnic_plane);
	vq->desc = desc;
	vq->driver = driver;
	vq->device = device;
	vq->modified = true;
	mutex_unlock(&labnic_plane);
	return 0;
}

static void set_vq_num(struct vdpa_device *vdpa, u16 index, u32 num)
{
	struct labnic_vq *vq = queue(vdpa, index);

	mutex_lock(&labnic_plane);
	/* There is no way to refuse; a size that is not taken does not work. */
	if (num <= vq->nic->can.queue_size) {
		vq->num = num;
		vq->modified = true;
	}
	mutex_unlock(&labnic_plane);
}

/* In any context. */
static void kick_vq(struct vdpa_device *vdpa, u16 index)
{
	struct labnic_vq *vq = queue(vdpa, index);

	atomic64_inc(&vq->kicks);
	labnic_kicked(vq);
}

static void set_vq_cb(struct vdpa_device *vdpa, u16 index,
		      struct vdpa_callback *cb)
{
	mutex_lock(&labnic_plane);
	queue(vdpa, index)->cb = *cb;
	mutex_unlock(&labnic_plane);
}

static void enable(struct labnic_vq *vq)
{
	struct labnic *nic = vq->nic;

	if (labnic_running(nic) && !nic->can.enable_after_driver_ok) {
		nic->counters.ignored_enables++;
		return;
	}
	vq->ready = true;
	if (!nic->suspended || nic->can.apply == LABNIC_APPLY_ENABLE)
		labnic_ring_latch(vq);
}

static void disable(struct labnic_vq *vq)
{
	struct labnic *nic = vq->nic;

	vq->ready = false;
	if (nic->suspended && nic->can.apply == LABNIC_APPLY_RESUME)
		return;
	if (labnic_running(nic))
		labnic_ring_suspend(vq);
	vq->live = false;
}

static void set_vq_ready(struct vdpa_device *vdpa, u16 index, bool ready)
{
	struct labnic_vq *vq = queue(vdpa, index);

	mutex_lock(&labnic_plane);
	if (ready && !vq->ready)
		enable(vq);
	else if (!ready && vq->ready)
		disable(vq);
	labnic_switch_credit(vq->nic);
	labnic_schedule(vq->nic);
	mutex_unlock(&labnic_plane);
}

static bool get_vq_ready(struct vdpa_device *vdpa, u16 index)
{
	return READ_ONCE(queue(vdpa, index)->ready);
}

static int set_vq_state(struct vdpa_device *vdpa, u16 index,
			const struct vdpa_vq_state *state)
{
	struct labnic_vq *vq = queue(vdpa, index);
	int ret = 0;

	mutex_lock(&labnic_plane);
	if (vq->nic->can.ring_state != LABNIC_RING_STATE_NONE) {
		vq->base = state->split.avail_index;
		vq->base_set = true;
		vq->modified = true;
	} else if (state->split.avail_index) {
		ret = -EOPNOTSUPP;
	}
	mutex_unlock(&labnic_plane);
	return ret;
}

static int get_vq_state(struct vdpa_device *vdpa, u16 index,
			struct vdpa_vq_state *state)
{
	struct labnic_vq *vq = queue(vdpa, index);
	struct labnic *nic = vq->nic;
	u16 base;
	int ret = 0;

	mutex_lock(&labnic_plane);
	if (vq->base_set)
		base = vq->base;
	else if (nic->can.ring_state == LABNIC_RING_STATE_USED)
		base = labnic_ring_used(vq);
	else
		base = vq->vring.last_avail_idx;
	if (labnic_fault(nic, LABNIC_FAULT_WRONG_BASE))
		base++;
	if (nic->can.ring_state == LABNIC_RING_STATE_NONE)
		ret = -EOPNOTSUPP;
	else
		state->split.avail_index = base;
	mutex_unlock(&labnic_plane);
	return ret;
}

static u32 get_vq_align(struct vdpa_device *vdpa)
{
	return PAGE_SIZE;
}

static u32 get_vq_group(struct vdpa_device *vdpa, u16 index)
{
	return labnic_group(labnic_of(vdpa), index);
}

static u32 get_vq_desc_group(struct vdpa_device *vdpa, u16 index)
{
	return labnic_desc_group(labnic_of(vdpa), index);
}

static u64 get_device_features(struct vdpa_device *vdpa)
{
	return labnic_of(vdpa)->offered;
}

static u64 get_backend_features(const struct vdpa_device *vdpa)
{
	return BIT_ULL(VHOST_BACKEND_F_ENABLE_AFTER_DRIVER_OK);
}

static int set_driver_features(struct vdpa_device *vdpa, u64 features)
{
	const u64 needed = BIT_ULL(VIRTIO_F_VERSION_1) |
			   BIT_ULL(VIRTIO_F_ACCESS_PLATFORM);
	struct labnic *nic = labnic_of(vdpa);

	/* Memory is reached through the IOTLB, and everything is little-endian. */
	if ((features & ~nic->offered) || (features & needed) != needed)
		return -EINVAL;
	mutex_lock(&labnic_plane);
	nic->features = features;
	mutex_unlock(&labnic_plane);
	return 0;
}

static u64 get_driver_features(struct vdpa_device *vdpa)
{
	return labnic_of(vdpa)->features;
}

static void set_config_cb(struct vdpa_device *vdpa, struct vdpa_callback *cb)
{
	mutex_lock(&labnic_plane);
	labnic_of(vdpa)->config_cb = *cb;
	mutex_unlock(&labnic_plane);
}

static u16 get_vq_num_max(struct vdpa_device *vdpa)
{
	return labnic_of(vdpa)->can.queue_size;
}

static u16 get_vq_size(struct vdpa_device *vdpa, u16 index)
{
	return labnic_of(vdpa)->can.queue_size;
}

static u32 get_device_id(struct vdpa_device *vdpa)
{
	return VIRTIO_ID_NET;
}

static u32 get_vendor_id(struct vdpa_device *vdpa)
{
	return 0;
}

static u8 get_status(struct vdpa_device *vdpa)
{
	return READ_ONCE(labnic_of(vdpa)->status);
}

static void set_status(struct vdpa_device *vdpa, u8 status)
{
	struct labnic *nic = labnic_of(vdpa);
	u8 old;

	mutex_lock(&labnic_plane);
	old = nic->status;
	/* Refused: a start without features, and recovery without a reset. */
	if (!(status & VIRTIO_CONFIG_S_FEATURES_OK))
		status &= ~VIRTIO_CONFIG_S_DRIVER_OK;
	status |= old & VIRTIO_CONFIG_S_NEEDS_RESET;
	WRITE_ONCE(nic->status, status);
	/* The control queue may now be another queue. */
	if ((status ^ old) & VIRTIO_CONFIG_S_FEATURES_OK)
		labnic_iotlb_bind(nic);
	if ((status & ~old) & VIRTIO_CONFIG_S_DRIVER_OK) {
		labnic_doorbell_start(nic);
		labnic_schedule(nic);
	}
	mutex_unlock(&labnic_plane);
}

static int do_reset(struct labnic *nic, bool clear_maps)
{
	unsigned int i;
	int ret = 0;

	mutex_lock(&labnic_plane);
	WRITE_ONCE(nic->status, 0);
	nic->suspended = false;
	nic->features = 0;
	nic->generation++;
	nic->config_cb = (struct vdpa_callback) {};
	ether_addr_copy(nic->mac, nic->permanent_mac);
	nic->pairs = 1;
	labnic_filter_reset(&nic->filter);
	for (i = 0; i < nic->nvqs; i++)
		labnic_ring_reset(&nic->vqs[i]);
	memset(nic->group_asid, 0, sizeof(nic->group_asid));
	labnic_iotlb_bind(nic);
	if (clear_maps)
		labnic_iotlb_clear(nic);
	labnic_doorbell_stop(nic);
	bitmap_zero(nic->kicked, LABNIC_QUEUES_MAX);
	labnic_switch_credit(nic);
	/* To open the device's file begins with a reset, and so fails. */
	if (nic->sf && nic->sf->closing)
		ret = -ENODEV;
	mutex_unlock(&labnic_plane);
	return ret;
}

static int reset(struct vdpa_device *vdpa)
{
	struct labnic *nic = labnic_of(vdpa);

	return do_reset(nic, !nic->can.iotlb_persist);
}

static int compat_reset(struct vdpa_device *vdpa, u32 flags)
{
	return do_reset(labnic_of(vdpa), flags & VDPA_RESET_F_CLEAN_MAP);
}

static int suspend(struct vdpa_device *vdpa)
{
	struct labnic *nic = labnic_of(vdpa);
	unsigned int i;

	if (labnic_fault(nic, LABNIC_FAULT_SUSPEND_RUNS_ON))
		return 0;
	mutex_lock(&labnic_plane);
	if (labnic_running(nic)) {
		for (i = 0; i < nic->nvqs; i++)
			labnic_ring_suspend(&nic->vqs[i]);
		nic->suspended = true;
	}
	mutex_unlock(&labnic_plane);
	return 0;
}

static int resume(struct vdpa_device *vdpa)
{
	struct labnic *nic = labnic_of(vdpa);
	unsigned int i;

	mutex_lock(&labnic_plane);
	if (nic->suspended) {
		for (i = 0; i < nic->nvqs; i++) {
			struct labnic_vq *vq = &nic->vqs[i];

			if (nic->can.apply != LABNIC_APPLY_RESUME)
				continue;
			if (!vq->ready)
				vq->live = false;
			else if (!vq->live || vq->modified)
				labnic_ring_latch(vq);
		}
		nic->suspended = false;
		labnic_switch_credit(nic);
		labnic_schedule(nic);
	}
	mutex_unlock(&labnic_plane);
	return 0;
}

static size_t get_config_size(struct vdpa_device *vdpa)
{
	size_t size = sizeof(struct virtio_net_config);

	if (labnic_fault(labnic_of(vdpa), LABNIC_FAULT_LARGE_CONFIG))
		size += LABNIC_CONFIG_EXCESS;
	return size;
}

static void get_config(struct vdpa_device *vdpa, unsigned int offset, void *data,
		       unsigned int length)
{
	struct labnic *nic = labnic_of(vdpa);
	struct virtio_net_config config = {
		.max_virtqueue_pairs = (__force __virtio16)cpu_to_le16(nic->max_pairs),
		.mtu = (__force __virtio16)cpu_to_le16(nic->mtu),
	};

	mutex_lock(&labnic_plane);
	ether_addr_copy(config.mac, nic->mac);
	if (labnic_link(nic))
		config.status = (__force __virtio16)cpu_to_le16(VIRTIO_NET_S_LINK_UP);
	mutex_unlock(&labnic_plane);
	memset(data, 0, length);
	if (offset < sizeof(config))
		memcpy(data, (u8 *)&config + offset,
		       min_t(size_t, length, sizeof(config) - offset));
}

static void set_config(struct vdpa_device *vdpa, unsigned int offset,
		       const void *data, unsigned int length)
{
	/* Nothing is writable: with VERSION_1 the MAC address is not either. */
}

static u32 get_generation(struct vdpa_device *vdpa)
{
	return READ_ONCE(labnic_of(vdpa)->generation);
}

static struct vdpa_iova_range get_iova_range(struct vdpa_device *vdpa)
{
	unsigned int bits = labnic_of(vdpa)->can.iova_bits;
	struct vdpa_iova_range range = {
		.first = 0,
		.last = bits == 64 ? U64_MAX : BIT_ULL(bits) - 1,
	};

	return range;
}

void labnic_free(struct vdpa_device *vdpa)
{
	struct labnic *nic = labnic_of(vdpa);
	unsigned int i;

	labnic_doorbell_free(nic);
	for (i = 0; nic->vqs && i < nic->nvqs; i++)
		labnic_ring_free(&nic->vqs[i]);
	kvfree(nic->vqs);
	labnic_iotlb_clear(nic);
}

/* All operations; labnic_ops_adapt() removes some. */
const struct vdpa_config_ops labnic_ops = {
	.set_vq_address		= set_vq_address,
	.set_vq_num		= set_vq_num,
	.kick_vq		= kick_vq,
	.set_vq_cb		= set_vq_cb,
	.set_vq_ready		= set_vq_ready,
	.get_vq_ready		= get_vq_ready,
	.set_vq_state		= set_vq_state,
	.get_vq_state		= get_vq_state,
	.get_vendor_vq_stats	= labnic_get_vendor_vq_stats,
	.get_vq_notification	= labnic_get_vq_notification,
	.get_vq_size		= get_vq_size,
	.get_vq_align		= get_vq_align,
	.get_vq_group		= get_vq_group,
	.get_vq_desc_group	= get_vq_desc_group,
	.get_device_features	= get_device_features,
	.get_backend_features	= get_backend_features,
	.set_driver_features	= set_driver_features,
	.get_driver_features	= get_driver_features,
	.set_config_cb		= set_config_cb,
	.get_vq_num_max		= get_vq_num_max,
	.get_device_id		= get_device_id,
	.get_vendor_id		= get_vendor_id,
	.get_status		= get_status,
	.set_status		= set_status,
	.reset			= reset,
	.compat_reset		= compat_reset,
	.suspend		= suspend,
	.resume			= resume,
	.get_config_size	= get_config_size,
	.get_config		= get_config,
	.set_config		= set_config,
	.get_generation		= get_generation,
	.get_iova_range		= get_iova_range,
	.set_map		= labnic_set_map,
	.dma_map		= labnic_dma_map,
	.dma_unmap		= labnic_dma_unmap,
	.reset_map		= labnic_reset_map,
	.set_group_asid		= labnic_set_group_asid,
	.free			= labnic_free,
};

/* Gives the device its own table, without the operations it lacks. */
void labnic_ops_adapt(struct labnic *nic)
{
	const struct labnic_abilities *can = &nic->can;
	struct vdpa_config_ops *ops = &nic->ops;

	*ops = labnic_ops;
	if (!can->suspend)
		ops->suspend = NULL;
	if (!can->resume)
		ops->resume = NULL;
	if (!can->doorbell)
		ops->get_vq_notification = NULL;
	if (!can->desc_group)
		ops->get_vq_desc_group = NULL;
	if (!can->enable_after_driver_ok)
		ops->get_backend_features = NULL;
	if (!can->iotlb_persist) {
		ops->compat_reset = NULL;
		ops->reset_map = NULL;
	}
	if (can->set_map) {
		ops->dma_map = NULL;
		ops->dma_unmap = NULL;
	} else {
		ops->set_map = NULL;
	}
	nic->vdpa.config = ops;
}
