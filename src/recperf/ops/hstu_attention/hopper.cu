// HSTU attention on Hopper (sm_90a): half-precision heads of WIDTH, 64, 128 or 256, plain causal rows.
// Compiled by NVRTC, so no headers.
//
// One warp copies blocks from memory with the chip's bulk copies (TMA); groups of four warps multiply (wgmma). Blocks in
// shared memory are [rows][64 columns], as many after each other as a head has, with the 128-byte swizzle.
//
// Forward: a group has 64 queries, keys pass by. Programs stay and take one block of queries after the other from a
// counter, so that copies for the next one begin while the last one is written.
// Backward: 128 keys stay, 64 queries at a time pass by. Scores lie with the keys down and the queries across, so weights
// and slopes are left operands of the key and value gradients as they are; slopes also go through shared memory for the
// query gradient, whose share of every block is added up in memory by the copy engine (bulk reduce), in a fixed order.
// Backward at width 256: the key and value gradients of 64 keys fill the registers of a group each, so the query gradient
// has a kernel of its own, which computes the scores once more.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short half_t;
struct alignas(64) Map { char bytes[128]; };  // CUtensorMap

#ifdef FLOAT16
#define KIND "f16"
#else
#define KIND "bf16"
#endif

constexpr int D = WIDTH, PARTS = D / 64;

// -- waiting, copying, multiplying --------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
__device__ __forceinline__ void barrier_init(u32 at, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count)); }
__device__ __forceinline__ void expect(u32 at, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); }
__device__ __forceinline__ void arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
__device__ __forceinline__ void wait(u32 at, int parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n@done bra.uni END;\nbra.uni AGAIN;\nEND:\n}" ::"r"(at), "r"(parity) : "memory");
}
__device__ __forceinline__ void group_barrier(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void copy_block(u32 to, const Map* map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
// A block of a head: its parts of 64 columns.
__device__ __forceinline__ void copy_head(u32 to, const Map* map, int column, int row, u32 barrier, int bytes) {
  for (int part = 0; part < PARTS; part++) copy_block(to + part * (bytes / PARTS), map, column + 64 * part, row, barrier);
}

// A swizzled operand in shared memory: groups of 8 rows are 1,024 bytes apart; `apart` is the distance of 64-column
// parts where the columns are not the summed dimension.
__device__ __forceinline__ u64 operand(u32 at, int apart = 16) { return (u64)((at & 0x3FFFF) >> 4) | (u64)(apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }
// Steps of 16 along the summed dimension: along columns (of the parts of a block of so many bytes), or along rows.
__device__ __forceinline__ u64 columns(u64 block, int step, int bytes) { return block + (step / 4) * (bytes / PARTS / 16) + (step % 4) * 2; }
__device__ __forceinline__ u64 rows(u64 block, int step) { return block + step * (2048 / 16); }

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when at most `left` committed groups of products are unfinished.
template <int left> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory"); }
// The compiler must neither read these registers before nor move writes behind this point.
template <int N> __device__ __forceinline__ void keep_order(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

#define OUT8(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define OUT16(c, d) OUT8(c, d, 0), OUT8(c, d, 8)
#define OUT32(c, d) OUT8(c, d, 0), OUT8(c, d, 8), OUT8(c, d, 16), OUT8(c, d, 24)
#define OUT64(c, d) OUT32(c, d), OUT8(c, d, 32), OUT8(c, d, 40), OUT8(c, d, 48), OUT8(c, d, 56)
#define OUT128(c, d) OUT64(c, d), OUT8(c, d, 64), OUT8(c, d, 72), OUT8(c, d, 80), OUT8(c, d, 88), OUT8(c, d, 96), OUT8(c, d, 104), OUT8(c, d, 112), OUT8(c, d, 120)
#define NEW(r) "=f"(r)
#define SUM(r) "+f"(r)
#define LIST16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define LIST32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define LIST64                                                                                                             \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

#define LIST128 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"

// Sums of 64 rows and 32, 64 or 128 columns from two blocks in shared memory; the first product of a sum ignores what
// the registers held. TURNED: the summed dimension are the rows of both blocks instead of the columns.
#define SHARED_PRODUCT(SIZE, COLUMNS, A, B, T)                                                                                                \
  template <bool TURNED> __device__ __forceinline__ void multiply(float (&d)[SIZE], u64 a, u64 b, bool first) {                                \
    if (first)                                                                                                                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." KIND "." KIND " " LIST##SIZE   \
                   ", " A ", " B ", p, 1, 1, " T ", " T ";\n}" : OUT##SIZE(NEW, d) : "l"(a), "l"(b), "n"((int)TURNED));                         \
    else                                                                                                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." KIND "." KIND " " LIST##SIZE   \
                   ", " A ", " B ", p, 1, 1, " T ", " T ";\n}" : OUT##SIZE(SUM, d) : "l"(a), "l"(b), "n"((int)TURNED));                         \
  }
SHARED_PRODUCT(16, "32", "%16", "%17", "%18")
SHARED_PRODUCT(32, "64", "%32", "%33", "%34")
SHARED_PRODUCT(64, "128", "%64", "%65", "%66")
// Sums of 64 rows and 64, 128 or 256 columns from registers and a block in shared memory whose rows are summed over.
__device__ __forceinline__ void multiply(float (&d)[32], const u32* a, u64 b, bool keep) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." KIND "." KIND " " LIST32 ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
               : OUT32(SUM, d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
}
__device__ __forceinline__ void multiply(float (&d)[64], const u32* a, u64 b, bool keep) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." KIND "." KIND " " LIST64 ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
               : OUT64(SUM, d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
}
__device__ __forceinline__ void multiply(float (&d)[128], const u32* a, u64 b, bool keep) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." KIND "." KIND " " LIST128 ", {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"
               : OUT128(SUM, d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
}

// -- numbers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Weight SiLU(s) = x (1 + tanh x) with x = s / 2; returns twice its slope by s.
__device__ __forceinline__ float weigh(float x, float& weight) {
  const float t = tanh_fast(x), opened = 1.f + t;
  weight = x * opened;
  return fmaf(weight, 1.f - t, opened);
}
// Where nothing is seen: the hardware's tanh is exactly -1 there, so weight and slope are exactly 0.
constexpr float UNSEEN = -60.f;
// Four 8 x 8 matrices of registers to 16 rows of a block.
__device__ __forceinline__ void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// The two numbers of a pair, added to sums.
__device__ __forceinline__ void add_pair(float* sums, u32 pair) {
#ifdef FLOAT16
  float low, high;
  asm("{.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(low), "=f"(high) : "r"(pair));
  sums[0] += low, sums[1] += high;
#else
  sums[0] += __uint_as_float(pair << 16), sums[1] += __uint_as_float(pair & 0xFFFF0000u);
#endif
}
__device__ __forceinline__ void add_eight(float* sums, uint4 numbers) {
  add_pair(sums, numbers.x), add_pair(sums + 2, numbers.y), add_pair(sums + 4, numbers.z), add_pair(sums + 6, numbers.w);
}
// 64 rows of four warps, from sums in registers to memory, through 128 D bytes of shared memory, so that whole rows are
// written; and the sums of the written numbers over rows, unless `totals` is null.
__device__ __forceinline__ void write_rows(const float (&sum)[D / 2], float scale, u32 area, half_t* to, i64 stride, int rows_left, int barrier, float* totals = nullptr) {
  constexpr int EIGHTS = D / 8, BYTES = 2 * D;
  const int thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const float* s = sum + 8 * k;
    store_matrices(area + (thread / 32 * 16 + (lane & 15)) * BYTES + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4), pack(s[0] * scale, s[1] * scale), pack(s[2] * scale, s[3] * scale),
                   pack(s[4] * scale, s[5] * scale), pack(s[6] * scale, s[7] * scale));
  }
  group_barrier(barrier, 128);
  const int chunk = thread % EIGHTS;
  float eight[8] = {};
#pragma unroll
  for (int i = 0; i < EIGHTS / 2; i++) {
    const int row = i * (128 / EIGHTS) + thread / EIGHTS;
    uint4 numbers;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(numbers.x), "=r"(numbers.y), "=r"(numbers.z), "=r"(numbers.w) : "r"(area + row * BYTES + ((chunk ^ (row & 7)) << 4)));
    if (row < rows_left) {
      *(uint4*)(to + row * stride + chunk * 8) = numbers;
      if (totals) add_eight(eight, numbers);
    }
  }
  group_barrier(barrier, 128);
  if (totals) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      for (int apart = EIGHTS; apart < 32; apart *= 2) eight[i] += __shfl_xor_sync(~0u, eight[i], apart);
      if (lane < EIGHTS) asm volatile("st.shared.f32 [%0], %1;" ::"r"(area + (thread / 32 * D + chunk * 8 + i) * 4), "f"(eight[i]) : "memory");
    }
    group_barrier(barrier, 128);
    for (int column = thread; column < D; column += 128) {
      float total = 0.f;
      for (int warp = 0; warp < 4; warp++) {
        float share;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(share) : "r"(area + (warp * D + column) * 4) : "memory");
        total += share;
      }
      totals[column] = total;
    }
    group_barrier(barrier, 128);
  }
}

