// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: finds out whether a vDPA device is in use.
 *
 * vhost_vdpa does not report it: its file may be open with the device's status
 * still 0. So besides the status, the files of all processes are searched, as
 * fuser(1) does. The search cannot see a doorbell that stays mapped after the
 * file was closed, nor a file in transit through a socket. The deletion then
 * waits until they are gone.
 */
#include <linux/fdtable.h>
#include <linux/fs.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>

#include "sf.h"

static int has_number(struct device *dev, void *data)
{
	return dev->devt != 0;
}

static int is_file_of(const void *data, struct file *file, unsigned int fd)
{
	const dev_t *number = data;
	const struct inode *inode = file_inode(file);

	return S_ISCHR(inode->i_mode) && inode->i_rdev == *number;
}

static bool is_open(dev_t number)
{
	struct task_struct *process, *thread;
	bool found = false;

	rcu_read_lock();
	/* Each thread: the first one may have ended before the others. */
	for_each_process_thread(process, thread) {
		task_lock(thread);
		if (thread->files)
			found = iterate_fd(thread->files, 0, is_file_of, &number);
		task_unlock(thread);
		if (found)
			goto out;
	}
out:
	rcu_read_unlock();
	return found;
}

/* The caller keeps the device from being deleted. May sleep. */
bool labnic_in_use(struct labnic *nic)
{
	struct device *file;
	bool open;

	if (READ_ONCE(nic->status))
		return true;
	file = device_find_child(&nic->vdpa.dev, NULL, has_number);
	if (!file)
		return false;
	open = is_open(file->devt);
	put_device(file);
	return open;
}
