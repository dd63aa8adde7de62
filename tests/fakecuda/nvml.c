/* libnvidia-ml.so.1: the few calls that protocol/memory/cuda/nvml.py makes, answered from the shared directory. */
#define _GNU_SOURCE
#include "state.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9,
       GPU_IS_LOST = 15 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[DEVICES_MAX];
static int device_count;
static int initialised;

static int refused(const char *call) {
    pthread_mutex_lock(&mutex);
    int result = state_fails(call, GPU_IS_LOST);
    pthread_mutex_unlock(&mutex);
    return result;
}

#define CALL(name)                                                                                                     \
    do {                                                                                                               \
        int result = refused(name);                                                                                    \
        if (result)                                                                                                    \
            return result;                                                                                             \
        if (!initialised)                                                                                              \
            return UNINITIALIZED;                                                                                      \
    } while (0)

int nvmlInit_v2(void) {
    int result = refused("nvmlInit_v2");
    if (result)
        return result;
    int count = state_devices(devices);
    if (count < 0)
        return DRIVER_NOT_LOADED;
    device_count = count;
    initialised = 1;
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    switch (result) {
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned int room) {
    CALL("nvmlSystemGetDriverVersion");
    return snprintf(text, room, "0.0 (fake)") < (int)room ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    unsigned char wanted[16];
    CALL("nvmlDeviceGetHandleByUUID");
    int mig = !strncmp(uuid, "MIG-", 4);
    if ((!mig && strncmp(uuid, "GPU-", 4)) || uuid_of(uuid + 4, wanted))
        return INVALID_ARGUMENT;
    device_count = state_devices(devices);
    for (int i = 0; i < device_count; i++)
        if (devices[i].mig == mig && !memcmp(devices[i].uuid, wanted, 16)) {
            *handle = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    CALL("nvmlDeviceGetCount_v2");
    device_count = state_devices(devices);
    *count = 0;
    for (int i = 0; i < device_count; i++)
        *count += !devices[i].mig;
    return SUCCESS;
}

/* Like the real one it numbers whole devices only: instances are reached by their UUID. */
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    CALL("nvmlDeviceGetHandleByIndex_v2");
    for (int i = 0; i < device_count; i++)
        if (!devices[i].mig && !index--) {
            *handle = &devices[i];
            return SUCCESS;
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetUUID(struct device *device, char *text, unsigned int room) {
    CALL("nvmlDeviceGetUUID");
    const unsigned char *u = device->uuid;
    int written = snprintf(text, room, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                           device->mig ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9],
                           u[10], u[11], u[12], u[13], u[14], u[15]);
    return written < (int)room ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetMemoryInfo(struct device *device, unsigned long long *info) {
    CALL("nvmlDeviceGetMemoryInfo");
    int locked = state_lock();
    size_t used = state_used(device->uuid);
    state_unlock(locked);
    info[0] = device->nbytes;
    info[1] = device->nbytes - used;
    info[2] = used;
    return SUCCESS;
}

struct process {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
};

struct listing {
    struct device *device;
    struct process *processes;
    unsigned int count, room;
};

static void list_context(int pid, void *with) {
    struct listing *listing = with;
    if (listing->count < listing->room)
        listing->processes[listing->count] = (struct process){(unsigned int)pid, CONTEXT_NBYTES, ~0u, ~0u};
    listing->count++;
}

/* As they are called outside of a container: beyond what any process here is called. */
#define OUTSIDE 4194304u

static void list_memory(const struct memory *memory, void *with) {
    struct listing *listing = with;
    for (unsigned int i = 0; i < listing->count && i < listing->room; i++)
        if (listing->processes[i].pid == (unsigned int)memory->pid &&
            !memcmp(memory->uuid, listing->device->uuid, 16))
            listing->processes[i].used += memory->nbytes;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned int *count, struct process *processes) {
    CALL("nvmlDeviceGetComputeRunningProcesses_v3");
    struct listing listing = {device, processes, 0, *count};
    int locked = state_lock();
    context_each(device->uuid, list_context, &listing);
    memory_each(list_memory, &listing);
    state_unlock(locked);
    for (unsigned int i = 0; state_quirk("other-pids") && i < listing.count && i < listing.room; i++)
        processes[i].pid += OUTSIDE;
    *count = listing.count;
    return listing.count > listing.room ? INSUFFICIENT_SIZE : SUCCESS;
}
