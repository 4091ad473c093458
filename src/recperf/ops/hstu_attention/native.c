/* HSTU attention of rows first..last and its backward pass, four queries at a time: scores of a row are never all held.
 *
 * Shapes: T tokens, H heads, A width of q and k, V width of v; N tokens of a row, of which the last `queried` have
 * queries: all of them, or one. Of a head, keys are packed by column (A x N) where they meet queries and by row
 * (N x A) where they are added up; every width is filled up with zeros to whole tiles.
 *
 * A bias and the gradients of its scores are held for a whole row, N x N, because all heads share them.
 *
 * With a bias products and sums are fused, at twice the rate; without one they are rounded twice as they always were.
 *
 * A row is one thread's alone and its sums have one order, so that threads do not change a bit. */

#include "../vectors.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TILE 16
#define PIECES (TILE / LANES)
#define QUERIES 4

typedef struct {
    int64_t heads, qk, width;
    const int64_t *offsets;
    float alpha, length;
    int64_t last_only;
    /* Of a bias, all null without one: the last distance first, so that the keys of a query lie in order. */
    const float *positions, *buckets;
    const int64_t *starts, *key_times, *query_times;
    int64_t distances, bucket_count;
} Shape;

/* Where a tensor's numbers are: `token` and `head` are the steps from one to the next. */
typedef struct {
    float *data;
    int64_t token, head;
} View;

typedef struct {
    int64_t row, tokens, queried;
} Row;

static int64_t padded(int64_t count) { return (count + TILE - 1) / TILE * TILE; }

/* e^x for x in -87..88, beyond which it stays; NaN stays NaN. Good to 2 units in the last place. */
ALWAYS vec exponential(vec x, int fused) {
    const vec shift = spread(12582912.0f);
    x = blend(x < -87.0f, spread(-87.0f), x);
    x = blend(x > 88.0f, spread(88.0f), x);
    const vec moved = mul_add(x, spread(1.44269504f), shift, fused);
    const vec whole = moved - shift;
    const vec rest = mul_add(whole, spread(2.12194440e-4f), x - whole * 0.693359375f, fused);
    vec sum = mul_add(rest, spread(1.3888889e-3f), spread(8.3333333e-3f), fused);
    sum = mul_add(sum, rest, spread(4.1666667e-2f), fused);
    sum = mul_add(sum, rest, spread(1.6666667e-1f), fused);
    sum = mul_add(sum, rest, spread(0.5f), fused);
    sum = mul_add(sum * rest, rest, rest, fused) + 1.0f;
    /* The low bits of `moved` are the whole number itself. */
    return sum * (vec)(((ivec)moved + 127) << 23);
}

ALWAYS vec sigmoid(vec x, int fused) { return 1.0f / (1.0f + exponential(-x, fused)); }

/* Columns of `count` vectors, each `stride` after the one before: out[a * places + n]. */
static void pack_columns(const float *from, int64_t stride, int64_t count, int64_t dim, int64_t places, float *out) {
    for (int64_t a = 0; a < dim; a++) {
        float *to = out + a * places;
        for (int64_t n = 0; n < count; n++) to[n] = from[n * stride + a];
        memset(to + count, 0, (places - count) * sizeof(float));
    }
}

/* Their rows times a factor, filled up to whole tiles; rows beyond `count` up to `room` are zero. */
static void pack_rows(const float *from, int64_t stride, int64_t count, int64_t room, int64_t dim, float times,
                      float *out) {
    const int64_t wide = padded(dim);
    for (int64_t n = 0; n < count; n++) {
        for (int64_t a = 0; a < dim; a++) out[n * wide + a] = from[n * stride + a] * times;
        memset(out + n * wide + dim, 0, (wide - dim) * sizeof(float));
    }
    memset(out + count * wide, 0, (room - count) * wide * sizeof(float));
}

