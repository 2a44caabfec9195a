// GEMM-Q on Hopper: the query projection of the (row-block, head) tiles that compute, with RMSNorm and RoPE.
//
// Tiles are numbered row-block by row-block, so a thread block's tiles come in runs of one row-block: two of them share
// its tokens and are computed at once, 128 tokens by two heads. The line of tiles is cut into rounds of CHUNK tiles a
// thread block, and a last round of 4 to 8 (or of all, where there are fewer) that shares out what is left evenly: the
// thread blocks of a round work on neighbouring row-blocks, whose tokens they share in L2 with all the weights, and no
// thread block has more than one tile more than another.
#include "gemm.cuh"

constexpr int CHUNK = 4;

struct Shape {
    int heads, blocks, first_block, row_blocks, rows, offset, length, channels, cos_token, sin_token;
};

struct Fused {
    const element *bias, *norm_weight;
    const float *cos, *sin;
};

struct Tiles {
    u32* list;  // MAX_TILES of gemm_q.py at most: head << 24 | row, with row = batch * row_blocks + row-block
    int count;

    __device__ __forceinline__ int row(int index) const { return list[index] & 0xFFFFFF; }
    __device__ __forceinline__ int head(int index) const { return list[index] >> 24; }
    __device__ __forceinline__ bool paired(int index) const {
        return index + 1 < count && row(index) == row(index + 1);
    }
};

// Lists this thread block's tiles, by all threads: each takes some rows and counts the tiles before them.
__device__ Tiles list_tiles(const Shape& shape, const u64* mask64) {
    Tiles tiles{reinterpret_cast<u32*>(shared_memory + TABLE) + 16, 0};
    int* sums = reinterpret_cast<int*>(shared_memory + TABLE);  // of the warps
    int share = (shape.rows + THREADS - 1) / THREADS, thread = threadIdx.x, lane = thread % 32;
    int begin = min(thread * share, shape.rows), end = min(begin + share, shape.rows);
    auto word_of = [&](int row) {
        return __ldg(mask64 + row / shape.row_blocks * shape.blocks + shape.first_block + row % shape.row_blocks);
    };
    int own = 0;
    for (int row = begin; row < end; ++row) own += __popcll(word_of(row));
    int sum = own;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) sums[thread / 32] = sum;
    __syncthreads();
    int at = sum - own, total = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) {
        if (warp < thread / 32) at += sums[warp];
        total += sums[warp];
    }
    int blocks = gridDim.x, block = blockIdx.x, round = CHUNK * blocks;
    int rounds = total / round, left = total - rounds * round;
    if (rounds) --rounds, left += round;
    int first = (long long)left * block / blocks, last = (long long)left * (block + 1) / blocks;
    for (int row = begin; row < end; ++row)
        for (u64 word = word_of(row); word; word &= word - 1, ++at) {
            int slot = -1, turn = at / round;
            if (turn < rounds) {
                if (at % round / CHUNK == block) slot = turn * CHUNK + at % CHUNK;
            } else {
                int rest = at - rounds * round;
                if (rest >= first && rest < last) slot = rounds * CHUNK + rest - first;
            }
            if (slot >= 0) tiles.list[slot] = (__ffsll(word) - 1) << 24 | row;
        }
    tiles.count = rounds * CHUNK + last - first;
    return tiles;
}

__device__ __forceinline__ int first_token(const Shape& shape, int row) {
    return (shape.first_block + row % shape.row_blocks) * BLOCK - shape.offset;
}

__device__ __forceinline__ void produce(const Shape& shape, const Tiles& tiles, const TensorMap* x,
                                        const TensorMap* weight) {
    Pipeline pipeline;
    for (int index = 0; index < tiles.count;) {
        int count = tiles.paired(index) ? 2 : 1, row = tiles.row(index);
        int token = first_token(shape, row), batch = row / shape.row_blocks;
        int head = tiles.head(index), second = tiles.head(index + count - 1);
        for (int channel = 0; channel < shape.channels; channel += K_TILE) {
            constexpr int WEIGHTS = HEAD_DIM * K_TILE * 2;
            u32 stage = pipeline.acquire(BOX + count * WEIGHTS);
            load_box(stage, x, pipeline.full(), channel, token, batch);
            load_box(stage + BOX, weight, pipeline.full(), channel, head * HEAD_DIM);
            if (count == 2) load_box(stage + BOX + WEIGHTS, weight, pipeline.full(), channel, second * HEAD_DIM);
            pipeline.ring.advance();
        }
        index += count;
    }
}