// 64 rows of four warps straight from registers to memory: the four threads of a row exchange pairs, so that each writes
// eight columns side by side, and shared memory stays free for the next queries.
__device__ __forceinline__ void write_registers(const float (&sum)[D / 2], float scale, half_t* to, i64 stride, int rows_left) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int below = 0; below < 16; below += 8) {
#pragma unroll
    for (int chunk = 0; chunk < D / 8; chunk += 4) {
      u32 pair[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* s = sum + 4 * (chunk + i) + below / 4;
        pair[i] = pack(s[0] * scale, s[1] * scale);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(~0u, odd ? pair[i] : pair[i + 1], 1);
        (odd ? pair[i] : pair[i + 1]) = other;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 other = __shfl_xor_sync(~0u, upper ? pair[i] : pair[i + 2], 2);
        (upper ? pair[i] : pair[i + 2]) = other;
      }
      if (row + below < rows_left) *(uint4*)(to + (row + below) * stride + (chunk + (lane & 3)) * 8) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
  }
}

// -- forward ------------------------------------------------------------------------------------------------------

namespace forward {
constexpr int GROUPS = D > 128 ? 2 : 3, QUERIES = 64 * GROUPS, KEYS = D > 64 ? 64 : 128, SLICE = 64 * D * 2, BLOCK = KEYS * D * 2, STAGES = D > 128 ? 2 : 4;
constexpr int Q = 0, K = Q + GROUPS * SLICE, V = K + STAGES * BLOCK, BARRIERS = V + STAGES * BLOCK;
constexpr int K_FULL = BARRIERS, K_EMPTY = K_FULL + 8 * STAGES, V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES, Q_FULL = V_EMPTY + 8 * STAGES, Q_EMPTY = Q_FULL + 8,
              TILE_FULL = Q_EMPTY + 8, TILE_EMPTY = TILE_FULL + 16, TILE = TILE_EMPTY + 16;
}  // namespace forward

