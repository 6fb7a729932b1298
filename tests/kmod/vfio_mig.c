// SPDX-License-Identifier: GPL-2.0-only
/*
 * bellhop_vfio_mig: a VFIO device whose state can move to another one.
 *
 * It takes the place of a PCI function of the lab host, so a VMM opens it as
 * any function with a variant driver: by its address, in its IOMMU group, in a
 * type1 container or an IOAS of iommufd. All that the VMM sees of it is made
 * here: configuration space, a memory BAR, MSI-X. The function itself stays
 * untouched.
 *
 *   guest ── BAR 0: page, acked ──> registers ─┐  after an interval:
 *                                              ├─ the page by mig_write_page(),
 *         <── vector 0, a full page ───────────┘  then a trigger of vector 0
 *
 * It writes the number of the write to the whole page. It waits until the
 * guest has acknowledged that number, so each write has an interrupt.
 *
 *   page of BAR 0   content
 *   0               registers, 4 bytes each (REG_...)
 *   1, 2            MSI-X table, Pending Bit Array: the VMM has its own
 *   3               scratch memory, which is part of the state
 *
 *   RUNNING <──> STOP ──> STOP_COPY ──> STOP        the state is read
 *      │                      ^
 *      └───> PRE_COPY ────────┘                     its first part is read before
 *   RUNNING <──> STOP ──> RESUMING ───> STOP        it is written, and checked
 *
 * Locks: mig->lock protects all of a device. It is held while the device writes
 * to guest memory, so a page that is not in the log yet is not written yet.
 */
#include <linux/anon_inodes.h>
#include <linux/eventfd.h>
#include <linux/file.h>
#include <linux/iommufd.h>
#include <linux/iova_bitmap.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/unaligned.h>
#include <linux/vfio.h>
#include <linux/vfio_pci_core.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#define VECTORS 2
#define BAR_SIZE 0x4000
#define SCRATCH 0x3000

#define REG_ID 0x00
#define REG_RUN 0x04
#define REG_INTERVAL_US 0x08
#define REG_ACKED 0x0c
#define REG_PAGE_LOW 0x10
#define REG_PAGE_HIGH 0x14
#define REG_DONE 0x18
#define REG_RAISED 0x1c
#define REG_FAILED 0x20

#define MAGIC 0x4d564842
#define VERSION 2

static unsigned int extra = (1 << 20) + 4097;
module_param(extra, uint, 0644);
MODULE_PARM_DESC(extra, "bytes of the state that stand for memory of the device");

static int fail_state = -1;
module_param(fail_state, int, 0644);
MODULE_PARM_DESC(fail_state, "devices cannot enter this state of a migration, see fail_skip");

static int fail_skip;
module_param(fail_skip, int, 0644);
MODULE_PARM_DESC(fail_skip, "entries of fail_state that succeed before");

static int fail_times = -1;
module_param(fail_times, int, 0644);
MODULE_PARM_DESC(fail_times, "entries of fail_state that fail before all succeed; negative: all");

static bool logs = true;
module_param(logs, bool, 0644);
MODULE_PARM_DESC(logs, "devices that are bound from now on log what they write");

static bool precopy = true;
module_param(precopy, bool, 0644);
MODULE_PARM_DESC(precopy, "devices that are bound from now on have PRE_COPY");

static ulong precopied;
module_param(precopied, ulong, 0444);
MODULE_PARM_DESC(precopied, "bytes that were read in PRE_COPY");

static bool log_lies;
module_param(log_lies, bool, 0644);
MODULE_PARM_DESC(log_lies, "the log reports no page");

/* What a migration moves. It follows the extra bytes, which never change. */
struct mig_state {
	__le32 magic;
	__le32 version;
	__le32 run;
	__le32 interval_us;
	__le32 acked;
	__le32 raised;
	__le64 page;
	__le32 done;
	__le32 failed;
	__le32 extra;
	__le32 reserved;
	u8 scratch[PAGE_SIZE];
} __packed;

/* The data of a migration, as a file. */
struct mig_file {
	struct mutex lock;
	bool closed;
	/* The state is not there yet. */
	bool precopy;
	size_t size;
	/* Bytes of the state that are there. */
	size_t len;
	size_t position;
	u8 *data;
};

