/* libcuda.so.1: finding functions, initialising, devices, contexts, and what every call begins with. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#define STACK_MAX 16

struct device devices[DEVICES_MAX]; /* those this process sees, by its ordinals */
int device_count;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int initialised_pid; /* 0 before cuInit; a forked child has another pid, and no driver */
static struct context contexts[DEVICES_MAX];
static struct range ranges[RANGES_MAX];
static _Thread_local struct context *stack[STACK_MAX];
static _Thread_local int depth;

struct context *current(void) { return depth ? stack[depth - 1] : NULL; }

Result enter(const char *call, enum needs needs) {
    pthread_mutex_lock(&mutex);
    Result wanted = (Result)state_fails(call, UNKNOWN);
    if (wanted)
        return wanted;
    if (needs >= INITIALISED && initialised_pid != getpid())
        return NOT_INITIALIZED;
    if (needs < CONTEXT)
        return SUCCESS;
    struct context *context = current();
    if (!context || !context->retained)
        return INVALID_CONTEXT;
    return context->lost;
}

void leave(int *inside) {
    (void)inside;
    pthread_mutex_unlock(&mutex);
}

/* ---- ranges ---- */

struct range *range_new(enum kind kind, uintptr_t at, size_t nbytes, int device, const char *file) {
    for (int i = 0; i < RANGES_MAX; i++)
        if (!ranges[i].kind) {
            ranges[i] = (struct range){.kind = kind, .at = at, .nbytes = nbytes, .device = device};
            snprintf(ranges[i].file, sizeof ranges[i].file, "%s", file);
            return &ranges[i];
        }
    abort(); /* a test with thousands of ranges wants a larger table */
}

struct range *range_of(enum kind kind, const char *file) {
    for (int i = 0; i < RANGES_MAX; i++)
        if (ranges[i].kind == kind && !strcmp(ranges[i].file, file))
            return &ranges[i];
    return NULL;
}

struct range *range_around(enum kind kind, uintptr_t at, size_t n) {
    for (int i = 0; i < RANGES_MAX; i++)
        if (ranges[i].kind == kind && ranges[i].at <= at && n <= ranges[i].nbytes &&
            at - ranges[i].at <= ranges[i].nbytes - n)
            return &ranges[i];
    return NULL;
}

struct range *range_at(enum kind kind, uintptr_t at) {
    for (int i = 0; i < RANGES_MAX; i++)
        if (ranges[i].kind == kind && ranges[i].at == at)
            return &ranges[i];
    return NULL;
}

int range_touched(enum kind kind, uintptr_t at, size_t n) {
    for (int i = 0; i < RANGES_MAX; i++)
        if (ranges[i].kind == kind && ranges[i].at < at + n && at < ranges[i].at + ranges[i].nbytes)
            return 1;
    return 0;
}

int ranges_of(enum kind kind) {
    int count = 0;
    for (int i = 0; i < RANGES_MAX; i++)
        count += ranges[i].kind == kind;
    return count;
}

void range_forget(struct range *range) { range->kind = 0; }