extern "C" __global__ void __launch_bounds__(128 * (forward::GROUPS + 1), 1) attend(
    const __grid_constant__ Map q_map, const __grid_constant__ Map k_map, const __grid_constant__ Map v_map, half_t* __restrict__ out, i64 out_token, i64 out_head,
    const i64* __restrict__ offsets, int row_blocks, int heads, int tiles, u32* counter, float half, float over) {
  using namespace forward;
  extern __shared__ char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + K_FULL + 8 * i, 1);
      barrier_init(base + K_EMPTY + 8 * i, GROUPS);
      barrier_init(base + V_FULL + 8 * i, 1);
      barrier_init(base + V_EMPTY + 8 * i, GROUPS);
    }
    barrier_init(base + Q_FULL, 1);
    barrier_init(base + Q_EMPTY, GROUPS);
    for (int i = 0; i < 2; i++) {
      barrier_init(base + TILE_FULL + 8 * i, 1);
      barrier_init(base + TILE_EMPTY + 8 * i, GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_bulk();
  }
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 3 ? 32 : 24));
    if (threadIdx.x == 0) {
      int block = 0;  // blocks of keys copied so far
      for (int round = 0;; round++) {
        int tile, tokens = 0, first = 0;
        i64 start = 0;
        do {
          tile = (int)atomicAdd(counter, 1u);
          if (tile >= tiles) break;
          // The longest way of a row first: what starts last should end soon.
          first = (row_blocks - 1 - tile % row_blocks) * QUERIES;
          start = offsets[tile / row_blocks / heads];
          tokens = (int)(offsets[tile / row_blocks / heads + 1] - start);
        } while (first >= tokens);
        wait(base + TILE_EMPTY + 8 * (round & 1), ((round >> 1) & 1) ^ 1);
        asm volatile("st.shared.s32 [%0], %1;" ::"r"(base + TILE + 4 * (round & 1)), "r"(tile) : "memory");
        arrive(base + TILE_FULL + 8 * (round & 1));
        if (tile >= tiles) break;
        const int column = tile / row_blocks % heads * D, row = (int)start, blocks = (min(first + QUERIES, tokens) + KEYS - 1) / KEYS;
        wait(base + Q_EMPTY, (round & 1) ^ 1);
        expect(base + Q_FULL, GROUPS * SLICE);
        for (int g = 0; g < GROUPS; g++) copy_head(base + Q + g * SLICE, &q_map, column, row + first + 64 * g, base + Q_FULL, SLICE);
        for (int i = 0; i < blocks; i++, block++) {
          const int slot = block % STAGES, parity = (block / STAGES & 1) ^ 1;
          wait(base + K_EMPTY + 8 * slot, parity);
          expect(base + K_FULL + 8 * slot, BLOCK);
          copy_head(base + K + slot * BLOCK, &k_map, column, row + i * KEYS, base + K_FULL + 8 * slot, BLOCK);
          wait(base + V_EMPTY + 8 * slot, parity);
          expect(base + V_FULL + 8 * slot, BLOCK);
          copy_head(base + V + slot * BLOCK, &v_map, column, row + i * KEYS, base + V_FULL + 8 * slot, BLOCK);
        }
      }
      // The last program leaves the counter at zero for the next call.
      if (atomicInc(counter + 1, gridDim.x - 1) == gridDim.x - 1) atomicExch(counter, 0u);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 3 ? 160 : 240));
  const int own = group - 1, warp = threadIdx.x % 128 / 32;
  const bool leader = threadIdx.x % 128 == 0;
  float sum[D / 2], score[KEYS / 2];
  u32 weight[KEYS / 4];
  int before = 0;  // blocks of keys of the tiles before
  for (int round = 0;; round++) {
    wait(base + TILE_FULL + 8 * (round & 1), (round >> 1) & 1);
    int tile;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(tile) : "r"(base + TILE + 4 * (round & 1)) : "memory");
    if (tile >= tiles) return;
    const int pair = tile / row_blocks, first = (row_blocks - 1 - tile % row_blocks) * QUERIES, query = first + 64 * own;
    const i64 start = offsets[pair / heads];
    const int tokens = (int)(offsets[pair / heads + 1] - start), blocks = (min(first + QUERIES, tokens) + KEYS - 1) / KEYS;
    group_barrier(1 + own, 128);
    if (leader) arrive(base + TILE_EMPTY + 8 * (round & 1));
    // The blocks that these queries see; later ones are for the groups behind.
    const int seen = query < tokens ? min(blocks, query / KEYS + 1) : 0;
    const u64 queries = operand(base + Q + own * SLICE);
    if (seen || leader) wait(base + Q_FULL, round & 1);
    for (int i = 0; i < seen; i++) {
      const int slot = (before + i) % STAGES, parity = (before + i) / STAGES & 1;
      wait(base + K_FULL + 8 * slot, parity);
      const u64 keys = operand(base + K + slot * BLOCK), values = operand(base + V + slot * BLOCK, BLOCK / PARTS);
      products_begin();
#pragma unroll
      for (int k = 0; k < D / 16; k++) multiply<false>(score, columns(queries, k, SLICE), columns(keys, k, BLOCK), k == 0);
      products_commit();
      products_wait<0>();  // the scores, and the sum before them
      keep_order(score);
      keep_order(sum);
      if (leader) {
        arrive(base + K_EMPTY + 8 * slot);
        if (i > 0) arrive(base + V_EMPTY + 8 * ((before + i - 1) % STAGES));
        if (i == seen - 1) arrive(base + Q_EMPTY);
      }
      if ((i + 1) * KEYS > query) {
        const int m = query + 16 * warp + lane / 4, n = i * KEYS + (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++) score[j] = n + (j / 4) * 8 + (j & 1) <= m + (j & 2) * 4 ? score[j] : 0.f;
      }
      // SiLU(s) = x + x tanh(x) with x = s / 2.
#pragma unroll
      for (int j = 0; j < KEYS / 2; j += 2) {
        const float x = score[j] * half, y = score[j + 1] * half;
        weight[j / 2] = pack(fmaf(x, tanh_fast(x), x), fmaf(y, tanh_fast(y), y));
      }
      wait(base + V_FULL + 8 * slot, parity);
      keep_order(sum);
      products_begin();
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++) multiply(sum, weight + 4 * k, rows(values, k), i > 0 || k > 0);
      products_commit();
    }
    products_wait<0>();
    keep_order(sum);
    if (leader) {
      arrive(seen ? base + V_EMPTY + 8 * ((before + seen - 1) % STAGES) : base + Q_EMPTY);
      for (int i = seen; i < blocks; i++) {
        const int slot = (before + i) % STAGES, parity = (before + i) / STAGES & 1;
        wait(base + K_FULL + 8 * slot, parity);
        arrive(base + K_EMPTY + 8 * slot);
        wait(base + V_FULL + 8 * slot, parity);
        arrive(base + V_EMPTY + 8 * slot);
      }
    }
    before += blocks;
    if (seen) write_registers(sum, over, out + (start + query) * out_token + pair % heads * out_head, out_token, tokens - query);
  }
}

