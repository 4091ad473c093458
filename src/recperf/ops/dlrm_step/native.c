/* A whole training step of a small DLRM: lookups, MLPs, interaction, loss, backward pass and AdamW, in one call.
 *
 * Samples go through in blocks that stay in the first-level cache. All products are of one form, C = A B, with the rows
 * of B in vectors; widths are padded to whole vectors, and what lies in the padding is never read as an input. Sums run
 * in a fixed order on one thread, so that repeats are equal to the bit.
 *
 * Shapes: B samples, F features, D width of a table row, I inputs and O outputs of a layer. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE__)
#include <immintrin.h>
#endif

/* A product and a sum in one rounding, where the processor has it: in this file alone. */
#pragma GCC optimize("fp-contract=fast")

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX__) && !defined(__AVX512F__)
#define REGISTERS 16
#else
#define REGISTERS 32
#endif
#define BLOCK 64
#define MOST_LAYERS 16
/* Samples that are fetched ahead of the one whose ids are checked: they lie anywhere. */
#define AHEAD 16

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec value) { *(loose *)to = value; }
INLINE vec pick(mask which, vec one, vec other) { return (vec)(((mask)one & which) | ((mask)other & ~which)); }

INLINE vec root(vec of) {
#if defined(__aarch64__)
    return (vec)vsqrtq_f32((float32x4_t)of);
#elif defined(__AVX512F__)
    return (vec)_mm512_sqrt_ps((__m512)of);
#elif defined(__AVX__)
    return (vec)_mm256_sqrt_ps((__m256)of);
#elif defined(__SSE__)
    return (vec)_mm_sqrt_ps((__m128)of);
#else
    for (int lane = 0; lane < LANES; lane++) of[lane] = sqrtf(of[lane]);
    return of;
#endif
}

static int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

/* What becomes of a product. A NaN passes a ReLU, as in torch. */
enum { BIAS, BIAS_RELU, PLAIN, WHERE_POSITIVE, ADD };

INLINE void tile(int height, int vectors, int64_t depth, const float *restrict a, int64_t a_row, int64_t a_col,
                 const float *restrict b, int64_t ldb, float *restrict c, int64_t ldc, int kind,
                 const float *restrict other, int64_t ldo) {
    vec sum[8][4];
#pragma GCC unroll 8
    for (int m = 0; m < height; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) sum[m][n] = kind <= BIAS_RELU ? load(other + n * LANES) : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec right[4];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) right[n] = load(b + k * ldb + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < height; m++) {
            const float left = a[m * a_row + k * a_col];
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++) sum[m][n] += right[n] * left;
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < height; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) {
            vec value = sum[m][n];
            float *place = c + m * ldc + n * LANES;
            if (kind == BIAS_RELU) value = pick(value < 0, (vec){0}, value);
            if (kind == WHERE_POSITIVE) value = pick(load(other + m * ldo + n * LANES) <= 0, (vec){0}, value);
            if (kind == ADD) value += load(place);
            store(place, value);
        }
}

INLINE void columns(int height, int vectors, int64_t rows, int64_t depth, const float *a, int64_t a_row, int64_t a_col,
                    const float *b, int64_t ldb, float *c, int64_t ldc, int kind, const float *other, int64_t ldo) {
    int64_t m = 0;
    for (; m + height <= rows; m += height)
        tile(height, vectors, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, kind, other + m * ldo, ldo);
    for (; m < rows; m++)
        tile(1, vectors, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, kind, other + m * ldo, ldo);
}

