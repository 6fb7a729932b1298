// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: address spaces, their mappings, and the spaces that queues use.
 *
 * A new device has no mappings: a driver that forgets to map cannot reach
 * physical memory.
 */
#include "labnic.h"

/* Per address space: enough for guest RAM in single pages. */
#define LABNIC_MAPS_MAX		(1U << 22)

unsigned int labnic_group(const struct labnic *nic, u16 index)
{
	return nic->can.cvq_group && labnic_is_cvq(nic, index) ? 1 : 0;
}

/* The group of a queue's rings; the control queue's are in its own group. */
unsigned int labnic_desc_group(const struct labnic *nic, u16 index)
{
	if (!nic->can.desc_group || labnic_is_cvq(nic, index))
		return labnic_group(nic, index);
	return nic->can.cvq_group ? 2 : 1;
}

void labnic_iotlb_init(struct labnic *nic)
{
	unsigned int asid;

	spin_lock_init(&nic->iotlb_lock);
	for (asid = 0; asid < LABNIC_SPACES_MAX; asid++)
		vhost_iotlb_init(&nic->spaces[asid], LABNIC_MAPS_MAX, 0);
}

/* Under labnic_plane, except when the device is freed. */
void labnic_iotlb_clear(struct labnic *nic)
{
	unsigned int asid;

	spin_lock(&nic->iotlb_lock);
	for (asid = 0; asid < LABNIC_SPACES_MAX; asid++)
		vhost_iotlb_reset(&nic->spaces[asid]);
	spin_unlock(&nic->iotlb_lock);
}

/* Under labnic_plane: gives each queue the spaces that its groups are in. */
void labnic_iotlb_bind(struct labnic *nic)
{
	unsigned int i;

	for (i = 0; i < nic->nvqs; i++) {
		struct labnic_vq *vq = &nic->vqs[i];
		unsigned int rings = nic->group_asid[labnic_desc_group(nic, i)];
		unsigned int buffers = nic->group_asid[labnic_group(nic, i)];

		vringh_set_iotlb(&vq->vring, &nic->spaces[rings],
				 &nic->iotlb_lock);
		vringh_set_iotlb(&vq->buffers, &nic->spaces[buffers],
				 &nic->iotlb_lock);
	}
}

int labnic_set_group_asid(struct vdpa_device *vdpa, unsigned int group,
			  unsigned int asid)
{
	struct labnic *nic = labnic_of(vdpa);

	if (group >= vdpa->ngroups || asid >= vdpa->nas)
		return -EINVAL;
	mutex_lock(&labnic_plane);
	nic->group_asid[group] = asid;
	labnic_iotlb_bind(nic);
	mutex_unlock(&labnic_plane);
	return 0;
}

int labnic_set_map(struct vdpa_device *vdpa, unsigned int asid,
		   struct vhost_iotlb *iotlb)
{
	struct labnic *nic = labnic_of(vdpa);
	struct vhost_iotlb_map *map;
	struct vhost_iotlb *space;
	int ret = 0;

	if (asid >= vdpa->nas)
		return -EINVAL;
	if (labnic_fault(nic, LABNIC_FAULT_SILENT_MAP))
		return 0;
	mutex_lock(&labnic_plane);
	spin_lock(&nic->iotlb_lock);
	space = &nic->spaces[asid];
	vhost_iotlb_reset(space);
	for (map = vhost_iotlb_itree_first(iotlb, 0, U64_MAX); map && !ret;
	     map = vhost_iotlb_itree_next(map, 0, U64_MAX))
		ret = vhost_iotlb_add_range(space, map->start, map->last,
					    map->addr, map->perm);
	if (ret)
		vhost_iotlb_reset(space);
	spin_unlock(&nic->iotlb_lock);
	mutex_unlock(&labnic_plane);
	return ret;
}

int labnic_dma_map(struct vdpa_device *vdpa, unsigned int asid, u64 iova,
		   u64 size, u64 pa, u32 perm, void *opaque)
{
	struct labnic *nic = labnic_of(vdpa);
	int ret;

	if (asid >= vdpa->nas)
		return -EINVAL;
	if (labnic_fault(nic, LABNIC_FAULT_SILENT_MAP))
		return 0;
	mutex_lock(&labnic_plane);
	spin_lock(&nic->iotlb_lock);
	ret = vhost_iotlb_add_range(&nic->spaces[asid], iova, iova + size - 1,
				    pa, perm);
	spin_unlock(&nic->iotlb_lock);
	mutex_unlock(&labnic_plane);
	return ret;
}

int labnic_dma_unmap(struct vdpa_device *vdpa, unsigned int asid, u64 iova,
		     u64 size)
{
	struct labnic *nic = labnic_of(vdpa);

	if (asid >= vdpa->nas)
		return -EINVAL;
	mutex_lock(&labnic_plane);
	spin_lock(&nic->iotlb_lock);
	vhost_iotlb_del_range(&nic->spaces[asid], iova, iova + size - 1);
	spin_unlock(&nic->iotlb_lock);
	mutex_unlock(&labnic_plane);
	return 0;
}

int labnic_reset_map(struct vdpa_device *vdpa, unsigned int asid)
{
	struct labnic *nic = labnic_of(vdpa);

	if (asid >= vdpa->nas)
		return -EINVAL;
	mutex_lock(&labnic_plane);
	spin_lock(&nic->iotlb_lock);
	vhost_iotlb_reset(&nic->spaces[asid]);
	spin_unlock(&nic->iotlb_lock);
	mutex_unlock(&labnic_plane);
	return 0;
}