struct mig {
	struct vfio_device vdev;
	struct mutex lock;
	u8 config[PCI_CFG_SPACE_SIZE];
	struct mig_state regs;
	struct eventfd_ctx *triggers[VECTORS];
	/* Signalled when the host wants the function back. */
	struct eventfd_ctx *wanted;
	/* To guest memory in an IOAS. Else the device is in a container. */
	struct iommufd_access *access;
	struct delayed_work tick;
	u8 page[PAGE_SIZE];

	enum vfio_device_mig_state state;
	struct file *filp;

	bool logging;
	/* Numbers of the pages that were written. */
	struct xarray written;
};

static struct mig *to_mig(struct vfio_device *vdev)
{
	return container_of(vdev, struct mig, vdev);
}

static u32 get(__le32 value)
{
	return le32_to_cpu(value);
}

static void add_one(__le32 *value)
{
	le32_add_cpu(value, 1);
}

/* The device works on its own. */

static bool works(struct mig *mig)
{
	u16 command = get_unaligned_le16(mig->config + PCI_COMMAND);

	return (mig->state == VFIO_DEVICE_STATE_RUNNING ||
		mig->state == VFIO_DEVICE_STATE_PRE_COPY) &&
	       get(mig->regs.run) && mig->regs.acked == mig->regs.done &&
	       command & PCI_COMMAND_MASTER;
}

static void mig_schedule(struct mig *mig)
{
	u32 us = max(get(mig->regs.interval_us), 100U);

	if (works(mig))
		mod_delayed_work(system_wq, &mig->tick, usecs_to_jiffies(us));
}

/* Writes mig->page to guest memory. It runs in a kernel thread. */
static int mig_write_page(struct mig *mig, dma_addr_t to)
{
	if (mig->access)
		return iommufd_access_rw(mig->access, to, mig->page, PAGE_SIZE,
					 IOMMUFD_ACCESS_RW_WRITE |
					 IOMMUFD_ACCESS_RW_KTHREAD);
	return vfio_dma_rw(&mig->vdev, to, mig->page, PAGE_SIZE, true);
}

static void mig_tick(struct work_struct *work)
{
	struct mig *mig = container_of(to_delayed_work(work), struct mig, tick);
	dma_addr_t to;
	u32 number;
	int i;

	mutex_lock(&mig->lock);
	if (!works(mig))
		goto out;
	number = get(mig->regs.done) + 1;
	to = le64_to_cpu(mig->regs.page);
	for (i = 0; i < PAGE_SIZE; i += 4)
		put_unaligned_le32(number, mig->page + i);
	if (mig->logging)
		xa_store(&mig->written, to >> PAGE_SHIFT, xa_mk_value(1),
			 GFP_KERNEL);
	if (mig_write_page(mig, to)) {
		add_one(&mig->regs.failed);
	} else {
		add_one(&mig->regs.done);
		if (mig->triggers[0]) {
			add_one(&mig->regs.raised);
			eventfd_signal(mig->triggers[0]);
		}
	}
out:
	mutex_unlock(&mig->lock);
}

/* Configuration space and BAR. */

static void mig_reset_locked(struct mig *mig)
{
	memset(&mig->regs, 0, sizeof(mig->regs));
	put_unaligned_le16(0, mig->config + PCI_COMMAND);
}

static void mig_config_init(struct mig *mig)
{
	u8 *config = mig->config;

	put_unaligned_le16(0x1234, config + PCI_VENDOR_ID);
	put_unaligned_le16(0xbe11, config + PCI_DEVICE_ID);
	put_unaligned_le16(PCI_STATUS_CAP_LIST, config + PCI_STATUS);
	config[PCI_CLASS_DEVICE + 1] = 0xff;
	put_unaligned_le16(0x1234, config + PCI_SUBSYSTEM_VENDOR_ID);
	put_unaligned_le16(0x0001, config + PCI_SUBSYSTEM_ID);
	config[PCI_CAPABILITY_LIST] = 0x40;
	config[0x40] = PCI_CAP_ID_MSIX;
	put_unaligned_le16(VECTORS - 1, config + 0x42);
	put_unaligned_le32(0x1000, config + 0x44);
	put_unaligned_le32(0x2000, config + 0x48);
}