/* C (rows x width) from A (rows x depth, any strides) and B (depth x width). */
INLINE void product(int64_t rows, int64_t width, int64_t depth, const float *a, int64_t a_row, int64_t a_col,
                    const float *b, float *c, int kind, const float *other, int64_t ldo) {
    const int64_t ld = padded(width);
    int64_t n = 0;
#if REGISTERS == 32 && LANES < 16
    for (; n + 4 * LANES <= ld; n += 4 * LANES)
        columns(4, 4, rows, depth, a, a_row, a_col, b + n, ld, c + n, ld, kind, other + n, ldo);
#endif
    for (; n + 2 * LANES <= ld; n += 2 * LANES)
        columns(REGISTERS / 4, 2, rows, depth, a, a_row, a_col, b + n, ld, c + n, ld, kind, other + n, ldo);
    for (; n < ld; n += LANES)
        columns(8, 1, rows, depth, a, a_row, a_col, b + n, ld, c + n, ld, kind, other + n, ldo);
}

static void forward(int64_t samples, int64_t in, int64_t out, const float *x, const float *transposed,
                    const float *bias, float *y, int relu) {
    if (relu)
        product(samples, out, in, x, padded(in), 1, transposed, y, BIAS_RELU, bias, 0);
    else
        product(samples, out, in, x, padded(in), 1, transposed, y, BIAS, bias, 0);
}

/* The gradient of the input; with `passed` it goes through the ReLU whose output that is. */
static void to_input(int64_t samples, int64_t in, int64_t out, const float *slope, const float *weight, float *to,
                     const float *passed) {
    if (passed)
        product(samples, in, out, slope, padded(out), 1, weight, to, WHERE_POSITIVE, passed, padded(in));
    else
        product(samples, in, out, slope, padded(out), 1, weight, to, PLAIN, to, 0);
}

static void to_weights(int64_t samples, int64_t in, int64_t out, const float *slope, const float *x, float *weight,
                       float *bias) {
    product(out, in, samples, slope, 1, padded(out), x, weight, ADD, weight, 0);
    for (int64_t n = 0; n < padded(out); n += LANES) {
        vec sum = {0};
        for (int64_t s = 0; s < samples; s++) sum += load(slope + s * padded(out) + n);
        store(bias + n, load(bias + n) + sum);
    }
}

/* One parameter. Its gradient has padded rows; that of the table is cleared for the next step. */
typedef struct {
    float *value, *mean, *square, *gradient;
    int64_t rows, width, stride, clear;
    double decay;
} Parameter;

typedef struct {
    double rate, beta1, beta2, eps, steps;
} Adam;

/* What a step multiplies by, of one parameter. */
typedef struct {
    float shrink, rate, mean_new, square_old, square_new, root_scale, eps;
} Factors;

INLINE void adamw_lanes(float *value, float *mean, float *square, const float *gradient, const Factors *factors) {
    const vec g = load(gradient), old = load(mean), first = old + (g - old) * factors->mean_new;
    const vec second = load(square) * factors->square_old + g * g * factors->square_new;
    store(mean, first);
    store(square, second);
    const vec size = root(second) * factors->root_scale + factors->eps;
    store(value, load(value) * factors->shrink - first * factors->rate / size);
}

static void adamw(const Parameter *p, const Adam *adam) {
    const Factors factors = {
        .shrink = (float)(1 - adam->rate * p->decay),
        .rate = (float)(adam->rate / (1 - pow(adam->beta1, adam->steps))),
        .mean_new = (float)(1 - adam->beta1),
        .square_old = (float)adam->beta2,
        .square_new = (float)(1 - adam->beta2),
        .root_scale = (float)(1 / sqrt(1 - pow(adam->beta2, adam->steps))),
        .eps = (float)adam->eps,
    };
    const int64_t rows = p->stride == p->width ? 1 : p->rows, count = p->rows * p->width / rows;
    for (int64_t row = 0; row < rows; row++) {
        float *value = p->value + row * count, *mean = p->mean + row * count, *square = p->square + row * count;
        float *gradient = p->gradient + row * p->stride;
        int64_t k = 0;
        for (; k + LANES <= count; k += LANES) {
            adamw_lanes(value + k, mean + k, square + k, gradient + k, &factors);
            if (p->clear) store(gradient + k, (vec){0});
        }
        if (k == count) continue;
        /* The last ones by way of copies: a vector would reach beyond them. */
        float rest[4][LANES] = {{0}};
        const int64_t size = (count - k) * sizeof(float);
        memcpy(rest[0], value + k, size), memcpy(rest[1], mean + k, size);
        memcpy(rest[2], square + k, size), memcpy(rest[3], gradient + k, size);
        adamw_lanes(rest[0], rest[1], rest[2], rest[3], &factors);
        memcpy(value + k, rest[0], size), memcpy(mean + k, rest[1], size), memcpy(square + k, rest[2], size);
        if (p->clear) memset(gradient + k, 0, size);
    }
}

