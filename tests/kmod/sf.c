// SPDX-License-Identifier: GPL-2.0-only
/*
 * labnic: subfunctions' ports and their state (sf.h).
 *
 *   devlink port add platform/labnic.0 flavour pcisf pfnum 0 sfnum 88
 *   devlink port function set platform/labnic.0/32768 hw_addr … state active
 *   devlink port del platform/labnic.0/32768
 *
 * Commands run under the devl_lock of the NIC. A port is deleted in any state,
 * as with mlx5: the function goes first, and the command waits for it.
 */
#include <linux/etherdevice.h>
#include <linux/slab.h>

#include "sf.h"

static struct workqueue_struct *labnic_sf_workqueue;

int labnic_sf_init(void)
{
	/* Not ordered: a work that waits for its device stops no others. */
	labnic_sf_workqueue = alloc_workqueue("labnic-sf", WQ_UNBOUND, 0);
	return labnic_sf_workqueue ? 0 : -ENOMEM;
}

void labnic_sf_exit(void)
{
	destroy_workqueue(labnic_sf_workqueue);
}

static struct labnic_sf *of_port(struct devlink_port *port)
{
	return container_of(port, struct labnic_sf, port);
}

/*
 * Ensures that the vDPA device can be deleted without waiting for its user.
 * From then on, no new device can be added and the present one cannot be
 * opened, until as many calls of labnic_sf_stay() or a new activation.
 */
int labnic_sf_leave(struct labnic_sf *sf, struct netlink_ext_ack *extack)
{
	struct labnic *nic;
	bool in_use;
	int pass;

	/* Only an open between the two checks finds the device closing. */
	for (pass = 0; pass < 2; pass++) {
		mutex_lock(&labnic_plane);
		sf->closing += pass;
		nic = sf->nic;
		if (nic)
			get_device(&nic->vdpa.dev);
		mutex_unlock(&labnic_plane);
		if (!nic)
			continue;
		in_use = labnic_in_use(nic);
		put_device(&nic->vdpa.dev);
		if (in_use) {
			if (pass)
				labnic_sf_stay(sf);
			NL_SET_ERR_MSG_MOD(extack,
					   "the SF's vDPA device is in use; close it first");
			return -EBUSY;
		}
	}
	return 0;
}

void labnic_sf_stay(struct labnic_sf *sf)
{
	mutex_lock(&labnic_plane);
	sf->closing--;
	mutex_unlock(&labnic_plane);
}

/* The function's driver was bound or unbound. */
void labnic_sf_bound(struct labnic_sf *sf, bool bound)
{
	mutex_lock(&labnic_plane);
	if (bound && sf->state == LABNIC_SF_ACTIVE)
		sf->state = LABNIC_SF_ATTACHED;
	else if (!bound && sf->state == LABNIC_SF_ATTACHED)
		sf->state = LABNIC_SF_ACTIVE;
	mutex_unlock(&labnic_plane);
}

static void sf_work(struct work_struct *work)
{
	struct labnic_sf *sf = container_of(to_delayed_work(work),
					    struct labnic_sf, work);
	enum labnic_sf_state state;

	mutex_lock(&labnic_plane);
	state = sf->state;
	mutex_unlock(&labnic_plane);
	switch (state) {
	case LABNIC_SF_ACTIVE:
	case LABNIC_SF_ATTACHED:
		/* If this fails, the function stays active and detached. */
		if (!sf->device)
			sf->device = labnic_sf_device_add(sf);
		break;
	case LABNIC_SF_LEAVING:
		if (sf->device)
			labnic_sf_device_remove(sf->device);
		sf->device = NULL;
		mutex_lock(&labnic_plane);
		sf->state = LABNIC_SF_INACTIVE;
		mutex_unlock(&labnic_plane);
		break;
	case LABNIC_SF_INACTIVE:
		break;
	}
}

static int activate(struct labnic_sf *sf, struct netlink_ext_ack *extack)
{
	int ret = 0;

	mutex_lock(&labnic_plane);
	if (sf->state == LABNIC_SF_INACTIVE) {
		sf->state = LABNIC_SF_ACTIVE;
		sf->closing = 0;
		mod_delayed_work(labnic_sf_workqueue, &sf->work,
				 msecs_to_jiffies(labnic_sf_attach_ms()));
	} else if (sf->state == LABNIC_SF_LEAVING) {
		NL_SET_ERR_MSG_MOD(extack, "the SF is inactive but still attached; try again");
		ret = -EBUSY;
	}
	mutex_unlock(&labnic_plane);
	return ret;
}