template <int OWN>
__device__ __forceinline__ void start_from_bias(float* sums, const element* bias, int head) {
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
        float2 pair = unpack(bias ? load_pair(bias + head * HEAD_DIM + 8 * i + threadIdx.x % 4 * 2) : 0);
        sums[4 * i] = sums[4 * i + 2] = pair.x;
        sums[4 * i + 1] = sums[4 * i + 3] = pair.y;
    }
}

template <int HEADS, int SIZE>
__device__ __forceinline__ void normalise(float (&sums)[SIZE], const element* norm_weight, float norm_eps) {
    constexpr int OWN = SIZE / HEADS;  // numbers of one head
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
        float* s = sums + head * OWN;
        float scale[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < OWN; ++i) scale[i / 2 % 2] += s[i] * s[i];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            scale[side] += __shfl_xor_sync(~0u, scale[side], 1);
            scale[side] += __shfl_xor_sync(~0u, scale[side], 2);
            scale[side] = rsqrtf(scale[side] / HEAD_DIM + norm_eps);
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) s[i] *= scale[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
        float2 pair = unpack(load_pair(norm_weight + 8 * i + threadIdx.x % 4 * 2));
#pragma unroll
        for (int head = 0; head < HEADS; ++head)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                sums[head * OWN + 4 * i + 2 * side] *= pair.x;
                sums[head * OWN + 4 * i + 2 * side + 1] *= pair.y;
            }
    }
}

// This thread's two tokens are `token` of the stream and the eighth after it.
template <int HEADS, int SIZE>
__device__ __forceinline__ void rotate(float (&sums)[SIZE], const Shape& shape, const Fused& fused, int token) {
    constexpr int OWN = SIZE / HEADS;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        int row = min(max(token + 8 * side, 0), shape.length - 1) + shape.offset;  // what lies outside is not stored
        const float* cos = fused.cos + (long long)row * shape.cos_token + threadIdx.x % 4 * 2;
        const float* sin = fused.sin + (long long)row * shape.sin_token + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < OWN / 4; ++i) {
            float2 c = __ldg(reinterpret_cast<const float2*>(cos + 8 * i));
            float2 s = __ldg(reinterpret_cast<const float2*>(sin + 8 * i));
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                float* pair = sums + head * OWN + 4 * i + 2 * side;
                float even = pair[0], odd = pair[1];
                pair[0] = even * c.x - odd * s.x;
                pair[1] = odd * c.y + even * s.y;
            }
        }
    }
}

template <int HEADS>
__device__ __forceinline__ void compute(const Shape& shape, const Fused& fused, float norm_eps, int row,
                                        const int (&heads)[2], const TensorMap* out, int consumer, Pipeline& pipeline) {
    constexpr int OWN = HEAD_DIM / 2;
    float sums[HEADS * OWN];
#pragma unroll
    for (int head = 0; head < HEADS; ++head) start_from_bias<OWN>(sums + head * OWN, fused.bias, heads[head]);
    touch(sums);  // else ptxas keeps two rows' equal numbers in one register, and copies them between products
    multiply(sums, (shape.channels + K_TILE - 1) / K_TILE, consumer, pipeline);
    int token = first_token(shape, row) + consumer * 64;
    if (fused.norm_weight) normalise<HEADS>(sums, fused.norm_weight, norm_eps);
    if (fused.cos) rotate<HEADS>(sums, shape, fused, token + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    copy_out(sums, pipeline.staging(consumer), consumer, [&](int box, u32 address) {
        constexpr int BOXES = HEAD_DIM / 64;
        if (token + 64 > 0 && token < shape.length)
            store_box(out, address, box % BOXES * 64, heads[box / BOXES], token, row / shape.row_blocks);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_q(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
           const __grid_constant__ TensorMap out, const u64* mask64, const __grid_constant__ Fused fused,
           const __grid_constant__ Shape shape, float norm_eps) {
    if (threadIdx.x == 0) {
        Pipeline().init();
        barrier_init_fence();
    }
    Tiles tiles = list_tiles(shape, mask64);
    __syncthreads();
    int consumer = threadIdx.x / WARPGROUP - 1;
    if (consumer < 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) produce(shape, tiles, &x, &weight);
    } else {
        registers_raise<232>();
        Pipeline pipeline;
        for (int index = 0; index < tiles.count;) {
            int count = tiles.paired(index) ? 2 : 1, row = tiles.row(index);
            int heads[2] = {tiles.head(index), tiles.head(index + count - 1)};
            if (count == 2)
                compute<2>(shape, fused, norm_eps, row, heads, &out, consumer, pipeline);
            else
                compute<1>(shape, fused, norm_eps, row, heads, &out, consumer, pipeline);
            index += count;
        }
        if (threadIdx.x % WARPGROUP == 0) store_wait_read();
    }
}