static u32 mig_register(struct mig *mig, u32 offset)
{
	struct mig_state *regs = &mig->regs;

	switch (offset) {
	case REG_ID:
		return MAGIC;
	case REG_RUN:
		return get(regs->run);
	case REG_INTERVAL_US:
		return get(regs->interval_us);
	case REG_ACKED:
		return get(regs->acked);
	case REG_PAGE_LOW:
		return lower_32_bits(le64_to_cpu(regs->page));
	case REG_PAGE_HIGH:
		return upper_32_bits(le64_to_cpu(regs->page));
	case REG_DONE:
		return get(regs->done);
	case REG_RAISED:
		return get(regs->raised);
	case REG_FAILED:
		return get(regs->failed);
	default:
		return 0;
	}
}

static void mig_set_register(struct mig *mig, u32 offset, u32 value)
{
	struct mig_state *regs = &mig->regs;
	u64 page = le64_to_cpu(regs->page);

	switch (offset) {
	case REG_RUN:
		regs->run = cpu_to_le32(value & 1);
		mig_schedule(mig);
		break;
	case REG_INTERVAL_US:
		regs->interval_us = cpu_to_le32(value);
		break;
	case REG_ACKED:
		regs->acked = cpu_to_le32(value);
		mig_schedule(mig);
		break;
	case REG_PAGE_LOW:
		regs->page = cpu_to_le64((page & ~0xffffffffULL) | value);
		break;
	case REG_PAGE_HIGH:
		regs->page = cpu_to_le64((u32)page | (u64)value << 32);
		break;
	}
}

/* The bytes of the two regions; NULL: registers. */
static u8 *mig_bytes(struct mig *mig, u32 region, u64 offset, size_t count)
{
	if (region == VFIO_PCI_CONFIG_REGION_INDEX &&
	    offset + count <= sizeof(mig->config))
		return mig->config + offset;
	if (region == VFIO_PCI_BAR0_REGION_INDEX && offset >= SCRATCH &&
	    offset + count <= BAR_SIZE)
		return mig->regs.scratch + (offset - SCRATCH);
	return NULL;
}

static bool mig_in_registers(u32 region, u64 offset, size_t count)
{
	return region == VFIO_PCI_BAR0_REGION_INDEX && count == 4 &&
	       !(offset % 4) && offset < PAGE_SIZE;
}

static ssize_t mig_read(struct vfio_device *vdev, char __user *buf,
			size_t count, loff_t *ppos)
{
	u64 offset = *ppos & VFIO_PCI_OFFSET_MASK;
	u32 region = VFIO_PCI_OFFSET_TO_INDEX(*ppos);
	struct mig *mig = to_mig(vdev);
	ssize_t ret = -EINVAL;
	u8 *bytes;
	u32 value;

	mutex_lock(&mig->lock);
	bytes = mig_bytes(mig, region, offset, count);
	if (bytes) {
		ret = copy_to_user(buf, bytes, count) ? -EFAULT : count;
	} else if (mig_in_registers(region, offset, count)) {
		value = mig_register(mig, offset);
		ret = copy_to_user(buf, &value, 4) ? -EFAULT : 4;
	}
	mutex_unlock(&mig->lock);
	return ret;
}

static ssize_t mig_write(struct vfio_device *vdev, const char __user *buf,
			 size_t count, loff_t *ppos)
{
	u64 offset = *ppos & VFIO_PCI_OFFSET_MASK;
	u32 region = VFIO_PCI_OFFSET_TO_INDEX(*ppos);
	struct mig *mig = to_mig(vdev);
	u16 command = PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER;
	ssize_t ret = -EINVAL;
	u8 *bytes;
	u32 value;

	mutex_lock(&mig->lock);
	bytes = mig_bytes(mig, region, offset, count);
	if (region == VFIO_PCI_CONFIG_REGION_INDEX) {
		if (offset == PCI_COMMAND && count == 2) {
			ret = copy_from_user(&value, buf, 2) ? -EFAULT : 2;
			if (ret == 2)
				put_unaligned_le16(value & command, bytes);
			mig_schedule(mig);
		} else if (bytes) {
			ret = count;
		}
	} else if (bytes) {
		ret = copy_from_user(bytes, buf, count) ? -EFAULT : count;
	} else if (mig_in_registers(region, offset, count)) {
		ret = copy_from_user(&value, buf, 4) ? -EFAULT : 4;
		if (ret == 4)
			mig_set_register(mig, offset, value);
	}
	mutex_unlock(&mig->lock);
	return ret;
}

/* Requests. */

static void mig_disconnect(struct eventfd_ctx **triggers, u32 count)
{
	u32 i;

	for (i = 0; i < count; i++) {
		if (triggers[i])
			eventfd_ctx_put(triggers[i]);
		triggers[i] = NULL;
	}
}