// -- backward -----------------------------------------------------------------------------------------------------

// Keys and values stay; queries and gradients pass by.
namespace backward {
constexpr int QUERIES = 64, KEYS = D > 128 ? 64 : 128, STAGES = 2, BLOCK = QUERIES * D * 2, KEY_BLOCK = KEYS * D * 2;
constexpr int K = 0, V = K + KEY_BLOCK, Q = V + KEY_BLOCK, G = Q + STAGES * BLOCK, S = G + STAGES * BLOCK;
#if WIDTH <= 128
constexpr int SLOPES = KEYS * QUERIES * 2, SHARE = QUERIES * (D / 2) * 4, SUM = S + 2 * SLOPES, K_FULL = SUM + 2 * SHARE;
#else
constexpr int SLOPES = KEYS * QUERIES * 4, K_FULL = S + 2 * SLOPES;
#endif
constexpr int V_FULL = K_FULL + 8, Q_FULL = V_FULL + 8, Q_EMPTY = Q_FULL + 8 * STAGES, G_FULL = Q_EMPTY + 8 * STAGES, G_EMPTY = G_FULL + 8 * STAGES, SUM_FULL = G_EMPTY + 8 * STAGES,
              SUM_EMPTY = SUM_FULL + 16;

__device__ __forceinline__ void init_blocks(u32 base) {
  barrier_init(base + K_FULL, 1);
  barrier_init(base + V_FULL, 1);
  for (int i = 0; i < STAGES; i++) {
    barrier_init(base + Q_FULL + 8 * i, 1);
    barrier_init(base + Q_EMPTY + 8 * i, 2);
    barrier_init(base + G_FULL + 8 * i, 1);
    barrier_init(base + G_EMPTY + 8 * i, 2);
  }
}
__device__ __forceinline__ void bring_blocks(u32 base, const Map* q_map, const Map* k_map, const Map* v_map, const Map* g_map, int column, int at, int blocks) {
  expect(base + K_FULL, KEY_BLOCK);
  copy_head(base + K, k_map, column, at, base + K_FULL, KEY_BLOCK);
  for (int i = 0; i < blocks; i++) {
    const int slot = i % STAGES, parity = (i / STAGES & 1) ^ 1;
    wait(base + Q_EMPTY + 8 * slot, parity);
    expect(base + Q_FULL + 8 * slot, BLOCK);
    copy_head(base + Q + slot * BLOCK, q_map, column, at + i * QUERIES, base + Q_FULL + 8 * slot, BLOCK);
    if (i == 0) {
      expect(base + V_FULL, KEY_BLOCK);
      copy_head(base + V, v_map, column, at, base + V_FULL, KEY_BLOCK);
    }
    wait(base + G_EMPTY + 8 * slot, parity);
    expect(base + G_FULL + 8 * slot, BLOCK);
    copy_head(base + G + slot * BLOCK, g_map, column, at + i * QUERIES, base + G_FULL + 8 * slot, BLOCK);
  }
}
}  // namespace backward

#if WIDTH <= 128

