/* Histories on a CPU: reference.py says what must come out. Callers split the work; nothing here starts threads.
 *
 * A kind is one byte an event, so that picking is counting and finding bytes: loops over them have a form that the
 * compiler turns into vector instructions. Of all else an event is only read when it is in the history. What takes the
 * time is the catalogue, whose rows lie anywhere in tens of megabytes: that loop is so short that a core has as many
 * of its turns under way as it can wait for. Prefetching rows made it slower on a Neoverse-N1. */
#include <stdint.h>
#include <string.h>

enum { ACTION_BITS = 7, MOST_ACTIONS = 3 };
enum { FINE, UNKNOWN_ITEM, LARGE_ID, UNKNOWN_PLACE };
enum { BLOCK = 128, MOST_WORDS = 3 };

typedef struct {
    const void *items, *times;
    const uint8_t *kinds, *plus, *like, *skip; /* kinds, or the three others */
    const uint32_t *catalogue;
    int64_t known; /* items of the catalogue */
    int64_t wide;  /* whether items and times are int64 instead of uint32 */
    int64_t count;
} events;

typedef struct {
    uint8_t actions[MOST_ACTIONS];
    int64_t count, cap, most;
} rule;

typedef struct {
    int32_t *items, *artists, *albums;
    int64_t *times;
} room;

typedef struct {
    uint32_t *places;
    uint8_t *actions;
} output;

/* A block is short enough for its hits to be counted in one byte. */
static inline uint8_t hits(const uint8_t *kinds, uint8_t action) {
    uint8_t sum = 0;
    for (int64_t i = 0; i < BLOCK; i++) sum = (uint8_t)(sum + ((kinds[i] & action) != 0));
    return sum;
}

/* Where the last `cap` events of an action begin; 0 where there are fewer. */
static int64_t edge_of(const uint8_t *kinds, int64_t count, uint8_t action, int64_t cap) {
    while (count >= BLOCK) {
        const uint8_t more = hits(kinds + count - BLOCK, action);
        if (more >= cap) break;
        cap -= more;
        count -= BLOCK;
    }
    while (count > 0 && cap > 0) cap -= (kinds[--count] & action) != 0;
    return count;
}

static inline output step(output to, const uint8_t *kinds, int64_t at, uint8_t actions) {
    *to.places = (uint32_t)at;
    *to.actions = kinds[at] & ACTION_BITS;
    const int64_t hit = (kinds[at] & actions) != 0;
    return (output){to.places + hit, to.actions + hit};
}

/* The events of some actions from first to last, appended; words without any are passed over. */
static output append(output to, const uint8_t *kinds, int64_t first, int64_t last, uint8_t actions) {
    const uint64_t anywhere = 0x0101010101010101u * actions;
    for (; first + 8 <= last; first += 8) {
        uint64_t word;
        memcpy(&word, kinds + first, 8);
        if (!(word & anywhere)) continue;
        for (int64_t at = first; at < first + 8; at++) to = step(to, kinds, at, actions);
    }
    for (; first < last; first++) to = step(to, kinds, first, actions);
    return to;
}

/* Edges of the actions, ascending, and the actions that count from each edge to the next; the last edge is the end. */
static void divide(const uint8_t *kinds, int64_t count, const rule *r, int64_t *edges, uint8_t *actions) {
    for (int64_t p = 0; p < r->count; p++) {
        const int64_t edge = edge_of(kinds, count, r->actions[p], r->cap);
        int64_t at = p;
        for (; at > 0 && edges[at - 1] > edge; at--) {
            edges[at] = edges[at - 1];
            actions[at] = actions[at - 1];
        }
        edges[at] = edge;
        actions[at] = r->actions[p];
    }
    edges[r->count] = count;
    for (int64_t p = 1; p < r->count; p++) actions[p] |= actions[p - 1];
}

static output picked(output to, const uint8_t *kinds, int64_t count, const rule *r) {
    int64_t edges[MOST_ACTIONS + 1];
    uint8_t actions[MOST_ACTIONS];
    divide(kinds, count, r, edges, actions);
    for (int64_t p = 0; p < r->count; p++) to = append(to, kinds, edges[p], edges[p + 1], actions[p]);
    return to;
}