static long mig_set_irqs(struct mig *mig, struct vfio_irq_set __user *arg)
{
	size_t minsz = offsetofend(struct vfio_irq_set, count);
	struct eventfd_ctx **triggers = mig->triggers;
	struct vfio_irq_set set;
	u32 i, count = VECTORS;
	size_t data_size = 0;
	long ret;
	s32 fd;

	if (copy_from_user(&set, arg, minsz))
		return -EFAULT;
	if (set.index == VFIO_PCI_REQ_IRQ_INDEX) {
		triggers = &mig->wanted;
		count = 1;
	} else if (set.index != VFIO_PCI_MSIX_IRQ_INDEX) {
		return -EINVAL;
	}
	ret = vfio_set_irqs_validate_and_prepare(&set, count, VFIO_PCI_NUM_IRQS,
						 &data_size);
	if (ret)
		return ret;
	if (!set.count && set.flags & VFIO_IRQ_SET_DATA_NONE) {
		mig_disconnect(triggers, count);
		return 0;
	}
	if (!(set.flags & VFIO_IRQ_SET_DATA_EVENTFD))
		return -EINVAL;
	for (i = set.start; i < set.start + set.count; i++) {
		struct eventfd_ctx *trigger = NULL;

		if (get_user(fd, (s32 __user *)arg->data + (i - set.start)))
			return -EFAULT;
		if (fd >= 0)
			trigger = eventfd_ctx_fdget(fd);
		if (IS_ERR(trigger))
			return PTR_ERR(trigger);
		mig_disconnect(triggers + i, 1);
		triggers[i] = trigger;
	}
	return 0;
}

static void mig_request(struct vfio_device *vdev, unsigned int count)
{
	struct mig *mig = to_mig(vdev);

	mutex_lock(&mig->lock);
	if (mig->wanted)
		eventfd_signal(mig->wanted);
	mutex_unlock(&mig->lock);
}

static long mig_region_info(struct vfio_region_info __user *arg)
{
	size_t minsz = offsetofend(struct vfio_region_info, offset);
	struct vfio_region_info info;

	if (copy_from_user(&info, arg, minsz))
		return -EFAULT;
	if (info.argsz < minsz || info.index >= VFIO_PCI_NUM_REGIONS)
		return -EINVAL;
	info.flags = 0;
	info.size = 0;
	info.cap_offset = 0;
	info.offset = VFIO_PCI_INDEX_TO_OFFSET(info.index);
	if (info.index == VFIO_PCI_BAR0_REGION_INDEX)
		info.size = BAR_SIZE;
	if (info.index == VFIO_PCI_CONFIG_REGION_INDEX)
		info.size = PCI_CFG_SPACE_SIZE;
	if (info.size)
		info.flags = VFIO_REGION_INFO_FLAG_READ |
			     VFIO_REGION_INFO_FLAG_WRITE;
	return copy_to_user(arg, &info, minsz) ? -EFAULT : 0;
}

static long mig_irq_info(struct vfio_irq_info __user *arg)
{
	size_t minsz = offsetofend(struct vfio_irq_info, count);
	struct vfio_irq_info info;

	if (copy_from_user(&info, arg, minsz))
		return -EFAULT;
	if (info.argsz < minsz || info.index >= VFIO_PCI_NUM_IRQS)
		return -EINVAL;
	info.flags = 0;
	info.count = 0;
	if (info.index == VFIO_PCI_MSIX_IRQ_INDEX) {
		info.flags = VFIO_IRQ_INFO_EVENTFD;
		info.count = VECTORS;
	}
	if (info.index == VFIO_PCI_REQ_IRQ_INDEX) {
		info.flags = VFIO_IRQ_INFO_EVENTFD;
		info.count = 1;
	}
	return copy_to_user(arg, &info, minsz) ? -EFAULT : 0;
}

static long mig_info(struct vfio_device_info __user *arg)
{
	size_t minsz = offsetofend(struct vfio_device_info, num_irqs);
	struct vfio_device_info info;

	if (copy_from_user(&info, arg, minsz))
		return -EFAULT;
	if (info.argsz < minsz)
		return -EINVAL;
	info.flags = VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET;
	info.num_regions = VFIO_PCI_NUM_REGIONS;
	info.num_irqs = VFIO_PCI_NUM_IRQS;
	return copy_to_user(arg, &info, minsz) ? -EFAULT : 0;
}