// `sums` has the query gradient of 64 tokens as two halves of its columns in the order of the products' registers
// (grad_queries turns them into rows); rows of the batch begin at a multiple of 64 tokens there. Programs add their
// shares of a block in a fixed order, later keys first, so that repeats are equal to the bit; `turns` counts them.
// `totals`, unless null: of every program and half of its keys, the sums of its key and value gradients over tokens.
extern "C" __global__ void __launch_bounds__(384, 1) grad_keys(
    const __grid_constant__ Map q_map, const __grid_constant__ Map k_map, const __grid_constant__ Map v_map, const __grid_constant__ Map g_map, float* __restrict__ sums,
    u32* __restrict__ turns, float* __restrict__ totals, half_t* __restrict__ dk, half_t* __restrict__ dv, i64 dk_token, i64 dk_head, i64 dv_token, i64 dv_head, const i64* __restrict__ offsets, int row_blocks,
    int heads, int sum_blocks, float half, float over) {
  using namespace backward;
  extern __shared__ char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const int pair = blockIdx.x / row_blocks, row = pair / heads, head = pair % heads;
  // A program waits for the one with the next keys, which must have begun before it: the chip starts programs in the
  // order of their numbers.
  const int first = (row_blocks - 1 - blockIdx.x % row_blocks) * KEYS;
  const i64 start = offsets[row];
  // A row that is longer than the caller said is cut: nobody would add the shares of later keys.
  const int tokens = min((int)(offsets[row + 1] - start), row_blocks * KEYS);
  if (first >= tokens) {
    for (int i = threadIdx.x; totals && i < 4 * D; i += 384) totals[(i64)blockIdx.x * 4 * D + i] = 0.f;
    return;
  }
  const int blocks = (tokens - first + QUERIES - 1) / QUERIES;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_blocks(base);
    for (int i = 0; i < 2; i++) {
      barrier_init(base + SUM_FULL + 8 * i, 128);
      barrier_init(base + SUM_EMPTY + 8 * i, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_bulk();
  }
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 0 && lane == 0) {
      bring_blocks(base, &q_map, &k_map, &v_map, &g_map, head * D, (int)start + first, blocks);
    } else if ((warp == 1 || warp == 2) && lane == 0) {
      const int part = warp - 1;
      i64 at = ((i64)head * sum_blocks + start / QUERIES + row + first / QUERIES) * 2 + part;
      for (int i = 0; i < blocks; i++, at += 2) {
        wait(base + SUM_FULL + 8 * part, i & 1);
        // Of the programs that add to this block, the one with its own keys comes first.
        u32 turn;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(turns + at) : "memory");
        while (turn != (u32)(i / 2));
        const float* to = sums + at * (SHARE / 4);
        const u32 from = base + SUM + part * SHARE;
        // The first share is written instead of added, so `sums` need not be zero.
        if (turn == 0)
          asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(SHARE) : "memory");
        else
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(SHARE) : "memory");
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
        arrive(base + SUM_EMPTY + 8 * part);
        asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async.global;" ::: "memory");
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turns + at), "r"(turn + 1) : "memory");
      }
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int own = group - 1, own_warp = threadIdx.x % 128 / 32;
  const bool leader = threadIdx.x % 128 == 0;
  float score[32], dweight[32], sum_k[D / 2], sum_v[D / 2], sum_q[D / 4];
  u32 weight[16], slope[16];
#pragma unroll
  for (int i = 0; i < D / 2; i++) sum_k[i] = sum_v[i] = 0.f;
  keep_order(sum_k);
  keep_order(sum_v);
  // 64 keys and values are this group's; of the query gradient it computes half of the columns, from all keys.
  const u64 keys = operand(base + K + own * 64 * 128), values = operand(base + V + own * 64 * 128), key_columns = operand(base + K + own * (PARTS == 2 ? KEY_BLOCK / 2 : 64));
  const u32 slopes_at = base + S + (64 * own + 16 * own_warp + (lane & 15)) * 128;
  wait(base + K_FULL, 0);
  wait(base + V_FULL, 0);
  for (int i = 0; i < blocks; i++) {
    const int slot = i % STAGES, parity = i / STAGES & 1;
    const u64 queries = operand(base + Q + slot * BLOCK, BLOCK / PARTS), gradients = operand(base + G + slot * BLOCK, BLOCK / PARTS);
    wait(base + Q_FULL + 8 * slot, parity);
    products_begin();
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply<false>(score, columns(keys, k, KEY_BLOCK), columns(queries, k, BLOCK), k == 0);
    products_commit();
    wait(base + G_FULL + 8 * slot, parity);
    products_begin();
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply<false>(dweight, columns(values, k, KEY_BLOCK), columns(gradients, k, BLOCK), k == 0);
    products_commit();
    products_wait<1>();  // the scores, and the key gradient of the block before
    keep_order(score);
    keep_order(sum_k);
    if (i > 0 && leader) arrive(base + Q_EMPTY + 8 * ((i - 1) % STAGES));
    const int query = first + i * QUERIES;
    if (i < 2 || query + QUERIES > tokens) {
      const int n = first + 64 * own + 16 * own_warp + lane / 4, m = query + (lane & 3) * 2;
#pragma unroll
      for (int j = 0; j < 32; j++) {
        const int at = m + (j / 4) * 8 + (j & 1);
        score[j] = at >= n + (j & 2) * 4 && at < tokens ? score[j] * half : UNSEEN;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 32; j++) score[j] *= half;
    }
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      float low, high;
      score[j] = weigh(score[j], low), score[j + 1] = weigh(score[j + 1], high);
      weight[j / 2] = pack(low, high);
    }
    keep_order(sum_v);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(sum_v, weight + 4 * k, rows(gradients, k), true);
    products_commit();
    products_wait<1>();  // the gradient of the weights
    keep_order(dweight);
#pragma unroll
    for (int j = 0; j < 32; j += 2) slope[j / 2] = pack(dweight[j] * score[j], dweight[j + 1] * score[j + 1]);
#pragma unroll
    for (int k = 0; k < 4; k++)
      store_matrices(slopes_at + (i & 1) * SLOPES + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4), slope[4 * k], slope[4 * k + 1], slope[4 * k + 2], slope[4 * k + 3]);
    fence_bulk();
    // Two places for slopes: behind this barrier nobody reads those of the block before the last one.
    group_barrier(1, 256);
    const u64 slopes = operand(base + S + (i & 1) * SLOPES);
    keep_order(sum_k);
    products_begin();
