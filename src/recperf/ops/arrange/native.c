/* A batch of histories arranged for a model that reads every distinct row of its tables once. One call writes all
 * arrays of the batch, so that a thread that prepares batches hardly ever holds the lock of Python.
 *
 * Ids lie feature after feature: context, history, candidates. A row has context tokens, its history and a candidate;
 * its positions are the last two. Rows behind the samples' only fill up the batch: their ids and times are 0. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FINE, TOO_LONG, NO_OFFSETS, NO_MEMORY };
enum { PARTS = 3, CODES = 8, DIGIT = 8, DIGITS = 1 << DIGIT, FEW = 4 };

typedef struct {
    const int64_t *values, *offsets, *times, *queries;
    const uint8_t *actions;
    const float *labels, *rates;
    const int64_t *rows; /* of each table: those of the history, then those of the context */
    int64_t samples, fillers, events, context, shared, ages, most, rated;
} batch;

/* What is computed on the way. A word is a key above the place it is from. */
typedef struct {
    uint64_t *words, *others;
    uint32_t *ids, *places[PARTS], *sources, *order, *bins;
    int64_t *index, *numbers;
    uint8_t *used;
} work;

static inline uint32_t row_of(int64_t id, int64_t rows) {
    if ((uint64_t)id < (uint64_t)rows) return (uint32_t)id;
    const int64_t rest = id % rows;
    return (uint32_t)(rest < 0 ? rest + rows : rest);
}

/* Sorts by keys up to `largest`; equal ones stay in their order. One pass where there are not many more keys than words,
 * otherwise one for every byte of a key. */
static void sort(work *w, int64_t count, uint64_t largest) {
    const int once = largest < (uint64_t)(FEW * count);
    const uint64_t mask = once ? UINT32_MAX : DIGITS - 1, bins = once ? largest + 1 : DIGITS;
    uint32_t digits[DIGITS], *starts = once ? w->bins : digits;
    for (int shift = 32; largest; shift += DIGIT, largest = once ? 0 : largest >> DIGIT) {
        memset(starts, 0, bins * sizeof *starts);
        for (int64_t i = 0; i < count; i++) starts[(w->words[i] >> shift) & mask]++;
        uint32_t sum = 0;
        for (uint64_t bin = 0; bin < bins; bin++) {
            const uint32_t more = starts[bin];
            starts[bin] = sum;
            sum += more;
        }
        for (int64_t i = 0; i < count; i++) w->others[starts[(w->words[i] >> shift) & mask]++] = w->words[i];
        uint64_t *swapped = w->words;
        w->words = w->others;
        w->others = swapped;
    }
}

/* The distinct ids, ascending, and the place of each id among them; returns their number. */
static int64_t distinct(work *w, const uint32_t *ids, int64_t count, int64_t rows, int64_t *values, uint32_t *places) {
    if (rows <= FEW * count) {
        int64_t unique = 0;
        memset(w->bins, 0, (size_t)rows * sizeof *w->bins);
        for (int64_t i = 0; i < count; i++) w->bins[ids[i]] = 1;
        for (int64_t row = 0; row < rows; row++) {
            if (!w->bins[row]) continue;
            w->bins[row] = (uint32_t)unique;
            values[unique++] = row;
        }
        for (int64_t i = 0; i < count; i++) places[i] = w->bins[ids[i]];
        return unique;
    }
    for (int64_t i = 0; i < count; i++) w->words[i] = (uint64_t)ids[i] << 32 | (uint64_t)i;
    sort(w, count, (uint64_t)rows - 1);
    int64_t unique = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t id = w->words[i] >> 32;
        if (!i || id != w->words[i - 1] >> 32) values[unique++] = (int64_t)id;
        places[(uint32_t)w->words[i]] = (uint32_t)(unique - 1);
    }
    return unique;
}

