/* Streams and events. What a stream is given is put off until somebody waits for it, as late as a device may do it:
 * who reads too early, or uses a staging buffer again too early, gets wrong bytes every time. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

enum work { COPY_IN, COPY_OUT, COPY_WITHIN, SET, RECORD, WAIT };

struct operation {
    enum work work;
    uintptr_t to, from;
    size_t nbytes;
    int value;
    struct event *event;
    uint64_t mark; /* of the event: which record */
    struct operation *next;
};

struct stream {
    int used;
    struct context *context;
    struct operation *first, *last;
};

struct event {
    int used;
    struct stream *stream; /* of the last record */
    uint64_t recorded, reached;
};

#define STREAMS_MAX 256
#define EVENTS_MAX 4096
static struct stream streams[STREAMS_MAX];
static struct event events[EVENTS_MAX];

static Result run_until(struct event *event, uint64_t mark);

static Result perform(const struct operation *op) {
    switch (op->work) {
    case COPY_IN:
        if (!device_may(op->to, op->nbytes, READ_WRITE) || !host_pinned(op->from, op->nbytes))
            return ILLEGAL_ADDRESS;
        memcpy((void *)op->to, (const void *)op->from, op->nbytes);
        return SUCCESS;
    case COPY_OUT:
        if (!device_may(op->from, op->nbytes, READ) || !host_pinned(op->to, op->nbytes))
            return ILLEGAL_ADDRESS;
        memcpy((void *)op->to, (const void *)op->from, op->nbytes);
        return SUCCESS;
    case COPY_WITHIN:
        if (!device_may(op->to, op->nbytes, READ_WRITE) || !device_may(op->from, op->nbytes, READ))
            return ILLEGAL_ADDRESS;
        memmove((void *)op->to, (const void *)op->from, op->nbytes);
        return SUCCESS;
    case SET:
        if (!device_may(op->to, op->nbytes, READ_WRITE))
            return ILLEGAL_ADDRESS;
        memset((void *)op->to, op->value, op->nbytes);
        return SUCCESS;
    case RECORD:
        if (op->event->reached < op->mark)
            op->event->reached = op->mark;
        return SUCCESS;
    case WAIT:
        return run_until(op->event, op->mark);
    }
    abort();
}

/* Does the next operation; a fault loses the context, and all that was still to do. */
static Result step(struct stream *stream) {
    struct operation *op = stream->first;
    stream->first = op->next;
    if (!stream->first)
        stream->last = NULL;
    Result result = perform(op);
    free(op);
    if (result && !stream->context->lost)
        stream->context->lost = result;
    return result;
}

static Result run(struct stream *stream) {
    Result result = SUCCESS;
    while (stream->first && !result)
        result = step(stream);
    return result ? result : stream->context->lost;
}

static Result run_until(struct event *event, uint64_t mark) {
    Result result = SUCCESS;
    while (event->reached < mark && event->stream && event->stream->first && !result)
        result = step(event->stream);
    return result;
}

Result streams_run(void) {
    Result result = SUCCESS;
    for (int i = 0; i < STREAMS_MAX && !result; i++)
        if (streams[i].first)
            result = run(&streams[i]);
    return result;
}

int streams_live(void) {
    int live = 0;
    for (int i = 0; i < STREAMS_MAX; i++)
        live += streams[i].used;
    return live;
}

int events_live(void) {
    int live = 0;
    for (int i = 0; i < EVENTS_MAX; i++)
        live += events[i].used;
    return live;
}

void streams_forget(void) {
    for (int i = 0; i < STREAMS_MAX; i++)
        for (struct operation *op = streams[i].first, *next; op; op = next) {
            next = op->next;
            free(op);
        }
    memset(streams, 0, sizeof streams);
    memset(events, 0, sizeof events);
}

static int stream_known(struct stream *stream) { return stream >= streams && stream < streams + STREAMS_MAX && stream->used; }
static int event_known(struct event *event) { return event >= events && event < events + EVENTS_MAX && event->used; }

