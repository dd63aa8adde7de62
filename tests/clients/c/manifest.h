/* From a grant's descriptors to mapped memory, every claim about it checked: seals, sizes, the manifest, each row. */

/* libxxhash's, declared here because its header is in a package of its own. */
typedef struct { uint64_t low64, high64; } XXH128_hash_t;
XXH128_hash_t XXH3_128bits(const void *data, size_t nbytes);

enum { MANIFEST_MAX = 512 << 20, ALIGNMENT = 256, DIGEST = 16 };

#define NO_ALIAS UINT32_MAX

/* Only sealed memory of exactly this size can neither change nor shrink under a reader. Closes the descriptor. */
static uint8_t *map_checked(int fd, uint64_t nbytes, const char *what)
{
    const int seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
    struct stat found;
    if (fstat(fd, &found) || !S_ISREG(found.st_mode) || (uint64_t)found.st_size != nbytes)
        die(TRANSFER, "%s: not memory of %" PRIu64 " bytes", what, nbytes);
    if ((fcntl(fd, F_GETFL) & (O_ACCMODE | O_PATH)) != O_RDONLY)
        die(TRANSFER, "%s: not opened for reading only", what);
    int got = fcntl(fd, F_GET_SEALS);
    if (got < 0 || (got & seals) != seals)
        die(TRANSFER, "%s: seals are missing", what);
    void *memory = mmap(NULL, nbytes ? nbytes : 1, PROT_READ, MAP_PRIVATE, fd, 0);
    if (memory == MAP_FAILED)
        die(TRANSFER, "%s: %s", what, strerror(errno));
    close(fd);
    return memory;
}

struct segments { uint64_t count, nbytes[FDS_MAX]; const uint8_t *memory[FDS_MAX]; };

static struct segments map_segments(struct frame *frame)
{
    struct reader list = value_of(frame->body, "segments");
    struct segments segments = {next_of(&list, ARRAY, "segments").number, {0}, {0}};
    if (frame->fd_count != 1 + segments.count)
        die(TRANSFER, "%zu descriptors with a grant of %" PRIu64 " segments", frame->fd_count, segments.count);
    for (uint64_t i = 0; i < segments.count; i++) {
        if (!is(text_of(list, "memory"), "host"))
            die(PROTOCOL, "a memory kind that this client does not know");
        segments.nbytes[i] = uint_of(list, "nbytes");
        segments.memory[i] = map_checked(frame->fds[1 + i], segments.nbytes[i], "a segment");
        skip(&list, 0);
    }
    return segments;
}

static void require_text(struct reader map, const char *key, struct item wanted)
{
    struct item found = text_of(map, key);
    if (found.number != wanted.number || memcmp(found.data, wanted.data, found.number))
        die(TRANSFER, "grant and manifest disagree about %s", key);
}

/* The manifest's bytes: those that were granted, of this generation and config, and of segments of these sizes. */
static struct reader manifest_of(struct frame *frame, const char *fingerprint, const struct segments *segments)
{
    uint64_t nbytes = uint_of(frame->body, "manifest_nbytes");
    if (nbytes > MANIFEST_MAX)
        die(TRANSFER, "a manifest of %" PRIu64 " bytes", nbytes);
    const uint8_t *bytes = map_checked(frame->fds[0], nbytes, "the manifest");
    char digest[65];
    sha256_hex(bytes, nbytes, digest);
    if (!is(text_of(frame->body, "manifest_sha256"), digest))
        die(TRANSFER, "the manifest is not the one that was granted");
    struct reader manifest = {bytes, bytes + nbytes};
    if (uint_of(manifest, "format") != 1)
        die(TRANSFER, "a manifest of another format");
    struct reader meta = value_of(manifest, "meta"), sizes = value_of(meta, "segments_nbytes");
    require_text(meta, "generation", text_of(frame->body, "generation"));
    require_text(meta, "receipts_version", text_of(frame->body, "receipts_version"));
    require_text(meta, "fingerprint", (struct item){TEXT, strlen(fingerprint), (const uint8_t *)fingerprint});
    if (next_of(&sizes, ARRAY, "segments_nbytes").number != segments->count)
        die(TRANSFER, "grant and manifest disagree about the number of segments");
    for (uint64_t i = 0; i < segments->count; i++)
        if (next_of(&sizes, UINT, "segments_nbytes").number != segments->nbytes[i])
            die(TRANSFER, "grant and manifest disagree about a segment's size");
    return manifest;
}

