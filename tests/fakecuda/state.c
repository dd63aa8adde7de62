#define _GNU_SOURCE
#include "state.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CALLS_MAX 128

int state_path(char *path, const char *file) {
    const char *directory = getenv("FAKECUDA");
    if (!directory || !*directory)
        return -1;
    return snprintf(path, PATH_NBYTES, "%s/%s", directory, file) < PATH_NBYTES ? 0 : -1;
}

int state_lock(void) {
    char path[PATH_NBYTES];
    if (state_path(path, "lock"))
        return -1;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0)
        flock(fd, LOCK_EX); /* given back by the kernel, too, should we be killed */
    return fd;
}

void state_unlock(int locked) {
    if (locked >= 0)
        close(locked);
}

void hex_of(const unsigned char *uuid, char *text) {
    for (int i = 0; i < 16; i++)
        snprintf(text + 2 * i, 3, "%02x", uuid[i]);
}

int uuid_of(const char *text, unsigned char *uuid) {
    int digits = 0;
    for (; *text && digits < 32; text++) {
        unsigned int digit;
        char one[2] = {*text, 0};
        if (*text == '-')
            continue;
        if (sscanf(one, "%1x", &digit) != 1)
            return -1;
        uuid[digits / 2] = (unsigned char)(digits % 2 ? uuid[digits / 2] | digit : digit << 4);
        digits++;
    }
    return digits == 32 ? 0 : -1;
}

int state_devices(struct device *found) {
    char path[PATH_NBYTES], line[256], kind[8], uuid[64];
    int count = 0;
    FILE *table = state_path(path, "devices") ? NULL : fopen(path, "re");
    if (!table)
        return -1;
    while (count < DEVICES_MAX && fgets(line, sizeof line, table)) {
        struct device *device = &found[count];
        memset(device, 0, sizeof *device);
        if (sscanf(line, "%7s %63s %zu %d %63[^\n]", kind, uuid, &device->nbytes, &device->speed, device->name) != 5 ||
            uuid_of(uuid, device->uuid))
            continue;
        device->mig = !strcmp(kind, "MIG");
        count++;
    }
    fclose(table);
    return count;
}

/* ---- failing on demand ---- */

static struct {
    const char *name;
    long times;
} called[CALLS_MAX];
static long called_in_all;
static int without_device; /* this process has met a lost one */

static long count(const char *call) {
    called_in_all++;
    for (int i = 0; i < CALLS_MAX; i++) {
        if (!called[i].name)
            called[i].name = call; /* a literal of the caller's */
        if (!strcmp(called[i].name, call))
            return ++called[i].times;
    }
    return 0;
}

/* Count anew; both libraries have this, each for its own calls. */
void fakecuda_count_anew(void) {
    memset(called, 0, sizeof called);
    called_in_all = 0;
    without_device = 0;
}

/* A small file's text, with room for `nbytes`; -1 where it is not there. */
static int text_of(const char *file, char *text, size_t nbytes) {
    char path[PATH_NBYTES];
    FILE *found = state_path(path, file) ? NULL : fopen(path, "re");
    if (!found)
        return -1;
    text[fread(text, 1, nbytes - 1, found)] = 0;
    fclose(found);
    return 0;
}

/* `rules` is "CALL NTH RESULT", separated by commas or newlines; NTH counts this process's calls, `*` fits any. */
static int ruled(char *rules, const char *call, long nth) {
    char name[64], which[16], *rest = NULL;
    int result;
    for (char *rule = strtok_r(rules, ",\n", &rest); rule; rule = strtok_r(NULL, ",\n", &rest)) {
        if (sscanf(rule, "%63s %15s %d", name, which, &result) != 3)
            continue;
        int any = !strcmp(name, "*");
        if ((any || !strcmp(name, call)) && (*which == '*' || atol(which) == (any ? called_in_all : nth)))
            return result;
    }
    return 0;
}

/* The file `lose` has the rule; from the call on that it fits there is the file `lost`, for all processes. */
static int is_lost(const char *call, long nth) {
    char path[PATH_NBYTES], rules[256];
    if (!without_device && text_of("lost", rules, sizeof rules) == 0)
        without_device = 1;
    if (!without_device && text_of("lose", rules, sizeof rules) == 0 && ruled(rules, call, nth)) {
        without_device = 1;
        int fd = state_path(path, "lost") ? -1 : open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0)
            abort();
        close(fd);
    }
    return without_device;
}

int state_without_device(void) { return without_device; }

/* Nobody waits but for a call that the file `held` names, and that as long as whoever has named it locks the file. */
static void wait_while_held(const char *call) {
    char path[PATH_NBYTES], name[64];
    if (text_of("held", name, sizeof name) || strcmp(name, call) || state_path(path, "held"))
        return;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0)
        flock(fd, LOCK_SH);
    close(fd);
}