void *nothing_at(void *at, size_t nbytes) {
    int fixed = at ? MAP_FIXED : 0;
    return mmap(at, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}

void range_gone(struct range *range) {
    nothing_at((void *)range->at, range->nbytes);
    range_forget(range);
}

int device_may(uintptr_t at, size_t nbytes, enum access access) {
    static const enum kind kinds[] = {MAPPED, LEGACY, OPENED};
    for (int i = 0; i < 3; i++) {
        struct range *range = range_around(kinds[i], at, nbytes);
        if (range)
            return (range->access & access) == access;
    }
    return 0;
}

int host_pinned(uintptr_t at, size_t nbytes) {
    return range_around(PINNED, at, nbytes) || range_around(REGISTERED, at, nbytes);
}

/* ---- physical memory: a file that its device has room for ---- */

Result memory_new(size_t nbytes, int device, int legacy, char *path, int *fd) {
    static uint64_t made;
    char uuid[40], file[NAME_NBYTES];
    Result result = OUT_OF_MEMORY;
    hex_of(devices[device].uuid, uuid);
    snprintf(file, sizeof file, "memory/%s-%lx-%zu-%d-%s", uuid, (unsigned long)++made, nbytes, getpid(),
             legacy ? "legacy" : "vmm");
    if (state_path(path, file))
        return NO_DEVICE;
    int locked = state_lock();
    if (nbytes <= devices[device].nbytes && state_used(devices[device].uuid) <= devices[device].nbytes - nbytes) {
        *fd = open_alive(path, O_RDWR | O_CREAT | O_EXCL);
        if (*fd >= 0 && !posix_fallocate(*fd, 0, (off_t)nbytes)) {
            result = SUCCESS;
            state_taken(devices[device].uuid);
        } else if (*fd >= 0) {
            unlink(path);
            close(*fd);
        }
    }
    state_unlock(locked);
    if (result)
        return result;
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (memory == MAP_FAILED)
        abort();
    memset(memory, 0xa5, nbytes); /* who counts on zeros is to be found out */
    munmap(memory, nbytes);
    return SUCCESS;
}

/* ---- initialising and devices ---- */

static int slower(const void *one, const void *other) {
    return ((const struct device *)other)->speed - ((const struct device *)one)->speed;
}

/* What `wanted`, a word of $CUDA_VISIBLE_DEVICES, means: an index into `all`, or the beginning of a UUID. */
static int meant(const char *wanted, const struct device *all, int count) {
    char text[40], beginning[40];
    int digits = 0;
    if (*wanted >= '0' && *wanted <= '9')
        return atoi(wanted) < count ? atoi(wanted) : -1;
    int mig = !strncmp(wanted, "MIG-", 4);
    if (!mig && strncmp(wanted, "GPU-", 4))
        return -1;
    for (const char *at = wanted + 4; *at && digits < 32; at++)
        if (*at != '-')
            beginning[digits++] = *at;
    for (int i = 0; i < count; i++) {
        hex_of(all[i].uuid, text);
        if (all[i].mig == mig && digits && !strncasecmp(text, beginning, (size_t)digits))
            return i;
    }
    return -1;
}

static Result find_devices(void) {
    struct device all[DEVICES_MAX];
    char words[1024], *rest = NULL;
    int count = state_devices(all);
    if (count <= 0)
        return NO_DEVICE;
    const char *order = getenv("CUDA_DEVICE_ORDER"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!order || strcmp(order, "PCI_BUS_ID"))
        for (int i = 1; i < count; i++) /* equal speeds stay in the order of their slots */
            for (int j = i; j > 0 && slower(&all[j - 1], &all[j]) > 0; j--) {
                struct device other = all[j];
                all[j] = all[j - 1];
                all[j - 1] = other;
            }
    device_count = 0;
    if (!visible) {
        memcpy(devices, all, sizeof all);
        device_count = count;
        return SUCCESS;
    }
    snprintf(words, sizeof words, "%s", visible);
    for (char *word = strtok_r(words, ",", &rest); word && device_count < DEVICES_MAX; word = strtok_r(NULL, ",", &rest)) {
        int index = meant(word + strspn(word, " "), all, count);
        if (index < 0)
            break; /* the real one, too, heeds only what stands before the first word that means nothing */
        devices[device_count++] = all[index];
    }
    return device_count ? SUCCESS : NO_DEVICE;
}

static Result cuInit(unsigned int flags) {
    CALL("cuInit", NOTHING);
    if (flags)
        return INVALID_VALUE;
    if (initialised_pid)
        return initialised_pid == getpid() ? SUCCESS : NOT_INITIALIZED;
    Result result = find_devices();
    if (!result)
        initialised_pid = getpid();
    return result;
}

static Result cuDriverGetVersion(int *version) {
    CALL("cuDriverGetVersion", NOTHING);
    *version = 13000;
    return SUCCESS;
}

static Result cuDeviceGetCount(int *count) {
    CALL("cuDeviceGetCount", INITIALISED);
    *count = device_count;
    return SUCCESS;
}

static int unseen(int device) { return device < 0 || device >= device_count; }

static Result cuDeviceGet(int *device, int ordinal) {
    CALL("cuDeviceGet", INITIALISED);
    if (unseen(ordinal))
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

static Result cuDeviceGetUuid(unsigned char *uuid, int device) {
    CALL("cuDeviceGetUuid", INITIALISED);
    if (unseen(device))
        return INVALID_DEVICE;
    memcpy(uuid, devices[device].uuid, 16);
    return SUCCESS;
}

static Result cuDeviceGetName(char *name, int length, int device) {
    CALL("cuDeviceGetName", INITIALISED);
    if (unseen(device))
        return INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", devices[device].name);
    return SUCCESS;
}

static Result cuDeviceTotalMem(size_t *nbytes, int device) {
    CALL("cuDeviceTotalMem", INITIALISED);
    if (unseen(device))
        return INVALID_DEVICE;
    *nbytes = devices[device].nbytes;
    return SUCCESS;
}

enum { HAS_VIRTUAL_MEMORY = 102, HAS_DESCRIPTORS = 103 };

static Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALL("cuDeviceGetAttribute", INITIALISED);
    if (unseen(device))
        return INVALID_DEVICE;
    if (attribute != HAS_VIRTUAL_MEMORY && attribute != HAS_DESCRIPTORS)
        return INVALID_VALUE;
    *value = !state_quirk(attribute == HAS_VIRTUAL_MEMORY ? "no-virtual-memory" : "no-descriptors");
    return SUCCESS;
}

/* ---- contexts ---- */

static Result cuDevicePrimaryCtxRetain(struct context **given, int device) {
    CALL("cuDevicePrimaryCtxRetain", INITIALISED);
    if (unseen(device))
        return INVALID_DEVICE;
    struct context *context = &contexts[device];
    if (!context->retained) {
        char uuid[40], file[NAME_NBYTES], path[PATH_NBYTES];
        int fd = -1;
        hex_of(devices[device].uuid, uuid);
        snprintf(file, sizeof file, "contexts/%s-%d", uuid, getpid());
        if (state_path(path, file))
            return NO_DEVICE;
        int locked = state_lock();
        if (state_used(devices[device].uuid) + CONTEXT_NBYTES <= devices[device].nbytes)
            fd = open_alive(path, O_RDWR | O_CREAT);
        if (fd >= 0) {
            context->alive = mmap(NULL, 4096, PROT_NONE, MAP_SHARED, fd, 0);
            state_taken(devices[device].uuid);
        }
        state_unlock(locked);
        if (fd < 0)
            return OUT_OF_MEMORY;
        close(fd); /* the mapping holds the lock */
        madvise(context->alive, 4096, MADV_DONTFORK);
        context->device = device;
        context->lost = SUCCESS;
    }
    context->retained++;
    *given = context;
    return SUCCESS;
}

static Result cuDevicePrimaryCtxRelease(int device) {
    CALL("cuDevicePrimaryCtxRelease", INITIALISED);
    if (unseen(device) || !contexts[device].retained)
        return INVALID_CONTEXT;
    if (!--contexts[device].retained)
        munmap(contexts[device].alive, 4096);
    return SUCCESS;
}

static Result cuCtxPushCurrent(struct context *context) {
    CALL("cuCtxPushCurrent", INITIALISED);
    if (!context || !context->retained || depth == STACK_MAX)
        return INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}

static Result cuCtxPopCurrent(struct context **context) {
    CALL("cuCtxPopCurrent", INITIALISED);
    if (!depth)
        return INVALID_CONTEXT;
    *context = stack[--depth];
    return SUCCESS;
}

static Result cuCtxGetCurrent(struct context **context) {
    CALL("cuCtxGetCurrent", INITIALISED);
    *context = current();
    return SUCCESS;
}

static Result cuCtxSetCurrent(struct context *context) {
    CALL("cuCtxSetCurrent", INITIALISED);
    if (context && !context->retained)
        return INVALID_CONTEXT;
    if (!depth && context)
        depth = 1;
    if (depth)
        stack[depth - 1] = context;
    return SUCCESS;
}

static Result cuCtxSynchronize(void) {
    CALL("cuCtxSynchronize", CONTEXT);
    return streams_run();
}

/* ---- finding functions ---- */

#define ENTRY(name)                                                                                                    \
    { #name, (void *)name }
static const struct entry own_entries[] = {ENTRY(cuInit),
                                           ENTRY(cuDriverGetVersion),
                                           ENTRY(cuDeviceGetCount),
                                           ENTRY(cuDeviceGet),
                                           ENTRY(cuDeviceGetUuid),
                                           ENTRY(cuDeviceGetName),
                                           ENTRY(cuDeviceTotalMem),
                                           ENTRY(cuDeviceGetAttribute),
                                           ENTRY(cuDevicePrimaryCtxRetain),
                                           ENTRY(cuDevicePrimaryCtxRelease),
                                           ENTRY(cuCtxPushCurrent),
                                           ENTRY(cuCtxPopCurrent),
                                           ENTRY(cuCtxGetCurrent),
                                           ENTRY(cuCtxSetCurrent),
                                           ENTRY(cuCtxSynchronize),
                                           {NULL, NULL}};

Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    const struct entry *tables[] = {own_entries, vmm_entries, legacy_entries, stream_entries};
    (void)version;
    (void)flags;
    for (int i = 0; i < 4; i++)
        for (const struct entry *entry = tables[i]; entry->name; entry++)
            if (!strcmp(entry->name, symbol)) {
                *function = entry->function;
                if (status)
                    *status = 0;
                return SUCCESS;
            }
    *function = NULL;
    if (status)
        *status = 1; /* no such symbol */
    return NOT_FOUND;
}

/* ---- for tests ---- */

/* One line of what this process has and has not given back, in `text`; returns how many things. */
int fakecuda_live(char *text, size_t room) {
    pthread_mutex_lock(&mutex);
    int retained = 0;
    for (int i = 0; i < DEVICES_MAX; i++)
        retained += contexts[i].retained;
    int counts[] = {handles_live(),       ranges_of(RESERVED), ranges_of(MAPPED),     ranges_of(LEGACY), ranges_of(OPENED),
                    ranges_of(PINNED), ranges_of(REGISTERED), streams_live(), events_live(), retained};
    static const char *names[] = {"handles", "reserved", "mapped",     "legacy",  "opened",
                                  "pinned",  "registered", "streams", "events", "contexts"};
    int in_all = 0;
    size_t length = 0;
    text[0] = 0;
    for (int i = 0; i < 10; i++) {
        in_all += counts[i];
        if (counts[i] && length < room)
            length += (size_t)snprintf(text + length, room - length, "%s%s=%d", length ? " " : "", names[i], counts[i]);
    }
    pthread_mutex_unlock(&mutex);
    return in_all;
}

/* Forget all, as if the process had begun anew: for tests that share a process. */
void fakecuda_reset(void) {
    pthread_mutex_lock(&mutex);
    streams_forget();
    handles_forget();
    for (int i = 0; i < RANGES_MAX; i++)
        if (ranges[i].kind && ranges[i].kind != REGISTERED)
            munmap((void *)ranges[i].at, ranges[i].nbytes);
    memset(ranges, 0, sizeof ranges);
    for (int i = 0; i < DEVICES_MAX; i++)
        if (contexts[i].retained)
            munmap(contexts[i].alive, 4096);
    memset(contexts, 0, sizeof contexts);
    depth = 0;
    initialised_pid = 0;
    device_count = 0;
    pthread_mutex_unlock(&mutex);
}

/* At a regular end, write down what was not given back: leaks/PID, which is not there for a clean process. */
__attribute__((destructor)) static void report(void) {
    char text[512], file[64], path[PATH_NBYTES];
    if (initialised_pid != getpid() || state_without_device()) /* whom nothing is taken back from */
        return;
    for (int i = 0; i < DEVICES_MAX; i++) {
        if (contexts[i].retained && contexts[i].lost) /* nor from him */
            return;
        contexts[i].retained = 0; /* a context may well be kept to the end: the engine's is */
    }
    if (!fakecuda_live(text, sizeof text))
        return;
    snprintf(file, sizeof file, "leaks/%d", getpid());
    FILE *leaks = state_path(path, file) ? NULL : fopen(path, "we");
    if (leaks) {
        fprintf(leaks, "%s\n", text);
        fclose(leaks);
    }
}
