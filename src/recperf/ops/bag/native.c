/* Embedding bags on a CPU. The table does not fit any cache, so that each row is a miss to DRAM: rows that will be
 * needed soon are prefetched. Callers split the work; nothing here starts threads. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, FAR = 16, NEAR = 3 };

/* FAR rows ahead to the second-level cache, which has more requests in flight, and NEAR rows ahead to the first. */
static void prefetch_far(const float *row, int64_t dim) {
    for (int64_t k = 0; k < dim; k += LINE / 4) __builtin_prefetch(row + k, 0, 2);
}

static void prefetch_near(const float *row, int64_t dim) {
    for (int64_t k = 0; k < dim; k += LINE / 4) __builtin_prefetch(row + k, 0, 3);
}

static uint64_t finalise(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

/* The table row of each id first..last: ops/hashing.py says how, and a test holds the two together. */
void hash_rows(const int64_t *ids, int64_t *rows, int64_t first, int64_t last, uint64_t key, uint64_t count) {
    for (int64_t i = first; i < last; i++)
        rows[i] = (int64_t)(((finalise(finalise((uint64_t)ids[i] + key) + key) >> 32) * count) >> 32);
}

/* Check the bags first..last and write the row that each of their ids has in the stacked tables to `stacked`. The tables
 * of the features begin at `starts`; without starts there is one table, an id is its row, and nothing is written.
 * Returns ALL_KNOWN, BAD_OFFSETS, BAD_STARTS, or the place of an id that is outside its table. */
enum { ALL_KNOWN = -1, BAD_OFFSETS = -2, BAD_STARTS = -3 };

int64_t stack_rows(const int64_t *ids, const int64_t *offsets, const int64_t *starts, int64_t *stacked, int64_t first,
                   int64_t last, int64_t bags, int64_t features, int64_t rows, int64_t count) {
    if (offsets[0] != 0 || offsets[bags] != count) return BAD_OFFSETS;
    for (int64_t bag = first; bag < last; bag++)
        if (offsets[bag] < 0 || offsets[bag] > offsets[bag + 1] || offsets[bag + 1] > count) return BAD_OFFSETS;
    const int64_t bags_per_feature = bags / features;
    for (int64_t bag = first; bag < last;) {
        const int64_t feature = bag / bags_per_feature, after = (feature + 1) * bags_per_feature;
        const int64_t end = offsets[after < last ? after : last];
        const int64_t start = starts ? starts[feature] : 0;
        const int64_t stop = feature + 1 < features ? starts[feature + 1] : rows;
        if (start < 0 || start > stop || stop > rows) return BAD_STARTS;
        const uint64_t own = (uint64_t)(stop - start);
        uint64_t outside = 0;
        for (int64_t i = offsets[bag]; i < end; i++) outside |= (uint64_t)ids[i] >= own;
        if (outside)
            for (int64_t i = offsets[bag];; i++)
                if ((uint64_t)ids[i] >= own) return i;
        if (starts)
            for (int64_t i = offsets[bag]; i < end; i++) stacked[i] = ids[i] + start;
        bag = after < last ? after : last;
    }
    return ALL_KNOWN;
}

/* A register's floats, which may lie anywhere, and the number of registers that hold sums. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
enum { SUMS = 16 };
#elif defined(__AVX__)
#define VECTOR_BYTES 32
enum { SUMS = 8 };
#else
#define VECTOR_BYTES 16
enum { SUMS = 16 };
#endif
typedef float vector __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
enum { LANES = VECTOR_BYTES / 4 };

/* Sums `sums` registers' columns of a bag: a sum in memory would be read and written again for every row. With each
 * row these columns of later rows are prefetched, a line at a time, so that requests to memory never pause. */
static inline __attribute__((always_inline)) void sum_columns(const float *table, const int64_t *rows, int64_t count,
                                                              int64_t left, int64_t dim, float *out, const int sums) {
    vector sum[SUMS];
    for (int k = 0; k < sums; k++) sum[k] = (vector){0};
    for (int64_t i = 0; i < count; i++) {
        const float *row = table + rows[i] * dim;
        const float *far = table + rows[i + FAR < left ? i + FAR : i] * dim;
        const float *near = table + rows[i + NEAR < left ? i + NEAR : i] * dim;
#pragma GCC unroll 16
        for (int k = 0; k < sums; k++) {
            if (k * VECTOR_BYTES % LINE == 0) {
                __builtin_prefetch(far + k * LANES, 0, 2);
                __builtin_prefetch(near + k * LANES, 0, 3);
            }
            sum[k] += *(const vector *)(row + k * LANES);
        }
    }
    for (int k = 0; k < sums; k++) *(vector *)(out + k * LANES) = sum[k];
}

/* out[b] = sum of table[rows[i]] for the ids i of bag b, for bags first..last. Every column is summed in the order of
 * the ids, whatever the registers: so it has the same bits everywhere. */
void bag_sum(const float *table, const int64_t *rows, const int64_t *offsets, float *out, int64_t first, int64_t last,
             int64_t dim) {
    const int64_t stop = offsets[last];
    for (int64_t bag = first; bag < last; bag++) {
        float *sum = out + bag * dim;
        const int64_t begin = offsets[bag], count = offsets[bag + 1] - begin, left = stop - begin;
        const int64_t *own = rows + begin;
        int64_t c = 0;
        for (; c + SUMS * LANES <= dim; c += SUMS * LANES) sum_columns(table + c, own, count, left, dim, sum + c, SUMS);
        for (; c + 4 * LANES <= dim; c += 4 * LANES) sum_columns(table + c, own, count, left, dim, sum + c, 4);
        for (; c + LANES <= dim; c += LANES) sum_columns(table + c, own, count, left, dim, sum + c, 1);
        for (; c < dim; c++) {
            float total = 0;
            for (int64_t i = 0; i < count; i++) total += table[own[i] * dim + c];
            sum[c] = total;
        }
    }
}

/* Positions of rows in ascending order of row, equal rows in their original order. Radix sort, 11 bits a pass. */
void sort_rows(const int64_t *rows, int64_t count, int64_t most, int32_t *order, int32_t *scratch) {
    enum { BITS = 11, BUCKETS = 1 << BITS };
    int32_t *from = order, *to = scratch;
    for (int64_t i = 0; i < count; i++) from[i] = (int32_t)i;
    for (int shift = 0; shift == 0 || (most >> shift) != 0; shift += BITS) {
        int64_t places[BUCKETS] = {0}, sum = 0;
        for (int64_t i = 0; i < count; i++) places[(rows[from[i]] >> shift) & (BUCKETS - 1)]++;
        for (int64_t b = 0; b < BUCKETS; b++) {
            int64_t size = places[b];
            places[b] = sum;
            sum += size;
        }
        for (int64_t i = 0; i < count; i++) to[places[(rows[from[i]] >> shift) & (BUCKETS - 1)]++] = from[i];
        int32_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != order) memcpy(order, from, count * sizeof(int32_t));
}

/* Cuts of the sorted order into `parts` ranges, never between two occurrences of one row: the end of a row is found by
 * bisection, since one row may fill a whole batch. */
void cut_rows(const int64_t *rows, const int32_t *order, int64_t count, int64_t parts, int64_t *cuts) {
    cuts[0] = 0;
    for (int64_t part = 1; part < parts; part++) {
        const int64_t even = count * part / parts;
        int64_t low = even > cuts[part - 1] ? even : cuts[part - 1], high = count;
        if (low) {
            const int64_t row = rows[order[low - 1]];
            while (low < high) {
                const int64_t middle = (low + high) / 2;
                if (rows[order[middle]] == row)
                    low = middle + 1;
                else
                    high = middle;
            }
        }
        cuts[part] = low;
    }
    cuts[parts] = count;
}

/* The summed gradient of the row at position *at of the sorted order, which moves behind the row's last occurrence.
 * The gradient of a row that occurs once is read where it lies; others are added up in `sum`. */
static const float *add_up(const int64_t *rows, const int32_t *order, const int32_t *bags, const float *gradient,
                           int64_t *at, int64_t last, int64_t dim, float *sum) {
    int64_t i = *at;
    const int64_t row = rows[order[i]];
    const float *total = gradient + (int64_t)bags[order[i++]] * dim;
    for (; i < last && rows[order[i]] == row; i++) {
        const float *more = gradient + (int64_t)bags[order[i]] * dim;
        for (int64_t k = 0; k < dim; k++) sum[k] = total[k] + more[k];
        total = sum;
    }
    *at = i;
    return total;
}

/* Sum of squares in 16 partial sums: one alone would wait for each addition before the next. */
static double square(const float *values, int64_t dim) {
    enum { PARTS = 16 };
    float parts[PARTS] = {0};
    int64_t k = 0;
    for (; k + PARTS <= dim; k += PARTS)
        for (int64_t part = 0; part < PARTS; part++) parts[part] += values[k + part] * values[k + part];
    for (; k < dim; k++) parts[k % PARTS] += values[k] * values[k];
    for (int64_t half = PARTS / 2; half; half /= 2)
        for (int64_t part = 0; part < half; part++) parts[part] += parts[part + half];
    return parts[0];
}

/* The rules of ops/table_rules.py, in its order. */
enum { SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM };

/* Updates the rows at positions first..last of the order by a rule, with decoupled decay. A row has `states` numbers of
 * state; `numbers` are the rule's, the learning rate first. The caller cuts between different rows. */
void update_rows(float *table, float *state, const int64_t *rows, const int32_t *order, const int32_t *bags,
                 const float *gradient, int64_t first, int64_t last, int64_t dim, int64_t states, int64_t rule,
                 const float *numbers, float eps, float decay, float scale, float *sum) {
    const float rate = numbers[0], keep = 1.0f - rate * decay;
    for (int64_t i = first; i < last;) {
        if (i + FAR < last) {
            const int64_t far = rows[order[i + FAR]];
            prefetch_far(table + far * dim, dim);
            if (states) prefetch_far(state + far * states, states);
        }
        if (i + NEAR < last) prefetch_near(gradient + (int64_t)bags[order[i + NEAR]] * dim, dim);
        const int64_t number = rows[order[i]];
        float *row = table + number * dim, *own = states ? state + number * states : 0;
        const float *slopes = add_up(rows, order, bags, gradient, &i, last, dim, sum);
        switch (rule) {
        case ADAGRAD:
            for (int64_t k = 0; k < dim; k++) {
                const float slope = slopes[k] * scale;
                own[k] += slope * slope;
                row[k] = keep * row[k] - rate * slope / (sqrtf(own[k]) + eps);
            }
            break;
        case ADAM: {
            float *means = own, *squares = own + dim;
            for (int64_t k = 0; k < dim; k++) {
                const float slope = slopes[k] * scale;
                means[k] += numbers[1] * (slope - means[k]);
                squares[k] += numbers[2] * (slope * slope - squares[k]);
                row[k] = keep * row[k] - numbers[3] * means[k] / (sqrtf(squares[k] * numbers[4]) + eps);
            }
            break;
        }
        case ROWWISE_ADAM: {
            float *means = own, *mean_square = own + dim;
            const float now = (float)(square(slopes, dim) / (double)dim) * scale * scale;
            *mean_square += numbers[2] * (now - *mean_square);
            const float step = numbers[3] / (sqrtf(*mean_square * numbers[4]) + eps);
            for (int64_t k = 0; k < dim; k++) {
                means[k] += numbers[1] * (slopes[k] * scale - means[k]);
                row[k] = keep * row[k] - step * means[k];
            }
            break;
        }
        default: {
            float step = rate * scale;
            if (rule == ROWWISE_ADAGRAD) {
                *own += (float)(square(slopes, dim) / (double)dim) * scale * scale;
                step /= sqrtf(*own) + eps;
            }
            for (int64_t k = 0; k < dim; k++) row[k] = keep * row[k] - step * slopes[k];
        }
        }
    }
}

/* Squared norm of the summed gradient of the rows at positions first..last. */
double squared_norm(const int64_t *rows, const int32_t *order, const int32_t *bags, const float *gradient,
                    int64_t first, int64_t last, int64_t dim, float *sum) {
    double total = 0;
    for (int64_t i = first; i < last;) {
        total += square(add_up(rows, order, bags, gradient, &i, last, dim, sum), dim);
    }
    return total;
}
