/* The softmax over a catalogue, its backward pass, and the items with the highest scores. Scores are computed in blocks
 * of BLOCK items by POSITIONS positions, which stay in the caches, with the positions across a vector: sums and maxima
 * over items then work on whole vectors.
 *
 * Shapes: T positions, I items, D width, P = D filled up with zeros to whole tiles. The positions come packed twice, in
 * groups of POSITIONS: by row (T x P), and by column, every group by itself (P x POSITIONS).
 *
 * A thread has groups of positions or blocks of items of its own, and every sum has one order, so that threads do not
 * change a bit. */

#include "../vectors.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define POSITIONS 96
#define BLOCK 96
#define TILE 16
#define ACROSS 3
#define PANEL (ACROSS * LANES)
/* Vectors of sums that fit into registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define SUMS 24
#else
#define SUMS 12
#endif
#define DOWN (SUMS / ACROSS)

typedef struct {
    const float *items, *columns, *rows, *bias; /* bias: null without one */
    int64_t count, dim, positions;
    float scale;
    /* Null where no item is masked: the items of all masks, sorted in each; where that of a position begins and ends,
     * and its target, which is never masked. Item 0 of this call is number `first`. */
    const int64_t *masked, *begins, *ends, *targets;
    int64_t first;
} Call;

/* 2^x for x up to 126; below -100 it stays. Good to 2 units in the last place, 1 of 0, and NaN stays NaN. Times a weight
 * it is no denormal number, which processors multiply a hundred times more slowly. */
ALWAYS vec power_of_two(vec x) {
    const vec shift = spread(12582912.0f);
    x = larger(spread(-100.0f), x);
    const vec moved = x + shift;
    const vec rest = x - (moved - shift);
    vec sum = mul_add(rest, spread(1.32764725e-3f), spread(9.67554096e-3f), 1);
    sum = mul_add(sum, rest, spread(5.55071309e-2f), 1);
    sum = mul_add(sum, rest, spread(2.40221202e-1f), 1);
    sum = mul_add(sum, rest, spread(6.93146944e-1f), 1);
    sum = mul_add(sum, rest, spread(1.0f), 1);
    /* The low bits of `moved` are the whole number itself. */
    return (vec)((ivec)sum + ((ivec)moved << 23));
}

