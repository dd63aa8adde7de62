/* From a place to a connection that may be trusted, or the finding that there is none. Not one byte is sent here. */

/* Connect first, look second: the other order calls a daemon absent that restarts between the two calls. */
static int connect_to(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        die(INVALID_PLACE, "the path is too long: %s", path);
    strcpy(address.sun_path, path);
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        int problem = connect(fd, (struct sockaddr *)&address, sizeof address) ? errno : 0;
        struct stat found;
        int missing = lstat(path, &found) ? errno : 0;
        if (missing ? missing != ENOENT : !S_ISSOCK(found.st_mode))
            die(INVALID_PLACE, "%s: not a socket that we may look at", path);
        if (!problem)
            return fd;
        close(fd);
        if (problem == ENOENT && missing)
            die(ABSENT, "%s: no weights are cached here", path);
        if (problem == ECONNREFUSED && !missing)
            die(UNREACHABLE, "%s: the daemon died after binding", path);
        if (problem != ENOENT && problem != ECONNREFUSED && problem != EAGAIN)
            die(INVALID_PLACE, "%s: %s", path, strerror(problem));
        if (now_ms() >= deadline_ms)
            die(NOT_READY, "%s: nobody took the connection before the deadline", path);
        poll(NULL, 0, 10);
    }
}

static int trusted(uid_t uid) { return uid == 0 || uid == geteuid(); }

/* Every directory on the way: whoever can write to one could have put another socket there. Links are refused. */
static void check_trust(const char *runtime_dir, const char *path, int fd)
{
    char passed[sizeof((struct sockaddr_un){0}).sun_path];
    struct stat found;
    for (const char *slash = path; slash; slash = strchr(slash + 1, '/')) {
        size_t length = slash == path ? 1 : (size_t)(slash - path);
        snprintf(passed, sizeof passed, "%.*s", (int)length, path);
        if (lstat(passed, &found))
            die(UNREACHABLE, "%s: %s", passed, strerror(errno));
        int sticky_is_enough = length < strlen(runtime_dir) && found.st_mode & S_ISVTX;
        if (!S_ISDIR(found.st_mode) || !trusted(found.st_uid) || (found.st_mode & 022 && !sticky_is_enough))
            die(UNTRUSTED, "%s: not a directory that only we or root can change", passed);
    }
    struct ucred peer;
    socklen_t nbytes = sizeof peer;
    if (!lstat(path, &found) && !trusted(found.st_uid))
        die(UNTRUSTED, "%s: the socket is somebody else's", path);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) || !trusted(peer.uid))
        die(UNTRUSTED, "%s: the process behind the socket is somebody else's", path);
}
