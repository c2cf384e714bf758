/* A switch with delay: relay DELAY BITS PORT...
 *
 * Takes every frame that comes in by a network interface PORT and sends it out by another one, DELAY
 * nanoseconds later and not faster than BITS per second into each PORT (0: no limit). Frames have
 * 02:00:00:00:00:0I as address of port number I, so there is nothing to learn. They are taken as
 * the sender's kernel holds them, up to 64 KiB and with unfinished checksums: a header tells.
 * Prints "ready" and runs until it is killed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>

enum {
    PORTS = 10,
    HEADER = sizeof(struct virtio_net_hdr),
    LONGEST = 1 << 18,        /* bytes of a frame */
    QUEUE = 8 << 20,          /* bytes that may wait for a port; what comes then is lost */
    SOCKET_BUFFER = 32 << 20, /* bytes */
    AT_ONCE = 32              /* frames taken from a port before others have their turn */
};
#define NEVER INT64_MAX
#define SECOND 1000000000LL

struct frame {
    struct frame *next;
    int64_t due;
    size_t length;
    unsigned char bytes[]; /* HEADER, then the frame itself */
};

struct port {
    struct frame *first, **end;
    size_t waiting;  /* bytes */
    int64_t free_at; /* when its wire has carried all that waits */
};

static struct port ports[PORTS];
static struct pollfd sockets[PORTS];
static int count;
static int64_t delay;
static double ns_per_byte;

static int64_t now(void)
{
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return moment.tv_sec * SECOND + moment.tv_nsec;
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void option(int fd, int level, int name, const void *value, socklen_t size, const char *what)
{
    if (setsockopt(fd, level, name, value, size) != 0)
        fail(what);
}

static int open_port(const char *name)
{
    const int on = 1, buffer = SOCKET_BUFFER, index = (int)if_nametoindex(name);
    const int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
    if (fd < 0 || index == 0)
        fail(name);
    const struct packet_mreq all = {.mr_ifindex = index, .mr_type = PACKET_MR_PROMISC};
    option(fd, SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof buffer, name);
    option(fd, SOL_SOCKET, SO_SNDBUFFORCE, &buffer, sizeof buffer, name);
    option(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on, name);
    option(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on, name);
    option(fd, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all, name);
    const struct sockaddr_ll address = {
        .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = index};
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) != 0)
        fail(name);
    return fd;
}

static void enqueue(struct port *port, const unsigned char *bytes, size_t length, int64_t came)
{
    struct frame *frame;
    if (port->waiting + length > QUEUE || !(frame = malloc(sizeof *frame + length)))
        return;
    const int64_t start = came + delay > port->free_at ? came + delay : port->free_at;
    port->free_at = start + (int64_t)((double)(length - HEADER) * ns_per_byte);
    *frame = (struct frame){.due = port->free_at, .length = length};
    memcpy(frame->bytes, bytes, length);
    *port->end = frame;
    port->end = &frame->next;
    port->waiting += length;
}

static void forward(int from, const unsigned char *bytes, size_t length)
{
    const unsigned char *to = bytes + HEADER; /* six bytes; the first is odd if it is for all */
    const int64_t came = now();
    for (int i = 0; i < count; i++)
        if (i != from && ((to[0] & 1) || to[ETH_ALEN - 1] == i))
            enqueue(&ports[i], bytes, length, came);
}

static void take(int from)
{
    static unsigned char bytes[LONGEST];
    for (int i = 0; i < AT_ONCE; i++) {
        const ssize_t length = recv(sockets[from].fd, bytes, sizeof bytes, 0);
        if (length < HEADER + ETH_HLEN)
            return;
        forward(from, bytes, (size_t)length);
    }
}

/* Sends what is due; returns when the next frame will be. */
static int64_t deliver(int to)
{
    struct port *port = &ports[to];
    struct frame *frame;
    while ((frame = port->first) && frame->due <= now()) {
        send(sockets[to].fd, frame->bytes, frame->length, 0); /* may be lost, as on any network */
        if (!(port->first = frame->next))
            port->end = &port->first;
        port->waiting -= frame->length;
        free(frame);
    }
    return frame ? frame->due : NEVER;
}

int main(int argc, char **argv)
{
    if (argc < 4 || argc > 3 + PORTS)
        return 2;
    delay = atoll(argv[1]);
    ns_per_byte = atof(argv[2]) > 0 ? 8e9 / atof(argv[2]) : 0;
    for (count = 0; count < argc - 3; count++) {
        ports[count].end = &ports[count].first;
        sockets[count] = (struct pollfd){.fd = open_port(argv[3 + count]), .events = POLLIN};
    }
    /* Ahead of busy ranks, which would stretch the delay; where that is not allowed, without. */
    const struct sched_param priority = {.sched_priority = 10};
    if (sched_setscheduler(0, SCHED_FIFO, &priority) != 0)
        perror("no real-time priority");
    mlockall(MCL_CURRENT);
    puts("ready");
    fclose(stdout);

    for (;;) {
        int64_t next = NEVER;
        for (int i = 0; i < count; i++) {
            const int64_t due = deliver(i);
            next = due < next ? due : next;
        }
        const int64_t rest = next == NEVER ? 3600 * SECOND : next - now();
        const struct timespec patience = {rest > 0 ? rest / SECOND : 0, rest > 0 ? rest % SECOND : 0};
        if (ppoll(sockets, (nfds_t)count, &patience, NULL) > 0)
            for (int i = 0; i < count; i++)
                if (sockets[i].revents)
                    take(i);
    }
}
