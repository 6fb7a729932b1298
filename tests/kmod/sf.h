/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * labnic: the NIC as a physical function with subfunctions.
 *
 *   platform/labnic.0                   devlink.c   the NIC's own instance
 *     port 0, flavour physical                      the uplink
 *     port N, flavour pcisf             sf.c        one per subfunction
 *       its netdev                      netdev.c    the representor
 *       auxiliary/labnic.sf.M           sf_device.c the function itself
 *         devlink instance, nested under port N
 *         vdpa management device, if enable_vnet; at most one vDPA device
 *
 * States of a subfunction, as those of mlx5's:
 *
 *              state active           its driver probed
 *   inactive ----------------> active ----------------> attached
 *      ^                        ^  |                     |   |
 *      |                        |  |     driver unbound  |   |
 *      |                        |  |  <------------------+   |
 *      |                        |  | state inactive          | state inactive
 *      |   auxiliary device     |  v                         v
 *      +------------------------|-- leaving <----------------+
 *               is gone
 *
 * A work does the steps to and from attached, so a command returns before they
 * are done, as with hardware.
 *
 * Locking, outermost first
 * ------------------------
 *   genl_mutex                        vdpa commands only; devlink has none
 *     -> vdpa_dev_lock                  (below)
 *   device_lock of labnic.0           probe and remove of the NIC
 *     -> devl_lock of labnic.0        every devlink command on it
 *       -> (flush of a subfunction's work)
 *         -> device_lock of labnic.sf.M     its probe, its remove; its reload
 *           -> devl_lock of labnic.sf.M
 *             -> vdpa_dev_lock        every vdpa command; (un)registering
 *               -> device_lock of a vDPA device
 *     -> rtnl                         netdevs come and go; ndo_open, ndo_stop
 *       -> labnic_plane               innermost: everything of struct
 *                                     labnic_sf and labnic_netdev is under it
 *
 * rtnl is never taken below a subfunction's work. devlink also calls the
 * getters of a port function under rtnl alone, when it reports a netdev, so
 * they take only labnic_plane. Nothing below takes the devl_lock of labnic.0: a
 * nested instance notifies its parent through a work of devlink.
 *
 * A vDPA device whose file is open is deleted only when it is closed, and the
 * vdpa core waits for that with vdpa_dev_lock held. So a command that would
 * delete one (state inactive, port del, reload) is refused with EBUSY while the
 * device is in use. From the check on it cannot be opened any more, because
 * its reset fails (labnic_sf_leave()).
 */
#ifndef LABNIC_SF_H
#define LABNIC_SF_H

#include <linux/auxiliary_bus.h>
#include <linux/netdevice.h>
#include <linux/skbuff.h>
#include <net/devlink.h>

#include "labnic.h"

#define LABNIC_SF_MAX		64
/* Of subfunctions' ports: their slot is added. */
#define LABNIC_SF_PORT_INDEX	32768

struct labnic_sf;
struct labnic_sf_device;

/* A netdev of the NIC: the uplink, or the representor of a subfunction. */
struct labnic_netdev {
	struct net_device *dev;
	struct labnic_sf *sf;		/* NULL: the uplink */
	bool up;			/* between ndo_open and ndo_stop */
	struct sk_buff_head queue;	/* frames for the function */
	struct delayed_work work;
};

struct labnic_pf {
	struct devlink *devlink;
	struct device *dev;
	enum devlink_eswitch_mode mode;
	struct devlink_port uplink_port;
	struct labnic_netdev *uplink;
	struct labnic_sf *sfs[LABNIC_SF_MAX];
	struct labnic_health *health;
};

enum labnic_sf_state {
	LABNIC_SF_INACTIVE,
	LABNIC_SF_ACTIVE,
	LABNIC_SF_ATTACHED,
	LABNIC_SF_LEAVING,
};

struct labnic_sf {
	struct labnic_pf *pf;
	struct devlink_port port;
	unsigned int slot;
	u32 sfnum;
	struct labnic_netdev *representor;
	struct delayed_work work;
	struct labnic_sf_device *device;	/* the work's alone */

	/* Under labnic_plane. */
	enum labnic_sf_state state;
	u8 hw_addr[ETH_ALEN];		/* all zero: none was given */
	bool roce;
	unsigned int closing;		/* not 0: no vDPA device can be opened or added */
	struct labnic *nic;		/* the vDPA device, if there is one */
};

/* devlink.c */
int labnic_pf_init(void);
void labnic_pf_exit(void);
void labnic_switch_id(struct netdev_phys_item_id *id);

/* sf.c */
extern const struct devlink_port_ops labnic_sf_port_ops;
int labnic_sf_init(void);
void labnic_sf_exit(void);
int labnic_sf_new(struct devlink *devlink,
		  const struct devlink_port_new_attrs *attrs,
		  struct netlink_ext_ack *extack, struct devlink_port **port);
void labnic_sf_remove_all(struct labnic_pf *pf);
bool labnic_sf_any(const struct labnic_pf *pf);
int labnic_sf_leave(struct labnic_sf *sf, struct netlink_ext_ack *extack);
void labnic_sf_stay(struct labnic_sf *sf);
void labnic_sf_bound(struct labnic_sf *sf, bool bound);
int labnic_rate_set(struct devlink_rate *rate, void *priv, u64 value,
		    struct netlink_ext_ack *extack);

/* sf_device.c */
int labnic_sf_driver_register(void);
void labnic_sf_driver_unregister(void);
struct labnic_sf_device *labnic_sf_device_add(struct labnic_sf *sf);
void labnic_sf_device_remove(struct labnic_sf_device *device);

/* netdev.c */
struct labnic_netdev *labnic_netdev_add(struct device *parent,
					struct devlink_port *port,
					struct labnic_sf *sf, const char *name);
void labnic_netdev_remove(struct labnic_netdev *netdev);
void labnic_netdev_receive(struct labnic_netdev *netdev, const void *frame,
			   size_t length);
void labnic_netdev_credit(struct labnic_netdev *netdev);

/* health.c */
int labnic_health_add(struct labnic_pf *pf);
void labnic_health_remove(struct labnic_pf *pf);

/* holder.c */
bool labnic_in_use(struct labnic *nic);

/* mgmt.c */
int labnic_device_add(struct vdpa_mgmt_dev *mdev, const char *name,
		      const struct vdpa_dev_set_config *config,
		      struct labnic_sf *sf);
extern const u64 labnic_features;
void labnic_device_del(struct vdpa_mgmt_dev *mdev, struct vdpa_device *vdpa);
int labnic_device_set_attr(struct vdpa_mgmt_dev *mdev, struct vdpa_device *vdpa,
			   const struct vdpa_dev_set_config *config);

/* params.c */
unsigned int labnic_sf_attach_ms(void);

#endif /* LABNIC_SF_H */