/* Rows up to a fixed number: enough of the first ones are unused. */
static void fill_rows(work *w, int64_t *values, int64_t unique, int64_t fixed) {
    if (unique >= fixed) return;
    memset(w->used, 0, (size_t)fixed);
    for (int64_t u = 0; u < unique; u++)
        if (values[u] < fixed) w->used[values[u]] = 1;
    for (int64_t row = 0; unique < fixed; row++)
        if (!w->used[row]) values[unique++] = row;
}

/* Picks in the order of what they pick, and where the picks of each begin. */
static void group(const int64_t *index, int64_t count, int64_t rows, int64_t *order, int64_t *starts) {
    memset(starts, 0, (size_t)(rows + 1) * sizeof *starts);
    for (int64_t i = 0; i < count; i++) starts[index[i]]++;
    for (int64_t row = 1; row <= rows; row++) starts[row] += starts[row - 1];
    for (int64_t i = count; i-- > 0;) order[--starts[index[i]]] = i;
}

/* The number of each position's (item, artist, album) among the distinct ones, and the positions of each. */
static int64_t entities(work *w, int64_t positions, const int64_t *unique, int64_t *starts) {
    for (int64_t i = 0; i < positions; i++) w->words[i] = (uint64_t)i;
    for (int part = PARTS - 1; part >= 0; part--) {
        for (int64_t i = 0; i < positions; i++) {
            const uint32_t at = (uint32_t)w->words[i];
            w->words[i] = (uint64_t)w->places[part][at] << 32 | at;
        }
        sort(w, positions, (uint64_t)unique[part] - 1);
    }
    int64_t count = 0;
    for (int64_t i = 0; i < positions; i++) {
        const uint32_t at = w->order[i] = (uint32_t)w->words[i];
        int fresh = !i;
        for (int part = 0; part < PARTS && !fresh; part++)
            fresh = w->places[part][at] != w->places[part][w->order[i - 1]];
        if (fresh) starts[count++] = i;
        w->sources[at] = (uint32_t)(count - 1);
    }
    starts[count] = positions;
    return count;
}

static int64_t each_position(work *w, int64_t positions, int64_t *starts) {
    for (int64_t i = 0; i < positions; i++) starts[i] = w->sources[i] = w->order[i] = (uint32_t)i;
    starts[positions] = positions;
    return positions;
}

/* The square root of the minutes before the last token, rounded as assemble/plan.py says. */
static inline int32_t age_of(int64_t seconds, int64_t ages) {
    const float before = (float)seconds, least = before < 1e-6f ? 1e-6f : before;
    const int64_t age = (int64_t)(float)sqrt((double)(least / 60.0f));
    return (int32_t)(age < ages ? age : ages - 1);
}

/* Where rows begin among the positions and among the tokens; fillers share what is missing to the fixed length. */
static void divide(const batch *b, int64_t *positions, int64_t *tokens) {
    const int64_t missing = b->fillers * (b->most - b->context - 1) - b->events;
    positions[0] = tokens[0] = 0;
    for (int64_t r = 0; r < b->samples + b->fillers; r++) {
        const int64_t filler = r - b->samples;
        const int64_t history = filler < 0 ? b->offsets[r + 1] - b->offsets[r]
                                           : missing / b->fillers + (filler < missing % b->fillers);
        positions[r + 1] = positions[r] + history + 1;
        tokens[r + 1] = tokens[r] + history + 1 + b->context;
    }
}

/* Rows of a table that the positions look up. */
static void table_ids(const batch *b, int part, const int64_t *positions, int64_t total, uint32_t *ids) {
    const int64_t *history = b->values + b->context * b->samples + part * b->events, rows = b->rows[part];
    const int64_t *candidates = b->values + b->context * b->samples + PARTS * b->events + part * b->samples;
    for (int64_t r = 0; r < b->samples; r++) {
        uint32_t *to = ids + positions[r];
        for (int64_t i = b->offsets[r]; i < b->offsets[r + 1]; i++) *to++ = row_of(history[i], rows);
        *to = row_of(candidates[r], rows);
    }
    memset(ids + positions[b->samples], 0, (size_t)(total - positions[b->samples]) * sizeof *ids);
}

