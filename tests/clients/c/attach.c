/* A client in C: attaches to a daemon as protocol/WIRE.md says, checks everything that came, and prints each row.
 *
 *   attach RUNTIME_DIR NAME/DEVICE FINGERPRINT CONTENT [SECONDS]
 *
 * CONTENT is the digest of the checkpoint that is wanted (64 hex digits), or `current`, or a version. When every byte has
 * been compared with its digest it says so, and holds the lease until standard input ends; then it compares again.
 *
 *   cc -o attach attach.c -l:libxxhash.so.0
 */
#define _GNU_SOURCE
#include "ending.h"
#include "msgpack.h"
#include "place.h"
#include "frame.h"
#include "sha256.h"
#include "manifest.h"

static _Noreturn void malformed(const char *what) { die(PROTOCOL, "not msgpack as the wire has it: %s", what); }

static _Noreturn void refused(struct reader body)
{
    struct item code = text_of(body, "code"), message = text_of(body, "message");
    int status = is(code, "config_mismatch") || is(code, "content_mismatch") || is(code, "content_unproven") ? MISMATCH
               : is(code, "daemon_not_ready") ? NOT_READY : REFUSED;
    die(status, "%.*s: %.*s", (int)code.number, code.data, (int)message.number, message.data);
}

/* The grant's frame, however long it takes. */
static void wait_for_grant(int fd, struct frame *frame)
{
    for (;;) {
        receive(fd, frame);
        if (frame->type == GRANT)
            return;
        if (frame->fd_count)
            die(TRANSFER, "descriptors came with an answer that has none");
        if (frame->type == REFUSAL)
            refused(frame->body);
        if (frame->type == UNPROVEN)
            die(MISMATCH, "the daemon asks for a content digest");
        if (frame->type != LOADING)
            die(PROTOCOL, "an answer of type %u that was not asked for", frame->type);
        struct item stage = text_of(frame->body, "stage");
        fprintf(stderr, "loading: %.*s\n", (int)stage.number, stage.data);
    }
}

static int64_t seconds_of(const char *word)
{
    char *end;
    long seconds = strtol(word, &end, 10);
    if (end == word || *end || seconds < 0 || seconds > 1000000)
        die(USAGE, "SECONDS is a whole number from 0 to 1000000, not \"%s\"", word);
    return seconds;
}

int main(int count, char **words)
{
    if (count != 5 && count != 6)
        die(USAGE, "usage: attach RUNTIME_DIR NAME/DEVICE FINGERPRINT CONTENT [SECONDS]");
    deadline_ms = now_ms() + 1000 * (count == 6 ? seconds_of(words[5]) : 60);
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.sock", words[1], words[2]);
    int fd = connect_to(path);
    check_trust(words[1], path, fd);
    say_hello(fd, words[3], words[4]);
    struct frame frame = {0};
    wait_for_grant(fd, &frame);
    struct segments segments = map_segments(&frame);
    struct reader manifest = manifest_of(&frame, words[3], &segments);
    uint64_t rows = check_rows(manifest, &segments, 1);
    struct item generation = text_of(frame.body, "generation"), version = text_of(frame.body, "version");
    printf("attached: %" PRIu64 " rows, generation %.*s, version %.*s\n", rows, (int)generation.number, generation.data,
           (int)version.number, version.data);
    fflush(stdout);
    for (char byte; read(STDIN_FILENO, &byte, 1) > 0;)
        ; /* the open connection is the lease */
    check_rows(manifest, &segments, 0);
    puts("unchanged");
    close(fd);
    free(frame.memory);
    return OK;
}