static void mig_close_file(struct mig *mig);

static long mig_ioctl(struct vfio_device *vdev, unsigned int cmd,
		      unsigned long arg)
{
	struct mig *mig = to_mig(vdev);
	void __user *uarg = (void __user *)arg;
	long ret;

	switch (cmd) {
	case VFIO_DEVICE_GET_INFO:
		return mig_info(uarg);
	case VFIO_DEVICE_GET_REGION_INFO:
		return mig_region_info(uarg);
	case VFIO_DEVICE_GET_IRQ_INFO:
		return mig_irq_info(uarg);
	case VFIO_DEVICE_SET_IRQS:
		mutex_lock(&mig->lock);
		ret = mig_set_irqs(mig, uarg);
		mutex_unlock(&mig->lock);
		return ret;
	case VFIO_DEVICE_RESET:
		mutex_lock(&mig->lock);
		mig_reset_locked(mig);
		mig_close_file(mig);
		mig->state = VFIO_DEVICE_STATE_RUNNING;
		mutex_unlock(&mig->lock);
		return 0;
	default:
		return -ENOTTY;
	}
}

/* The data of a migration. */

static ssize_t mig_file_read(struct file *filp, char __user *buf, size_t count,
			     loff_t *pos)
{
	struct mig_file *file = filp->private_data;
	ssize_t ret;

	if (pos)
		return -ESPIPE;
	mutex_lock(&file->lock);
	count = min(count, file->len - file->position);
	ret = count;
	if (file->closed)
		ret = -ENODEV;
	else if (!count && file->precopy)
		ret = -ENOMSG;
	else if (copy_to_user(buf, file->data + file->position, count))
		ret = -EFAULT;
	else
		file->position += count;
	if (ret > 0 && file->precopy)
		precopied += ret;
	mutex_unlock(&file->lock);
	return ret;
}

static long mig_file_ioctl(struct file *filp, unsigned int cmd,
			   unsigned long arg)
{
	size_t minsz = offsetofend(struct vfio_precopy_info, dirty_bytes);
	struct mig_file *file = filp->private_data;
	struct vfio_precopy_info info = {};
	long ret = -EINVAL;

	if (cmd != VFIO_MIG_GET_PRECOPY_INFO)
		return -ENOTTY;
	if (copy_from_user(&info, (void __user *)arg, minsz))
		return -EFAULT;
	if (info.argsz < minsz)
		return -EINVAL;
	mutex_lock(&file->lock);
	if (!file->closed && file->precopy) {
		info.initial_bytes = file->len - file->position;
		info.dirty_bytes = 0;
		ret = copy_to_user((void __user *)arg, &info, minsz) ? -EFAULT :
								       0;
	}
	mutex_unlock(&file->lock);
	return ret;
}

static ssize_t mig_file_write(struct file *filp, const char __user *buf,
			      size_t count, loff_t *pos)
{
	struct mig_file *file = filp->private_data;
	ssize_t ret;

	if (pos)
		return -ESPIPE;
	mutex_lock(&file->lock);
	ret = count;
	if (file->closed)
		ret = -ENODEV;
	else if (count > file->size - file->len)
		ret = -ENOSPC;
	else if (copy_from_user(file->data + file->len, buf, count))
		ret = -EFAULT;
	else
		file->len += count;
	mutex_unlock(&file->lock);
	return ret;
}

static int mig_file_release(struct inode *inode, struct file *filp)
{
	struct mig_file *file = filp->private_data;

	mutex_destroy(&file->lock);
	kvfree(file->data);
	kfree(file);
	return 0;
}

static const struct file_operations mig_save_fops = {
	.owner = THIS_MODULE,
	.read = mig_file_read,
	.unlocked_ioctl = mig_file_ioctl,
	.release = mig_file_release,
};

static const struct file_operations mig_resume_fops = {
	.owner = THIS_MODULE,
	.write = mig_file_write,
	.release = mig_file_release,
};

static struct file *mig_file_open(const struct file_operations *fops, int flags)
{
	struct mig_file *file = kzalloc(sizeof(*file), GFP_KERNEL_ACCOUNT);
	struct file *filp;