static const uint8_t *column(struct reader manifest, const char *name, uint64_t count, unsigned width)
{
    struct reader value = value_of(value_of(manifest, "columns"), name);
    struct item bytes = next_of(&value, BYTES, name);
    if (bytes.number / width != count || bytes.number % width)
        die(TRANSFER, "column %s has another length", name);
    return bytes.data;
}

static unsigned itemsize_of(struct item dtype)
{
    static const struct { const char *name; unsigned nbytes; } sizes[] = {
        {"bool", 1}, {"uint8", 1}, {"int8", 1}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"float8_e8m0fnu", 1},
        {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1}, {"int16", 2}, {"uint16", 2}, {"float16", 2}, {"bfloat16", 2},
        {"int32", 4}, {"uint32", 4}, {"float32", 4}, {"int64", 8}, {"uint64", 8}, {"float64", 8}, {"complex64", 8}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (is(dtype, sizes[i].name))
            return sizes[i].nbytes;
    die(TRANSFER, "an unknown dtype: %.*s", (int)dtype.number, dtype.data);
}

/* Bytes from the first element to the end of the last, which is what a row claims; 0 without elements. */
static uint64_t extent(const uint8_t *dims, const uint8_t *strides, unsigned ndim, unsigned itemsize)
{
    uint64_t last = 0, step, nbytes = 0;
    int overflow = 0, empty = 0;
    for (unsigned i = 0; i < ndim; i++) {
        uint64_t dim = le(dims + 8 * i, 8), stride = le(strides + 8 * i, 8);
        empty |= dim == 0;
        overflow |= stride >> 63 || __builtin_mul_overflow(dim ? dim - 1 : 0, stride, &step) || __builtin_add_overflow(last, step, &last);
    }
    overflow |= __builtin_add_overflow(last, 1, &last) || __builtin_mul_overflow(last, itemsize, &nbytes);
    if (overflow && !empty)
        die(TRANSFER, "a row's shape does not fit into memory");
    return empty ? 0 : nbytes;
}

/* The columns that this client looks at: u16, u64, u64, u8, i32, u8, 16 bytes; u64 and i64 for each dimension. */
struct table {
    uint64_t count, dtypes;
    struct item dtype_names[256];
    const uint8_t *segment, *offset, *nbytes, *dtype, *alias, *ndim, *digest, *dims, *strides;
};

static struct table table_of(struct reader manifest)
{
    struct table table = {0};
    struct reader names = value_of(manifest, "names"), dtypes = value_of(manifest, "dtypes");
    table.count = next_of(&names, ARRAY, "names").number;
    table.dtypes = next_of(&dtypes, ARRAY, "dtypes").number;
    if (table.dtypes > 256)
        die(TRANSFER, "more dtypes than there are");
    for (uint64_t i = 0; i < table.dtypes; i++)
        table.dtype_names[i] = next_of(&dtypes, TEXT, "dtypes");
    table.segment = column(manifest, "segment", table.count, 2);
    table.offset = column(manifest, "offset", table.count, 8);
    table.nbytes = column(manifest, "nbytes", table.count, 8);
    table.dtype = column(manifest, "dtype", table.count, 1);
    table.alias = column(manifest, "alias", table.count, 4);
    table.ndim = column(manifest, "ndim", table.count, 1);
    table.digest = column(manifest, "digest", table.count, DIGEST);
    uint64_t flat = 0;
    for (uint64_t i = 0; i < table.count; i++)
        flat += table.ndim[i];
    table.dims = column(manifest, "dims", flat, 8);
    table.strides = column(manifest, "strides", flat, 8);
    return table;
}