static void codes_and_times(const batch *b, const int64_t *positions, const int64_t *tokens, int64_t *codes,
                            int64_t *times) {
    for (int64_t r = 0; r < b->samples + b->fillers; r++) {
        const int64_t first = positions[r], history = positions[r + 1] - first - 1;
        int64_t *at = times + tokens[r];
        memset(at, 0, (size_t)(tokens[r + 1] - tokens[r]) * sizeof *at);
        codes[first + history] = CODES;
        if (r >= b->samples) {
            memset(codes + first, 0, (size_t)history * sizeof *codes);
            continue;
        }
        for (int64_t i = 0; i < history; i++) codes[first + i] = b->actions[b->offsets[r] + i] & (CODES - 1);
        if (history) memcpy(at + b->context, b->times + b->offsets[r], (size_t)history * sizeof *at);
        at[b->context + history] = b->queries[r];
    }
}

typedef struct {
    int64_t *index, *order, *starts;
} pick;

static pick next_pick(void ***out) {
    const pick p = {(*out)[0], (*out)[1], (*out)[2]};
    *out += 3;
    return p;
}

/* How tokens are assembled: what each position reads and, for the backward pass, the tokens of each source and of each
 * pair of age and action. */
static void plan(const batch *b, work *w, const int64_t *positions, const int64_t *tokens, const int64_t *codes,
                 const int64_t *times, void **out) {
    int32_t *source = out[0], *action = out[1], *age = out[2], *source_order = out[3], *kind_order = out[5];
    const int64_t rows = b->samples + b->fillers, actions = b->shared ? CODES + 1 : 1;
    int64_t *token_of = w->numbers;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t last = times[tokens[r + 1] - 1];
        for (int64_t t = tokens[r]; t < tokens[r + 1]; t++) {
            const int64_t at = positions[r] + t - tokens[r] - b->context;
            age[t] = age_of(last - times[t], b->ages);
            int64_t kind = actions;
            if (t - tokens[r] >= b->context) {
                kind = action[at] = b->shared ? (int32_t)codes[at] : 0;
                source[at] = (int32_t)w->sources[at];
                token_of[at] = t;
            }
            w->index[t] = age[t] * (actions + 1) + kind;
        }
    }
    for (int64_t i = 0; i < positions[rows]; i++) source_order[i] = (int32_t)token_of[w->order[i]];
    group(w->index, tokens[rows], b->ages * (actions + 1), token_of, out[6]);
    for (int64_t t = 0; t < tokens[rows]; t++) kind_order[t] = (int32_t)token_of[t];
}

static void fill_picks(pick p, int64_t count, int64_t fixed, int64_t rows) {
    if (!fixed) return;
    for (int64_t i = count; i < fixed; i++) {
        p.index[i] = rows - 1;
        p.order[i] = i;
    }
    p.starts[rows] = fixed;
}

