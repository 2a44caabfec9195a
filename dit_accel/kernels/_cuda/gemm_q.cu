// GEMM-Q on Hopper: the query projection of the (row-block, head) tiles that compute, with RMSNorm and RoPE.
//
// A unit is one head of two row-blocks that compute it: each consumer multiplies the 128 tokens of one row-block by the
// head's weights, which both read. This reaches 0.93, 0.98 and 0.94 times the speed of dense F.linear at 4608, 16896
// and 33024 tokens, and 6.1 times with 90% skipped at 33024 tokens. (Two heads of one row-block, 64 tokens per
// consumer, reached 0.89, 1.01, 0.96 and 5.6; with 90% skipped a row-block has few heads to pair.) An unpaired
// row-block is a separate unit and uses both consumers, 64 tokens each.
//
// Row-blocks are taken in groups of about one unit per thread block, and a group's units head by head: units that run
// together share the group's tokens and a few heads' weights in L2. Thread blocks take units in turn; if the last round
// needs at most half of the thread blocks, two share a unit.
#include "gemm.cuh"

constexpr int PAIR = 2;
constexpr int WEIGHTS = HEAD_DIM * K_TILE * 2;  // bytes, behind the two row-blocks in a stage
constexpr int OWN = HEAD_DIM / 2;               // sums of a thread, of 64 tokens

struct Shape {
    int heads, blocks, first_block, row_blocks, rows, offset, length, channels, cos_token, sin_token;
};

struct Fused {
    const element *bias, *norm_weight;
    const float *cos, *sin;
};

// Rows are numbered batch * row_blocks + row-block. A share of a unit of the last round may have none.
struct Unit {
    int head, rows, first, second;

    __device__ __forceinline__ int row(int index) const { return index ? second : first; }
};

struct Units {
    u32* list;  // MAX_UNITS of gemm_q.py at most: head << 24 | row, rows << 24 | second row
    int count;

    __device__ __forceinline__ Unit operator[](int index) const {
        u32 first = list[2 * index], second = list[2 * index + 1];
        return {int(first >> 24), int(second >> 24), int(first & 0xFFFFFF), int(second & 0xFFFFFF)};
    }
};

// Sum over the threads before this one; `sums` holds one number per warp.
__device__ __forceinline__ int sum_before(int own, int* sums, int& total) {
    int warp = threadIdx.x / 32, sum = sum_of_lanes(own);
    if (threadIdx.x % 32 == 31) sums[warp] = sum;
    __syncthreads();
    int before = sum - own;
    total = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    __syncthreads();
    return before;
}

// Called by all threads: lists this thread block's units. Each thread takes some cells, a group's rows for one head.
__device__ Units list_units(const Shape& shape, const u64* mask64) {
    int* sums = reinterpret_cast<int*>(shared_memory + TABLE);
    Units units{reinterpret_cast<u32*>(sums) + 16, 0};
    u64* words = reinterpret_cast<u64*>(shared_memory);  // MAX_ROWS of gemm_q.py at most, where the ring will be
    int own = 0, tiles, total;
    for (int row = threadIdx.x; row < shape.rows; row += THREADS) {
        u64 word = __ldg(mask64 + row / shape.row_blocks * shape.blocks + shape.first_block + row % shape.row_blocks);
        words[row] = word;
        own += __popcll(word);
    }
    sum_before(own, sums, tiles);
    int workers = gridDim.x, worker = blockIdx.x;
    int groups = max((tiles + workers) / (PAIR * workers), 1);
    int group_rows = ((shape.rows + groups - 1) / groups + PAIR - 1) / PAIR * PAIR;
    int cells = (shape.rows + group_rows - 1) / group_rows * shape.heads;
    int share = (cells + THREADS - 1) / THREADS;
    int begin = min(int(threadIdx.x) * share, cells), end = min(begin + share, cells);
    auto rows_of = [&](int cell) {
        int first = cell / shape.heads * group_rows, last = min(first + group_rows, shape.rows), rows = 0;
        for (int row = first; row < last; ++row) rows += words[row] >> cell % shape.heads & 1;
        return rows;
    };
    own = 0;
    for (int cell = begin; cell < end; ++cell) own += (rows_of(cell) + PAIR - 1) / PAIR;
    int at = sum_before(own, sums, total);
    int rounds = total / workers, left = total % workers;
    int sharers = left > 0 && left <= workers / 2 ? 2 : 1;  // of a unit of the last round
    for (int cell = begin; cell < end; ++cell) {
        int head = cell % shape.heads, rows = rows_of(cell);
        for (int taken = 0; taken < rows; taken += PAIR, ++at) {
            int slot = at / workers, first = taken, size = min(rows - taken, PAIR);
            if (worker / (slot < rounds ? 1 : sharers) != at % workers) continue;
            if (slot == rounds && sharers == 2) {
                first += worker % 2;
                size = min(size - worker % 2, 1);
            }
            u32* entry = units.list + 2 * slot;
            entry[0] = head << 24, entry[1] = size << 24;
            for (int row = cell / shape.heads * group_rows, seen = 0; seen < first + size; ++row)
                if (words[row] >> head & 1) {
                    if (seen >= first) entry[seen - first] |= row;
                    ++seen;
                }
        }
    }
    units.count = rounds + (worker < left * sharers);
    fence_async_proxy();  // the words are read before the copy engine overwrites them
    return units;
}

