/* What the processes of one test share: a directory, named by $FAKECUDA. See README.md for its files. */
#ifndef FAKECUDA_STATE_H
#define FAKECUDA_STATE_H

#include <stddef.h>
#include <stdint.h>

#define DEVICES_MAX 16
#define NAME_NBYTES 160
#define PATH_NBYTES 512
#define CONTEXT_NBYTES ((size_t)4 << 20) /* what a context takes of a device here */

struct device {
    unsigned char uuid[16];
    int mig;   /* a MIG instance: its UUID is written with MIG- instead of GPU- */
    int speed; /* the driver lists the fastest first, unless $CUDA_DEVICE_ORDER is PCI_BUS_ID */
    size_t nbytes;
    char name[64];
};

/* A file of memory/: its name says it all. Live while somebody holds a lock of it. */
struct memory {
    unsigned char uuid[16];
    uint64_t serial;
    size_t nbytes;
    int pid; /* whose call made it */
    int legacy;
    char file[NAME_NBYTES];
};

/* All of these return -1 where there is no state directory or the file is not there. */
int state_path(char *path, const char *file);
int state_lock(void);         /* one process at a time; returns what state_unlock wants */
void state_unlock(int locked);
int state_devices(struct device *found); /* in the order of their slots; returns how many */
int state_fails(const char *call, int lost); /* the result to fail with, `lost` where no device is any more, or 0; notes the call */
int state_without_device(void);              /* whether this process has met a lost one */
void fakecuda_count_anew(void);
void hex_of(const unsigned char *uuid, char *text);
int uuid_of(const char *text, unsigned char *uuid);

/* Memory and contexts; the caller holds the state's lock. What `visit` is given is alive. */
typedef void memory_visit(const struct memory *, void *);
typedef void context_visit(int pid, void *);
int memory_parse(const char *file, struct memory *found);
void memory_each(memory_visit *visit, void *with);
void context_each(const unsigned char *uuid, context_visit *visit, void *with);
size_t state_used(const unsigned char *uuid);
void state_taken(const unsigned char *uuid); /* something was: keeps the most that there has been, in peaks/ */

/* Whether the driver is to be worse than the real one, so that whoever checks it is seen to notice: the file `quirks`
 * has the word. `forgetful`: memory dies with the process that made it. `unprotected`: read-only is not. `hoarding`: no
 * memory comes back, that of contexts included. Or be another one, that says so: `no-virtual-memory` has no
 * cuMemCreate, `no-descriptors` cannot export what it makes; `other-pids`: NVML calls processes as another PID namespace
 * does. */
int state_quirk(const char *word);

/* Opens a file and shares its lock: it counts as alive until this descriptor, every copy and every mapping is gone. */
int open_alive(const char *path, int flags);

#endif