static double squares_of(const Parameter *p) {
    double sum = 0;
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t k = 0; k < p->width; k++) {
            const double g = p->gradient[row * p->stride + k];
            sum += g * g;
        }
    return sum;
}

typedef struct {
    int64_t in, out;
    float *transposed, *weight, *bias; /* Copies: I x O and O x I, padded, and the bias. */
    float *output, *slope;         /* B x O of a block, and its gradient. */
    Parameter weights, biases;
} Layer;

typedef struct {
    int64_t features, dim, layers[2], dot, diagonal, table_rows;
    Layer layer[2][MOST_LAYERS];
    Parameter table;
    const int64_t *rows_F;
    float *dense, *pooled, *interacted, *to_interacted, *to_dense;
    int64_t *places;
} Net;

enum { FEATURES, DIM, BOTTOM_LAYERS, TOP_LAYERS, DOT, DIAGONAL, WIDTHS };

static float *reserve(float **scratch, int64_t floats) {
    float *place = *scratch;
    *scratch += (floats + 15) / 16 * 16;
    return place;
}

/* Lay the network out in the scratch memory, which begins with the table's gradient; returns its end. `sizes`: as the
 * enum, then the widths of both MLPs and the rows of each table. `tensors`: values, means, squares of the table, then
 * of each layer's weight and bias. */
static float *lay_out(Net *net, const int64_t *sizes, float *const *tensors, const double *decays, float *scratch) {
    net->features = sizes[FEATURES], net->dim = sizes[DIM], net->dot = sizes[DOT], net->diagonal = sizes[DIAGONAL];
    net->layers[0] = sizes[BOTTOM_LAYERS], net->layers[1] = sizes[TOP_LAYERS];
    const int64_t *widths = sizes + WIDTHS;
    net->rows_F = widths + net->layers[0] + net->layers[1] + 2;
    net->table_rows = 0;
    for (int64_t f = 0; f < net->features; f++) net->table_rows += net->rows_F[f];
    const int64_t rows = net->table_rows;
    float *gradient = reserve(&scratch, rows * net->dim);
    net->table = (Parameter){tensors[0], tensors[1], tensors[2], gradient, rows, net->dim, net->dim, 1, decays[1]};
    tensors += 3;
    net->dense = reserve(&scratch, BLOCK * padded(widths[0]));
    for (int part = 0; part < 2; part++, widths++)
        for (int64_t index = 0; index < net->layers[part]; index++, widths++, tensors += 6) {
            Layer *one = &net->layer[part][index];
            const int64_t in = one->in = widths[0], out = one->out = widths[1];
            one->transposed = reserve(&scratch, in * padded(out));
            one->weight = reserve(&scratch, out * padded(in));
            one->bias = reserve(&scratch, padded(out));
            one->output = reserve(&scratch, BLOCK * padded(out));
            one->slope = reserve(&scratch, BLOCK * padded(out));
            float *to_weight = reserve(&scratch, out * padded(in)), *to_bias = reserve(&scratch, padded(out));
            one->weights =
                (Parameter){tensors[0], tensors[1], tensors[2], to_weight, out, in, padded(in), 0, decays[0]};
            one->biases = (Parameter){tensors[3], tensors[4], tensors[5], to_bias, 1, out, padded(out), 0, decays[0]};
        }
    const int64_t interacted = padded(net->layer[1][0].in), own = padded(net->layer[0][net->layers[0] - 1].out);
    net->interacted = reserve(&scratch, BLOCK * interacted);
    net->to_interacted = reserve(&scratch, BLOCK * interacted);
    net->to_dense = reserve(&scratch, BLOCK * own);
    net->pooled = reserve(&scratch, 2 * BLOCK * net->features * net->dim);
    net->places = (int64_t *)reserve(&scratch, 2 * BLOCK * net->features);
    return scratch;
}