static void later(struct stream *stream, struct operation wanted) {
    struct operation *op = malloc(sizeof *op);
    if (!op)
        abort();
    *op = wanted;
    op->next = NULL;
    if (stream->last)
        stream->last->next = op;
    else
        stream->first = op;
    stream->last = op;
}

static Result cuStreamCreate(struct stream **given, unsigned int flags) {
    CALL("cuStreamCreate", CONTEXT);
    if (flags > 1)
        return INVALID_VALUE;
    for (int i = 0; i < STREAMS_MAX; i++)
        if (!streams[i].used && !streams[i].first) {
            streams[i] = (struct stream){.used = 1, .context = current()};
            *given = &streams[i];
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

static Result cuStreamDestroy(struct stream *stream) {
    CALL("cuStreamDestroy", CONTEXT);
    if (!stream_known(stream))
        return INVALID_HANDLE;
    stream->used = 0; /* what it was given is still done, some time */
    return SUCCESS;
}

static Result cuStreamSynchronize(struct stream *stream) {
    CALL("cuStreamSynchronize", CONTEXT);
    return stream_known(stream) ? run(stream) : INVALID_HANDLE;
}

static Result cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned int flags) {
    CALL("cuStreamWaitEvent", CONTEXT);
    if (!stream_known(stream) || !event_known(event))
        return INVALID_HANDLE;
    if (flags)
        return INVALID_VALUE;
    later(stream, (struct operation){.work = WAIT, .event = event, .mark = event->recorded});
    return SUCCESS;
}

static Result cuEventCreate(struct event **given, unsigned int flags) {
    CALL("cuEventCreate", CONTEXT);
    if (flags > 7)
        return INVALID_VALUE;
    for (int i = 0; i < EVENTS_MAX; i++)
        if (!events[i].used) {
            events[i] = (struct event){.used = 1};
            *given = &events[i];
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

static Result cuEventDestroy(struct event *event) {
    CALL("cuEventDestroy", CONTEXT);
    if (!event_known(event))
        return INVALID_HANDLE;
    run_until(event, event->recorded); /* its operations name it */
    event->used = 0;
    return SUCCESS;
}

static Result cuEventRecord(struct event *event, struct stream *stream) {
    CALL("cuEventRecord", CONTEXT);
    if (!event_known(event) || !stream_known(stream))
        return INVALID_HANDLE;
    if (event->stream && event->stream != stream)
        run_until(event, event->recorded); /* an earlier record elsewhere is no longer to be waited for there */
    event->stream = stream;
    later(stream, (struct operation){.work = RECORD, .event = event, .mark = ++event->recorded});
    return SUCCESS;
}

static Result cuEventSynchronize(struct event *event) {
    CALL("cuEventSynchronize", CONTEXT);
    return event_known(event) ? run_until(event, event->recorded) : INVALID_HANDLE;
}

/* Every time somebody asks, one more operation is done. */
static Result cuEventQuery(struct event *event) {
    CALL("cuEventQuery", CONTEXT);
    if (!event_known(event))
        return INVALID_HANDLE;
    if (event->reached < event->recorded && event->stream->first) {
        Result result = step(event->stream);
        return result ? result : NOT_READY;
    }
    return SUCCESS;
}

static Result copy(struct stream *stream, enum work work, uintptr_t to, uintptr_t from, size_t nbytes) {
    if (!stream_known(stream))
        return INVALID_HANDLE;
    uintptr_t device = work == COPY_OUT ? from : to, host = work == COPY_OUT ? to : from;
    if (!device_may(device, nbytes, NONE) || (work == COPY_WITHIN && !device_may(from, nbytes, NONE)))
        return INVALID_VALUE; /* not addresses of a device at all */
    if (work == COPY_WITHIN || host_pinned(host, nbytes)) {
        later(stream, (struct operation){.work = work, .to = to, .from = from, .nbytes = nbytes});
        return SUCCESS;
    }
    /* Memory that is not pinned is copied before the call returns. */
    Result result = run(stream);
    if (result)
        return result;
    if (!device_may(device, nbytes, work == COPY_OUT ? READ : READ_WRITE))
        return stream->context->lost = ILLEGAL_ADDRESS;
    memcpy((void *)to, (const void *)from, nbytes);
    return SUCCESS;
}

static Result cuMemcpyHtoDAsync(uintptr_t to, const void *from, size_t nbytes, struct stream *stream) {
    CALL("cuMemcpyHtoDAsync", CONTEXT);
    return copy(stream, COPY_IN, to, (uintptr_t)from, nbytes);
}

static Result cuMemcpyDtoHAsync(void *to, uintptr_t from, size_t nbytes, struct stream *stream) {
    CALL("cuMemcpyDtoHAsync", CONTEXT);
    return copy(stream, COPY_OUT, (uintptr_t)to, from, nbytes);
}

static Result cuMemcpyDtoDAsync(uintptr_t to, uintptr_t from, size_t nbytes, struct stream *stream) {
    CALL("cuMemcpyDtoDAsync", CONTEXT);
    return copy(stream, COPY_WITHIN, to, from, nbytes);
}

static Result cuMemsetD8Async(uintptr_t to, unsigned char value, size_t nbytes, struct stream *stream) {
    CALL("cuMemsetD8Async", CONTEXT);
    if (!stream_known(stream))
        return INVALID_HANDLE;
    if (!device_may(to, nbytes, NONE))
        return INVALID_VALUE;
    later(stream, (struct operation){.work = SET, .to = to, .value = value, .nbytes = nbytes});
    return SUCCESS;
}

/* Those that wait, for programs without a stream: as the real ones, they see what all streams have done. */
static Result at_once(enum work work, uintptr_t to, uintptr_t from, size_t nbytes) {
    Result result = streams_run();
    if (result)
        return result;
    uintptr_t device = work == COPY_OUT ? from : to;
    if (!device_may(device, nbytes, NONE))
        return INVALID_VALUE;
    if (!device_may(device, nbytes, work == COPY_OUT ? READ : READ_WRITE))
        return current()->lost = ILLEGAL_ADDRESS;
    memcpy((void *)to, (const void *)from, nbytes);
    return SUCCESS;
}

static Result cuMemcpyHtoD(uintptr_t to, const void *from, size_t nbytes) {
    CALL("cuMemcpyHtoD", CONTEXT);
    return at_once(COPY_IN, to, (uintptr_t)from, nbytes);
}

static Result cuMemsetD8(uintptr_t to, unsigned char value, size_t nbytes) {
    CALL("cuMemsetD8", CONTEXT);
    Result result = streams_run();
    if (result)
        return result;
    if (!device_may(to, nbytes, NONE))
        return INVALID_VALUE;
    if (!device_may(to, nbytes, READ_WRITE))
        return current()->lost = ILLEGAL_ADDRESS;
    memset((void *)to, value, nbytes);
    return SUCCESS;
}

static Result cuMemcpyDtoH(void *to, uintptr_t from, size_t nbytes) {
    CALL("cuMemcpyDtoH", CONTEXT);
    return at_once(COPY_OUT, (uintptr_t)to, from, nbytes);
}

#define ENTRY(name)                                                                                                    \
    { #name, (void *)name }
const struct entry stream_entries[] = {ENTRY(cuStreamCreate),    ENTRY(cuStreamDestroy),  ENTRY(cuStreamSynchronize),
                                       ENTRY(cuStreamWaitEvent), ENTRY(cuEventCreate),    ENTRY(cuEventDestroy),
                                       ENTRY(cuEventRecord),     ENTRY(cuEventSynchronize), ENTRY(cuEventQuery),
                                       ENTRY(cuMemcpyHtoDAsync), ENTRY(cuMemcpyDtoHAsync), ENTRY(cuMemcpyDtoDAsync),
                                       ENTRY(cuMemsetD8Async),   ENTRY(cuMemsetD8),   ENTRY(cuMemcpyHtoD),     ENTRY(cuMemcpyDtoH),
                                       {NULL, NULL}};
