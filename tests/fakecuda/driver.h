/* What the parts of the driver share: one process's tables, all behind one mutex. */
#ifndef FAKECUDA_DRIVER_H
#define FAKECUDA_DRIVER_H

#include "state.h"

#define GRANULARITY ((size_t)2 << 20)
#define RANGES_MAX 4096
#define HANDLES_MAX 4096

typedef enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ALREADY_MAPPED = 208,
    NOT_MAPPED = 211,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    HOST_ALREADY_REGISTERED = 712,
    HOST_NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
} Result;

enum kind { RESERVED = 1, MAPPED, LEGACY, OPENED, PINNED, REGISTERED };
enum access { NONE = 0, READ = 1, READ_WRITE = 3 };

/* Addresses of this process that mean something to the driver. A MAPPED range lies within a RESERVED one. */
struct range {
    enum kind kind;
    uintptr_t at;
    size_t nbytes;
    enum access access;
    int device;
    int times; /* of an OPENED one: so often it was opened here, and has to be closed */
    char file[PATH_NBYTES];
};

struct context {
    int device;
    int retained;
    Result lost; /* after a fault, the answer to all that comes */
    void *alive;
};

enum needs { NOTHING, INITIALISED, CONTEXT };

extern struct device devices[DEVICES_MAX];
extern int device_count;

Result enter(const char *call, enum needs needs);
void leave(int *inside);

/* Begins a call: takes the mutex until the function returns, notes the call, and fails it where the test wants so. */
#define CALL(name, needs)                                                                                              \
    __attribute__((cleanup(leave), unused)) int inside = 0;                                                            \
    do {                                                                                                               \
        Result refused = enter(name, needs);                                                                           \
        if (refused)                                                                                                   \
            return refused;                                                                                            \
    } while (0)

struct context *current(void);
struct range *range_new(enum kind kind, uintptr_t at, size_t nbytes, int device, const char *file);
struct range *range_at(enum kind kind, uintptr_t at);               /* that begins there */
struct range *range_of(enum kind kind, const char *file);           /* of that memory */
struct range *range_around(enum kind kind, uintptr_t at, size_t n); /* that holds all of it */
int range_touched(enum kind kind, uintptr_t at, size_t n);          /* whether any holds some of it */
int ranges_of(enum kind kind);
void range_forget(struct range *range);
void range_gone(struct range *range); /* no other is ever given its addresses: whoever still uses them is found out */
void *nothing_at(void *at, size_t nbytes); /* addresses without memory, there or anywhere */
Result memory_new(size_t nbytes, int device, int legacy, char *path, int *fd); /* counted, and filled with rubbish */

/* Whether the device may read or write there now. */
int device_may(uintptr_t at, size_t nbytes, enum access access);
int host_pinned(uintptr_t at, size_t nbytes);

int handles_live(void);
void handles_forget(void);
int streams_live(void);
int events_live(void);
void streams_forget(void);
Result streams_run(void);

struct entry {
    const char *name;
    void *function;
};
extern const struct entry vmm_entries[], legacy_entries[], stream_entries[];

#endif