/* Products of the block's vectors with TILE packed columns. */
APART void products(const float *block, int64_t wide, const float *columns, int64_t places, int64_t dim,
                     vec sum[QUERIES][PIECES], int fused) {
    vec held[QUERIES][PIECES] = {0};
    int64_t a = 0;
    do {
        vec column[PIECES];
        for (int p = 0; p < PIECES; p++) column[p] = *(const vec *)(columns + a * places + p * LANES);
        for (int i = 0; i < QUERIES; i++)
            for (int p = 0; p < PIECES; p++)
                held[i][p] = mul_add(spread(block[i * wide + a]), column[p], held[i][p], fused);
    } while (++a < dim);
    /* Unrolled, because a copy of the whole array would keep it in memory during the loop above. */
#pragma GCC unroll 16
    for (int i = 0; i < QUERIES; i++)
#pragma GCC unroll 16
        for (int p = 0; p < PIECES; p++) sum[i][p] = held[i][p];
}

/* For each query of the block the sum of `count` packed rows, each times the query's weight; TILE columns of it. */
APART void weighted(const float *weights, int64_t places, const float *rows, int64_t wide, int64_t count, float *out,
                     int fused) {
    vec held[QUERIES][PIECES] = {0};
    int64_t n = 0;
    do {
        vec row[PIECES];
        for (int p = 0; p < PIECES; p++) row[p] = *(const vec *)(rows + n * wide + p * LANES);
        for (int i = 0; i < QUERIES; i++)
            for (int p = 0; p < PIECES; p++)
                held[i][p] = mul_add(spread(weights[i * places + n]), row[p], held[i][p], fused);
    } while (++n < count);
    for (int i = 0; i < QUERIES; i++)
        for (int p = 0; p < PIECES; p++) *(vec *)(out + i * wide + p * LANES) = held[i][p];
}

/* The other way: to each of `count` rows the sum of the block's vectors, each times its weight for that row. */
APART void scatter(const float *weights, int64_t places, const float *block, int64_t wide, int64_t count, float *out,
                    int fused) {
    vec held[QUERIES][PIECES];
    for (int i = 0; i < QUERIES; i++)
        for (int p = 0; p < PIECES; p++) held[i][p] = *(const vec *)(block + i * wide + p * LANES);
    for (int64_t n = 0; n < count; n++)
        for (int p = 0; p < PIECES; p++) {
            vec *to = (vec *)(out + n * wide + p * LANES);
            vec sum = *to;
            for (int i = 0; i < QUERIES; i++) sum = mul_add(spread(weights[i * places + n]), held[i][p], sum, fused);
            *to = sum;
        }
}

/* Set to 0 what lies behind the query among the first `seen` keys. */
static void hide(int64_t query, int64_t seen, float *weights) {
    for (int64_t n = query + 1; n < seen; n++) weights[n] = 0.0f;
}

static Row row_of(const Shape *shape, int64_t index) {
    const int64_t tokens = shape->offsets[index + 1] - shape->offsets[index];
    return (Row){index, tokens, shape->last_only && tokens ? 1 : tokens};
}

static float *of_row(const View *view, const Shape *shape, const Row *row, int64_t head, int queries) {
    const int64_t token = queries && shape->last_only ? row->row : shape->offsets[row->row];
    return view->data + token * view->token + head * view->head;
}

static int64_t longest(const Shape *shape, int64_t first, int64_t last) {
    int64_t most = 0;
    for (int64_t b = first; b < last; b++) {
        const int64_t tokens = shape->offsets[b + 1] - shape->offsets[b];
        most = tokens > most ? tokens : most;
    }
    return most;
}

/* Room for the parts of one head's work, one behind the other. */
typedef struct {
    float *begin, *keys, *keys_by_row, *values, *values_by_row, *weights, *slopes, *query, *grads, *out, *d_keys,
        *d_values, *bias, *d_bias;
} Room;

