/* What every part of the client uses: how it ends, and the one deadline of the whole exchange. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum status {
    OK, DIFFERS, ABSENT = 3, UNREACHABLE, UNTRUSTED, NOT_READY, MISMATCH, REFUSED, PROTOCOL, TRANSFER, INVALID_PLACE, USAGE = 64
};

static int64_t deadline_ms;

static _Noreturn void die(enum status status, const char *format, ...)
{
    va_list rest;
    va_start(rest, format);
    fflush(stdout);
    vfprintf(stderr, format, rest);
    fputc('\n', stderr);
    _exit(status); /* the kernel closes and unmaps */
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void wait_for(int fd, short events) /* one deadline for all: small waits cannot add up */
{
    struct pollfd what = {fd, events, 0};
    int64_t left = deadline_ms - now_ms();
    int ready = left <= 0 ? 0 : poll(&what, 1, (int)left);
    if (ready == 0)
        die(NOT_READY, "the deadline has passed");
}
