/* Memory without addresses, and addresses for it: cuMemCreate and what belongs to it. None of it needs a context. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PINNED_MEMORY = 1, ON_DEVICE = 1, AS_DESCRIPTOR = 1 };

/* cuda.h's CUmemAllocationProp and CUmemAccessDesc. */
struct properties {
    int type, handle_types;
    struct {
        int type, id;
    } location;
    void *unused;
    unsigned char flags[8];
};
struct access_wanted {
    struct {
        int type, id;
    } location;
    int flags;
};

struct handle {
    int used;
    int device;
    size_t nbytes;
    int exportable;
    void *alive; /* a mapping without access: it holds the file's lock, as any descriptor of it would */
    char path[PATH_NBYTES];
};
static struct handle handles[HANDLES_MAX];

static struct handle *handle_of(uint64_t number) {
    struct handle *handle = number && number <= HANDLES_MAX ? &handles[number - 1] : NULL;
    return handle && handle->used ? handle : NULL;
}

/* Takes `fd` over. */
static Result handle_new(uint64_t *number, int fd, const char *path, size_t nbytes, int device, int exportable) {
    for (int i = 0; i < HANDLES_MAX; i++) {
        struct handle *handle = &handles[i];
        if (handle->used)
            continue;
        handle->alive = mmap(NULL, nbytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        close(fd);
        if (handle->alive == MAP_FAILED)
            return OUT_OF_MEMORY;
        madvise(handle->alive, nbytes, MADV_DONTFORK);
        handle->used = 1;
        handle->device = device;
        handle->nbytes = nbytes;
        handle->exportable = exportable;
        snprintf(handle->path, sizeof handle->path, "%s", path);
        *number = (uint64_t)i + 1;
        return SUCCESS;
    }
    abort(); /* a test with thousands of handles wants a larger table */
}

int handles_live(void) {
    int live = 0;
    for (int i = 0; i < HANDLES_MAX; i++)
        live += handles[i].used;
    return live;
}

void handles_forget(void) {
    for (int i = 0; i < HANDLES_MAX; i++)
        if (handles[i].used)
            munmap(handles[i].alive, handles[i].nbytes);
    memset(handles, 0, sizeof handles);
}

static Result usable(const struct properties *wanted) {
    if (!wanted || wanted->type != PINNED_MEMORY || wanted->location.type != ON_DEVICE)
        return INVALID_VALUE;
    if (state_quirk("no-virtual-memory") || ((wanted->handle_types & AS_DESCRIPTOR) && state_quirk("no-descriptors")))
        return NOT_SUPPORTED;
    return wanted->location.id < 0 || wanted->location.id >= device_count ? INVALID_DEVICE : SUCCESS;
}

static Result cuMemGetAllocationGranularity(size_t *granularity, const struct properties *wanted, int option) {
    CALL("cuMemGetAllocationGranularity", INITIALISED);
    if (option != 0 && option != 1)
        return INVALID_VALUE;
    *granularity = GRANULARITY;
    return usable(wanted);
}

static Result cuMemCreate(uint64_t *number, size_t nbytes, const struct properties *wanted, unsigned long long flags) {
    char path[PATH_NBYTES];
    int fd;
    CALL("cuMemCreate", INITIALISED);
    Result result = usable(wanted);
    if (result)
        return result;
    if (flags || !nbytes || nbytes % GRANULARITY)
        return INVALID_VALUE;
    result = memory_new(nbytes, wanted->location.id, 0, path, &fd);
    if (result)
        return result;
    return handle_new(number, fd, path, nbytes, wanted->location.id, wanted->handle_types == AS_DESCRIPTOR);
}

static Result cuMemRelease(uint64_t number) {
    CALL("cuMemRelease", INITIALISED);
    struct handle *handle = handle_of(number);
    if (!handle)
        return INVALID_VALUE;
    munmap(handle->alive, handle->nbytes);
    handle->used = 0;
    return SUCCESS;
}

static Result cuMemGetAllocationPropertiesFromHandle(struct properties *found, uint64_t number) {
    CALL("cuMemGetAllocationPropertiesFromHandle", INITIALISED);
    struct handle *handle = handle_of(number);
    if (!handle)
        return INVALID_VALUE;
    memset(found, 0, sizeof *found);
    found->type = PINNED_MEMORY;
    found->handle_types = handle->exportable ? AS_DESCRIPTOR : 0;
    found->location.type = ON_DEVICE;
    found->location.id = handle->device;
    return SUCCESS;
}

static Result cuMemExportToShareableHandle(int *fd, uint64_t number, int type, unsigned long long flags) {
    CALL("cuMemExportToShareableHandle", INITIALISED);
    struct handle *handle = handle_of(number);
    if (!handle || flags || type != AS_DESCRIPTOR || !handle->exportable)
        return INVALID_VALUE;
    *fd = open_alive(handle->path, O_RDWR);
    return *fd < 0 ? OUT_OF_MEMORY : SUCCESS;
}

static Result cuMemImportFromShareableHandle(uint64_t *number, void *descriptor, int type) {
    char link[64], path[PATH_NBYTES], room[PATH_NBYTES];
    struct memory found;
    CALL("cuMemImportFromShareableHandle", INITIALISED);
    snprintf(link, sizeof link, "/proc/self/fd/%d", (int)(intptr_t)descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (type != AS_DESCRIPTOR || length < 0 || state_path(room, "memory/"))
        return INVALID_VALUE;
    path[length] = 0;
    if (strncmp(path, room, strlen(room)) || memory_parse(path + strlen(room), &found) || found.legacy)
        return INVALID_VALUE;
    int device = 0;
    while (device < device_count && memcmp(devices[device].uuid, found.uuid, 16))
        device++;
    if (device == device_count)
        return INVALID_DEVICE; /* of a device that this process does not see */
    int fd = open_alive(path, O_RDWR);
    return fd < 0 ? INVALID_VALUE : handle_new(number, fd, path, found.nbytes, device, 1);
}

static Result cuMemAddressReserve(uintptr_t *given, size_t nbytes, size_t alignment, uintptr_t wanted,
                                  unsigned long long flags) {
    CALL("cuMemAddressReserve", INITIALISED);
    (void)wanted; /* a hint, which is not heeded */
    if (flags || !nbytes || nbytes % GRANULARITY || (alignment & (alignment - 1)))
        return INVALID_VALUE;
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    char *base = nothing_at(NULL, nbytes + alignment);
    if (base == MAP_FAILED)
        return OUT_OF_MEMORY;
    char *at = (char *)(((uintptr_t)base + alignment - 1) & ~(uintptr_t)(alignment - 1));
    if (at > base)
        munmap(base, (size_t)(at - base));
    if (base + alignment > at)
        munmap(at + nbytes, (size_t)(base + alignment - at));
    range_new(RESERVED, (uintptr_t)at, nbytes, -1, "");
    *given = (uintptr_t)at;
    return SUCCESS;
}

static Result cuMemAddressFree(uintptr_t at, size_t nbytes) {
    CALL("cuMemAddressFree", INITIALISED);
    struct range *range = range_at(RESERVED, at);
    if (!range || range->nbytes != nbytes || range_touched(MAPPED, at, nbytes))
        return INVALID_VALUE;
    range_gone(range);
    return SUCCESS;
}

static Result cuMemMap(uintptr_t at, size_t nbytes, size_t offset, uint64_t number, unsigned long long flags) {
    CALL("cuMemMap", INITIALISED);
    struct handle *handle = handle_of(number);
    if (!handle || flags || offset || nbytes != handle->nbytes || !range_around(RESERVED, at, nbytes))
        return INVALID_VALUE;
    if (range_touched(MAPPED, at, nbytes))
        return ALREADY_MAPPED;
    int fd = open_alive(handle->path, O_RDWR);
    if (fd < 0)
        return OUT_OF_MEMORY;
    void *mapped = mmap((void *)at, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0);
    close(fd); /* the mapping holds the lock, so a handle may go before it */
    if (mapped == MAP_FAILED)
        return OUT_OF_MEMORY;
    madvise(mapped, nbytes, MADV_DONTFORK);
    range_new(MAPPED, at, nbytes, handle->device, handle->path);
    return SUCCESS;
}

static Result cuMemSetAccess(uintptr_t at, size_t nbytes, const struct access_wanted *wanted, size_t count) {
    CALL("cuMemSetAccess", INITIALISED);
    struct range *range = range_at(MAPPED, at);
    if (!range || range->nbytes != nbytes || count != 1 || wanted->location.type != ON_DEVICE)
        return INVALID_VALUE;
    if (wanted->location.id != range->device)
        return INVALID_DEVICE;
    if (wanted->flags != NONE && wanted->flags != READ && wanted->flags != READ_WRITE)
        return INVALID_VALUE;
    if (wanted->flags == READ && state_quirk("unprotected"))
        return range->access = READ_WRITE, mprotect((void *)at, nbytes, PROT_READ | PROT_WRITE) ? OUT_OF_MEMORY : SUCCESS;
    int protection = wanted->flags == READ_WRITE ? PROT_READ | PROT_WRITE : wanted->flags == READ ? PROT_READ : PROT_NONE;
    if (mprotect((void *)at, nbytes, protection))
        return OUT_OF_MEMORY;
    range->access = (enum access)wanted->flags;
    return SUCCESS;
}

static Result cuMemUnmap(uintptr_t at, size_t nbytes) {
    CALL("cuMemUnmap", INITIALISED);
    struct range *range = range_at(MAPPED, at);
    if (!range || range->nbytes != nbytes)
        return INVALID_VALUE;
    nothing_at((void *)at, nbytes); /* the addresses stay reserved */
    range_forget(range);
    return SUCCESS;
}

#define ENTRY(name)                                                                                                    \
    { #name, (void *)name }
const struct entry vmm_entries[] = {ENTRY(cuMemGetAllocationGranularity),
                                    ENTRY(cuMemCreate),
                                    ENTRY(cuMemRelease),
                                    ENTRY(cuMemGetAllocationPropertiesFromHandle),
                                    ENTRY(cuMemExportToShareableHandle),
                                    ENTRY(cuMemImportFromShareableHandle),
                                    ENTRY(cuMemAddressReserve),
                                    ENTRY(cuMemAddressFree),
                                    ENTRY(cuMemMap),
                                    ENTRY(cuMemSetAccess),
                                    ENTRY(cuMemUnmap),
                                    {NULL, NULL}};