	if (!file)
		return ERR_PTR(-ENOMEM);
	mutex_init(&file->lock);
	file->size = sizeof(struct mig_state) + extra;
	file->data = kvzalloc(file->size, GFP_KERNEL_ACCOUNT);
	if (!file->data) {
		kfree(file);
		return ERR_PTR(-ENOMEM);
	}
	filp = anon_inode_getfile("bellhop_vfio_mig", fops, file, flags);
	if (IS_ERR(filp)) {
		kvfree(file->data);
		kfree(file);
		return filp;
	}
	stream_open(filp->f_inode, filp);
	return filp;
}

static u8 mig_extra_byte(size_t index)
{
	return index * 31 + (index >> 8) * 7 + (index >> 16);
}

/* The rest of the data. */
static void mig_save_state(struct mig *mig, struct file *filp)
{
	struct mig_file *file = filp->private_data;
	struct mig_state *state;
	size_t size = file->size - sizeof(*state);

	mutex_lock(&file->lock);
	state = (struct mig_state *)(file->data + size);
	*state = mig->regs;
	state->magic = cpu_to_le32(MAGIC);
	state->version = cpu_to_le32(VERSION);
	state->extra = cpu_to_le32(size);
	file->len = file->size;
	file->precopy = false;
	mutex_unlock(&file->lock);
}

/* The data up to the state. */
static struct file *mig_save(void)
{
	struct file *filp = mig_file_open(&mig_save_fops, O_RDONLY);
	struct mig_file *file;
	size_t i;

	if (IS_ERR(filp))
		return filp;
	file = filp->private_data;
	file->len = file->size - sizeof(struct mig_state);
	file->precopy = true;
	for (i = 0; i < file->len; i++)
		file->data[i] = mig_extra_byte(i);
	return filp;
}

static int mig_load(struct mig *mig)
{
	struct mig_file *file = mig->filp->private_data;
	size_t i, size = file->size - sizeof(struct mig_state);
	struct mig_state *state = (struct mig_state *)(file->data + size);
	int ret = -EINVAL;

	mutex_lock(&file->lock);
	if (file->len != file->size || get(state->magic) != MAGIC ||
	    get(state->version) != VERSION || state->reserved ||
	    get(state->extra) != size)
		goto out;
	for (i = 0; i < size; i++)
		if (file->data[i] != mig_extra_byte(i))
			goto out;
	mig->regs = *state;
	ret = 0;
out:
	mutex_unlock(&file->lock);
	return ret;
}

static void mig_close_file(struct mig *mig)
{
	struct mig_file *file;

	if (!mig->filp)
		return;
	file = mig->filp->private_data;
	mutex_lock(&file->lock);
	file->closed = true;
	mutex_unlock(&file->lock);
	fput(mig->filp);
	mig->filp = NULL;
}

/* States. */

#define STEP(from, to) ((from) << 8 | (to))

static struct file *mig_step(struct mig *mig, enum vfio_device_mig_state next)
{
	struct file *filp;
	int ret;

	if (next == READ_ONCE(fail_state)) {
		if (fail_skip > 0) {
			fail_skip--;
		} else if (fail_times) {
			if (fail_times > 0)
				fail_times--;
			return ERR_PTR(-EIO);
		}
	}
	switch (STEP(mig->state, next)) {
	case STEP(VFIO_DEVICE_STATE_RUNNING, VFIO_DEVICE_STATE_STOP):
	case STEP(VFIO_DEVICE_STATE_STOP, VFIO_DEVICE_STATE_RUNNING):
		return NULL;
	case STEP(VFIO_DEVICE_STATE_STOP, VFIO_DEVICE_STATE_STOP_COPY):
		filp = mig_save();
		if (!IS_ERR(filp))
			mig_save_state(mig, filp);
		break;
	case STEP(VFIO_DEVICE_STATE_RUNNING, VFIO_DEVICE_STATE_PRE_COPY):
		filp = mig_save();
		break;
	case STEP(VFIO_DEVICE_STATE_PRE_COPY, VFIO_DEVICE_STATE_STOP_COPY):
		mig_save_state(mig, mig->filp);
		return NULL;
	case STEP(VFIO_DEVICE_STATE_STOP, VFIO_DEVICE_STATE_RESUMING):
		filp = mig_file_open(&mig_resume_fops, O_WRONLY);
		break;
	case STEP(VFIO_DEVICE_STATE_RESUMING, VFIO_DEVICE_STATE_STOP):
		ret = mig_load(mig);
		if (ret)
			return ERR_PTR(ret);
		fallthrough;
	case STEP(VFIO_DEVICE_STATE_STOP_COPY, VFIO_DEVICE_STATE_STOP):
	case STEP(VFIO_DEVICE_STATE_PRE_COPY, VFIO_DEVICE_STATE_RUNNING):
		mig_close_file(mig);
		return NULL;
	default:
		return ERR_PTR(-EINVAL);
	}
	if (IS_ERR(filp))
		return filp;
	get_file(filp);
	mig->filp = filp;
	return filp;
}