/* The function is leaving; the device cannot be in use (any more). */
static void deactivate(struct labnic_sf *sf)
{
	mutex_lock(&labnic_plane);
	if (sf->state != LABNIC_SF_INACTIVE) {
		sf->state = LABNIC_SF_LEAVING;
		mod_delayed_work(labnic_sf_workqueue, &sf->work, 0);
	}
	mutex_unlock(&labnic_plane);
}

static int state_set(struct devlink_port *port, enum devlink_port_fn_state state,
		     struct netlink_ext_ack *extack)
{
	struct labnic_sf *sf = of_port(port);
	int ret;

	if (state == DEVLINK_PORT_FN_STATE_ACTIVE)
		return activate(sf, extack);
	ret = labnic_sf_leave(sf, extack);
	if (ret)
		return ret;
	deactivate(sf);
	return 0;
}

static int state_get(struct devlink_port *port, enum devlink_port_fn_state *state,
		     enum devlink_port_fn_opstate *opstate,
		     struct netlink_ext_ack *extack)
{
	struct labnic_sf *sf = of_port(port);
	enum labnic_sf_state now;

	mutex_lock(&labnic_plane);
	now = sf->state;
	mutex_unlock(&labnic_plane);
	*state = now == LABNIC_SF_ACTIVE || now == LABNIC_SF_ATTACHED ?
		 DEVLINK_PORT_FN_STATE_ACTIVE : DEVLINK_PORT_FN_STATE_INACTIVE;
	*opstate = now == LABNIC_SF_ATTACHED || now == LABNIC_SF_LEAVING ?
		   DEVLINK_PORT_FN_OPSTATE_ATTACHED :
		   DEVLINK_PORT_FN_OPSTATE_DETACHED;
	return 0;
}

static int hw_addr_get(struct devlink_port *port, u8 *address, int *length,
		       struct netlink_ext_ack *extack)
{
	struct labnic_sf *sf = of_port(port);

	mutex_lock(&labnic_plane);
	ether_addr_copy(address, sf->hw_addr);
	mutex_unlock(&labnic_plane);
	*length = ETH_ALEN;
	return 0;
}

/* Applies to vDPA devices that are added from now on. */
static int hw_addr_set(struct devlink_port *port, const u8 *address, int length,
		       struct netlink_ext_ack *extack)
{
	struct labnic_sf *sf = of_port(port);

	if (length != ETH_ALEN || !is_valid_ether_addr(address)) {
		NL_SET_ERR_MSG_MOD(extack, "the hardware address must be a unicast Ethernet address");
		return -EINVAL;
	}
	mutex_lock(&labnic_plane);
	memcpy(sf->hw_addr, address, ETH_ALEN);
	mutex_unlock(&labnic_plane);
	return 0;
}

static int roce_get(struct devlink_port *port, bool *enabled,
		    struct netlink_ext_ack *extack)
{
	struct labnic_sf *sf = of_port(port);

	mutex_lock(&labnic_plane);
	*enabled = sf->roce;
	mutex_unlock(&labnic_plane);
	return 0;
}

static int roce_set(struct devlink_port *port, bool enable,
		    struct netlink_ext_ack *extack)
{
	struct labnic_sf *sf = of_port(port);

	mutex_lock(&labnic_plane);
	sf->roce = enable;
	mutex_unlock(&labnic_plane);
	return 0;
}

/* The core keeps the value and reports it; nothing is shaped. */
int labnic_rate_set(struct devlink_rate *rate, void *priv, u64 value,
		    struct netlink_ext_ack *extack)
{
	return 0;
}

bool labnic_sf_any(const struct labnic_pf *pf)
{
	unsigned int slot;

	for (slot = 0; slot < LABNIC_SF_MAX; slot++)
		if (pf->sfs[slot])
			return true;
	return false;
}

static int check(const struct labnic_pf *pf,
		 const struct devlink_port_new_attrs *attrs,
		 struct netlink_ext_ack *extack)
{
	unsigned int slot;

