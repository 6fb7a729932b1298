// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: statistics and attributes for tests.
 *
 *   vdpa dev vstats show NAME qidx N    counts of one queue
 *   /sys/bus/vdpa/devices/NAME/labnic/  link, needs_reset, counts of the port
 */
#include <linux/kstrtox.h>
#include <linux/sysfs.h>
#include <net/netlink.h>
#include <uapi/linux/vdpa.h>

#include "labnic.h"

struct labnic_stat {
	const char *name;
	u64 value;
};

static int put(struct sk_buff *msg, const struct labnic_stat *stats, size_t n)
{
	size_t i;

	for (i = 0; i < n; i++)
		if (nla_put_string(msg, VDPA_ATTR_DEV_VENDOR_ATTR_NAME,
				   stats[i].name) ||
		    nla_put_u64_64bit(msg, VDPA_ATTR_DEV_VENDOR_ATTR_VALUE,
				      stats[i].value, VDPA_ATTR_PAD))
			return -EMSGSIZE;
	return 0;
}

int labnic_get_vendor_vq_stats(struct vdpa_device *vdpa, u16 index,
			       struct sk_buff *msg,
			       struct netlink_ext_ack *extack)
{
	struct labnic *nic = labnic_of(vdpa);
	struct labnic_queue_stats stats;
	struct labnic_vq *vq;
	u64 kicks, doorbells;
	bool cvq;

	if (index >= nic->nvqs) {
		NL_SET_ERR_MSG_MOD(extack, "there is no such queue");
		return -EINVAL;
	}
	vq = &nic->vqs[index];
	mutex_lock(&labnic_plane);
	stats = vq->stats;
	cvq = labnic_is_cvq(nic, index);
	mutex_unlock(&labnic_plane);
	kicks = atomic64_read(&vq->kicks);
	doorbells = atomic64_read(&vq->doorbells);
	if (cvq) {
		const struct labnic_stat list[] = {
			{ "cvq requests", stats.packets },
			{ "cvq successes", stats.successes },
			{ "cvq errors", stats.drops + stats.errors },
			{ "kicks", kicks },
		};

		return put(msg, list, ARRAY_SIZE(list));
	}
	if (index & 1) {
		const struct labnic_stat list[] = {
			{ "tx packets", stats.packets },
			{ "tx bytes", stats.bytes },
			{ "tx errors", stats.errors },
			{ "tx drops", stats.drops },
			{ "tx waits", stats.waits },
			{ "kicks", kicks },
			{ "doorbells", doorbells },
		};

		return put(msg, list, ARRAY_SIZE(list));
	}
	if (!(index & 1)) {
		const struct labnic_stat list[] = {
			{ "rx packets", stats.packets },
			{ "rx bytes", stats.bytes },
			{ "rx errors", stats.errors },
			{ "rx overruns", stats.overruns },
			{ "rx drops", stats.drops },
			{ "kicks", kicks },
			{ "doorbells", doorbells },
		};

		return put(msg, list, ARRAY_SIZE(list));
	}
	return -EINVAL;
}

static struct labnic *of_device(struct device *dev)
{
	return labnic_of(dev_to_vdpa(dev));
}

static ssize_t link_show(struct device *dev, struct device_attribute *attr,
			 char *text)
{
	return sysfs_emit(text, "%d\n", of_device(dev)->link);
}

static ssize_t link_store(struct device *dev, struct device_attribute *attr,
			  const char *text, size_t length)
{
	struct labnic *nic = of_device(dev);
	bool up;
	int ret;

	ret = kstrtobool(text, &up);
	if (ret)
		return ret;
	mutex_lock(&labnic_plane);
	if (up != nic->link) {
		nic->link = up;
		if (!up)
			labnic_switch_forget(nic);
		labnic_config_changed(nic);
		labnic_switch_credit(nic);
		labnic_schedule(nic);
	}
	mutex_unlock(&labnic_plane);
	return length;
}
static DEVICE_ATTR_RW(link);

/* Writing 1 breaks the device until its driver resets it. */
static ssize_t needs_reset_store(struct device *dev, struct device_attribute *attr,
				 const char *text, size_t length)
{
	struct labnic *nic = of_device(dev);
	bool wanted;
	int ret;

	ret = kstrtobool(text, &wanted);
	if (ret)
		return ret;
	if (!wanted)
		return -EINVAL;
	mutex_lock(&labnic_plane);
	nic->status |= VIRTIO_CONFIG_S_NEEDS_RESET;
	labnic_config_changed(nic);
	labnic_switch_credit(nic);
	mutex_unlock(&labnic_plane);
	return length;
}
static DEVICE_ATTR_WO(needs_reset);

/* Writing N loses the next N kicks and doorbells of transmit queues. */
static ssize_t drop_kicks_show(struct device *dev, struct device_attribute *attr,
			       char *text)
{
	return sysfs_emit(text, "%d\n", atomic_read(&of_device(dev)->drop_kicks));
}

static ssize_t drop_kicks_store(struct device *dev, struct device_attribute *attr,
				const char *text, size_t length)
{
	u16 count;
	int ret;

	ret = kstrtou16(text, 0, &count);
	if (ret)
		return ret;
	atomic_set(&of_device(dev)->drop_kicks, count);
	return length;
}
static DEVICE_ATTR_RW(drop_kicks);

#define LABNIC_COUNTER(counter, value)					\
	static ssize_t counter##_show(struct device *dev,		\
				      struct device_attribute *attr,	\
				      char *text)			\
	{								\
		struct labnic *nic = of_device(dev);			\
		u64 count;						\
									\
		mutex_lock(&labnic_plane);				\
		count = value;						\
		mutex_unlock(&labnic_plane);				\
		return sysfs_emit(text, "%llu\n", count);		\
	}								\
	static DEVICE_ATTR_RO(counter)

LABNIC_COUNTER(link_down, nic->counters.link_down);
LABNIC_COUNTER(filtered, nic->counters.filtered);
LABNIC_COUNTER(ignored_enables, nic->counters.ignored_enables);
LABNIC_COUNTER(bad_doorbells, atomic64_read(&nic->counters.bad_doorbells));

static struct attribute *labnic_attributes[] = {
	&dev_attr_link.attr,
	&dev_attr_needs_reset.attr,
	&dev_attr_drop_kicks.attr,
	&dev_attr_link_down.attr,
	&dev_attr_filtered.attr,
	&dev_attr_ignored_enables.attr,
	&dev_attr_bad_doorbells.attr,
	NULL
};

static const struct attribute_group labnic_attribute_group = {
	.name = "labnic",
	.attrs = labnic_attributes,
};

const struct attribute_group *labnic_attribute_groups[] = {
	&labnic_attribute_group,
	NULL
};