static int64_t counted(const uint8_t *kinds, int64_t count, const rule *r) {
    int64_t edges[MOST_ACTIONS + 1], length = 0;
    uint8_t actions[MOST_ACTIONS];
    divide(kinds, count, r, edges, actions);
    for (int64_t p = 0; p < r->count; p++) {
        int64_t at = edges[p];
        for (; at + BLOCK <= edges[p + 1]; at += BLOCK) length += hits(kinds + at, actions[p]);
        for (; at < edges[p + 1]; at++) length += (kinds[at] & actions[p]) != 0;
    }
    return length;
}

/* Kinds of a scan; `space` is where those of three columns are put together. */
static const uint8_t *kinds_from(const events *e, int64_t begin, int64_t count, uint8_t *restrict space) {
    if (e->kinds) return e->kinds + begin;
    const uint8_t *restrict plus = e->plus + begin, *restrict like = e->like + begin, *restrict skip = e->skip + begin;
    for (int64_t i = 0; i < count; i++)
        space[i] = (uint8_t)((plus[i] != 0) | (uint8_t)((like[i] != 0) << 1) | (uint8_t)((skip[i] != 0) << 2));
    return space;
}

/* Offsets of the samples' histories, and their events. There is room for one more than are picked. */
void pick(const events *e, const int64_t *begin, const int64_t *stop, int64_t samples, const rule *r, uint8_t *space,
          int64_t *offsets, uint32_t *places, uint8_t *actions) {
    offsets[0] = 0;
    for (int64_t b = 0; b < samples; b++) {
        const int64_t count = stop[b] - begin[b];
        const output to = {places + offsets[b], actions + offsets[b]};
        int64_t length = picked(to, kinds_from(e, begin[b], count, space), count, r).places - to.places;
        if (length > r->most) {
            memmove(to.places, to.places + length - r->most, (size_t)r->most * sizeof *places);
            memmove(to.actions, to.actions + length - r->most, (size_t)r->most);
            length = r->most;
        }
        offsets[b + 1] = offsets[b] + length;
    }
}

/* A scan whose picked events are known by their number: those of each action from its edge on. */
typedef struct {
    int64_t begin, stop, length, edges[MOST_ACTIONS], hits[MOST_ACTIONS];
} scan;

static scan scanned(const uint8_t *kinds, int64_t begin, int64_t stop, const rule *r) {
    scan s = {.begin = begin, .stop = stop, .length = counted(kinds + begin, stop - begin, r)};
    for (int64_t p = 0; p < r->count; p++) {
        int64_t at = s.edges[p] = begin + edge_of(kinds + begin, stop - begin, r->actions[p], r->cap);
        for (; at + BLOCK <= stop; at += BLOCK) s.hits[p] += hits(kinds + at, r->actions[p]);
        for (; at < stop; at++) s.hits[p] += (kinds[at] & r->actions[p]) != 0;
    }
    return s;
}

static inline int64_t is_picked(const scan *s, const uint8_t *kinds, int64_t at, const rule *r) {
    int64_t any = 0;
    for (int64_t p = 0; p < r->count; p++) any |= (kinds[at] & r->actions[p]) != 0 && at >= s->edges[p];
    return any;
}

/* Moves both ends of a scan forward. */
static void slide(scan *s, const uint8_t *kinds, int64_t begin, int64_t stop, const rule *r) {
    for (; s->stop < stop; s->stop++) {
        for (int64_t p = 0; p < r->count; p++) {
            if (!(kinds[s->stop] & r->actions[p]) || ++s->hits[p] <= r->cap) continue;
            /* The action's oldest event makes room, but may count as another action too. */
            while (!(kinds[s->edges[p]] & r->actions[p])) s->edges[p]++;
            const int64_t oldest = s->edges[p]++;
            s->hits[p]--;
            s->length -= !is_picked(s, kinds, oldest, r);
        }
        s->length += is_picked(s, kinds, s->stop, r);
    }
    for (; s->begin < begin; s->begin++) {
        s->length -= is_picked(s, kinds, s->begin, r);
        for (int64_t p = 0; p < r->count; p++) {
            if (s->edges[p] > s->begin) continue;
            s->hits[p] -= (kinds[s->begin] & r->actions[p]) != 0;
            s->edges[p] = s->begin + 1;
        }
    }
}

/* Whether the next scan is most of the last one: sliding takes events one by one, counting by vectors of 16 or more. */
static int is_near(const int64_t *begin, const int64_t *stop, int64_t b) {
    const int64_t forward = begin[b] - begin[b - 1], more = stop[b] - stop[b - 1];
    return forward >= 0 && more >= 0 && 16 * (forward + more) <= stop[b - 1] - begin[b];
}