int state_fails(const char *call, int lost) {
    char path[PATH_NBYTES], rules[2048];
    long nth = count(call);
    if (!state_path(path, "calls")) {
        int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        int length = snprintf(rules, sizeof rules, "%d %s\n", getpid(), call);
        if (fd >= 0 && write(fd, rules, (size_t)length) != length)
            abort(); /* a full disk must not look like a call that was not made */
        close(fd);
    }
    wait_while_held(call);
    if (is_lost(call, nth))
        return lost;
    const char *own = getenv("FAKECUDA_FAIL");
    if (own) {
        snprintf(rules, sizeof rules, "%s", own);
        int result = ruled(rules, call, nth);
        if (result)
            return result;
    }
    return text_of("fail", rules, sizeof rules) ? 0 : ruled(rules, call, nth);
}

/* ---- who is alive: the kernel counts for us ---- */

int open_alive(const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC, 0600);
    if (fd >= 0 && flock(fd, LOCK_SH | LOCK_NB)) {
        close(fd);
        return -1;
    }
    return fd;
}

int state_quirk(const char *word) {
    char words[256];
    return text_of("quirks", words, sizeof words) == 0 && strstr(words, word) != NULL;
}

/* Also of a process that nobody has reaped yet. */
static int dead(int pid) {
    struct pollfd end = {(int)syscall(SYS_pidfd_open, pid, 0), POLLIN, 0};
    if (end.fd < 0)
        return 1;
    int ended = poll(&end, 1, 0) == 1;
    close(end.fd);
    return ended;
}

/* Removes what nobody holds. Legacy memory is emptied, so that whoever still reads it is killed by SIGBUS. */
static int alive(const char *path, int legacy) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return 0;
    int held = flock(fd, LOCK_EX | LOCK_NB) != 0;
    if (!held) {
        if (legacy && ftruncate(fd, 0))
            abort();
        unlink(path);
    }
    close(fd);
    return held;
}

int memory_parse(const char *file, struct memory *found) {
    char uuid[40], kind[8];
    memset(found, 0, sizeof *found);
    if (sscanf(file, "%32[0-9a-f]-%lx-%zu-%d-%7s", uuid, &found->serial, &found->nbytes, &found->pid, kind) != 5 ||
        uuid_of(uuid, found->uuid))
        return -1;
    found->legacy = !strcmp(kind, "legacy");
    snprintf(found->file, sizeof found->file, "%s", file);
    return 0;
}

void memory_each(memory_visit *visit, void *with) {
    char path[PATH_NBYTES];
    struct dirent *entry;
    struct memory found;
    DIR *directory = state_path(path, "memory") ? NULL : opendir(path);
    if (!directory)
        return;
    while ((entry = readdir(directory))) {
        char file[PATH_NBYTES + 256];
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (memory_parse(entry->d_name, &found) || !(state_quirk("hoarding") || alive(file, found.legacy)))
            continue;
        if (state_quirk("forgetful") && dead(found.pid))
            unlink(file);
        else
            visit(&found, with);
    }
    closedir(directory);
}

void context_each(const unsigned char *uuid, context_visit *visit, void *with) {
    char path[PATH_NBYTES], wanted[40], of[40];
    struct dirent *entry;
    int pid;
    DIR *directory = state_path(path, "contexts") ? NULL : opendir(path);
    if (!directory)
        return;
    hex_of(uuid, wanted);
    while ((entry = readdir(directory))) {
        char file[PATH_NBYTES + 256];
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (sscanf(entry->d_name, "%32[0-9a-f]-%d", of, &pid) != 2 || strcmp(of, wanted))
            continue;
        if (state_quirk("hoarding") || alive(file, 0))
            visit(pid, with);
    }
    closedir(directory);
}

struct sum {
    const unsigned char *uuid;
    size_t nbytes;
};

static void add_memory(const struct memory *memory, void *with) {
    struct sum *sum = with;
    if (!memcmp(memory->uuid, sum->uuid, 16))
        sum->nbytes += memory->nbytes;
}

static void add_context(int pid, void *with) {
    (void)pid;
    ((struct sum *)with)->nbytes += CONTEXT_NBYTES;
}

size_t state_used(const unsigned char *uuid) {
    struct sum sum = {uuid, 0};
    memory_each(add_memory, &sum);
    context_each(uuid, add_context, &sum);
    return sum.nbytes;
}

void state_taken(const unsigned char *uuid) {
    char text[40], file[NAME_NBYTES], path[PATH_NBYTES], before[32] = "0";
    size_t used = state_used(uuid);
    hex_of(uuid, text);
    snprintf(file, sizeof file, "peaks/%s", text);
    text_of(file, before, sizeof before);
    if (used <= strtoull(before, NULL, 10) || state_path(path, file))
        return;
    FILE *peak = fopen(path, "we");
    if (!peak)
        abort();
    fprintf(peak, "%zu", used);
    fclose(peak);
}