/* Floats of scratch memory that a network needs; -1 where it has more layers than there is room for. */
int64_t scratch_floats(const int64_t *sizes) {
    for (int part = BOTTOM_LAYERS; part <= TOP_LAYERS; part++)
        if (sizes[part] < 1 || sizes[part] > MOST_LAYERS) return -1;
    Net net;
    float *const tensors[6 * 2 * MOST_LAYERS + 3] = {0};
    const double decays[2] = {0};
    return lay_out(&net, sizes, tensors, decays, (float *)0) - (float *)0;
}

/* Padded copies of the weights, and gradients of zero. */
static void copy_weights(Net *net) {
    for (int part = 0; part < 2; part++)
        for (int64_t index = 0; index < net->layers[part]; index++) {
            Layer *one = &net->layer[part][index];
            const int64_t in = one->in, out = one->out;
            memset(one->weights.gradient, 0, out * padded(in) * sizeof(float));
            memset(one->biases.gradient, 0, padded(out) * sizeof(float));
            memset(one->transposed, 0, in * padded(out) * sizeof(float));
            memset(one->weight, 0, out * padded(in) * sizeof(float));
            memset(one->bias, 0, padded(out) * sizeof(float));
            memcpy(one->bias, one->biases.value, out * sizeof(float));
            for (int64_t o = 0; o < out; o++) {
                memcpy(one->weight + o * padded(in), one->weights.value + o * in, in * sizeof(float));
                for (int64_t i = 0; i < in; i++) one->transposed[i * padded(out) + o] = one->weights.value[o * in + i];
            }
        }
}

static float *vector_of(const Net *net, float *dense, float *pooled, int64_t index, int64_t sample) {
    const int64_t ld = padded(net->layer[0][net->layers[0] - 1].out);
    return index ? pooled + (sample * net->features + index - 1) * net->dim : dense + sample * ld;
}

static void interact(Net *net, int64_t samples) {
    const Layer *last = &net->layer[0][net->layers[0] - 1];
    const int64_t ld = padded(net->layer[1][0].in), own = last->out, dim = net->dim, rest = net->features * dim;
    for (int64_t s = 0; s < samples; s++) {
        float *row = net->interacted + s * ld;
        memcpy(row, last->output + s * padded(own), own * sizeof(float));
        if (!net->dot) {
            memcpy(row + own, net->pooled + s * rest, rest * sizeof(float));
            continue;
        }
        row += own;
        for (int64_t i = 0; i <= net->features; i++)
            for (int64_t j = 0; j < i + net->diagonal; j++) {
                const float *one = vector_of(net, last->output, net->pooled, i, s);
                const float *other = vector_of(net, last->output, net->pooled, j, s);
                float sum = 0;
                for (int64_t k = 0; k < dim; k++) sum += one[k] * other[k];
                *row++ = sum;
            }
    }
}