static int64_t padded(int64_t count) { return (count + TILE - 1) / TILE * TILE; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The positions of a group, filled up to whole panels. */
static int64_t in_panels(int64_t positions) { return (positions + PANEL - 1) / PANEL * PANEL; }

/* A block of items as it is, or in `room`, filled up with zeros to whole tiles and a whole block. */
static const float *wide_rows(const Call *call, int64_t first, int64_t count, float *room) {
    const int64_t dim = call->dim, wide = padded(dim);
    const float *from = call->items + first * dim;
    if (wide == dim && count == BLOCK) return from;
    for (int64_t n = 0; n < count; n++) {
        memcpy(room + n * wide, from + n * dim, dim * sizeof(float));
        memset(room + n * wide + dim, 0, (wide - dim) * sizeof(float));
    }
    memset(room + count * wide, 0, (BLOCK - count) * wide * sizeof(float));
    return room;
}

/* Products of DOWN items with a panel of positions. */
APART void products(const float *items, int64_t wide, const float *columns, int64_t dim, float *out) {
    vec held[DOWN][ACROSS] = {0};
    int64_t a = 0;
    do {
        vec column[ACROSS];
        for (int p = 0; p < ACROSS; p++) column[p] = *(const vec *)(columns + a * POSITIONS + p * LANES);
        for (int i = 0; i < DOWN; i++)
            for (int p = 0; p < ACROSS; p++)
                held[i][p] = mul_add(spread(items[i * wide + a]), column[p], held[i][p], 1);
    } while (++a < dim);
    for (int i = 0; i < DOWN; i++)
        for (int p = 0; p < ACROSS; p++) *(vec *)(out + i * POSITIONS + p * LANES) = held[i][p];
}

/* Products of a block of items, P wide, with a group of positions: BLOCK x POSITIONS. */
static void block_products(const Call *call, const float *items, int64_t count, int64_t group, float *out) {
    const int64_t wide = padded(call->dim), positions = least(POSITIONS, call->positions - group);
    for (int64_t p = 0; p < positions; p += PANEL)
        for (int64_t j = 0; j < count; j += DOWN)
            products(items + j * wide, wide, call->columns + group * wide + p, call->dim, out + j * POSITIONS + p);
}

/* Adds to each of some rows of `out` the sum of `count` rows, each times its weight: `across` vectors of them. Weights
 * for one row of `out` lie `step` apart, those of the next begin `next` later. A block is summed by itself first, for a
 * tenth of the rounding. */
ALWAYS void weighted(const float *weights, int64_t step, int64_t next, const float *rows, int64_t wide, int64_t count,
                     float *out, int across) {
    const int down = SUMS / across;
    vec held[SUMS] = {0};
    for (int64_t n = 0; n < count; n++) {
        vec row[4];
#pragma GCC unroll 4
        for (int p = 0; p < across; p++) row[p] = *(const vec *)(rows + n * wide + p * LANES);
#pragma GCC unroll 24
        for (int i = 0; i < down; i++)
#pragma GCC unroll 4
            for (int p = 0; p < across; p++)
                held[i * across + p] = mul_add(spread(weights[n * step + i * next]), row[p], held[i * across + p], 1);
    }
#pragma GCC unroll 24
    for (int i = 0; i < down; i++)
#pragma GCC unroll 4
        for (int p = 0; p < across; p++) *(vec *)(out + i * wide + p * LANES) += held[i * across + p];
}

#define WEIGHTED(name, step, next, across)                                                                              \
    APART void name(const float *weights, const float *rows, int64_t wide, int64_t count, float *out) {                 \
        weighted(weights, step, next, rows, wide, count, out, across);                                                  \
    }
WEIGHTED(to_positions_1, POSITIONS, 1, 1)
WEIGHTED(to_positions_2, POSITIONS, 1, 2)
WEIGHTED(to_positions_3, POSITIONS, 1, 3)
WEIGHTED(to_positions_4, POSITIONS, 1, 4)
WEIGHTED(to_items_1, 1, POSITIONS, 1)
WEIGHTED(to_items_2, 1, POSITIONS, 2)
WEIGHTED(to_items_3, 1, POSITIONS, 3)
WEIGHTED(to_items_4, 1, POSITIONS, 4)

typedef void (*Weighted)(const float *, const float *, int64_t, int64_t, float *);
static const Weighted to_positions[] = {to_positions_1, to_positions_2, to_positions_3, to_positions_4};
static const Weighted to_items[] = {to_items_1, to_items_2, to_items_3, to_items_4};

/* Adds products of a block of weights (BLOCK x POSITIONS) and `count` rows to `rows_out` rows of `out`, P wide; the weights
 * for one of these begin `next` after those for the row before. */
static void add_weighted(const Weighted *ways, const float *weights, int64_t next, const float *rows, int64_t wide,
                         int64_t count, int64_t rows_out, float *out) {
    for (int64_t c = 0, across; c < wide / LANES; c += across) {
        const int64_t left = wide / LANES - c;
        across = left % 4 && left % 3 == 0 ? 3 : least(left, 4);
        for (int64_t i = 0; i < rows_out; i += SUMS / across)
            ways[across - 1](weights + i * next, rows + c * LANES, wide, count, out + i * wide + c * LANES);
    }
}

/* The first place from `at` on whose item is not below the number. */
static int64_t place_of(const Call *call, int64_t at, int64_t end, int64_t number) {
    while (at < end) {
        const int64_t middle = at + (end - at) / 2;
        if (call->masked[middle] < number)
            at = middle + 1;
        else
            end = middle;
    }
    return at;
}

/* Sets the scores of masked items in a block; `cursors` are the places of the next ones, from the group's first. */
static void mask(const Call *call, int64_t group, int64_t item, int64_t count, int64_t *cursors, float value,
                 float *scores) {
    const int64_t positions = least(POSITIONS, call->positions - group), begin = call->first + item;
    for (int64_t i = 0; i < positions; i++) {
        const int64_t end = call->ends[group + i];
        int64_t at = cursors[i];
        for (; at < end && call->masked[at] < begin + count; at++)
            if (call->masked[at] != call->targets[group + i])
                scores[(call->masked[at] - begin) * POSITIONS + i] = value;
        cursors[i] = at;
    }
}

static void set_cursors(const Call *call, int64_t group, int64_t count, int64_t item, int64_t *cursors) {
    for (int64_t i = 0; i < count; i++)
        cursors[i] = place_of(call, call->begins[group + i], call->ends[group + i], call->first + item);
}

/* Turns a block of scores into powers of two, over the highest score of each position so far. `part` takes their sums,
 * and `fade` by how much sums of earlier blocks shrink. */
static void raise(const Call *call, int64_t item, int64_t count, int64_t positions, float *scores, float *high,
                  float *part, float *fade) {
    for (int64_t p = 0; p < positions; p += LANES) {
        const vec before = *(vec *)(high + p);
        vec most = before, sum = {0};
        for (int64_t n = 0; n < count; n++) {
            vec *score = (vec *)(scores + n * POSITIONS + p);
            *score = mul_add(*score, spread(call->scale), spread(call->bias ? call->bias[item + n] : 0.0f), 1);
            most = larger(*score, most);
        }
        for (int64_t n = 0; n < count; n++) {
            vec *score = (vec *)(scores + n * POSITIONS + p);
            *score = power_of_two(*score - most);
            sum += *score;
        }
        *(vec *)(high + p) = most;
        *(vec *)(part + p) = sum;
        *(vec *)(fade + p) = power_of_two(before - most);
    }
}

static void multiply_rows(float *rows, int64_t wide, const float *factors, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (factors[i] == 1.0f) continue;
        for (int64_t c = 0; c < wide; c++) rows[i * wide + c] *= factors[i];
    }
}

