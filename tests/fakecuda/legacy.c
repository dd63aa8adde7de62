/* Memory with an address from the start, that dies with its process, and pinned host memory. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct ipc_handle {
    char file[64]; /* the end of the file's name: uuid digits are cut to what tells it apart */
};

static Result cuMemAlloc(uintptr_t *given, size_t nbytes) {
    char path[PATH_NBYTES];
    int fd;
    CALL("cuMemAlloc", CONTEXT);
    if (!nbytes)
        return INVALID_VALUE;
    int device = current()->device;
    Result result = memory_new(nbytes, device, 1, path, &fd);
    if (result)
        return result;
    void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return OUT_OF_MEMORY;
    madvise(at, nbytes, MADV_DONTFORK);
    range_new(LEGACY, (uintptr_t)at, nbytes, device, path)->access = READ_WRITE;
    *given = (uintptr_t)at;
    return SUCCESS;
}

static Result cuMemFree(uintptr_t at) {
    CALL("cuMemFree", CONTEXT);
    struct range *range = range_at(LEGACY, at);
    if (!range)
        return INVALID_VALUE;
    range_gone(range);
    int locked = state_lock();
    state_used(devices[range->device].uuid); /* empties it for whoever has opened it: use after free is seen */
    state_unlock(locked);
    return SUCCESS;
}

/* What the 64 bytes hold: the beginning of the UUID, serial, size and pid fit in any case. */
static int pack(const char *path, struct ipc_handle *handle) {
    const char *file = strrchr(path, '/');
    memset(handle, 0, sizeof *handle);
    if (!file || strlen(file + 1) < 32)
        return -1;
    /* A file's name is at most 32 + 1 + 16 + 1 + 20 + 1 + 10 + 7 letters; without the UUID and the kind it fits. */
    int length = snprintf(handle->file, sizeof handle->file, "%s", file + 1 + 32);
    return length < (int)sizeof handle->file ? 0 : -1;
}

static Result cuIpcGetMemHandle(struct ipc_handle *handle, uintptr_t at) {
    CALL("cuIpcGetMemHandle", CONTEXT);
    struct range *range = range_at(LEGACY, at);
    if (!range || pack(range->file, handle))
        return INVALID_VALUE;
    return SUCCESS;
}

struct search {
    const char *end;
    struct memory found;
    int there;
};

static void look(const struct memory *memory, void *with) {
    struct search *search = with;
    if (memory->legacy && !strcmp(memory->file + 32, search->end)) {
        search->found = *memory;
        search->there = 1;
    }
}

static Result cuIpcOpenMemHandle(uintptr_t *given, struct ipc_handle handle, unsigned int flags) {
    char file[NAME_NBYTES + 8], path[PATH_NBYTES];
    CALL("cuIpcOpenMemHandle", CONTEXT);
    if (flags != 1 || memchr(handle.file, 0, sizeof handle.file) == NULL)
        return INVALID_VALUE;
    struct search search = {.end = handle.file, .there = 0};
    int locked = state_lock();
    memory_each(look, &search);
    state_unlock(locked);
    if (!search.there)
        return INVALID_HANDLE; /* of a holder that is dead, or none at all */
    if (search.found.pid == getpid())
        return INVALID_CONTEXT; /* not in the process that it comes from */
    if (memcmp(search.found.uuid, devices[current()->device].uuid, 16))
        return INVALID_DEVICE; /* no peers here */
    snprintf(file, sizeof file, "memory/%s", search.found.file);
    if (state_path(path, file))
        return INVALID_HANDLE;
    struct range *opened = range_of(OPENED, path);
    if (opened) { /* in one process it has one place, however often it is opened */
        opened->times++;
        *given = opened->at;
        return SUCCESS;
    }
    int fd = open(path, O_RDWR | O_CLOEXEC); /* not its lock: whoever opens it does not keep it */
    if (fd < 0)
        return INVALID_HANDLE;
    void *at = mmap(NULL, search.found.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return OUT_OF_MEMORY;
    madvise(at, search.found.nbytes, MADV_DONTFORK);
    opened = range_new(OPENED, (uintptr_t)at, search.found.nbytes, current()->device, path);
    opened->access = READ_WRITE;
    opened->times = 1;
    *given = (uintptr_t)at;
    return SUCCESS;
}

static Result cuIpcCloseMemHandle(uintptr_t at) {
    CALL("cuIpcCloseMemHandle", CONTEXT);
    struct range *range = range_at(OPENED, at);
    if (!range)
        return INVALID_VALUE;
    if (--range->times)
        return SUCCESS;
    range_gone(range);
    return SUCCESS;
}

static Result cuMemHostAlloc(void **given, size_t nbytes, unsigned int flags) {
    CALL("cuMemHostAlloc", CONTEXT);
    if (!nbytes || flags & ~7u)
        return INVALID_VALUE;
    void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return OUT_OF_MEMORY;
    range_new(PINNED, (uintptr_t)at, nbytes, -1, "");
    *given = at;
    return SUCCESS;
}

static Result cuMemFreeHost(void *at) {
    CALL("cuMemFreeHost", CONTEXT);
    struct range *range = range_at(PINNED, (uintptr_t)at);
    if (!range)
        return INVALID_VALUE;
    range_gone(range);
    return SUCCESS;
}

static Result cuMemHostRegister(void *at, size_t nbytes, unsigned int flags) {
    CALL("cuMemHostRegister", CONTEXT);
    if (!nbytes || flags & ~15u)
        return INVALID_VALUE;
    if (range_touched(REGISTERED, (uintptr_t)at, nbytes) || range_touched(PINNED, (uintptr_t)at, nbytes))
        return HOST_ALREADY_REGISTERED;
    range_new(REGISTERED, (uintptr_t)at, nbytes, -1, "");
    return SUCCESS;
}

static Result cuMemHostUnregister(void *at) {
    CALL("cuMemHostUnregister", CONTEXT);
    struct range *range = range_at(REGISTERED, (uintptr_t)at);
    if (!range)
        return HOST_NOT_REGISTERED;
    range_forget(range);
    return SUCCESS;
}

#define ENTRY(name)                                                                                                    \
    { #name, (void *)name }
const struct entry legacy_entries[] = {
    ENTRY(cuMemAlloc),        ENTRY(cuMemFree),           ENTRY(cuIpcGetMemHandle), ENTRY(cuIpcOpenMemHandle),
    ENTRY(cuIpcCloseMemHandle), ENTRY(cuMemHostAlloc),    ENTRY(cuMemFreeHost),     ENTRY(cuMemHostRegister),
    ENTRY(cuMemHostUnregister), {NULL, NULL}};