/* How many events `pick` picks for each sample. Anchors of a user that follow one another share most of their scans. */
void measure(const events *e, const int64_t *begin, const int64_t *stop, int64_t samples, const rule *r, uint8_t *space,
             int64_t *lengths) {
    scan s;
    int known = 0;
    for (int64_t b = 0; b < samples; b++) {
        const int64_t count = stop[b] - begin[b];
        if (known && is_near(begin, stop, b)) {
            slide(&s, e->kinds, begin[b], stop[b], r);
        } else {
            known = e->kinds && b + 1 < samples && is_near(begin, stop, b + 1);
            if (known) s = scanned(e->kinds, begin[b], stop[b], r);
            else s.length = counted(kinds_from(e, begin[b], count, space), count, r);
        }
        lengths[b] = s.length > r->most ? r->most : s.length;
    }
}

/* Items and times, for columns of either width; whether all items are known. */
#define WORDS_OF(name, word)                                                                                           \
    static int name(const events *e, int64_t begin, const uint32_t *places, int64_t count, int32_t *restrict items,    \
                    int64_t *restrict times) {                                                                         \
        const word *from_items = (const word *)e->items + begin, *from_times = (const word *)e->times + begin;         \
        int strange = 0;                                                                                               \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            const word item = from_items[places[i]];                                                                   \
            strange |= (uint64_t)item >= (uint64_t)e->known;                                                           \
            items[i] = (int32_t)item;                                                                                  \
            times[i] = (int64_t)from_times[places[i]];                                                                 \
        }                                                                                                              \
        return !strange;                                                                                               \
    }
WORDS_OF(narrow_words, uint32_t)
WORDS_OF(wide_words, int64_t)

/* Artists and albums of known items; their bits together. */
static uint64_t rows_of(const uint32_t *catalogue, const int32_t *restrict items, int64_t count,
                        int32_t *restrict artists, int32_t *restrict albums) {
    uint64_t seen = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t row;
        memcpy(&row, catalogue + 2 * (int64_t)items[i], sizeof row);
        artists[i] = (int32_t)row;
        albums[i] = (int32_t)(row >> 32);
        seen |= row;
    }
    return seen;
}

static uint32_t largest(const uint32_t *places, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) most = places[i] > most ? places[i] : most;
    return most;
}

int64_t fill(const events *e, const int64_t *begin, const int64_t *offsets, int64_t samples, const uint32_t *places,
             const room *to) {
    uint64_t seen = 0;
    for (int64_t b = 0; b < samples; b++) {
        const int64_t at = offsets[b], count = offsets[b + 1] - at;
        if (count && begin[b] + (int64_t)largest(places + at, count) >= e->count) return UNKNOWN_PLACE;
        const int known = e->wide ? wide_words(e, begin[b], places + at, count, to->items + at, to->times + at)
                                  : narrow_words(e, begin[b], places + at, count, to->items + at, to->times + at);
        if (!known) return UNKNOWN_ITEM;
        seen |= rows_of(e->catalogue, to->items + at, count, to->artists + at, to->albums + at);
    }
    return seen & 0x8000000080000000u ? LARGE_ID : FINE;
}

static inline uint64_t turned(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

/* Rows of cross features: xxh64 (Collet, seed 0) of up to three columns, -1 for none, modulo the rows of the cross. */
void crosses(const int64_t *columns, const int64_t *parts, const int64_t *rows, int64_t count, int64_t samples,
             int32_t *out) {
    const uint64_t p1 = 0x9E3779B185EBCA87u, p2 = 0xC2B2AE3D27D4EB4Fu, p3 = 0x165667B19E3779F9u,
                   p4 = 0x85EBCA77C2B2AE63u, p5 = 0x27D4EB2F165667C5u;
    for (int64_t c = 0; c < count; c++, parts += MOST_WORDS) {
        int64_t used = 0;
        while (used < MOST_WORDS && parts[used] >= 0) used++;
        for (int64_t b = 0; b < samples; b++) {
            uint64_t hash = p5 + 8 * (uint64_t)used;
            for (int64_t w = 0; w < used; w++) {
                hash ^= turned((uint64_t)columns[parts[w] * samples + b] * p2, 31) * p1;
                hash = turned(hash, 27) * p1 + p4;
            }
            hash = (hash ^ hash >> 33) * p2;
            hash = (hash ^ hash >> 29) * p3;
            *out++ = (int32_t)((hash ^ hash >> 32) % (uint64_t)rows[c]);
        }
    }
}