	if (attrs->flavour != DEVLINK_PORT_FLAVOUR_PCI_SF) {
		NL_SET_ERR_MSG_MOD(extack, "only ports of flavour pcisf can be added");
		return -EOPNOTSUPP;
	}
	if (attrs->port_index_valid) {
		NL_SET_ERR_MSG_MOD(extack, "the port index can't be chosen");
		return -EOPNOTSUPP;
	}
	if (!attrs->sfnum_valid) {
		NL_SET_ERR_MSG_MOD(extack, "sfnum is missing; it is not assigned by itself");
		return -EOPNOTSUPP;
	}
	if (attrs->controller_valid && attrs->controller) {
		NL_SET_ERR_MSG_MOD(extack, "there is no external controller");
		return -EOPNOTSUPP;
	}
	if (attrs->pfnum != 0) {
		NL_SET_ERR_MSG_MOD(extack, "pfnum must be 0");
		return -EOPNOTSUPP;
	}
	if (pf->mode != DEVLINK_ESWITCH_MODE_SWITCHDEV) {
		NL_SET_ERR_MSG_MOD(extack, "SF ports need eswitch mode switchdev");
		return -EOPNOTSUPP;
	}
	for (slot = 0; slot < LABNIC_SF_MAX; slot++) {
		if (pf->sfs[slot] && pf->sfs[slot]->sfnum == attrs->sfnum) {
			NL_SET_ERR_MSG_MOD(extack, "this sfnum exists; choose another one");
			return -EEXIST;
		}
	}
	return 0;
}

static int free_slot(const struct labnic_pf *pf)
{
	unsigned int slot;

	for (slot = 0; slot < LABNIC_SF_MAX; slot++)
		if (!pf->sfs[slot])
			return slot;
	return -ENOSPC;
}

static void remove(struct labnic_sf *sf)
{
	deactivate(sf);
	flush_delayed_work(&sf->work);
	devl_rate_leaf_destroy(&sf->port);
	labnic_netdev_remove(sf->representor);
	devl_port_unregister(&sf->port);
	sf->pf->sfs[sf->slot] = NULL;
	kfree(sf);
}

static int port_del(struct devlink *devlink, struct devlink_port *port,
		    struct netlink_ext_ack *extack)
{
	struct labnic_sf *sf = of_port(port);
	int ret;

	ret = labnic_sf_leave(sf, extack);
	if (ret)
		return ret;
	remove(sf);
	return 0;
}

const struct devlink_port_ops labnic_sf_port_ops = {
	.port_del		= port_del,
	.port_fn_hw_addr_get	= hw_addr_get,
	.port_fn_hw_addr_set	= hw_addr_set,
	.port_fn_roce_get	= roce_get,
	.port_fn_roce_set	= roce_set,
	.port_fn_state_get	= state_get,
	.port_fn_state_set	= state_set,
};

int labnic_sf_new(struct devlink *devlink,
		  const struct devlink_port_new_attrs *attrs,
		  struct netlink_ext_ack *extack, struct devlink_port **port)
{
	struct labnic_pf *pf = devlink_priv(devlink);
	struct labnic_sf *sf;
	int ret, slot;

	ret = check(pf, attrs, extack);
	if (ret)
		return ret;
	slot = free_slot(pf);
	if (slot < 0) {
		NL_SET_ERR_MSG_MOD(extack, "there are 64 SFs, as many as can be");
		return slot;
	}
	sf = kzalloc(sizeof(*sf), GFP_KERNEL);
	if (!sf)
		return -ENOMEM;
	sf->pf = pf;
	sf->slot = slot;
	sf->sfnum = attrs->sfnum;
	sf->roce = true;
	INIT_DELAYED_WORK(&sf->work, sf_work);
	labnic_switch_id(&sf->port.attrs.switch_id);
	devlink_port_attrs_pci_sf_set(&sf->port, 0, 0, sf->sfnum, false);
	ret = devl_port_register_with_ops(devlink, &sf->port,
					  LABNIC_SF_PORT_INDEX + slot,
					  &labnic_sf_port_ops);
	if (ret)
		goto err_free;
	sf->representor = labnic_netdev_add(pf->dev, &sf->port, sf, "eth%d");
	if (IS_ERR(sf->representor)) {
		ret = PTR_ERR(sf->representor);
		goto err_port;
	}
	ret = devl_rate_leaf_create(&sf->port, sf, NULL);
	if (ret)
		goto err_netdev;
	pf->sfs[slot] = sf;
	*port = &sf->port;
	return 0;

err_netdev:
	labnic_netdev_remove(sf->representor);
err_port:
	devl_port_unregister(&sf->port);
err_free:
	kfree(sf);
	return ret;
}

/* Under devl_lock, and unregistered: waits for devices that are in use. */
void labnic_sf_remove_all(struct labnic_pf *pf)
{
	unsigned int slot;

	for (slot = 0; slot < LABNIC_SF_MAX; slot++)
		if (pf->sfs[slot])
			remove(pf->sfs[slot]);
}
