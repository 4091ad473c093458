// The gate of an STU layer's output on an NVIDIA GPU, half precision, E = COLUMNS a multiple of 256: what triton.py's
// kernels of the same names do. Compiled by NVRTC, so no headers.
//
// A warp takes a whole row, so that its sums need no barrier, and loads its next row before it computes this one. A
// lane has 8 neighbouring columns of every 256; it writes z over the very gradients that it has read.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned short half_t;

#ifdef FLOAT16
#define KIND "f16"
#else
#define KIND "bf16"
#endif

constexpr int E = COLUMNS, CHUNKS = E / 256, OWN = 8 * CHUNKS, WARPS = 4;

struct alignas(16) Eight { u32 pair[4]; };  // numbers of half precision

__device__ __forceinline__ Eight load(const half_t* at) {
  Eight e;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(e.pair[0]), "=r"(e.pair[1]), "=r"(e.pair[2]), "=r"(e.pair[3]) : "l"(at));
  return e;
}
__device__ __forceinline__ float number(const Eight& e, int i) {
  float x;
#ifdef FLOAT16
  asm("{.reg .f16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(x) : "r"(i & 1 ? e.pair[i / 2] >> 16 : e.pair[i / 2]));
#else
  x = __uint_as_float(i & 1 ? e.pair[i / 2] & 0xFFFF0000u : e.pair[i / 2] << 16);
#endif
  return x;
}
__device__ __forceinline__ void store(half_t* at, const float (&x)[8]) {
  Eight e;
#pragma unroll
  for (int i = 0; i < 4; i++) asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(e.pair[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
  *(Eight*)at = e;
}
// Eight numbers of shared memory, read again in every round: they would fill the registers otherwise.
__device__ __forceinline__ void read(float (&x)[8], const float* at) {
  const u32 place = (u32)__cvta_generic_to_shared(at);
#pragma unroll
  for (int i = 0; i < 8; i += 4) asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3]) : "r"(place + 4 * i));
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

// Dropout: ops/dropout/rule.py.
struct Drop {
  const i64* numbers;
  u32 first, second, threshold;
  float scale;
};
__device__ __forceinline__ u32 mix(u32 word) {
  word = (word ^ word >> 16) * 0x7FEB352Du;
  word = (word ^ word >> 15) * 0x846CA68Bu;
  return word ^ word >> 16;
}
// The random words of a row, the first one already moved to the lane's first column.
struct Words {
  u32 a, b;
  __device__ __forceinline__ Words(const Drop& drop, i64 row, int first_column) {
#ifdef DROP
    const u32 low = (u32)(drop.numbers ? drop.numbers[row] : row);
    a = mix(mix(low ^ drop.first) + drop.second), b = mix(a ^ drop.second);
    a += (u32)first_column * 0x9E3779B1u;
    // Sums of lane and column must not be kept for every column: there are not that many registers.
    asm volatile("" : "+r"(a));
#endif
  }
  __device__ __forceinline__ float factor(const Drop& drop, int columns_on) const {
#ifdef DROP
    u32 word = a + (u32)columns_on * 0x9E3779B1u;
    word = (word ^ word >> 16 ^ b) * 0x7FEB352Du;
    word = (word ^ word >> 15) * 0x846CA68Bu;
    return word >= drop.threshold ? drop.scale : 0.f;
#else
    return 1.f;
#endif
  }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) gate(
    const half_t* __restrict__ attention, const half_t* __restrict__ u, const float* __restrict__ weight, const float* __restrict__ bias, half_t* __restrict__ z,
    float* __restrict__ stats, i64 T, i64 attention_stride, i64 u_stride, float eps, const i64* numbers, u32 first, u32 second, u32 threshold, float drop_scale) {
  const Drop drop{numbers, first, second, threshold, drop_scale};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = gridDim.x * WARPS;
  i64 row = blockIdx.x * WARPS + warp;
  Eight a[CHUNKS], g[CHUNKS];
  auto prefetch = [&](i64 row) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) a[c] = load(attention + row * attention_stride + c * 256 + lane * 8), g[c] = load(u + row * u_stride + c * 256 + lane * 8);
  };
  if (row < T) prefetch(row);
  for (; row < T; row += step) {
    float value[OWN], gate[OWN], sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float raw = number(g[i / 8], i % 8);
      value[i] = number(a[i / 8], i % 8), gate[i] = raw * sigmoid(raw), sum += value[i];
    }
    if (row + step < T) prefetch(row + step);
    const float mean = over_warp(sum) / E;
#pragma unroll
    for (int i = 0; i < OWN; i++) squares += (value[i] - mean) * (value[i] - mean);
    const float spread = rsqrtf(over_warp(squares) / E + eps);
    const Words words(drop, row, lane * 8);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int column = c * 256 + lane * 8;
      float out[3][8];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float v = value[8 * c + j], open = gate[8 * c + j];
        out[0][j] = open * words.factor(drop, c * 256 + j);
        out[1][j] = v * words.factor(drop, c * 256 + j + E);
        out[2][j] = open * ((v - mean) * spread * weight[column + j] + bias[column + j]) * words.factor(drop, c * 256 + j + 2 * E);
      }
