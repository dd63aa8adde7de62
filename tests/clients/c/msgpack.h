/* As much msgpack as the wire needs: reading any value (no extension types), writing small ones.
 *
 * Whoever includes this defines `malformed`, which is called for anything that cannot be read and does not return. A
 * reader is a window on bytes that stay the caller's; nothing is allocated, and nothing outside the window is read.
 */
#include <stdint.h>
#include <string.h>

static _Noreturn void malformed(const char *what);

enum kind { NIL, BOOLEAN, UINT, NEGATIVE, FLOAT, TEXT, BYTES, ARRAY, MAP };

struct reader { const uint8_t *at, *end; };

/* One value's head: `number` is its value, its length in bytes (TEXT, BYTES), or how many items or pairs follow. */
struct item { enum kind kind; uint64_t number; const uint8_t *data; };

static const uint8_t *take(struct reader *from, uint64_t nbytes)
{
    if ((uint64_t)(from->end - from->at) < nbytes)
        malformed("a value that is cut off");
    const uint8_t *taken = from->at;
    from->at += nbytes;
    return taken;
}

static uint64_t big_endian(struct reader *from, unsigned nbytes)
{
    const uint8_t *bytes = take(from, nbytes);
    uint64_t value = 0;
    for (unsigned i = 0; i < nbytes; i++)
        value = value << 8 | bytes[i];
    return value;
}

static struct item next(struct reader *from)
{
    uint8_t head = *take(from, 1);
    struct item item = {NIL, 0, NULL};
    if (head <= 0x7f) item = (struct item){UINT, head, NULL};
    else if (head <= 0x8f) item = (struct item){MAP, head & 15, NULL};
    else if (head <= 0x9f) item = (struct item){ARRAY, head & 15, NULL};
    else if (head <= 0xbf) item = (struct item){TEXT, head & 31, NULL};
    else if (head >= 0xe0) item = (struct item){NEGATIVE, head, NULL};
    else switch (head) {
    case 0xc0: break;
    case 0xc2: case 0xc3: item = (struct item){BOOLEAN, head & 1, NULL}; break;
    case 0xc4: case 0xc5: case 0xc6: item = (struct item){BYTES, big_endian(from, 1u << (head - 0xc4)), NULL}; break;
    case 0xca: case 0xcb: item = (struct item){FLOAT, big_endian(from, 4u << (head - 0xca)), NULL}; break;
    case 0xcc: case 0xcd: case 0xce: case 0xcf: item = (struct item){UINT, big_endian(from, 1u << (head - 0xcc)), NULL}; break;
    case 0xd0: case 0xd1: case 0xd2: case 0xd3: item = (struct item){NEGATIVE, big_endian(from, 1u << (head - 0xd0)), NULL}; break;
    case 0xd9: case 0xda: case 0xdb: item = (struct item){TEXT, big_endian(from, 1u << (head - 0xd9)), NULL}; break;
    case 0xdc: case 0xdd: item = (struct item){ARRAY, big_endian(from, 2u << (head - 0xdc)), NULL}; break;
    case 0xde: case 0xdf: item = (struct item){MAP, big_endian(from, 2u << (head - 0xde)), NULL}; break;
    default: malformed("a type that the wire does not have");
    }
    if (item.kind == TEXT || item.kind == BYTES)
        item.data = take(from, item.number);
    return item;
}

static struct item next_of(struct reader *from, enum kind kind, const char *what)
{
    struct item item = next(from);
    if (item.kind != kind)
        malformed(what);
    return item;
}

static void skip(struct reader *from, int depth)
{
    struct item item = next(from);
    if (depth > 64)
        malformed("nested too deeply");
    uint64_t count = item.kind == ARRAY ? item.number : item.kind == MAP ? 2 * item.number : 0;
    while (count--)
        skip(from, depth + 1);
}

/* A reader that stands at the value of `key` in the map that `map` stands at. */
static struct reader value_of(struct reader map, const char *key)
{
    for (uint64_t left = next_of(&map, MAP, "not a map").number; left; left--) {
        struct item name = next_of(&map, TEXT, "a key that is not text");
        if (name.number == strlen(key) && !memcmp(name.data, key, name.number))
            return map;
        skip(&map, 0);
    }
    malformed(key);
}

static struct item text_of(struct reader map, const char *key)
{
    struct reader value = value_of(map, key);
    return next_of(&value, TEXT, key);
}

static uint64_t uint_of(struct reader map, const char *key)
{
    struct reader value = value_of(map, key);
    return next_of(&value, UINT, key).number;
}

static int is(struct item item, const char *text) { return item.number == strlen(text) && !memcmp(item.data, text, item.number); }

struct writer { uint8_t *at, *end; };

static void put(struct writer *to, const void *bytes, size_t nbytes)
{
    if ((size_t)(to->end - to->at) < nbytes)
        malformed("no room to write");
    memcpy(to->at, bytes, nbytes);
    to->at += nbytes;
}

static void put_head(struct writer *to, uint8_t head, uint64_t value, unsigned nbytes)
{
    uint8_t bytes[9] = {head};
    for (unsigned i = 0; i < nbytes; i++)
        bytes[1 + i] = (uint8_t)(value >> 8 * (nbytes - 1 - i));
    put(to, bytes, 1 + nbytes);
}

static void put_map(struct writer *to, uint16_t pairs) { put_head(to, 0xde, pairs, 2); }
static void put_nil(struct writer *to) { put_head(to, 0xc0, 0, 0); }
static void put_bool(struct writer *to, int value) { put_head(to, value ? 0xc3 : 0xc2, 0, 0); }
static void put_uint(struct writer *to, uint64_t value) { put_head(to, 0xcf, value, 8); }

static void put_float(struct writer *to, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_head(to, 0xcb, bits, 8);
}

static void put_text(struct writer *to, const char *text)
{
    put_head(to, 0xda, strlen(text), 2);
    put(to, text, strlen(text));
}
