// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: the module parameters, and a device's abilities derived from them.
 *
 * All are writable under /sys/module/labnic/parameters and are read when a
 * device is added: write, add, write again, add again, and two devices differ.
 */
#include <linux/log2.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/string.h>

#include "sf.h"

#define LABNIC_SWITCH(name, text)				\
	static bool name = true;				\
	module_param(name, bool, 0644);				\
	MODULE_PARM_DESC(name, text " (default: on)")

LABNIC_SWITCH(suspend, "SUSPEND");
LABNIC_SWITCH(resume, "RESUME");
LABNIC_SWITCH(cvq_group, "the control queue is a group of its own");
LABNIC_SWITCH(desc_group, "the data queues' rings are a group of their own: DESC_ASID");
LABNIC_SWITCH(iotlb_persist, "IOTLB_PERSIST: maps survive a reset");
LABNIC_SWITCH(enable_after_driver_ok, "ENABLE_AFTER_DRIVER_OK; off: such an enable is ignored");
LABNIC_SWITCH(set_map, "take the IOTLB as a whole; off: one map after the other");
LABNIC_SWITCH(event_idx, "offer EVENT_IDX");
LABNIC_SWITCH(indirect, "offer INDIRECT_DESC");
LABNIC_SWITCH(in_order, "offer IN_ORDER, unless completion is out of order");
LABNIC_SWITCH(mq, "offer MQ where max_vqp is more than 1");
LABNIC_SWITCH(mrg_rxbuf, "offer MRG_RXBUF");
LABNIC_SWITCH(doorbell, "a doorbell page per data queue");
LABNIC_SWITCH(config_interrupt, "tell the driver when the configuration changes");

static bool notification_data;
module_param(notification_data, bool, 0644);
MODULE_PARM_DESC(notification_data,
		 "offer NOTIFICATION_DATA (default: off; an eventfd loses the data)");

static char *ring_state = "avail";
module_param(ring_state, charp, 0644);
MODULE_PARM_DESC(ring_state, "vring base: avail (index), used (index) or none (default: avail)");

static char *apply = "enable";
module_param(apply, charp, 0644);
MODULE_PARM_DESC(apply,
		 "a ring changed while suspended is taken at enable or at resume "
		 "(default: enable)");

static char *completion = "immediate";
module_param(completion, charp, 0644);
MODULE_PARM_DESC(completion, "immediate, delayed or out_of_order (default: immediate)");

static unsigned int completion_ms = 20;
module_param(completion_ms, uint, 0644);
MODULE_PARM_DESC(completion_ms,
		 "delay of transmit completions in ms, where completion is not "
		 "immediate, up to 10000 (default: 20)");

static char *cvq = "full";
module_param(cvq, charp, 0644);
MODULE_PARM_DESC(cvq,
		 "control queue: full, poor (only the MAC address can be set) or none "
		 "(default: full)");

static unsigned int address_spaces = 3;
module_param(address_spaces, uint, 0644);
MODULE_PARM_DESC(address_spaces, "number of address spaces, 1 to 4 (default: 3)");

static unsigned int rx_prefetch;
module_param(rx_prefetch, uint, 0644);
MODULE_PARM_DESC(rx_prefetch,
		 "receive buffers taken in advance and in flight over a suspend, up to "
		 "32 (default: 0)");

static unsigned int queue_size = 256;
module_param(queue_size, uint, 0644);
MODULE_PARM_DESC(queue_size, "largest ring, a power of two up to 1024 (default: 256)");

static unsigned int credit_wait_ms = 1000;
module_param(credit_wait_ms, uint, 0644);
MODULE_PARM_DESC(credit_wait_ms,
		 "how long frames wait for a receiver without buffers before they are "
		 "dropped, up to 60000 (default: 1000)");

static unsigned int iova_bits = 48;
module_param(iova_bits, uint, 0644);
MODULE_PARM_DESC(iova_bits, "width of I/O virtual addresses, 32 to 64 (default: 48)");

static unsigned int doorbell_poll_us = 50;
module_param(doorbell_poll_us, uint, 0644);
MODULE_PARM_DESC(doorbell_poll_us,
		 "how often doorbells are looked at under load, in us (default: 50)");

static unsigned int sf_attach_ms = 20;
module_param(sf_attach_ms, uint, 0644);
MODULE_PARM_DESC(sf_attach_ms,
		 "how long after its activation a subfunction is attached, up to 10000 "
		 "ms (default: 20)");

static char *faults = "";
module_param(faults, charp, 0644);
MODULE_PARM_DESC(faults,
		 "deliberate faults, separated by commas: wrong_base, silent_map, "
		 "large_config, suspend_runs_on, used_id, used_length, lost_call");

