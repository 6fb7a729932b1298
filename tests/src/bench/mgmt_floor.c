/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * How fast the kernel's vDPA management is: adds, shows and deletes devices on the
 * simulator with one netlink socket and nothing else.
 *
 *   mgmt_floor PREFIX COUNT      prints nothing; fails at the first refusal
 */
#include <linux/genetlink.h>
#include <linux/netlink.h>
#include <linux/vdpa.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct request {
	struct nlmsghdr header;
	struct genlmsghdr generic;
	char attributes[512];
};

static int fd;
static uint32_t sequence;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void put_string(struct request *request, int type, const char *text)
{
	struct nlattr *attribute =
		(void *)((char *)request + NLMSG_ALIGN(request->header.nlmsg_len));
	size_t length = strlen(text) + 1;

	attribute->nla_type = type;
	attribute->nla_len = NLA_HDRLEN + length;
	memcpy((char *)attribute + NLA_HDRLEN, text, length);
	request->header.nlmsg_len = NLMSG_ALIGN(request->header.nlmsg_len) +
				    NLA_ALIGN(attribute->nla_len);
}

static void begin(struct request *request, uint16_t family, uint8_t command)
{
	memset(request, 0, sizeof(*request));
	request->header.nlmsg_len = NLMSG_LENGTH(GENL_HDRLEN);
	request->header.nlmsg_type = family;
	request->header.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK;
	request->header.nlmsg_seq = ++sequence;
	request->generic.cmd = command;
	request->generic.version = 1;
}

/* Sends, and reads up to the acknowledgement; returns the family number in the answer. */
static uint16_t carry_out(struct request *request)
{
	static char buffer[32768] __attribute__((aligned(8)));
	uint16_t family = 0;

	if (send(fd, request, request->header.nlmsg_len, 0) < 0)
		die("send");
	for (;;) {
		int length = recv(fd, buffer, sizeof(buffer), 0);
		struct nlmsghdr *header = (void *)buffer;

		if (length < 0)
			die("recv");
		for (; NLMSG_OK(header, length); header = NLMSG_NEXT(header, length)) {
			char *end = (char *)header + header->nlmsg_len;
			char *at = (char *)NLMSG_DATA(header) + GENL_HDRLEN;

			if (header->nlmsg_type == NLMSG_ERROR) {
				int code = ((struct nlmsgerr *)NLMSG_DATA(header))->error;

				if (code) {
					fprintf(stderr, "refused: %s\n", strerror(-code));
					exit(1);
				}
				return family;
			}
			if (header->nlmsg_type != GENL_ID_CTRL)
				continue;
			while (at + NLA_HDRLEN <= end) {
				struct nlattr *attribute = (void *)at;

				if (attribute->nla_type == CTRL_ATTR_FAMILY_ID)
					family = *(uint16_t *)(at + NLA_HDRLEN);
				at += NLA_ALIGN(attribute->nla_len);
			}
		}
	}
}

int main(int argc, char **argv)
{
	static const uint8_t commands[] = { VDPA_CMD_DEV_NEW, VDPA_CMD_DEV_GET,
					    VDPA_CMD_DEV_DEL };
	struct sockaddr_nl kernel = { .nl_family = AF_NETLINK };
	struct request request;
	uint16_t family;
	size_t step;
	int count, i;

	if (argc != 3)
		return 2;
	count = atoi(argv[2]);
	fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC);
	if (fd < 0 || connect(fd, (struct sockaddr *)&kernel, sizeof(kernel)))
		die("netlink");
	begin(&request, GENL_ID_CTRL, CTRL_CMD_GETFAMILY);
	put_string(&request, CTRL_ATTR_FAMILY_NAME, VDPA_GENL_NAME);
	family = carry_out(&request);
	for (step = 0; step < sizeof(commands); step++) {
		for (i = 0; i < count; i++) {
			char name[64];

			snprintf(name, sizeof(name), "%s%d", argv[1], i);
			begin(&request, family, commands[step]);
			if (commands[step] == VDPA_CMD_DEV_NEW)
				put_string(&request, VDPA_ATTR_MGMTDEV_DEV_NAME,
					   "vdpasim_net");
			put_string(&request, VDPA_ATTR_DEV_NAME, name);
			carry_out(&request);
		}
	}
	return 0;
}