/* The gradients of the bottom MLP's output, through its ReLU, and of the pooled rows. */
static void interact_backward(Net *net, int64_t samples) {
    const Layer *last = &net->layer[0][net->layers[0] - 1];
    const int64_t ld = padded(net->layer[1][0].in), own = last->out, dim = net->dim, rest = net->features * dim;
    float *to_pooled = net->pooled + BLOCK * rest;
    for (int64_t s = 0; s < samples; s++) {
        const float *row = net->to_interacted + s * ld;
        float *to_dense = net->to_dense + s * padded(own);
        memcpy(to_dense, row, own * sizeof(float));
        if (!net->dot)
            memcpy(to_pooled + s * rest, row + own, rest * sizeof(float));
        else {
            memset(to_pooled + s * rest, 0, rest * sizeof(float));
            row += own;
            for (int64_t i = 0; i <= net->features; i++)
                for (int64_t j = 0; j < i + net->diagonal; j++, row++) {
                    const float *one = vector_of(net, last->output, net->pooled, i, s);
                    const float *other = vector_of(net, last->output, net->pooled, j, s);
                    float *to_one = vector_of(net, net->to_dense, to_pooled, i, s);
                    float *to_other = vector_of(net, net->to_dense, to_pooled, j, s);
                    for (int64_t k = 0; k < dim; k++) {
                        const float by_one = *row * other[k], by_other = *row * one[k];
                        to_one[k] += by_one;
                        to_other[k] += by_other;
                    }
                }
        }
        float *slope = last->slope + s * padded(own);
        const float *passed = last->output + s * padded(own);
        for (int64_t k = 0; k < own; k++) slope[k] = passed[k] <= 0 ? 0.0f : to_dense[k];
    }
}

/* Binary cross entropy summed over the samples of a block, and its slope for a mean over `count` samples. */
static double loss_of(const Layer *last, const float *labels, int64_t samples, int64_t count) {
    double sum = 0;
    const float share = 1.0f / (float)count;
    for (int64_t s = 0; s < samples; s++) {
        const float logit = last->output[s * padded(1)], label = labels[s];
        const float small = expf(-fabsf(logit)), part = 1 / (1 + small);
        sum += (logit > 0 ? logit : 0.0f) - logit * label + log1pf(small);
        last->slope[s * padded(1)] = ((logit >= 0 ? part : small * part) - label) * share;
    }
    return sum;
}

/* The order of `PARTS` in native.py. */
enum {
    DATA, BOTTOM, EMBEDDING, INTERACTION, TOP, LOSS, TOP_BACK, INTERACTION_BACK, EMBEDDING_BACK, BOTTOM_BACK, UPDATE,
    PARTS
};

/* Adds the time since the last call to a part; nothing where nobody asks. */
static void clocked(int64_t *times, int part) {
    if (!times) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    if (part >= 0) times[part] += ns - times[PARTS];
    times[PARTS] = ns;
}

static void mlp_forward(Net *net, int part, const float *x, int64_t samples) {
    for (int64_t index = 0; index < net->layers[part]; index++) {
        Layer *one = &net->layer[part][index];
        forward(samples, one->in, one->out, x, one->transposed, one->bias, one->output,
                part == 0 || index + 1 < net->layers[part]);
        x = one->output;
    }
}

/* From the slope of the last layer, which has passed its ReLU, down to `to_x` where that is wanted. */
static void mlp_backward(Net *net, int part, const float *x, float *to_x, int64_t samples) {
    for (int64_t index = net->layers[part] - 1; index >= 0; index--) {
        Layer *one = &net->layer[part][index], *below = one - 1;
        const float *input = index ? below->output : x;
        to_weights(samples, one->in, one->out, one->slope, input, one->weights.gradient, one->biases.gradient);
        if (index)
            to_input(samples, one->in, one->out, one->slope, one->weight, below->slope, below->output);
        else if (to_x)
            to_input(samples, one->in, one->out, one->slope, one->weight, to_x, 0);
    }
}

/* What all steps have in common; the order of the fields is that of `_Training` in native.py. */
typedef struct {
    const int64_t *sizes;
    float *const *tensors;
    float *scratch, *steps;
    const float *dense_ND, *labels_N;
    const int64_t *ids, *order_N;
    int64_t by_feature, by_sample;
    double decays[2], beta1, beta2, eps;
} Training;

/* One step on the samples begin..end of the order; writes its loss, and the norm of its gradient where `norm` is set.
 * Returns -1, or before anything changed the place in B x F of an id outside its table. */