static void write_all(const batch *b, work *w, int64_t *counts, int64_t *longest, void **out) {
    const int64_t rows = b->samples + b->fillers, tables = PARTS + b->context;
    void **values = out, **contexts = out + tables, **parts = contexts + 3 * b->context, **planned = parts + 3 * PARTS;
    void **rest = planned + 8 + 3;
    int64_t *codes = rest[0], *tokens = rest[1], *positions = rest[2], *times = rest[3], unique[PARTS], fixed[PARTS];
    divide(b, positions, tokens);
    const int64_t total = positions[rows];
    codes_and_times(b, positions, tokens, codes, times);
    for (int part = 0; part < PARTS; part++) {
        table_ids(b, part, positions, total, w->ids);
        unique[part] = distinct(w, w->ids, total, b->rows[part], values[part], w->places[part]);
        fixed[part] = counts[part] ? counts[part] : unique[part];
        fill_rows(w, values[part], unique[part], fixed[part]);
        counts[part] = fixed[part];
    }
    for (int64_t x = 0; x < b->context; x++) {
        const int64_t table = PARTS + x;
        for (int64_t r = 0; r < rows; r++)
            w->ids[r] = r < b->samples ? row_of(b->values[x * b->samples + r], b->rows[table]) : 0;
        const int64_t found = distinct(w, w->ids, rows, b->rows[table], values[table], w->sources);
        if (!counts[table]) counts[table] = found;
        fill_rows(w, values[table], found, counts[table]);
        const pick p = next_pick(&contexts);
        for (int64_t r = 0; r < rows; r++) p.index[r] = w->sources[r];
        group(p.index, rows, counts[table], p.order, p.starts);
    }
    int64_t *source_starts = planned[5], all = counts[tables];
    const int64_t count = b->shared ? entities(w, total, unique, source_starts) : each_position(w, total, source_starts);
    for (int part = 0; part < PARTS; part++) {
        const pick p = next_pick(&parts);
        for (int64_t e = 0; e < count; e++) p.index[e] = w->places[part][w->order[source_starts[e]]];
        group(p.index, count, fixed[part], p.order, p.starts);
        fill_picks(p, count, all, fixed[part]);
    }
    for (int64_t e = count + 1; e <= all; e++) source_starts[e] = total;
    counts[tables] = all = all ? all : count;
    if (planned[0]) memcpy(planned[0], tokens, (size_t)(rows + 1) * sizeof *tokens);
    plan(b, w, positions, tokens, codes, times, planned + 1);
    void **last = planned + 8;
    const pick p = next_pick(&last);
    for (int64_t r = 0; r < b->samples; r++) p.index[r] = w->sources[positions[r + 1] - 1];
    group(p.index, b->samples, all, p.order, p.starts);
    if (rest[4]) memcpy(rest[4], b->queries, (size_t)b->samples * sizeof *b->queries);
    if (rest[5]) memcpy(rest[5], b->labels, (size_t)b->samples * sizeof *b->labels);
    if (b->rates && rest[6]) memcpy(rest[6], b->rates, (size_t)(b->samples * b->rated) * sizeof *b->rates);
    *longest = b->fillers ? b->most : *longest;
}

/* `counts`: how many distinct rows of each table and entities to fill up to, 0 for no more than there are; then how many
 * were written. `longest`: tokens of the longest row. */
int64_t arrange(const batch *b, int64_t *counts, int64_t *longest, void **out) {
    if (b->offsets[0] || b->offsets[b->samples] != b->events) return NO_OFFSETS;
    *longest = 0;
    for (int64_t r = 0; r < b->samples; r++) {
        const int64_t tokens = b->offsets[r + 1] - b->offsets[r] + 1 + b->context;
        if (b->offsets[r + 1] < b->offsets[r]) return NO_OFFSETS;
        if (tokens > *longest) *longest = tokens;
    }
    if (*longest > b->most) return TOO_LONG;
    const int64_t rows = b->samples + b->fillers, events = b->fillers ? b->fillers * (b->most - b->context - 1) : b->events;
    const size_t positions = (size_t)(events + rows), tokens = positions + (size_t)(rows * b->context);
    const size_t size = positions * (2 * sizeof(uint64_t) + (PARTS + 3 + FEW) * sizeof(uint32_t)) + 2 * tokens * sizeof(int64_t);
    uint8_t *memory = malloc(size + positions + 1);
    if (!memory) return NO_MEMORY;
    work w = {.words = (uint64_t *)memory};
    w.others = w.words + positions;
    w.index = (int64_t *)(w.others + positions);
    w.numbers = w.index + tokens;
    uint32_t *narrow = (uint32_t *)(w.numbers + tokens);
    for (int part = 0; part < PARTS; part++, narrow += positions) w.places[part] = narrow;
    w.ids = narrow;
    w.sources = narrow + positions;
    w.order = narrow + 2 * positions;
    w.bins = narrow + 3 * positions;
    w.used = memory + size;
    write_all(b, &w, counts, longest, out);
    free(memory);
    return FINE;
}
