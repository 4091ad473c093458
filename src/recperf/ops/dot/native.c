/* The dot interaction of samples first..last: vectors of a sample are its dense one and one of each sparse feature.
 *
 * Shapes: B samples, F sparse features, V = F + 1 vectors, D width, W output width (the dense vector, pairs, zeros).
 * Pairs are the lower triangle row by row: (1,0), (2,0), (2,1) ..., each row closed by its own square if `diagonal`. */

#include <stdint.h>
#include <string.h>

static const float *vector(const float *dense, const float *sparse, int64_t index, int64_t sample, int64_t samples,
                           int64_t dim) {
    return index ? sparse + ((index - 1) * samples + sample) * dim : dense + sample * dim;
}

static float product(const float *restrict a, const float *restrict b, int64_t dim) {
    /* Four sums side by side: one alone would wait for itself. */
    float sum[4] = {0};
    int64_t k = 0;
    for (; k + 4 <= dim; k += 4)
        for (int64_t lane = 0; lane < 4; lane++) sum[lane] += a[k + lane] * b[k + lane];
    for (; k < dim; k++) sum[0] += a[k] * b[k];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

void dot_forward(const float *dense, const float *sparse, float *out, int64_t first, int64_t last, int64_t samples,
                 int64_t features, int64_t dim, int64_t width, int64_t diagonal) {
    for (int64_t sample = first; sample < last; sample++) {
        float *row = out + sample * width;
        memcpy(row, dense + sample * dim, dim * sizeof(float));
        int64_t place = dim;
        for (int64_t i = 0; i <= features; i++) {
            const float *one = vector(dense, sparse, i, sample, samples, dim);
            for (int64_t j = 0; j < i + (diagonal != 0); j++)
                row[place++] = product(one, vector(dense, sparse, j, sample, samples, dim), dim);
        }
        memset(row + place, 0, (width - place) * sizeof(float));
    }
}

static void add(float *restrict to, const float *restrict from, float times, int64_t dim) {
    for (int64_t k = 0; k < dim; k++) to[k] += times * from[k];
}

void dot_backward(const float *dense, const float *sparse, const float *gradient, float *to_dense, float *to_sparse,
                  int64_t first, int64_t last, int64_t samples, int64_t features, int64_t dim, int64_t width,
                  int64_t diagonal) {
    for (int64_t sample = first; sample < last; sample++) {
        const float *row = gradient + sample * width;
        memcpy(to_dense + sample * dim, row, dim * sizeof(float));
        for (int64_t i = 1; i <= features; i++)
            memset(to_sparse + ((i - 1) * samples + sample) * dim, 0, dim * sizeof(float));
        const float *slope = row + dim;
        for (int64_t i = 0; i <= features; i++) {
            const float *one = vector(dense, sparse, i, sample, samples, dim);
            float *to_one = (float *)vector(to_dense, to_sparse, i, sample, samples, dim);
            for (int64_t j = 0; j < i; j++) {
                /* A product belongs to both of its vectors. */
                add(to_one, vector(dense, sparse, j, sample, samples, dim), *slope, dim);
                add((float *)vector(to_dense, to_sparse, j, sample, samples, dim), one, *slope, dim);
                slope++;
            }
            if (diagonal) add(to_one, one, 2 * *slope++, dim);
        }
    }
}
