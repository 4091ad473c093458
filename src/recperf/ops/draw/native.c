/* Drawing a batch on a CPU: plan.py defines the random numbers, reference.py the result. Loops over counters have no
 * calls and no branches, so that the compiler vectorises them. Callers split the work; nothing here starts threads. */
#include <math.h>
#include <stdint.h>

enum { UNIFORM, ZIPF };
enum { CHUNK = 128, LANES = 16 };

/* A word is a long chain of dependent instructions: several chains at a time keep the core busy. */
#define SEVERAL _Pragma("GCC unroll 4")

typedef struct {
    const int64_t *rows, *max_ids, *first, *factor, *shift;
    const double *slope, *start;
    const float *weights;
    const uint32_t *score_keys;
    int64_t samples, features, dense, first_dense, first_length, first_label;
    int64_t whole, begin, step; /* samples of the whole batch, and which of them are drawn */
    double power;
    float dense_scale;
    int32_t kind, fixed, distinct;
    uint32_t key[2];
} plan;

static inline uint32_t mix(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x7FEB352Du;
    word = (word ^ (word >> 15)) * 0x846CA68Bu;
    return word ^ (word >> 16);
}

static inline uint32_t draw(uint32_t first, uint32_t second, uint32_t counter) {
    return mix(mix(counter ^ first) + second);
}

static inline int64_t within(double place, int64_t rows) { return (int64_t)fmin(fmax(place, 0.0), (double)(rows - 1)); }

static int64_t zipf(const plan *p, int64_t f, uint32_t word) {
    double power = (double)word * 0x1p-32 * p->slope[f] + p->start[f];
    if (p->power != 0) power = log(power) * p->power;
    const int64_t rank = within(exp(power) - 0.5, p->rows[f]);
    return (rank * p->factor[f] + p->shift[f]) % p->rows[f];
}

/* Ids of feature f with the counters from `counter` on: all words first, so that computing them vectorises. */
static void draw_some(const plan *p, int64_t f, uint32_t counter, int64_t count, int64_t *ids) {
    const uint32_t first = p->key[0], second = p->key[1], rows = (uint32_t)p->rows[f];
    for (int64_t begin = 0; begin < count; begin += CHUNK) {
        uint32_t words[CHUNK];
        const int64_t left = count - begin < CHUNK ? count - begin : CHUNK;
        int64_t *out = ids + begin;
        SEVERAL
        for (int64_t i = 0; i < left; i++) words[i] = draw(first, second, counter + (uint32_t)(begin + i));
        if (p->kind == UNIFORM)
            for (int64_t i = 0; i < left; i++) out[i] = (int64_t)(((uint64_t)words[i] * rows) >> 32);
        else
            for (int64_t i = 0; i < left; i++) out[i] = zipf(p, f, words[i]);
    }
}

/* The place of sample b in the whole batch, by which its random numbers are known. */
static inline int64_t number_of(const plan *p, int64_t b) { return p->begin + b * p->step; }

static int64_t drawn_length(const plan *p, int64_t f, int64_t bag) {
    if (p->fixed) return p->max_ids[f];
    const int64_t number = number_of(p, bag - f * p->samples);
    const uint64_t word = draw(p->key[0], p->key[1], (uint32_t)(p->first_length + f * p->whole + number));
    const int64_t length = (int64_t)((word * (uint64_t)p->max_ids[f] + (1u << 31)) >> 32);
    return length < 1 ? 1 : length;
}

/* Moves the first occurrence of each id to the front; returns their number. */
static int64_t drop_repeats(int64_t *ids, int64_t count) {
    int64_t unique = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t j = 0;
        while (j < unique && ids[j] != ids[i]) j++;
        if (j == unique) ids[unique++] = ids[i];
    }
    return unique;
}

static uint32_t counter_of(const plan *p, int64_t f, int64_t bag) {
    return (uint32_t)(p->first[f] + number_of(p, bag - f * p->samples) * p->max_ids[f]);
}

/* Lengths of the bags first..last, each one slot after its bag, where the running sum needs them. */
void draw_lengths(const plan *p, int64_t *offsets, int64_t first, int64_t last) {
    int64_t ids[CHUNK];
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t f = bag / p->samples;
        int64_t length = drawn_length(p, f, bag);
        if (p->distinct) {
            draw_some(p, f, counter_of(p, f, bag), length, ids);
            length = drop_repeats(ids, length);
        }
        offsets[bag + 1] = length;
    }
}

void add_up(int64_t *offsets, int64_t bags) {
    offsets[0] = 0;
    for (int64_t bag = 0; bag < bags; bag++) offsets[bag + 1] += offsets[bag];
}

static int64_t sum_scores(const int64_t *ids, int64_t count, uint32_t first, uint32_t second) {
    int64_t total = 0;
    SEVERAL
    for (int64_t i = 0; i < count; i++) total += (int32_t)mix(mix((uint32_t)ids[i] ^ first) + second) >> 8;
    return total;
}

/* Ids and the planted score of the bags first..last. */
void draw_ids(const plan *p, const int64_t *offsets, int64_t *values, float *scores, int64_t first, int64_t last) {
    for (int64_t bag = first; bag < last; bag++) {
        const int64_t f = bag / p->samples, length = offsets[bag + 1] - offsets[bag];
        const uint32_t counter = counter_of(p, f, bag);
        int64_t *ids = values + offsets[bag];
        if (p->distinct) {
            int64_t drawn[CHUNK];
            const int64_t count = drawn_length(p, f, bag);
            draw_some(p, f, counter, count, drawn);
            drop_repeats(drawn, count);
            for (int64_t i = 0; i < length; i++) ids[i] = drawn[i];
        } else {
            draw_some(p, f, counter, length, ids);
        }
        const int64_t total = sum_scores(ids, length, p->score_keys[2 * f], p->score_keys[2 * f + 1]);
        scores[bag] = (float)total * 0x1p-23f / sqrtf((float)length);
    }
}

/* Dense features of one sample; returns their part of the log odds. */
static float draw_dense(const plan *p, uint32_t counter, float *dense) {
    const uint32_t first = p->key[0], second = p->key[1];
    const float scale = p->dense_scale, *weights = p->weights;
    const int64_t count = p->dense;
    SEVERAL
    for (int64_t i = 0; i < count; i++)
        dense[i] = (float)((int32_t)draw(first, second, counter + (uint32_t)i) >> 8) * scale;
    float lanes[LANES] = {0}, total = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += dense[i + lane] * weights[i + lane];
    for (; i < count; i++) total += dense[i] * weights[i];
    for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
    return total;
}

/* Dense features and labels of the samples first..last. */
void draw_samples(const plan *p, const float *scores, float *dense, float *labels, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        const int64_t number = number_of(p, b);
        float logit = draw_dense(p, (uint32_t)(p->first_dense + number * p->dense), dense + b * p->dense);
        for (int64_t f = 0; f < p->features; f++) logit += scores[f * p->samples + b];
        const uint32_t word = draw(p->key[0], p->key[1], (uint32_t)(p->first_label + number));
        labels[b] = (float)(word >> 8) * 0x1p-24f < 1.0f / (1.0f + expf(-logit)) ? 1.0f : 0.0f;
    }
}
