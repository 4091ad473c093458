/* Embedding bags on a CPU. The table does not fit any cache, so that each row is a miss to DRAM: rows that will be
 * needed soon are prefetched. Callers split the work; nothing here starts threads. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LINE 64

static void prefetch(const float *row, int64_t dim, int write) {
    const char *begin = (const char *)row, *end = (const char *)(row + dim);
    for (; begin < end; begin += LINE) {
        if (write)
            __builtin_prefetch(begin, 1, 3);
        else
            __builtin_prefetch(begin, 0, 3);
    }
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

/* Four floats that may lie anywhere. */
typedef float four __attribute__((vector_size(16), aligned(4)));
enum { WIDTH = 32 };

/* Sums WIDTH columns of a bag in registers: a sum in memory would be read and written again for every row. The
 * first columns also prefetch the rows that come `ahead` ids later; the others then find theirs in the nearest cache. */
static void sum_columns(const float *table, const int64_t *rows, int64_t count, int64_t dim, float *out,
                        const float *whole, int64_t ahead, int64_t left) {
    four a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};
    for (int64_t i = 0; i < count; i++) {
        if (whole && i + ahead < left) prefetch(whole + rows[i + ahead] * dim, dim, 0);
        const four *row = (const four *)(table + rows[i] * dim);
        a += row[0], b += row[1], c += row[2], d += row[3], e += row[4], f += row[5], g += row[6], h += row[7];
    }
    four *to = (four *)out;
    to[0] = a, to[1] = b, to[2] = c, to[3] = d, to[4] = e, to[5] = f, to[6] = g, to[7] = h;
}

/* out[b] = sum of table[rows[i]] for the ids i of bag b, for bags first..last. */
void bag_sum(const float *table, const int64_t *rows, const int64_t *offsets, float *out, int64_t first, int64_t last,
             int64_t dim, int64_t ahead) {
    const int64_t stop = offsets[last];
    for (int64_t bag = first; bag < last; bag++) {
        float *sum = out + bag * dim;
        const int64_t begin = offsets[bag], count = offsets[bag + 1] - begin;
        int64_t column = 0;
        for (; column + WIDTH <= dim; column += WIDTH)
            sum_columns(table + column, rows + begin, count, dim, sum + column, column ? 0 : table, ahead, stop - begin);
        for (; column < dim; column++) {
            float total = 0;
            for (int64_t i = 0; i < count; i++) total += table[rows[begin + i] * dim + column];
            sum[column] = total;
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

/* Adds up the gradient of the row at position i of the sorted order; returns the position after its last occurrence. */
static int64_t add_up(const int64_t *rows, const int32_t *order, const int32_t *bags, const float *gradient, int64_t i,
                      int64_t last, int64_t dim, float *sum) {
    const int64_t row = rows[order[i]];
    memcpy(sum, gradient + (int64_t)bags[order[i]] * dim, dim * sizeof(float));
    for (i++; i < last && rows[order[i]] == row; i++) {
        const float *more = gradient + (int64_t)bags[order[i]] * dim;
        for (int64_t k = 0; k < dim; k++) sum[k] += more[k];
    }
    return i;
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

/* Adagrad (state not null; each: a state a number, not a row) or SGD, with decoupled decay, on the rows at positions
 * first..last of the order. The caller cuts between different rows. */
void update_rows(float *table, float *state, const int64_t *rows, const int32_t *order, const int32_t *bags,
                 const float *gradient, int64_t first, int64_t last, int64_t dim, float rate, float eps, float decay,
                 float scale, int64_t each, int64_t ahead, float *sum) {
    for (int64_t i = first; i < last;) {
        if (i + ahead < last) prefetch(table + rows[order[i + ahead]] * dim, dim, 1);
        float *row = table + rows[order[i]] * dim;
        float *squares = state ? state + rows[order[i]] * (each ? dim : 1) : 0;
        i = add_up(rows, order, bags, gradient, i, last, dim, sum);
        float step = rate * scale;
        const float keep = 1.0f - rate * decay;
        if (squares && each) {
            for (int64_t k = 0; k < dim; k++) {
                const float slope = sum[k] * scale;
                squares[k] += slope * slope;
                row[k] = keep * row[k] - rate * slope / (sqrtf(squares[k]) + eps);
            }
            continue;
        }
        if (squares) {
            *squares += (float)(square(sum, dim) / (double)dim) * scale * scale;
            step /= sqrtf(*squares) + eps;
        }
        for (int64_t k = 0; k < dim; k++) row[k] = keep * row[k] - step * sum[k];
    }
}

/* Squared norm of the summed gradient of the rows at positions first..last. */
double squared_norm(const int64_t *rows, const int32_t *order, const int32_t *bags, const float *gradient,
                    int64_t first, int64_t last, int64_t dim, float *sum) {
    double total = 0;
    for (int64_t i = first; i < last;) {
        i = add_up(rows, order, bags, gradient, i, last, dim, sum);
        total += square(sum, dim);
    }
    return total;
}
