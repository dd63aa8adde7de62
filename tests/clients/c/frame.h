/* Frames of protocol version 1: a Hello out, answers and their descriptors in. */

enum { HEADER = 16, HELLO = 1, LOADING = 64, GRANT, UNPROVEN, REFUSAL, LAST = 71, FDS_MAX = 64, BODY_MAX = 1 << 20 };

static void put_le(uint8_t *at, uint32_t value, int nbytes)
{
    for (int i = 0; i < nbytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t le(const uint8_t *at, int nbytes)
{
    uint64_t value = 0;
    for (int i = nbytes; i--;)
        value = value << 8 | at[i];
    return value;
}

static void say_hello(int fd, const char *fingerprint, const char *content)
{
    uint8_t frame[HEADER + 4096] = "WCD1";
    struct writer to = {frame + HEADER, frame + sizeof frame};
    int64_t left_ms = deadline_ms - now_ms();
    int is_digest = strlen(content) == 64 && strspn(content, "0123456789abcdef") == 64;
    put_map(&to, 10);
    put_text(&to, "client_version"); put_text(&to, "c");
    put_text(&to, "name"); put_text(&to, "client in C");
    put_text(&to, "pid"); put_uint(&to, (uint64_t)getpid());
    put_text(&to, "config"); put_map(&to, 0);
    put_text(&to, "fingerprint"); put_text(&to, fingerprint);
    put_text(&to, "receipts"); put_nil(&to);
    put_text(&to, "receipts_trusted"); put_bool(&to, 0);
    put_text(&to, "digest");
    if (is_digest) put_text(&to, content); else put_nil(&to);
    put_text(&to, "want"); put_text(&to, is_digest ? "checkpoint" : content);
    put_text(&to, "wait_s"); put_float(&to, left_ms > 0 ? (double)left_ms / 1000 : 0);
    put_le(frame + 4, 1, 2);
    put_le(frame + 6, HELLO, 2);
    put_le(frame + 8, (uint32_t)(to.at - frame - HEADER), 4);
    for (const uint8_t *at = frame; at < to.at;) {
        ssize_t sent = send(fd, at, (size_t)(to.at - at), MSG_NOSIGNAL);
        if (sent > 0) at += sent;
        else if (errno == EAGAIN) wait_for(fd, POLLOUT);
        else return; /* it may have refused us unasked: its last words can still be read */
    }
}

struct frame { unsigned type; struct reader body; uint8_t *memory; int fds[FDS_MAX]; size_t fd_count; };

static void read_exactly(int fd, uint8_t *to, size_t nbytes, struct frame *frame)
{
    union { char room[CMSG_SPACE(FDS_MAX * sizeof(int))]; struct cmsghdr aligned; } control;
    for (size_t got = 0; got < nbytes;) {
        struct iovec missing = {to + got, nbytes - got};
        struct msghdr message = {.msg_iov = &missing, .msg_iovlen = 1};
        if (frame && got == 0) { /* descriptors ride on a frame's first byte */
            message.msg_control = control.room;
            message.msg_controllen = sizeof control.room;
        }
        ssize_t count = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        if (count < 0 && errno == EAGAIN) {
            wait_for(fd, POLLIN);
            continue;
        }
        if (count <= 0)
            die(UNREACHABLE, "the daemon ended the connection");
        for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each))
            if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS && frame) {
                frame->fd_count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
                memcpy(frame->fds, CMSG_DATA(each), frame->fd_count * sizeof(int));
            }
        if (message.msg_flags & MSG_CTRUNC)
            die(TRANSFER, "descriptors came where there is no room for them");
        got += (size_t)count;
    }
}

static void receive(int fd, struct frame *frame)
{
    uint8_t header[HEADER];
    frame->fd_count = 0;
    read_exactly(fd, header, HEADER, frame);
    frame->type = (unsigned)le(header + 6, 2);
    size_t nbytes = le(header + 8, 4);
    if (memcmp(header, "WCD1", 4) || le(header + 4, 2) != 1)
        die(PROTOCOL, "not a frame of protocol version 1");
    if (frame->type < LOADING || frame->type > LAST || nbytes > BODY_MAX)
        die(PROTOCOL, "a frame of type %u and %zu bytes", frame->type, nbytes);
    if (frame->fd_count != le(header + 12, 4))
        die(TRANSFER, "%zu descriptors came, %" PRIu64 " were announced", frame->fd_count, le(header + 12, 4));
    frame->memory = realloc(frame->memory, nbytes + 1);
    read_exactly(fd, frame->memory, nbytes, NULL);
    frame->body = (struct reader){frame->memory, frame->memory + nbytes};
}