#pragma unroll
    for (int k = 0; k < 8; k++) multiply<true>(sum_q, rows(slopes, k), rows(key_columns, k), k == 0);
    products_commit();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(sum_k, slope + 4 * k, rows(queries, k), true);
    products_commit();
    products_wait<1>();  // the query gradient, and the value gradient before it
    keep_order(sum_q);
    keep_order(sum_v);
    if (leader) arrive(base + G_EMPTY + 8 * slot);
    wait(base + SUM_EMPTY + 8 * own, (i & 1) ^ 1);
    const u32 to = base + SUM + own * SHARE + threadIdx.x % 128 * 16;
#pragma unroll
    for (int j = 0; j < D / 16; j++)
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 2048), "f"(sum_q[4 * j]), "f"(sum_q[4 * j + 1]), "f"(sum_q[4 * j + 2]), "f"(sum_q[4 * j + 3]) : "memory");
    fence_bulk();
    arrive(base + SUM_FULL + 8 * own);
  }
  products_wait<0>();
  keep_order(sum_k);
  keep_order(sum_v);
  wait(base + SUM_EMPTY + 8 * own, (blocks - 1) & 1);
  const int key = first + 64 * own;
  float* half_totals = totals ? totals + ((i64)blockIdx.x * 2 + own) * 2 * D : nullptr;
  write_rows(sum_k, half * over, base + SUM + own * SHARE, dk + (start + key) * dk_token + head * dk_head, dk_token, tokens - key, 2 + own, half_totals);
  write_rows(sum_v, over, base + SUM + own * SHARE, dv + (start + key) * dv_token + head * dv_head, dv_token, tokens - key, 2 + own, half_totals ? half_totals + D : nullptr);
}

extern "C" __global__ void __launch_bounds__(128) grad_queries(const float* __restrict__ sums, float* __restrict__ totals, half_t* __restrict__ dq, i64 dq_token, i64 dq_head, const i64* __restrict__ offsets,
                                                               int row_blocks, int heads, int sum_blocks, float scale) {
  constexpr int HALF = D / 2, PAIRS = HALF / 2, EIGHTS = HALF / 8;  // columns of a half, their pairs and groups of eight
  __shared__ u32 tile[64 * PAIRS];
  const int pair = blockIdx.x / row_blocks, block = blockIdx.x % row_blocks, row = pair / heads, head = pair % heads;
  const i64 start = offsets[row];
  const int tokens = (int)(offsets[row + 1] - start), thread = threadIdx.x, lane = thread % 32;
  if (totals) totals += (i64)blockIdx.x * D;
  if (block * 64 >= tokens) {
    if (totals && thread < D) totals[thread] = 0.f;
    return;
  }
  for (int part = 0; part < 2; part++) {
    float eight[8] = {};
    const float4* from = (const float4*)(sums + (((i64)head * sum_blocks + start / 64 + row + block) * 2 + part) * (64 * HALF));
    float4 sum[D / 16];
#pragma unroll
    for (int j = 0; j < D / 16; j++) sum[j] = from[j * 128 + thread];
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
      const int m = thread / 32 * 16 + lane / 4, d = j * 4 + (lane & 3), turned = d ^ (m & (EIGHTS - 1)) << 2;
      tile[m * PAIRS + turned] = pack(sum[j].x * scale, sum[j].y * scale);
      tile[(m + 8) * PAIRS + turned] = pack(sum[j].z * scale, sum[j].w * scale);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EIGHTS / 2; j++) {
      const int m = j * (128 / EIGHTS) + thread / EIGHTS, chunk = thread % EIGHTS;
      const uint4 numbers = *(const uint4*)&tile[m * PAIRS + (chunk * 4 ^ (m & (EIGHTS - 1)) << 2)];
      if (block * 64 + m < tokens) {
        *(uint4*)(dq + (start + block * 64 + m) * dq_token + head * dq_head + part * HALF + chunk * 8) = numbers;
        add_eight(eight, numbers);
      }
    }
    __syncthreads();
    if (totals) {
      float* shares = (float*)tile;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        for (int apart = EIGHTS; apart < 32; apart *= 2) eight[i] += __shfl_xor_sync(~0u, eight[i], apart);
        if (lane < EIGHTS) shares[thread / 32 * HALF + lane * 8 + i] = eight[i];
      }
      __syncthreads();
      if (thread < HALF) totals[part * HALF + thread] = shares[thread] + shares[HALF + thread] + shares[2 * HALF + thread] + shares[3 * HALF + thread];
      __syncthreads();
    }
  }
}

#else