int64_t dlrm_step(const Training *training, int64_t begin, int64_t end, double rate, float *loss, float *norm,
                  int64_t *times) {
    const int64_t *rows_B = training->order_N + begin, count = end - begin;
    Net net;
    lay_out(&net, training->sizes, training->tensors, training->decays, training->scratch);
    const float *dense_ND = training->dense_ND, *labels_N = training->labels_N;
    const int64_t *ids = training->ids, by_feature = training->by_feature, by_sample = training->by_sample;
    clocked(times, -1);
    const int64_t features = net.features, dim = net.dim, dense = net.layer[0][0].in, rest = features * dim;
    for (int64_t s = 0; s < count; s++) {
        if (s + AHEAD < count) {
            const int64_t next = rows_B[s + AHEAD];
            __builtin_prefetch(ids + next * by_sample);
            __builtin_prefetch(labels_N + next);
            for (int64_t k = 0; k < dense; k += 16) __builtin_prefetch(dense_ND + next * dense + k);
        }
        for (int64_t f = 0; f < features; f++)
            if ((uint64_t)ids[rows_B[s] * by_sample + f * by_feature] >= (uint64_t)net.rows_F[f])
                return s * features + f;
    }
    copy_weights(&net);
    double sum = 0;
    float labels[BLOCK];
    Layer *last = &net.layer[1][net.layers[1] - 1];
    const float *to_pooled = net.pooled + BLOCK * rest;
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t samples = count - first < BLOCK ? count - first : BLOCK;
        for (int64_t s = 0; s < samples; s++) {
            const int64_t row = rows_B[first + s];
            memcpy(net.dense + s * padded(dense), dense_ND + row * dense, dense * sizeof(float));
            labels[s] = labels_N[row];
            int64_t start = 0;
            for (int64_t f = 0; f < features; start += net.rows_F[f++])
                net.places[s * features + f] = start + ids[row * by_sample + f * by_feature];
        }
        clocked(times, DATA);
        mlp_forward(&net, 0, net.dense, samples);
        clocked(times, BOTTOM);
        for (int64_t v = 0; v < samples * features; v++)
            memcpy(net.pooled + v * dim, net.table.value + net.places[v] * dim, dim * sizeof(float));
        clocked(times, EMBEDDING);
        interact(&net, samples);
        clocked(times, INTERACTION);
        mlp_forward(&net, 1, net.interacted, samples);
        clocked(times, TOP);
        sum += loss_of(last, labels, samples, count);
        clocked(times, LOSS);
        mlp_backward(&net, 1, net.interacted, net.to_interacted, samples);
        clocked(times, TOP_BACK);
        interact_backward(&net, samples);
        clocked(times, INTERACTION_BACK);
        for (int64_t v = 0; v < samples * features; v++) {
            float *to = net.table.gradient + net.places[v] * dim;
            for (int64_t k = 0; k < dim; k++) to[k] += to_pooled[v * dim + k];
        }
        clocked(times, EMBEDDING_BACK);
        mlp_backward(&net, 0, net.dense, 0, samples);
        clocked(times, BOTTOM_BACK);
    }
    *loss = (float)(sum / (double)count);
    *training->steps += 1;
    const Adam adam = {rate, training->beta1, training->beta2, training->eps, *training->steps};
    double squares = norm ? squares_of(&net.table) : 0;
    for (int part = 0; part < 2; part++)
        for (int64_t index = 0; index < net.layers[part]; index++) {
            const Parameter *pair[2] = {&net.layer[part][index].weights, &net.layer[part][index].biases};
            for (int which = 0; which < 2; which++) {
                if (norm) squares += squares_of(pair[which]);
                adamw(pair[which], &adam);
            }
        }
    adamw(&net.table, &adam);
    if (norm) *norm = (float)sqrt(squares);
    clocked(times, UPDATE);
    return -1;
}