/* Whether `row`, whose dimensions begin at `flat`, is in all but its name the row `other`, which is no alias. */
static int same_row(const struct table *table, uint64_t row, uint64_t flat, uint64_t other)
{
    uint64_t there = 0, nbytes = 8 * (uint64_t)table->ndim[row];
    for (uint64_t i = 0; i < other && other < table->count; i++)
        there += table->ndim[i];
    return other < table->count && le(table->alias + 4 * other, 4) == NO_ALIAS &&
           !memcmp(table->segment + 2 * other, table->segment + 2 * row, 2) &&
           !memcmp(table->offset + 8 * other, table->offset + 8 * row, 8) &&
           !memcmp(table->nbytes + 8 * other, table->nbytes + 8 * row, 8) &&
           !memcmp(table->digest + DIGEST * other, table->digest + DIGEST * row, DIGEST) &&
           table->dtype[other] == table->dtype[row] && table->ndim[other] == table->ndim[row] &&
           !memcmp(table->dims + 8 * there, table->dims + 8 * flat, nbytes) &&
           !memcmp(table->strides + 8 * there, table->strides + 8 * flat, nbytes);
}

/* Every row against the segments and its own digest. How many there are; with `show` each is a line on standard output. */
static uint64_t check_rows(struct reader manifest, const struct segments *segments, int show)
{
    struct table table = table_of(manifest);
    struct reader names = value_of(manifest, "names");
    next_of(&names, ARRAY, "names");
    uint64_t flat = 0;
    for (uint64_t i = 0; i < table.count; flat += table.ndim[i++]) {
        struct item name = next_of(&names, TEXT, "names");
        int length = (int)name.number;
        uint64_t segment = le(table.segment + 2 * i, 2), offset = le(table.offset + 8 * i, 8), nbytes = le(table.nbytes + 8 * i, 8);
        uint64_t alias = le(table.alias + 4 * i, 4);
        if (segment >= segments->count || offset % ALIGNMENT || offset > segments->nbytes[segment] ||
            nbytes > segments->nbytes[segment] - offset)
            die(TRANSFER, "%.*s: a row that reaches out of its segment", length, name.data);
        if (table.dtype[i] >= table.dtypes)
            die(TRANSFER, "%.*s: a row without a dtype", length, name.data);
        struct item dtype = table.dtype_names[table.dtype[i]];
        if (extent(table.dims + 8 * flat, table.strides + 8 * flat, table.ndim[i], itemsize_of(dtype)) != nbytes)
            die(TRANSFER, "%.*s: a row's bytes are not what its shape needs", length, name.data);
        if (alias != NO_ALIAS && !same_row(&table, i, flat, alias))
            die(TRANSFER, "%.*s: an alias is not the row it names", length, name.data);
        XXH128_hash_t found = XXH3_128bits(segments->memory[segment] + offset, nbytes);
        char text[2 * DIGEST + 1], wanted[2 * DIGEST + 1];
        snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, found.high64, found.low64); /* the canonical form */
        for (int byte = 0; byte < DIGEST; byte++)
            snprintf(wanted + 2 * byte, 3, "%02x", table.digest[DIGEST * i + (uint64_t)byte]);
        if (strcmp(text, wanted))
            die(DIFFERS, "%.*s: the bytes are not those of the digest", length, name.data);
        if (show)
            printf("%.*s %" PRIu64 " %" PRIu64 " %" PRIu64 " %.*s %s\n", length, name.data, segment, offset, nbytes,
                   (int)dtype.number, dtype.data, text);
    }
    return table.count;
}