/* For groups first..last the logarithm to base 2 of each position's sum of powers of two (T), and unless null `mean`: the
 * items, weighted by their probabilities (T x P). `scale` and `bias` are for base 2. */
int softmax_forward(const Call *call, int64_t first, int64_t last, double *logs, float *mean) {
    const int64_t wide = padded(call->dim);
    float *scores = aligned_alloc(64, (BLOCK * wide + BLOCK * POSITIONS + 3 * POSITIONS) * sizeof(float));
    if (!scores) return 1;
    float *room = scores + BLOCK * POSITIONS, *high = room + BLOCK * wide, *part = high + POSITIONS,
          *fade = part + POSITIONS;
    double total[POSITIONS];
    int64_t cursors[POSITIONS];
    for (int64_t group = first * POSITIONS; group < least(last * POSITIONS, call->positions); group += POSITIONS) {
        const int64_t positions = least(POSITIONS, call->positions - group), across = in_panels(positions);
        float *out = mean ? mean + group * wide : 0;
        for (int64_t i = 0; i < POSITIONS; i++) high[i] = -1e30f, total[i] = 0;
        if (mean) memset(out, 0, POSITIONS * wide * sizeof(float));
        if (call->masked) set_cursors(call, group, positions, 0, cursors);
        for (int64_t item = 0; item < call->count; item += BLOCK) {
            const int64_t count = least(BLOCK, call->count - item);
            const float *items = wide_rows(call, item, count, room);
            block_products(call, items, count, group, scores);
            if (call->masked) mask(call, group, item, count, cursors, -INFINITY, scores);
            raise(call, item, count, across, scores, high, part, fade);
            for (int64_t i = 0; i < across; i++) total[i] = total[i] * fade[i] + part[i];
            if (!mean) continue;
            multiply_rows(out, wide, fade, across);
            add_weighted(to_positions, scores, 1, items, wide, count, across, out);
        }
        for (int64_t i = 0; i < positions; i++) {
            logs[group + i] = high[i] + log2(total[i]);
            fade[i] = (float)(1.0 / total[i]);
        }
        if (mean) multiply_rows(out, wide, fade, positions);
    }
    free(scores);
    return 0;
}