static struct file *mig_set_state(struct vfio_device *vdev,
				  enum vfio_device_mig_state new_state)
{
	struct mig *mig = to_mig(vdev);
	enum vfio_device_mig_state next;
	struct file *filp = NULL;
	int ret;

	mutex_lock(&mig->lock);
	while (new_state != mig->state) {
		ret = vfio_mig_get_next_state(vdev, mig->state, new_state,
					      &next);
		filp = ret ? ERR_PTR(ret) : mig_step(mig, next);
		if (IS_ERR(filp))
			break;
		mig->state = next;
		mig_schedule(mig);
		if (WARN_ON(filp && new_state != next)) {
			fput(filp);
			filp = ERR_PTR(-EINVAL);
			break;
		}
	}
	mutex_unlock(&mig->lock);
	return filp;
}

static int mig_get_state(struct vfio_device *vdev,
			 enum vfio_device_mig_state *state)
{
	struct mig *mig = to_mig(vdev);

	mutex_lock(&mig->lock);
	*state = mig->state;
	mutex_unlock(&mig->lock);
	return 0;
}

static int mig_data_size(struct vfio_device *vdev, unsigned long *size)
{
	*size = sizeof(struct mig_state) + extra;
	return 0;
}

static const struct vfio_migration_ops mig_ops = {
	.migration_set_state = mig_set_state,
	.migration_get_state = mig_get_state,
	.migration_get_data_size = mig_data_size,
};

/* The log of what it writes. All of the address space is logged. */

static int mig_log_start(struct vfio_device *vdev, struct rb_root_cached *ranges,
			 u32 nnodes, u64 *page_size)
{
	struct mig *mig = to_mig(vdev);

	mutex_lock(&mig->lock);
	mig->logging = true;
	mutex_unlock(&mig->lock);
	*page_size = PAGE_SIZE;
	return 0;
}

static int mig_log_stop(struct vfio_device *vdev)
{
	struct mig *mig = to_mig(vdev);

	mutex_lock(&mig->lock);
	mig->logging = false;
	xa_destroy(&mig->written);
	mutex_unlock(&mig->lock);
	return 0;
}

static int mig_log_read(struct vfio_device *vdev, unsigned long iova,
			unsigned long length, struct iova_bitmap *dirty)
{
	unsigned long first = iova >> PAGE_SHIFT;
	unsigned long last = (iova + length - 1) >> PAGE_SHIFT;
	struct mig *mig = to_mig(vdev);
	unsigned long number;
	int ret = 0;
	void *entry;

	mutex_lock(&mig->lock);
	if (!mig->logging)
		ret = -EINVAL;
	xa_for_each_range(&mig->written, number, entry, first, last) {
		if (!READ_ONCE(log_lies))
			iova_bitmap_set(dirty, number << PAGE_SHIFT, PAGE_SIZE);
		xa_erase(&mig->written, number);
	}
	mutex_unlock(&mig->lock);
	return ret;
}

static const struct vfio_log_ops mig_log_ops = {
	.log_start = mig_log_start,
	.log_stop = mig_log_stop,
	.log_read_and_clear = mig_log_read,
};

/* The device. */

static int mig_init(struct vfio_device *vdev)
{
	struct mig *mig = to_mig(vdev);

	mutex_init(&mig->lock);
	INIT_DELAYED_WORK(&mig->tick, mig_tick);
	xa_init(&mig->written);
	mig->state = VFIO_DEVICE_STATE_RUNNING;
	mig_config_init(mig);
	vdev->migration_flags = VFIO_MIGRATION_STOP_COPY;
	if (precopy)
		vdev->migration_flags |= VFIO_MIGRATION_PRE_COPY;
	vdev->mig_ops = &mig_ops;
	if (logs)
		vdev->log_ops = &mig_log_ops;
	return 0;
}

static int mig_open(struct vfio_device *vdev)
{
	struct mig *mig = to_mig(vdev);

	mutex_lock(&mig->lock);
	mig_reset_locked(mig);
	mig->state = VFIO_DEVICE_STATE_RUNNING;
	mutex_unlock(&mig->lock);
	return 0;
}

