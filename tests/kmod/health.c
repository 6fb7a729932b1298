// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: the NIC's health reporter, "fw"; tests raise its errors.
 *
 *   echo TEXT >/sys/kernel/debug/labnic/health_report
 *   echo Y    >/sys/kernel/debug/labnic/health_stuck      recovery fails
 *   devlink health test platform/labnic.0 reporter fw
 */
#include <linux/debugfs.h>
#include <linux/fs.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "sf.h"

#define LABNIC_HEALTH_TEXT	64

struct labnic_health {
	struct labnic_pf *pf;
	struct devlink_health_reporter *reporter;
	struct dentry *directory;
	struct work_struct test;
	bool stuck;
	u32 reports;
	char text[LABNIC_HEALTH_TEXT];	/* of the last error; under devl_lock */
};

static int recover(struct devlink_health_reporter *reporter, void *context,
		   struct netlink_ext_ack *extack)
{
	struct labnic_health *health = devlink_health_reporter_priv(reporter);

	if (health->stuck) {
		NL_SET_ERR_MSG_MOD(extack, "health_stuck is set");
		return -EIO;
	}
	return 0;
}

static int describe(struct devlink_health_reporter *reporter,
		    struct devlink_fmsg *message)
{
	struct labnic_health *health = devlink_health_reporter_priv(reporter);

	devlink_fmsg_u32_pair_put(message, "reports", health->reports);
	devlink_fmsg_string_pair_put(message, "last", health->text);
	devlink_fmsg_bool_pair_put(message, "stuck", health->stuck);
	return 0;
}

static int dump(struct devlink_health_reporter *reporter,
		struct devlink_fmsg *message, void *context,
		struct netlink_ext_ack *extack)
{
	return describe(reporter, message);
}

static int diagnose(struct devlink_health_reporter *reporter,
		    struct devlink_fmsg *message, struct netlink_ext_ack *extack)
{
	return describe(reporter, message);
}

/* Not under devl_lock, which reporting takes. */
static int report(struct labnic_health *health, const char *text)
{
	devl_lock(health->pf->devlink);
	health->reports++;
	strscpy(health->text, text, sizeof(health->text));
	devl_unlock(health->pf->devlink);
	return devlink_health_report(health->reporter, text, NULL);
}

static void test_work(struct work_struct *work)
{
	report(container_of(work, struct labnic_health, test), "test");
}

static int test(struct devlink_health_reporter *reporter,
		struct netlink_ext_ack *extack)
{
	struct labnic_health *health = devlink_health_reporter_priv(reporter);

	schedule_work(&health->test);
	return 0;
}

static const struct devlink_health_reporter_ops health_ops = {
	.name		= "fw",
	.recover	= recover,
	.dump		= dump,
	.diagnose	= diagnose,
	.test		= test,
};

static ssize_t report_write(struct file *file, const char __user *data,
			    size_t length, loff_t *offset)
{
	struct labnic_health *health = file->private_data;
	char text[LABNIC_HEALTH_TEXT];
	ssize_t copied;
	int ret;

	*offset = 0;
	copied = simple_write_to_buffer(text, sizeof(text) - 1, offset, data, length);
	if (copied < 0)
		return copied;
	text[copied] = 0;
	ret = report(health, strim(text));
	return ret ?: length;
}

static const struct file_operations report_fops = {
	.open	= simple_open,
	.write	= report_write,
	.llseek	= generic_file_llseek,
	.owner	= THIS_MODULE,
};

/* Under devl_lock, before the instance is registered. */
int labnic_health_add(struct labnic_pf *pf)
{
	struct labnic_health *health;

	health = kzalloc(sizeof(*health), GFP_KERNEL);
	if (!health)
		return -ENOMEM;
	health->pf = pf;
	INIT_WORK(&health->test, test_work);
	health->reporter = devl_health_reporter_create(pf->devlink, &health_ops, 0,
						       health);
	if (IS_ERR(health->reporter)) {
		int ret = PTR_ERR(health->reporter);

		kfree(health);
		return ret;
	}
	/* Without debugfs only the files are missing. */
	health->directory = debugfs_create_dir("labnic", NULL);
	debugfs_create_file("health_report", 0200, health->directory, health,
			    &report_fops);
	debugfs_create_bool("health_stuck", 0600, health->directory, &health->stuck);
	pf->health = health;
	return 0;
}

/* Not under devl_lock: waits for a report in progress, which takes it. */
void labnic_health_remove(struct labnic_pf *pf)
{
	struct labnic_health *health = pf->health;

	debugfs_remove_recursive(health->directory);
	cancel_work_sync(&health->test);
	devlink_health_reporter_destroy(health->reporter);
	kfree(health);
}