// One group computes weights and the value gradient; it hands the slopes of the weights, in the order of the products'
// registers, to the other, which computes the key gradient. `totals` as above, of every program.
extern "C" __global__ void __launch_bounds__(384, 1) grad_keys(
    const __grid_constant__ Map q_map, const __grid_constant__ Map k_map, const __grid_constant__ Map v_map, const __grid_constant__ Map g_map, float* __restrict__ totals, half_t* __restrict__ dk,
    half_t* __restrict__ dv, i64 dk_token, i64 dk_head, i64 dv_token, i64 dv_head, const i64* __restrict__ offsets, int row_blocks, int heads, float half, float over) {
  using namespace backward;
  constexpr int SLOPE_FULL = SUM_FULL, SLOPE_EMPTY = SUM_EMPTY;
  extern __shared__ char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const int pair = blockIdx.x / row_blocks, row = pair / heads, head = pair % heads, first = blockIdx.x % row_blocks * KEYS;
  const i64 start = offsets[row];
  const int tokens = (int)(offsets[row + 1] - start), blocks = (tokens - first + QUERIES - 1) / QUERIES;
  if (totals) totals += (i64)blockIdx.x * 2 * D;
  if (first >= tokens) {
    for (int i = threadIdx.x; totals && i < 2 * D; i += 384) totals[i] = 0.f;
    return;
  }
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_blocks(base);
    for (int i = 0; i < 2; i++) {
      barrier_init(base + SLOPE_FULL + 8 * i, 128);
      barrier_init(base + SLOPE_EMPTY + 8 * i, 128);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_bulk();
  }
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) bring_blocks(base, &q_map, &k_map, &v_map, &g_map, head * D, (int)start + first, blocks);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const bool leader = threadIdx.x % 128 == 0;
  const u32 slopes_at = base + S + threadIdx.x % 128 * 16;
  float score[32], sum[D / 2];
  u32 pairs[16];
#pragma unroll
  for (int i = 0; i < D / 2; i++) sum[i] = 0.f;
  keep_order(sum);
  // The weights' group multiplies keys by queries, the other one values by gradients.
  const bool weights = group == 1;
  const u64 keys = operand(base + (weights ? K : V));
  const u32 across = base + (weights ? Q : G), across_full = base + (weights ? Q_FULL : G_FULL), across_empty = base + (weights ? Q_EMPTY : G_EMPTY);
  const u32 summed = base + (weights ? G : Q), summed_full = base + (weights ? G_FULL : Q_FULL), summed_empty = base + (weights ? G_EMPTY : Q_EMPTY);
  const auto product = [&](int i) {
    const int slot = i % STAGES;
    wait(across_full + 8 * slot, i / STAGES & 1);
    products_begin();
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply<false>(score, columns(keys, k, KEY_BLOCK), columns(operand(across + slot * BLOCK), k, BLOCK), k == 0);
    products_commit();
  };
  const auto add = [&](int i) {
    const int slot = i % STAGES;
    wait(summed_full + 8 * slot, i / STAGES & 1);
    keep_order(sum);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(sum, pairs + 4 * k, rows(operand(summed + slot * BLOCK, BLOCK / PARTS), k), true);
    products_commit();
  };
  wait(base + (weights ? K_FULL : V_FULL), 0);
  product(0);
  if (weights) {
    products_commit();  // instead of the sum of the block before
    for (int i = 0;; i++) {
      products_wait<1>();  // the scores; the sum of the block before goes on
      keep_order(score);
      if (leader) arrive(across_empty + 8 * (i % STAGES));
      const int query = first + i * QUERIES, n = first + 16 * warp + lane / 4, m = query + (lane & 3) * 2;
      const bool edge = i == 0 || query + QUERIES > tokens;
      float weight[32];
      wait(base + SLOPE_EMPTY + 8 * (i & 1), (i / 2 & 1) ^ 1);
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        float slope[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int at = m + (j / 4) * 8 + (e & 1);
          const bool seen = !edge || (at >= n + (e & 2) * 4 && at < tokens);
          slope[e] = weigh(seen ? score[j + e] * half : UNSEEN, weight[j + e]);
        }
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(slopes_at + (i & 1) * SLOPES + j * 512), "f"(slope[0]), "f"(slope[1]), "f"(slope[2]), "f"(slope[3]) : "memory");
      }
      arrive(base + SLOPE_FULL + 8 * (i & 1));
      products_wait<0>();
      keep_order(sum);
      if (i > 0 && leader) arrive(summed_empty + 8 * ((i - 1) % STAGES));
#pragma unroll
      for (int j = 0; j < 32; j += 2) pairs[j / 2] = pack(weight[j], weight[j + 1]);
      if (i + 1 == blocks) break;
      product(i + 1);
      add(i);
    }
  } else {
    // The sum comes before the next product: it ends the use of a block that the weights' group waits for.
    for (int i = 0;; i++) {
      products_wait<0>();
      keep_order(score);
      if (leader) arrive(across_empty + 8 * (i % STAGES));
      wait(base + SLOPE_FULL + 8 * (i & 1), i / 2 & 1);
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        float slope[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(slope[0]), "=f"(slope[1]), "=f"(slope[2]), "=f"(slope[3]) : "r"(slopes_at + (i & 1) * SLOPES + j * 512) : "memory");
        pairs[j / 2] = pack(score[j] * slope[0], score[j + 1] * slope[1]), pairs[j / 2 + 1] = pack(score[j + 2] * slope[2], score[j + 3] * slope[3]);
      }
      arrive(base + SLOPE_EMPTY + 8 * (i & 1));
      if (i + 1 == blocks) break;
      add(i);
      product(i + 1);
      products_wait<1>();
      keep_order(sum);
      if (leader) arrive(summed_empty + 8 * (i % STAGES));
    }
  }
  add(blocks - 1);
  products_wait<0>();
  keep_order(sum);
  // Through the keys or values, which only this group read.
  const i64 at = start + first;
  half_t* to = weights ? dv + at * dv_token + head * dv_head : dk + at * dk_token + head * dk_head;
  write_rows(sum, weights ? over : half * over, base + (weights ? K : V), to, weights ? dv_token : dk_token, tokens - first, group, totals ? totals + (weights ? D : 0) : nullptr);
}