/* For blocks first..last of the items: to each the sum of the positions (I x D), weighted by its probability there times
 * their weight (T), and times `scale`; and unless null the sum of these products (I). */
int softmax_items(const Call *call, int64_t first, int64_t last, const float *logs, const float *weights, float scale,
                  float *out, float *sums) {
    const int64_t dim = call->dim, wide = padded(dim), groups = (call->positions + POSITIONS - 1) / POSITIONS;
    float *scores = aligned_alloc(64, (2 * BLOCK * wide + BLOCK * POSITIONS) * sizeof(float));
    int64_t *cursors = malloc((call->masked ? groups * POSITIONS : 1) * sizeof(int64_t));
    if (!scores || !cursors) {
        free(scores);
        free(cursors);
        return 1;
    }
    float *room = scores + BLOCK * POSITIONS, *added = room + BLOCK * wide;
    if (call->masked) set_cursors(call, 0, call->positions, first * BLOCK, cursors);
    for (int64_t item = first * BLOCK; item < least(last * BLOCK, call->count); item += BLOCK) {
        const int64_t count = least(BLOCK, call->count - item);
        const float *items = wide_rows(call, item, count, room);
        double total[BLOCK] = {0};
        memset(added, 0, BLOCK * wide * sizeof(float));
        for (int64_t group = 0; group < call->positions; group += POSITIONS) {
            const int64_t positions = least(POSITIONS, call->positions - group), across = in_panels(positions);
            block_products(call, items, count, group, scores);
            for (int64_t n = 0; n < count; n++) {
                const vec bias = spread(call->bias ? call->bias[item + n] : 0.0f);
                for (int64_t p = 0; p < across; p += LANES) {
                    vec *score = (vec *)(scores + n * POSITIONS + p);
                    const vec over = bias - *(const vec *)(logs + group + p);
                    const vec power = power_of_two(mul_add(*score, spread(call->scale), over, 1));
                    *score = power * *(const vec *)(weights + group + p);
                }
            }
            if (call->masked) mask(call, group, item, count, cursors + group, 0.0f, scores);
            for (int64_t n = 0; sums && n < count; n++)
                for (int64_t i = 0; i < positions; i++) total[n] += scores[n * POSITIONS + i];
            add_weighted(to_items, scores, POSITIONS, call->rows + group * wide, wide, positions, count, added);
        }
        for (int64_t n = 0; n < count; n++) {
            for (int64_t c = 0; c < dim; c++) out[(item + n) * dim + c] = added[n * wide + c] * scale;
            if (sums) sums[item + n] = (float)total[n];
        }
    }
    free(scores);
    free(cursors);
    return 0;
}

/* The product of a position and an item, added up in the same order and rounded as in a block. */
static float one_product(const Call *call, int64_t position, int64_t item) {
    const int64_t wide = padded(call->dim), group = position / POSITIONS * POSITIONS;
    const float *column = call->columns + group * wide + (position - group), *row = call->items + item * call->dim;
    vec sum = {0};
    for (int64_t a = 0; a < call->dim; a++) sum = mul_add(spread(row[a]), spread(column[a * POSITIONS]), sum, 1);
    return mul_add(sum, spread(call->scale), spread(call->bias ? call->bias[item] : 0.0f), 1)[0];
}