static int make_room(Room *room, const Shape *shape, int64_t most) {
    const int64_t places = padded(most), qk = padded(shape->qk), width = padded(shape->width);
    const int64_t wide = qk > width ? qk : width, pairs = shape->positions ? places * places : 0;
    const int64_t sizes[] = {qk * places,      places * qk,   width * places, places * width, QUERIES * places,
                             QUERIES * places, QUERIES * qk,  QUERIES * width, QUERIES * wide, places * qk,
                             places * width,   pairs,         pairs};
    float **parts[] = {&room->keys,   &room->keys_by_row, &room->values, &room->values_by_row,
                       &room->weights, &room->slopes,     &room->query,  &room->grads,
                       &room->out,    &room->d_keys,      &room->d_values,
                       &room->bias,   &room->d_bias};
    int64_t total = 1;
    for (int i = 0; i < 13; i++) total += sizes[i];
    room->begin = malloc(total * sizeof(float));
    if (!room->begin) return 0;
    float *at = room->begin;
    for (int i = 0; i < 13; i++) {
        *parts[i] = at;
        at += sizes[i];
    }
    return 1;
}

/* The bucket of the time between a query and a key of the row, sought from a bucket that is probably near. */
static inline int64_t bucket_near(const Shape *shape, int64_t query, int64_t key, int64_t bucket) {
    const int64_t a = shape->query_times[query], b = shape->key_times[key];
    const uint64_t apart = a > b ? (uint64_t)a - (uint64_t)b : (uint64_t)b - (uint64_t)a;
    const int64_t seconds = apart < 1 ? 1 : apart < INT64_MAX ? (int64_t)apart : INT64_MAX - 1;
    while (seconds >= shape->starts[bucket + 1]) bucket++;
    while (seconds < shape->starts[bucket]) bucket--;
    return bucket;
}

/* The bias of every query and the keys it sees; 0 elsewhere. */
static void fill_bias(const Shape *shape, const Row *row, const Room *room) {
    const int64_t places = padded(row->tokens), start = shape->offsets[row->row];
    int64_t first = 0;
    for (int64_t m = 0; m < row->tokens; m++) {
        float *to = room->bias + m * places;
        memcpy(to, shape->positions + shape->distances - 1 - m, (m + 1) * sizeof(float));
        memset(to + m + 1, 0, (places - m - 1) * sizeof(float));
        if (!shape->buckets) continue;
        int64_t bucket = first = bucket_near(shape, start + m, start, first);
        for (int64_t n = 0; n <= m; n++) {
            bucket = bucket_near(shape, start + m, start + n, bucket);
            to[n] += shape->buckets[bucket];
        }
    }
    memset(room->bias + row->tokens * places, 0, (places - row->tokens) * places * sizeof(float));
}

/* Sums of the scores' gradients of a row by distance, the last one first, and by bucket. */
static void sum_bias(const Shape *shape, const Row *row, const Room *room, float *restrict out) {
    const int64_t places = padded(row->tokens), start = shape->offsets[row->row];
    float *by_bucket = out + shape->distances;
    int64_t first = 0;
    memset(out, 0, (shape->distances + shape->bucket_count) * sizeof(float));
    for (int64_t m = 0; m < row->tokens; m++) {
        const float *from = room->d_bias + m * places;
        float *to = out + shape->distances - 1 - m;
        for (int64_t n = 0; n <= m; n++) to[n] += from[n];
        if (!shape->buckets) continue;
        int64_t bucket = first = bucket_near(shape, start + m, start, first);
        float sum = 0.0f;
        for (int64_t n = 0; n <= m; n++) {
            const int64_t next = bucket_near(shape, start + m, start + n, bucket);
            if (next != bucket) {
                by_bucket[bucket] += sum;
                sum = 0.0f;
                bucket = next;
            }
            sum += from[n];
        }
        by_bucket[bucket] += sum;
    }
}

/* Rows of `count` numbers, added up in their order. */
void attention_add_up(const float *rows, int64_t number, int64_t count, float *restrict out) {
    memset(out, 0, count * sizeof(float));
    for (int64_t b = 0; b < number; b++)
        for (int64_t c = 0; c < count; c++) out[c] += rows[b * count + c];
}

/* Adds the bias of the block's queries to TILE scores of each. */
static inline void add_bias(const float *bias, int64_t places, vec scores[QUERIES][PIECES]) {
    for (int i = 0; i < QUERIES; i++)
        for (int p = 0; p < PIECES; p++) scores[i][p] += *(const vec *)(bias + i * places + p * LANES);
}