#pragma unroll
      for (int part = 0; part < 3; part++) store(z + row * 3 * E + part * E + column, out[part]);
    }
    if (lane == 0) stats[row] = mean, stats[T + row] = spread;
  }
}

// `shares` of every program: the gradients of the norm's weight and bias, and the sum of u's gradient over its rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) gate_backward(
    half_t* __restrict__ dz, const half_t* __restrict__ attention, const half_t* __restrict__ u, const float* __restrict__ weight, const float* __restrict__ bias,
    const float* __restrict__ stats, half_t* __restrict__ dattention, half_t* __restrict__ du, float* __restrict__ shares, i64 T, i64 attention_stride, i64 u_stride, i64 du_stride,
    const i64* numbers, u32 first, u32 second, u32 threshold, float drop_scale) {
  const Drop drop{numbers, first, second, threshold, drop_scale};
  __shared__ alignas(16) float weights[2][E];
  __shared__ float sums[3][E];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = gridDim.x * WARPS;
  for (int i = threadIdx.x; i < E; i += 32 * WARPS) weights[0][i] = weight[i], weights[1][i] = bias[i];
  __syncthreads();
  i64 row = blockIdx.x * WARPS + warp;
  Eight in[5][CHUNKS];
  float mean = 0.f, spread = 0.f, dweight[OWN], dbias[OWN], total[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) dweight[i] = dbias[i] = total[i] = 0.f;
  auto prefetch = [&](i64 row, int c) {
    const int column = c * 256 + lane * 8;
#pragma unroll
    for (int part = 0; part < 3; part++) in[part][c] = load(dz + row * 3 * E + part * E + column);
    in[3][c] = load(attention + row * attention_stride + column), in[4][c] = load(u + row * u_stride + column);
  };
  if (row < T) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) prefetch(row, c);
    mean = stats[row], spread = stats[T + row];
  }
  for (; row < T; row += step) {
    const float shift = -mean * spread, scale = spread;
    const bool more = row + step < T;
    const Words words(drop, row, lane * 8);
    Eight values[CHUNKS];
    float slope[OWN], straight[OWN], sum = 0.f, along = 0.f;
    if (more) mean = stats[row + step], spread = stats[T + row + step];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int column = c * 256 + lane * 8;
      float out[3][8], draw[8], w[8], b[8];
      read(w, weights[0] + column), read(b, weights[1] + column);
      values[c] = in[3][c];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int i = 8 * c + j;
        const float value = number(in[3][c], j), raw = number(in[4][c], j), standard = fmaf(value, scale, shift);
        const float normed = fmaf(standard, w[j], b[j]);
        const float opened = sigmoid(raw), open = raw * opened;
        const float f0 = words.factor(drop, c * 256 + j), f1 = words.factor(drop, c * 256 + j + E), f2 = words.factor(drop, c * 256 + j + 2 * E);
        const float dgated = number(in[2][c], j) * f2, dgate = fmaf(dgated, normed, number(in[0][c], j) * f0), dnormed = dgated * open;
        out[0][j] = open * f0, out[1][j] = value * f1, out[2][j] = open * normed * f2;
        straight[i] = number(in[1][c], j) * f1;
        dweight[i] = fmaf(dnormed, standard, dweight[i]), dbias[i] += dnormed;
        slope[i] = dnormed * w[j], sum += slope[i], along = fmaf(slope[i], standard, along);
        draw[j] = dgate * fmaf(open, 1.f - opened, opened), total[i] += draw[j];
      }
      if (more) prefetch(row + step, c);
#pragma unroll
      for (int part = 0; part < 3; part++) store(dz + row * 3 * E + part * E + column, out[part]);
      store(du + row * du_stride + column, draw);
    }
    sum = over_warp(sum) / E, along = over_warp(along) / E;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      float before[8];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int i = 8 * c + j;
        before[j] = fmaf(slope[i] - sum - fmaf(number(values[c], j), scale, shift) * along, scale, straight[i]);
      }
      store(dattention + row * E + c * 256 + lane * 8, before);
    }
  }
  // The shares of the warps, one after the other.
  for (int turn = 0; turn < WARPS; turn++) {
    __syncthreads();
    if (warp == turn)
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int column = i / 8 * 256 + lane * 8 + i % 8;
        sums[0][column] = (turn ? sums[0][column] : 0.f) + dweight[i];
        sums[1][column] = (turn ? sums[1][column] : 0.f) + dbias[i];
        sums[2][column] = (turn ? sums[2][column] : 0.f) + total[i];
      }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * E; i += 32 * WARPS) shares[(i64)blockIdx.x * 3 * E + i] = sums[i / E][i % E];
}
