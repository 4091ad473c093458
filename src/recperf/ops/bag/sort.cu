// A stable radix sort of 4-byte row numbers with a 4-byte payload, one launch for each digit of BITS bits.
//
// `count_digits` counts the digits of all passes at once; its last block turns counts into first places. A pass then
// ranks the items of a tile by their digit, adds the counts of the tiles before it, which those publish, and writes
// the items of a digit side by side. Tiles start in the order of their numbers, so that one never waits for a tile that
// has not begun. Items from *used on are ignored, and their places in the result are left as they are.

typedef unsigned int u32;

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int ITEMS = 8;
constexpr int AT_ONCE = 16;
constexpr int TILE = THREADS * ITEMS;
constexpr int RADIX = 1 << BITS;
constexpr u32 ALL = 0xffffffffu;
constexpr u32 OWN = 1u << 30, SUM = 2u << 30, VALUE = OWN - 1;
// What a tile publishes for a digit: its own count, or that of all tiles up to it.

static __device__ long long used_items(const long long* used, int most) {
    long long count = *used;
    return count < most ? count : most;
}

// The sum of the values of the threads before this one.
static __device__ u32 before_me(u32 value, u32* of_warps) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 sum = value;
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        u32 total = lane < WARPS ? of_warps[lane] : 0;
        u32 upto = total;
        for (int step = 1; step < WARPS; step *= 2) {
            u32 other = __shfl_up_sync(ALL, upto, step);
            if (lane >= step) upto += other;
        }
        if (lane < WARPS) of_warps[lane] = upto - total;
    }
    __syncthreads();
    return of_warps[warp] + sum - value;
}

// `counts` and `blocks_done` are zero before.
extern "C" __global__ void __launch_bounds__(THREADS) count_digits(
    const u32* keys, const long long* used, int most, int passes, u32* counts, u32* blocks_done
) {
    __shared__ u32 own[4 * RADIX];
    __shared__ u32 of_warps[WARPS];
    __shared__ bool last;
    long long count = used_items(used, most);
    for (int at = threadIdx.x; at < passes * RADIX; at += THREADS) own[at] = 0;
    __syncthreads();
    for (long long first = (long long)blockIdx.x * TILE; first < count; first += (long long)gridDim.x * TILE) {
        u32 key[ITEMS];
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            long long at = first + item * THREADS + threadIdx.x;
            key[item] = at < count ? keys[at] : 0;
        }
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            if (first + item * THREADS + threadIdx.x >= count) break;
            for (int pass = 0; pass < passes; ++pass)
                atomicAdd(&own[pass * RADIX + (key[item] >> (pass * BITS)) % RADIX], 1u);
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < passes * RADIX; at += THREADS)
        if (own[at]) atomicAdd(&counts[at], own[at]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(blocks_done, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int pass = 0; pass < passes; ++pass) {
        u32* place = counts + pass * RADIX + threadIdx.x;
        u32 value = threadIdx.x < RADIX ? *(volatile u32*)place : 0;
        u32 first = before_me(value, of_warps);
        if (threadIdx.x < RADIX) *place = first;
        __syncthreads();
    }
}

// `published` (a number per tile and digit) and `next_tile` are zero before.
extern "C" __global__ void __launch_bounds__(THREADS) sort_digit(
    const u32* keys, const u32* payloads, u32* out_keys, u32* out_payloads, const long long* used, int most, int shift,
    const u32* first_places, u32* published, u32* next_tile
) {
    extern __shared__ u32 shared[];
    u32(*of_warp)[RADIX] = (u32(*)[RADIX])shared;
    u32 *staged_keys = shared + WARPS * RADIX, *staged_payloads = staged_keys + TILE;
    u32 *local_first = staged_payloads + TILE, *global_first = local_first + RADIX;
    __shared__ u32 of_warps[WARPS];
    __shared__ u32 my_tile;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) my_tile = atomicAdd(next_tile, 1u);
    for (int at = threadIdx.x; at < WARPS * RADIX; at += THREADS) shared[at] = 0;
    __syncthreads();
    long long count = used_items(used, most), first = (long long)my_tile * TILE;
    if (first >= count) return;
    int here = count - first < TILE ? (int)(count - first) : TILE;

    u32 key[ITEMS], payload[ITEMS], rank[ITEMS];
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        int at = (warp * ITEMS + item) * 32 + lane;
        // Items after the end rank last in the last digit and are not written.
        key[item] = at < here ? keys[first + at] : ALL;
        payload[item] = at < here ? payloads[first + at] : 0;
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        u32 digit = (key[item] >> shift) % RADIX, same = ALL;
#pragma unroll
        for (int bit = 0; bit < BITS; ++bit) {
            u32 set = __ballot_sync(ALL, digit >> bit & 1);
            same &= digit >> bit & 1 ? set : ~set;
        }
        int leader = __ffs(same) - 1;
        u32 earlier = 0;
        if (lane == leader) {
            earlier = of_warp[warp][digit];
            of_warp[warp][digit] = earlier + __popc(same);
        }
        __syncwarp();
        rank[item] = __shfl_sync(ALL, earlier, leader) + __popc(same & ((1u << lane) - 1));
    }
    __syncthreads();

    u32 total = 0;
    if (threadIdx.x < RADIX) {
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
            u32 of = of_warp[other][threadIdx.x];
            of_warp[other][threadIdx.x] = total;
            total += of;
        }
        u32* mine = published + (long long)my_tile * RADIX + threadIdx.x;
        *(volatile u32*)mine = total | (my_tile == 0 ? SUM : OWN);
    }
    u32 local = before_me(total, of_warps);
    if (threadIdx.x < RADIX) local_first[threadIdx.x] = local;
    __syncthreads();
    // While the tiles before this one publish their counts.
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        u32 digit = (key[item] >> shift) % RADIX;
        u32 to = local_first[digit] + of_warp[warp][digit] + rank[item];
        staged_keys[to] = key[item];
        staged_payloads[to] = payload[item];
    }
    if (threadIdx.x < RADIX) {
        u32 earlier = 0;
        if (my_tile > 0) {
            // Several tiles at a time: one after the other, the loads would take longer than the sort.
            int other = my_tile - 1;
            bool more = true;
            while (more) {
                u32 seen[AT_ONCE];
#pragma unroll
                for (int one = 0; one < AT_ONCE; ++one)
                    seen[one] = *(volatile u32*)(published + (long long)max(other - one, 0) * RADIX + threadIdx.x);
#pragma unroll
                for (int one = 0; one < AT_ONCE; ++one) {
                    if (!more || !seen[one]) break;
                    earlier += seen[one] & VALUE;
                    more = !(seen[one] & SUM);
                    --other;
                }
            }
            *(volatile u32*)(published + (long long)my_tile * RADIX + threadIdx.x) = (earlier + total) | SUM;
        }
        global_first[threadIdx.x] = first_places[threadIdx.x] + earlier - local;
    }
    __syncthreads();
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        int from = item * THREADS + threadIdx.x;
        if (from < here) {
            u32 sorted = staged_keys[from];
            u32 to = global_first[(sorted >> shift) % RADIX] + from;
            out_keys[to] = sorted;
            out_payloads[to] = staged_payloads[from];
        }
    }
}