ALWAYS void head_forward(const Shape *shape, const Row *row, const Room *room, const float *q, int64_t q_step,
                         float *out, int64_t out_step, int biased) {
    const int64_t places = padded(row->tokens), qk = padded(shape->qk), width = padded(shape->width);
    const int64_t before = row->tokens - row->queried;
    for (int64_t at = 0; at < row->queried; at += QUERIES) {
        const int64_t count = row->queried - at < QUERIES ? row->queried - at : QUERIES;
        const int64_t seen = before + at + count;
        pack_rows(q + at * q_step, q_step, count, QUERIES, shape->qk, shape->alpha, room->query);
        for (int64_t n = 0; n < seen; n += TILE) {
            vec scores[QUERIES][PIECES];
            products(room->query, qk, room->keys + n, places, shape->qk, scores, biased);
            if (biased) add_bias(room->bias + at * places + n, places, scores);
            for (int i = 0; i < QUERIES; i++)
                for (int p = 0; p < PIECES; p++)
                    *(vec *)(room->weights + i * places + n + p * LANES) =
                        scores[i][p] * sigmoid(scores[i][p], biased);
        }
        for (int64_t i = 0; i < count; i++) hide(before + at + i, seen, room->weights + i * places);
        for (int64_t c = 0; c < width; c += TILE)
            weighted(room->weights, places, room->values_by_row + c, width, seen, room->out + c, biased);
        for (int64_t i = 0; i < count; i++)
            for (int64_t c = 0; c < shape->width; c++)
                out[(at + i) * out_step + c] = room->out[i * width + c] / shape->length;
    }
}

int attention_forward(const Shape *shape, int64_t first, int64_t last, const View *q, const View *k, const View *v,
                      const View *out) {
    Room room;
    if (!make_room(&room, shape, longest(shape, first, last))) return 1;
    for (int64_t b = first; b < last; b++) {
        const Row row = row_of(shape, b);
        const int64_t places = padded(row.tokens);
        if (shape->positions) fill_bias(shape, &row, &room);
        for (int64_t head = 0; head < shape->heads; head++) {
            pack_columns(of_row(k, shape, &row, head, 0), k->token, row.tokens, shape->qk, places, room.keys);
            pack_rows(of_row(v, shape, &row, head, 0), v->token, row.tokens, row.tokens, shape->width, 1.0f,
                      room.values_by_row);
            const float *query = of_row(q, shape, &row, head, 1);
            float *to = of_row(out, shape, &row, head, 1);
            if (shape->positions)
                head_forward(shape, &row, &room, query, q->token, to, out->token, 1);
            else
                head_forward(shape, &row, &room, query, q->token, to, out->token, 0);
        }
    }
    free(room.begin);
    return 0;
}

/* Weights of the block, and how the loss changes with their scores. */
ALWAYS void block_slopes(const Shape *shape, const Row *row, const Room *room, int64_t at, int64_t count,
                         int64_t seen, int biased) {
    const int64_t places = padded(row->tokens), qk = padded(shape->qk), width = padded(shape->width);
    for (int64_t n = 0; n < seen; n += TILE) {
        vec scores[QUERIES][PIECES], grads[QUERIES][PIECES];
        products(room->query, qk, room->keys + n, places, shape->qk, scores, biased);
        products(room->grads, width, room->values + n, places, shape->width, grads, biased);
        if (biased) add_bias(room->bias + at * places + n, places, scores);
        for (int i = 0; i < QUERIES; i++)
            for (int p = 0; p < PIECES; p++) {
                const vec score = scores[i][p], open = sigmoid(score, biased), weight = score * open;
                const int64_t to = i * places + n + p * LANES;
                *(vec *)(room->weights + to) = weight;
                *(vec *)(room->slopes + to) = open * (1.0f + score * (1.0f - open)) * grads[i][p];
            }
    }
    for (int64_t i = 0; i < count; i++) {
        hide(at + i, seen, room->weights + i * places);
        hide(at + i, seen, room->slopes + i * places);
        if (!biased) continue;
        float *restrict to = room->d_bias + (at + i) * places;
        for (int64_t n = 0; n < at + i + 1; n++) to[n] += room->slopes[i * places + n];
    }
}