// Queries and gradients stay, 64 of each a group; values and keys pass by in turn, through three places.
namespace queries {
constexpr int BLOCK = 64 * D * 2, QUERIES = 128, PLACES = 3, Q = 0, G = Q + 2 * BLOCK, KV = G + 2 * BLOCK, Q_FULL = KV + PLACES * BLOCK, KV_FULL = Q_FULL + 8, KV_EMPTY = KV_FULL + 8 * PLACES;
}  // namespace queries

extern "C" __global__ void __launch_bounds__(384, 1) grad_queries(
    const __grid_constant__ Map q_map, const __grid_constant__ Map k_map, const __grid_constant__ Map v_map, const __grid_constant__ Map g_map, float* __restrict__ totals, half_t* __restrict__ dq,
    i64 dq_token, i64 dq_head, const i64* __restrict__ offsets, int row_blocks, int heads, float half, float over) {
  using namespace queries;
  extern __shared__ char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const int pair = blockIdx.x / row_blocks, row = pair / heads, head = pair % heads, first = (row_blocks - 1 - blockIdx.x % row_blocks) * QUERIES;
  const i64 start = offsets[row];
  const int tokens = (int)(offsets[row + 1] - start), blocks = (min(first + QUERIES, tokens) + 63) / 64;
  if (totals) totals += (i64)blockIdx.x * 2 * D;
  if (first >= tokens) {
    for (int i = threadIdx.x; totals && i < 2 * D; i += 384) totals[i] = 0.f;
    return;
  }
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    barrier_init(base + Q_FULL, 1);
    for (int i = 0; i < PLACES; i++) {
      barrier_init(base + KV_FULL + 8 * i, 1);
      barrier_init(base + KV_EMPTY + 8 * i, 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_bulk();
  }
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      const int column = head * D, at = (int)start;
      expect(base + Q_FULL, 4 * BLOCK);
      for (int g = 0; g < 2; g++) {
        copy_head(base + G + g * BLOCK, &g_map, column, at + first + 64 * g, base + Q_FULL, BLOCK);
        copy_head(base + Q + g * BLOCK, &q_map, column, at + first + 64 * g, base + Q_FULL, BLOCK);
      }
      for (int i = 0; i < 2 * blocks; i++) {
        const int place = i % PLACES;
        wait(base + KV_EMPTY + 8 * place, (i / PLACES & 1) ^ 1);
        expect(base + KV_FULL + 8 * place, BLOCK);
        copy_head(base + KV + place * BLOCK, i & 1 ? &k_map : &v_map, column, at + i / 2 * 64, base + KV_FULL + 8 * place, BLOCK);
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int own = group - 1, query = first + 64 * own, seen = query < tokens ? query / 64 + 1 : 0;
  const bool leader = threadIdx.x % 128 == 0;
  const u64 q = operand(base + Q + own * BLOCK), g = operand(base + G + own * BLOCK);
  float score[32], dweight[32], sum[D / 2];
  u32 slope[16];
#pragma unroll
  for (int i = 0; i < D / 2; i++) sum[i] = 0.f;
  keep_order(sum);
  wait(base + Q_FULL, 0);
  const auto products = [&](int i) {
    const int value = 2 * i, key = value + 1;
    wait(base + KV_FULL + 8 * (value % PLACES), value / PLACES & 1);
    products_begin();
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply<false>(dweight, columns(g, k, BLOCK), columns(operand(base + KV + value % PLACES * BLOCK), k, BLOCK), k == 0);
    products_commit();
    wait(base + KV_FULL + 8 * (key % PLACES), key / PLACES & 1);
    products_begin();
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply<false>(score, columns(q, k, BLOCK), columns(operand(base + KV + key % PLACES * BLOCK), k, BLOCK), k == 0);
    products_commit();
  };
  if (seen) products(0);
  for (int i = 0; i < seen; i++) {
    products_wait<0>();
    keep_order(dweight);
    if (leader) arrive(base + KV_EMPTY + 8 * (2 * i % PLACES));
    keep_order(score);
    const int m = query + 16 * warp + lane / 4, n = i * 64 + (lane & 3) * 2;
    const bool edge = i + 1 == seen;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      float both[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const bool visible = !edge || n + (j / 4) * 8 + e <= m + (j & 2) * 4;
        float weight;
        both[e] = dweight[j + e] * weigh(visible ? score[j + e] * half : UNSEEN, weight);
      }
      slope[j / 2] = pack(both[0], both[1]);
    }
    const u64 keys = operand(base + KV + (2 * i + 1) % PLACES * BLOCK, BLOCK / PARTS);
    keep_order(sum);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(sum, slope + 4 * k, rows(keys, k), true);
    products_commit();
    if (edge) break;
    products(i + 1);
    products_wait<2>();  // the sum
    keep_order(sum);
    if (leader) arrive(base + KV_EMPTY + 8 * ((2 * i + 1) % PLACES));
  }
  products_wait<0>();
  keep_order(sum);
  if (seen && leader) arrive(base + KV_EMPTY + 8 * ((2 * seen - 1) % PLACES));
  if (leader)
    for (int i = 2 * seen; i < 2 * blocks; i++) {
      wait(base + KV_FULL + 8 * (i % PLACES), i / PLACES & 1);
      arrive(base + KV_EMPTY + 8 * (i % PLACES));
    }
  // Through its own queries.
  write_rows(sum, half * over, base + Q + own * BLOCK, dq + (start + query) * dq_token + head * dq_head, dq_token, tokens - query, group, totals ? totals + own * D : nullptr);
}
#endif