/* Puts an item into a list whose scores descend; one with an equal score stays before it. */
static void insert(float *scores, int64_t *items, int64_t k, float score, int64_t item) {
    int64_t at = k - 1;
    for (; at > 0 && scores[at - 1] < score; at--) scores[at] = scores[at - 1], items[at] = items[at - 1];
    scores[at] = score;
    items[at] = item;
}

/* Puts the scores of LANES positions that are high enough into their lists. */
static void offer(const Call *call, int64_t group, int64_t p, int64_t item, int64_t count, const float *scores,
                  float *enough, int64_t k, float *highest, int64_t *numbers) {
    vec most = spread(-INFINITY);
    for (int64_t n = 0; n < count; n++) most = larger(*(const vec *)(scores + n * POSITIONS + p), most);
    for (int64_t i = p; i < p + LANES; i++) {
        float *list = highest + (group + i) * k;
        if (!(most[i - p] > enough[i])) continue;
        for (int64_t n = 0; n < count; n++) {
            const float score = scores[n * POSITIONS + i];
            if (!(score > enough[i])) continue;
            insert(list, numbers + (group + i) * k, k, score, call->first + item + n);
            enough[i] = list[k - 1];
        }
    }
}

/* Adds the items of this call to the lists of the k highest scores of groups first..last (T x k), which descend and begin
 * with -infinity. With `own`, the scores of targets, `reached` counts the items whose score is not below it: that of a
 * masked item is -infinity. */
int softmax_top(const Call *call, int64_t first, int64_t last, int64_t k, float *highest, int64_t *numbers,
                const float *own, int64_t *reached) {
    const int64_t wide = padded(call->dim);
    float *scores = aligned_alloc(64, (BLOCK * wide + BLOCK * POSITIONS + 2 * POSITIONS) * sizeof(float));
    if (!scores) return 1;
    float *room = scores + BLOCK * POSITIONS, *enough = room + BLOCK * wide, *limits = enough + POSITIONS;
    int64_t cursors[POSITIONS];
    for (int64_t group = first * POSITIONS; group < least(last * POSITIONS, call->positions); group += POSITIONS) {
        const int64_t positions = least(POSITIONS, call->positions - group), across = in_panels(positions);
        for (int64_t i = 0; i < POSITIONS; i++) {
            enough[i] = i < positions ? highest[(group + i) * k + k - 1] : INFINITY;
            limits[i] = i < positions && own ? own[group + i] : 0;
        }
        if (call->masked) set_cursors(call, group, positions, 0, cursors);
        for (int64_t item = 0; item < call->count; item += BLOCK) {
            const int64_t count = least(BLOCK, call->count - item);
            block_products(call, wide_rows(call, item, count, room), count, group, scores);
            for (int64_t n = 0; n < count; n++)
                for (int64_t p = 0; p < across; p += LANES) {
                    vec *score = (vec *)(scores + n * POSITIONS + p);
                    *score = mul_add(*score, spread(call->scale), spread(call->bias ? call->bias[item + n] : 0.0f), 1);
                }
            if (call->masked) mask(call, group, item, count, cursors, -INFINITY, scores);
            for (int64_t p = 0; p < across; p += LANES) {
                ivec not_below = {0};
                offer(call, group, p, item, count, scores, enough, k, highest, numbers);
                for (int64_t n = 0; own && n < count; n++)
                    not_below += (*(vec *)(scores + n * POSITIONS + p) < *(vec *)(limits + p)) + 1;
                for (int64_t i = p; own && i < least(p + LANES, positions); i++) reached[group + i] += not_below[i - p];
            }
        }
    }
    free(scores);
    return 0;
}

/* The score of each position's target among the items of this call, into `own` (T). */
void softmax_own(const Call *call, const int64_t *targets, float *own) {
    for (int64_t i = 0; i < call->positions; i++) {
        const int64_t item = targets[i] - call->first;
        if (item >= 0 && item < call->count) own[i] = one_product(call, i, item);
    }
}