ALWAYS void head_backward(const Shape *shape, const Row *row, const Room *room, const float *grad, int64_t grad_step,
                          const float *q, int64_t q_step, float *dq, int64_t dq_step, int biased) {
    const int64_t places = padded(row->tokens), qk = padded(shape->qk), width = padded(shape->width);
    const int64_t before = row->tokens - row->queried;
    memset(room->d_keys, 0, row->tokens * qk * sizeof(float));
    memset(room->d_values, 0, row->tokens * width * sizeof(float));
    for (int64_t at = 0; at < row->queried; at += QUERIES) {
        const int64_t count = row->queried - at < QUERIES ? row->queried - at : QUERIES;
        const int64_t seen = before + at + count;
        pack_rows(q + at * q_step, q_step, count, QUERIES, shape->qk, shape->alpha, room->query);
        pack_rows(grad + at * grad_step, grad_step, count, QUERIES, shape->width, 1.0f / shape->length, room->grads);
        block_slopes(shape, row, room, before + at, count, seen, biased);
        for (int64_t c = 0; c < qk; c += TILE) {
            weighted(room->slopes, places, room->keys_by_row + c, qk, seen, room->out + c, biased);
            scatter(room->slopes, places, room->query + c, qk, seen, room->d_keys + c, biased);
        }
        for (int64_t c = 0; c < width; c += TILE)
            scatter(room->weights, places, room->grads + c, width, seen, room->d_values + c, biased);
        for (int64_t i = 0; i < count; i++)
            for (int64_t a = 0; a < shape->qk; a++) dq[(at + i) * dq_step + a] = room->out[i * qk + a] * shape->alpha;
    }
}

static void unpack(const float *rows, int64_t count, int64_t dim, float *to, int64_t step) {
    for (int64_t n = 0; n < count; n++) memcpy(to + n * step, rows + n * padded(dim), dim * sizeof(float));
}

/* `d_bias` takes the gradient of the bias of each row: by distance, the last one first, then by bucket. */
int attention_backward(const Shape *shape, int64_t first, int64_t last, const View *grad, const View *q, const View *k,
                       const View *v, const View *dq, const View *dk, const View *dv, float *d_bias) {
    Room room;
    if (!make_room(&room, shape, longest(shape, first, last))) return 1;
    for (int64_t b = first; b < last; b++) {
        const Row row = row_of(shape, b);
        const int64_t places = padded(row.tokens), n = row.tokens;
        if (shape->positions) {
            fill_bias(shape, &row, &room);
            memset(room.d_bias, 0, places * places * sizeof(float));
        }
        for (int64_t head = 0; head < shape->heads; head++) {
            const float *keys = of_row(k, shape, &row, head, 0), *values = of_row(v, shape, &row, head, 0);
            pack_columns(keys, k->token, n, shape->qk, places, room.keys);
            pack_rows(keys, k->token, n, n, shape->qk, 1.0f, room.keys_by_row);
            pack_columns(values, v->token, n, shape->width, places, room.values);
            const float *from = of_row(grad, shape, &row, head, 1), *query = of_row(q, shape, &row, head, 1);
            float *to = of_row(dq, shape, &row, head, 1);
            if (shape->positions)
                head_backward(shape, &row, &room, from, grad->token, query, q->token, to, dq->token, 1);
            else
                head_backward(shape, &row, &room, from, grad->token, query, q->token, to, dq->token, 0);
            unpack(room.d_keys, n, shape->qk, of_row(dk, shape, &row, head, 0), dk->token);
            unpack(room.d_values, n, shape->width, of_row(dv, shape, &row, head, 0), dv->token);
        }
        if (shape->positions) sum_bias(shape, &row, &room, d_bias + b * (shape->distances + shape->bucket_count));
    }
    free(room.begin);
    return 0;
}