__device__ __forceinline__ int first_token(const Shape& shape, int row) {
    return (shape.first_block + row % shape.row_blocks) * BLOCK - shape.offset;
}

__device__ __forceinline__ void produce(const Shape& shape, const Units& units, const TensorMap* x,
                                        const TensorMap* weight) {
    Pipeline pipeline;
    for (int index = 0; index < units.count; ++index) {
        Unit unit = units[index];
        if (unit.rows == 0) continue;
        int token[PAIR], batch[PAIR];
#pragma unroll
        for (int i = 0; i < PAIR; ++i) {
            token[i] = first_token(shape, unit.row(i));
            batch[i] = unit.row(i) / shape.row_blocks;
        }
        for (int channel = 0; channel < shape.channels; channel += K_TILE) {
            u32 stage = pipeline.acquire(unit.rows * BOX + WEIGHTS);
            load_box(stage + PAIR * BOX, weight, pipeline.full(), channel, unit.head * HEAD_DIM);
#pragma unroll
            for (int i = 0; i < PAIR; ++i)
                if (i < unit.rows) load_box(stage + i * BOX, x, pipeline.full(), channel, token[i], batch[i]);
            pipeline.ring.advance();
        }
    }
}

__device__ __forceinline__ void normalise(float (&sums)[OWN], const element* norm_weight, float norm_eps) {
    float scale[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < OWN; ++i) scale[i / 2 % 2] += sums[i] * sums[i];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        scale[side] += __shfl_xor_sync(~0u, scale[side], 1);
        scale[side] += __shfl_xor_sync(~0u, scale[side], 2);
        scale[side] = rsqrtf(scale[side] / HEAD_DIM + norm_eps);
    }
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
        float2 pair = unpack(load_pair(norm_weight + 8 * i + threadIdx.x % 4 * 2));
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            sums[4 * i + 2 * side] *= scale[side] * pair.x;
            sums[4 * i + 2 * side + 1] *= scale[side] * pair.y;
        }
    }
}

// This thread's two tokens are `token` of the stream and the eighth after it.
__device__ __forceinline__ void rotate(float (&sums)[OWN], const Shape& shape, const Fused& fused, int token) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        int row = min(max(token + 8 * side, 0), shape.length - 1) + shape.offset;  // what lies outside is not stored
        const float* cos = fused.cos + (long long)row * shape.cos_token + threadIdx.x % 4 * 2;
        const float* sin = fused.sin + (long long)row * shape.sin_token + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < OWN / 4; ++i) {
            float2 c = __ldg(reinterpret_cast<const float2*>(cos + 8 * i));
            float2 s = __ldg(reinterpret_cast<const float2*>(sin + 8 * i));
            float* pair = sums + 4 * i + 2 * side;
            float even = pair[0], odd = pair[1];
            pair[0] = even * c.x - odd * s.x;
            pair[1] = odd * c.y + even * s.y;
        }
    }
}

// HALVES times 64 tokens of row-block `row`, from its token `begin` on, which lie `place` bytes into a stage.
template <int HALVES>
__device__ __forceinline__ void compute(const Shape& shape, const Fused& fused, float norm_eps, int head, int row,
                                        int begin, u32 place, const TensorMap* out, int consumer, Pipeline& pipeline) {
    float sums[HALVES][OWN];
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
        start_from_bias(sums[half], fused.bias, head * HEAD_DIM, shape.heads * HEAD_DIM);
    multiply((shape.channels + K_TILE - 1) / K_TILE, pipeline, [&](u32 stage) {
        u32 a = descriptor_k_major(stage + place), b = descriptor_k_major(stage + PAIR * BOX);
#pragma unroll
        for (int k = 0; k < K_TILE / 16; ++k)
#pragma unroll
            for (int half = 0; half < HALVES; ++half) wgmma<0>(sums[half], a + half * (BOX / 32) + 2 * k, b + 2 * k, 1);
    });
#pragma unroll
    for (int half = 0; half < HALVES; ++half) touch(sums[half]);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        int token = first_token(shape, row) + begin + half * 64;
        if (fused.norm_weight) normalise(sums[half], fused.norm_weight, norm_eps);
        if (fused.cos) rotate(sums[half], shape, fused, token + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
        copy_out(sums[half], pipeline.staging(consumer), consumer, [&](int box, u32 address) {
            if (token + 64 > 0 && token < shape.length)
                store_box(out, address, box * 64, head, token, row / shape.row_blocks);
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_q(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
           const __grid_constant__ TensorMap out, const u64* mask64, const __grid_constant__ Fused fused,
           const __grid_constant__ Shape shape, float norm_eps) {
    if (threadIdx.x == 0) {
        Pipeline().init();
        barrier_init_fence();
    }
    Units units = list_units(shape, mask64);
    __syncthreads();
    int consumer = threadIdx.x / WARPGROUP - 1;
    if (consumer < 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) produce(shape, units, &x, &weight);
    } else {
        registers_raise<232>();
        Pipeline pipeline;
        for (int index = 0; index < units.count; ++index) {
            Unit unit = units[index];
            if (unit.rows == PAIR)
                compute<2>(shape, fused, norm_eps, unit.head, unit.row(consumer), 0, consumer * BOX, &out, consumer,
                           pipeline);
            else if (unit.rows == 1)
                compute<1>(shape, fused, norm_eps, unit.head, unit.first, consumer * 64, consumer * BOX / 2, &out,
                           consumer, pipeline);
        }
        if (threadIdx.x % WARPGROUP == 0) store_wait_read();
    }
}