const char *const labnic_fault_names[LABNIC_FAULTS] = {
	[LABNIC_FAULT_WRONG_BASE]	= "wrong_base",
	[LABNIC_FAULT_SILENT_MAP]	= "silent_map",
	[LABNIC_FAULT_LARGE_CONFIG]	= "large_config",
	[LABNIC_FAULT_SUSPEND_RUNS_ON]	= "suspend_runs_on",
	[LABNIC_FAULT_USED_ID]		= "used_id",
	[LABNIC_FAULT_USED_LENGTH]	= "used_length",
	[LABNIC_FAULT_LOST_CALL]	= "lost_call",
};

static const char *const ring_states[] = { "avail", "used", "none" };
static const char *const applies[] = { "enable", "resume" };
static const char *const completions[] = { "immediate", "delayed", "out_of_order" };
static const char *const cvqs[] = { "full", "poor", "none" };

unsigned int labnic_doorbell_poll_us(void)
{
	return clamp(READ_ONCE(doorbell_poll_us), 1U, 100000U);
}

unsigned int labnic_sf_attach_ms(void)
{
	return min(READ_ONCE(sf_attach_ms), 10000U);
}

static int choose(const char *name, const char *const *words, size_t n,
		  const char *word)
{
	int choice = __sysfs_match_string(words, n, word);

	if (choice < 0)
		pr_err("labnic: %s can't be \"%s\"\n", name, word);
	return choice;
}

static int faults_read(unsigned long *set)
{
	char *copy, *rest, *word;
	int fault, ret = 0;

	copy = kstrdup(faults, GFP_KERNEL);
	if (!copy)
		return -ENOMEM;
	*set = 0;
	rest = strim(copy);
	while (!ret && (word = strsep(&rest, ",")) != NULL) {
		if (!*word)
			continue;
		fault = choose("faults", labnic_fault_names, LABNIC_FAULTS, word);
		if (fault < 0)
			ret = fault;
		else
			*set |= BIT(fault);
	}
	kfree(copy);
	return ret;
}

static int check_range(const char *name, unsigned int value, unsigned int low,
		       unsigned int high)
{
	if (value >= low && value <= high)
		return 0;
	pr_err("labnic: %s is %u; it must be %u to %u\n", name, value, low, high);
	return -EINVAL;
}

static int words_read(struct labnic_abilities *can)
{
	int choice;

	choice = choose("ring_state", ring_states, ARRAY_SIZE(ring_states), ring_state);
	if (choice < 0)
		return choice;
	can->ring_state = choice;
	choice = choose("apply", applies, ARRAY_SIZE(applies), apply);
	if (choice < 0)
		return choice;
	can->apply = choice;
	choice = choose("completion", completions, ARRAY_SIZE(completions), completion);
	if (choice < 0)
		return choice;
	can->completion = choice;
	choice = choose("cvq", cvqs, ARRAY_SIZE(cvqs), cvq);
	if (choice < 0)
		return choice;
	can->cvq = choice;
	return faults_read(&can->faults);
}

static int abilities_check(const struct labnic_abilities *can)
{
	if (check_range("completion_ms", can->completion_ms, 0, 10000) ||
	    check_range("address_spaces", can->address_spaces, 1, LABNIC_SPACES_MAX) ||
	    check_range("rx_prefetch", can->rx_prefetch, 0, 32) ||
	    check_range("queue_size", can->queue_size, 2, LABNIC_QUEUE_SIZE_MAX) ||
	    check_range("credit_wait_ms", can->credit_wait_ms, 0, 60000) ||
	    check_range("iova_bits", can->iova_bits, 32, 64))
		return -EINVAL;
	if (!is_power_of_2(can->queue_size)) {
		pr_err("labnic: queue_size %u is not a power of two\n", can->queue_size);
		return -EINVAL;
	}
	/*
	 * A used index shows where to resume only if buffers before it are
	 * used and buffers after it are not.
	 */
	if (can->ring_state == LABNIC_RING_STATE_USED &&
	    can->completion == LABNIC_COMPLETION_REORDERED) {
		pr_err("labnic: ring_state=used can't be with completion=out_of_order\n");
		return -EINVAL;
	}
	return 0;
}

/* Fails with a line in the kernel log that names the parameter. */
int labnic_abilities_read(struct labnic_abilities *can)
{
	int ret;

	kernel_param_lock(THIS_MODULE);
	*can = (struct labnic_abilities) {
		.suspend = suspend,
		.resume = resume,
		.cvq_group = cvq_group,
		.desc_group = desc_group,
		.iotlb_persist = iotlb_persist,
		.enable_after_driver_ok = enable_after_driver_ok,
		.set_map = set_map,
		.event_idx = event_idx,
		.indirect = indirect,
		.in_order = in_order,
		.mq = mq,
		.mrg_rxbuf = mrg_rxbuf,
		.notification_data = notification_data,
		.doorbell = doorbell,
		.config_interrupt = config_interrupt,
		.completion_ms = completion_ms,
		.address_spaces = address_spaces,
		.rx_prefetch = rx_prefetch,
		.queue_size = queue_size,
		.credit_wait_ms = credit_wait_ms,
		.iova_bits = iova_bits,
	};
	ret = words_read(can);
	kernel_param_unlock(THIS_MODULE);
	return ret ?: abilities_check(can);
}