static void mig_close(struct vfio_device *vdev)
{
	struct mig *mig = to_mig(vdev);

	mutex_lock(&mig->lock);
	mig_reset_locked(mig);
	mig_disconnect(mig->triggers, VECTORS);
	mig_disconnect(&mig->wanted, 1);
	mig_close_file(mig);
	mig->logging = false;
	xa_destroy(&mig->written);
	mutex_unlock(&mig->lock);
	cancel_delayed_work_sync(&mig->tick);
}

/*
 * vfio_dma_rw() has no access to an IOAS for a device with an IOMMU. So the
 * device has one of its own, beside the attachment that pins guest memory.
 */

static void mig_access_unmap(void *data, unsigned long iova,
			     unsigned long length)
{
	/* An access by iommufd_access_rw() pins nothing after its return. */
}

static const struct iommufd_access_ops mig_access_ops = {
	.unmap = mig_access_unmap,
};

static int mig_bind_iommufd(struct vfio_device *vdev, struct iommufd_ctx *ictx,
			    u32 *out_device_id)
{
	struct mig *mig = to_mig(vdev);
	struct iommufd_access *access;
	u32 id;
	int ret;

	access = iommufd_access_create(ictx, &mig_access_ops, mig, &id);
	if (IS_ERR(access))
		return PTR_ERR(access);
	ret = vfio_iommufd_physical_bind(vdev, ictx, out_device_id);
	if (ret)
		iommufd_access_destroy(access);
	else
		mig->access = access;
	return ret;
}

static void mig_unbind_iommufd(struct vfio_device *vdev)
{
	struct mig *mig = to_mig(vdev);

	vfio_iommufd_physical_unbind(vdev);
	iommufd_access_destroy(mig->access);
	mig->access = NULL;
}

static int mig_attach_ioas(struct vfio_device *vdev, u32 *pt_id)
{
	struct mig *mig = to_mig(vdev);
	u32 ioas_id = *pt_id;
	int ret;

	ret = vfio_iommufd_physical_attach_ioas(vdev, pt_id);
	if (ret)
		return ret;
	ret = iommufd_access_attach(mig->access, ioas_id);
	if (ret)
		vfio_iommufd_physical_detach_ioas(vdev);
	return ret;
}

static void mig_detach_ioas(struct vfio_device *vdev)
{
	iommufd_access_detach(to_mig(vdev)->access);
	vfio_iommufd_physical_detach_ioas(vdev);
}

static const struct vfio_device_ops mig_device_ops = {
	.name = "bellhop_vfio_mig",
	.init = mig_init,
	.open_device = mig_open,
	.close_device = mig_close,
	.read = mig_read,
	.write = mig_write,
	.ioctl = mig_ioctl,
	.request = mig_request,
	.bind_iommufd = mig_bind_iommufd,
	.unbind_iommufd = mig_unbind_iommufd,
	.attach_ioas = mig_attach_ioas,
	.detach_ioas = mig_detach_ioas,
};

static int mig_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct mig *mig;
	int ret;

	mig = vfio_alloc_device(mig, vdev, &pdev->dev, &mig_device_ops);
	if (IS_ERR(mig))
		return PTR_ERR(mig);
	pci_set_drvdata(pdev, mig);
	ret = vfio_register_group_dev(&mig->vdev);
	if (ret)
		vfio_put_device(&mig->vdev);
	return ret;
}

static void mig_remove(struct pci_dev *pdev)
{
	struct mig *mig = pci_get_drvdata(pdev);

	vfio_unregister_group_dev(&mig->vdev);
	vfio_put_device(&mig->vdev);
}

/* Virtual functions of the rig's virtio NIC. */
static const struct pci_device_id mig_ids[] = {
	{ PCI_DRIVER_OVERRIDE_DEVICE_VFIO(0x1af4, 0x1041) },
	{}
};
MODULE_DEVICE_TABLE(pci, mig_ids);

static struct pci_driver mig_driver = {
	.name = "bellhop_vfio_mig",
	.id_table = mig_ids,
	.probe = mig_probe,
	.remove = mig_remove,
	.driver_managed_dma = true,
};
module_pci_driver(mig_driver);

MODULE_IMPORT_NS(IOMMUFD);
MODULE_DESCRIPTION("A VFIO device of the Bellhop lab whose state can move");
MODULE_LICENSE("GPL");
