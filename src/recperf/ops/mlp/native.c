/* The backward pass of a ReLU and of the bias before it, one pass over the gradient, which it overwrites.
 *
 * Shapes: B samples, N outputs of the layer. Stripes first..last have `stripe` samples each, the last one fewer. */

#include <stdint.h>
#include <string.h>

void relu_backward(float *restrict gradient, const float *restrict activation, float *restrict sums, int64_t first,
                   int64_t last, int64_t stripe, int64_t samples, int64_t outputs) {
    for (int64_t s = first; s < last; s++) {
        float *sum = sums + s * outputs;
        memset(sum, 0, outputs * sizeof(float));
        const int64_t end = (s + 1) * stripe < samples ? (s + 1) * stripe : samples;
        for (int64_t row = s * stripe; row < end; row++) {
            float *slopes = gradient + row * outputs;
            const float *passed = activation + row * outputs;
            for (int64_t k = 0; k < outputs; k++) {
                const float slope = passed[k] > 0 ? slopes[k] : 0.0f;
                slopes[k] = slope;
                sum[k] += slope;
            }
        }
    }
}
