// GEMM-O on Hopper: out = start + sum over wanted heads of o_h W_h, 128 tokens by 256 columns a tile.
//
// DISPATCH starts from the weighted sum of the stack's entries, which come through the same ring as the operands. UPDATE
// starts from the bias, adds the reused heads, writes the stack's entry and (for entry 0) goes on with the computed
// heads and writes out.
//
// Tiles are numbered `(row * entries + entry) * column_tiles + column_tile`, so those that run together share o's rows
// and, in L2, the weights. Thread blocks draw them by ticket, because a tile costs what its word says; those beyond the
// last whole round are cut into halves of 128 columns.
#ifndef DISPATCH
#define DISPATCH 1
#endif
#include "gemm.cuh"

constexpr int HALF = 128, COLUMN_TILE = 2 * HALF;
constexpr int PARTS = HEAD_DIM / K_TILE;
constexpr int MAX_SOURCES = 4, MAX_ENTRIES = 8;
constexpr int MAIL = 2;  // tiles that the producer may be ahead

struct Weights {
    float of[MAX_ENTRIES];
};
struct Sources {
    TensorMap of[MAX_SOURCES];
};

struct Shape {
    int heads, blocks, first_block, row_blocks, rows, offset, length, columns, column_tiles, entries;
};

struct Item {
    int entry, column, batch, row_block, halves;  // halves: of 128 columns, 0 where the tile lies beyond the last one
};

__device__ __forceinline__ int ticket_count(const Shape& shape, int& whole) {
    int tiles = shape.rows * shape.column_tiles * (DISPATCH ? 1 : shape.entries);
    whole = tiles / gridDim.x * gridDim.x;
    return whole + 2 * (tiles - whole);
}

__device__ __forceinline__ Item item_of(const Shape& shape, int ticket, int whole) {
    int beyond = max(ticket - whole, 0), tile = ticket - beyond + beyond / 2, line = tile / shape.column_tiles;
    int entries = DISPATCH ? 1 : shape.entries, row = line / entries;
    Item item;
    item.entry = line % entries;
    item.column = tile % shape.column_tiles * COLUMN_TILE + beyond % 2 * HALF;
    item.halves = min(ticket < whole ? 2 : 1, max(shape.columns - item.column + HALF - 1, 0) / HALF);
    item.batch = row / shape.row_blocks;
    item.row_block = shape.first_block + row % shape.row_blocks;
    return item;
}

__device__ __forceinline__ u64 all_heads(const Shape& shape) { return ~u64(0) >> (64 - shape.heads); }

// The producer's word to the consumers: which tile comes next, -1 = none, and its heads.
struct Mail {
    u32 base = shared_address(shared_memory) + TABLE;
    Ring<MAIL> ring;

    __device__ __forceinline__ void init() const {
        for (u32 slot = 0; slot < MAIL; ++slot) {
            barrier_init(base + slot * 32, 1);
            barrier_init(base + slot * 32 + 8, CONSUMERS * 4);
        }
    }
    __device__ __forceinline__ void send(int ticket, u64 word) {
        u32 slot = base + ring.slot * 32;
        barrier_wait(slot + 8, ring.parity ^ 1);
        asm volatile("st.shared.b64 [%0], %1;\nst.shared.b32 [%0 + 8], %2;" ::"r"(slot + 16), "l"(word), "r"(ticket)
                     : "memory");
        barrier_arrive(slot);
        ring.advance();
    }
    __device__ __forceinline__ int receive(u64& word) {
        u32 slot = base + ring.slot * 32;
        int ticket;
        barrier_wait(slot, ring.parity);
        asm volatile("ld.shared.b64 %0, [%2];\nld.shared.b32 %1, [%2 + 8];"
                     : "=l"(word), "=r"(ticket)
                     : "r"(slot + 16)
                     : "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(slot + 8);
        ring.advance();
        u32 low = __shfl_sync(~0u, u32(word), 0), high = __shfl_sync(~0u, u32(word >> 32), 0);
        word = u64(high) << 32 | low;
        return __shfl_sync(~0u, ticket, 0);
    }
};

__device__ __forceinline__ void produce(const Shape& shape, const Sources& sources, const TensorMap* weight,
                                        const TensorMap* stack, const u64* mask64, int* counters) {
    Pipeline pipeline;
    Mail mail;
    int whole, count = ticket_count(shape, whole);
    auto word_at = [&](int ticket) {
        Item item = item_of(shape, ticket, whole);
        return ticket < count ? __ldg(mask64 + item.batch * shape.blocks + item.row_block) : 0;
    };
    int ticket = blockIdx.x, next = gridDim.x + atomicAdd(counters, 1);
    u64 word = word_at(ticket);
    while (ticket < count) {
        Item item = item_of(shape, ticket, whole);
        if (item.halves) mail.send(ticket, word);
        int token = item.row_block * BLOCK - shape.offset;
        if (DISPATCH)
            for (int entry = 0; entry < shape.entries; ++entry)
                for (int half = 0; half < item.halves; ++half) {
                    int column = item.column + half * HALF, boxes = column + 64 < shape.columns ? 2 : 1;
                    u32 stage = pipeline.acquire(boxes * BOX);
                    for (int box = 0; box < boxes; ++box)
                        load_box(stage + (1 + box) * BOX, stack, pipeline.full(), column + box * 64, token, item.batch,
                                 entry);
                    pipeline.ring.advance();
                }
        int after_next = gridDim.x + (next < count ? atomicAdd(counters, 1) : count);
        u64 next_word = word_at(next);
        for (int phase = DISPATCH; item.halves && phase < (item.entry ? 1 : 2); ++phase)
            for (u64 left = phase ? word : all_heads(shape) & ~word; left; left &= left - 1) {
                int head = __ffsll(left) - 1;
                for (int part = 0; part < PARTS; ++part) {
                    u32 stage = pipeline.acquire((1 + item.halves) * BOX);
                    load_box(stage, sources.of + item.entry, pipeline.full(), part * K_TILE, head, token, item.batch);
                    for (int half = 0; half < item.halves; ++half)
                        load_box(stage + (1 + half) * BOX, weight, pipeline.full(), head * HEAD_DIM + part * K_TILE,
                                 item.column + half * HALF);
                    pipeline.ring.advance();
                }
            }
        ticket = next, next = after_next, word = next_word;
    }
    mail.send(-1, 0);
    __threadfence();
    if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;  // for the next launch
}

// 128 columns of a stack entry: `sums (+)= weight * entry`.
template <int FIRST, bool OVERWRITE, int SIZE>
__device__ __forceinline__ void add_entry(float (&sums)[SIZE], float weight, int consumer, Pipeline& pipeline) {
    u32 boxes = pipeline.await() + BOX + consumer * BOX / 2;
#pragma unroll
    for (int box = 0; box < 2; ++box)
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            u32 m[4];
            load_matrices(matrix_address(boxes + box * BOX, group), m);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 pair = unpack(m[i]);
                float* sum = sums + FIRST + box * 32 + group * 8 + 2 * i;
                sum[0] = OVERWRITE ? weight * pair.x : fmaf(weight, pair.x, sum[0]);
                sum[1] = OVERWRITE ? weight * pair.y : fmaf(weight, pair.y, sum[1]);
            }
        }
    pipeline.release(pipeline.ring.slot);
    pipeline.ring.advance();
}

template <int SIZE>
__device__ __forceinline__ void start_from_stack(float (&sums)[SIZE], const Shape& shape, const Weights& weights,
                                                 int consumer, Pipeline& pipeline) {
    add_entry<0, true>(sums, weights.of[0], consumer, pipeline);
    if constexpr (SIZE == 128) add_entry<64, true>(sums, weights.of[0], consumer, pipeline);
    for (int entry = 1; entry < shape.entries; ++entry) {
        add_entry<0, false>(sums, weights.of[entry], consumer, pipeline);
        if constexpr (SIZE == 128) add_entry<64, false>(sums, weights.of[entry], consumer, pipeline);
    }
}

template <int SIZE>
__device__ __forceinline__ void start_from_bias(float (&sums)[SIZE], const element* bias, int column, int columns) {
#pragma unroll
    for (int i = 0; i < SIZE / 4; ++i) {
        int at = column + 8 * i + threadIdx.x % 4 * 2;
        float2 pair = unpack(bias && at < columns ? load_pair(bias + at) : 0);
        sums[4 * i] = sums[4 * i + 2] = pair.x;
        sums[4 * i + 1] = sums[4 * i + 3] = pair.y;
    }
    touch(sums);  // else ptxas keeps two rows' equal numbers in one register, and copies them between products
}

template <int SIZE>
__device__ __forceinline__ void tile(const Shape& shape, const Item& item, u64 word, const element* bias,
                                     const Weights& weights, const TensorMap* out, const TensorMap* stack, int consumer,
                                     Pipeline& pipeline) {
    float sums[SIZE];
    int token = item.row_block * BLOCK - shape.offset + consumer * 64;
    bool rows_valid = token + 64 > 0 && token < shape.length;
    auto store_to = [&](const TensorMap* map, int entry) {
        copy_out(sums, pipeline.staging(consumer), consumer, [&](int box, u32 address) {
            int column = item.column + box * 64;
            if (rows_valid && column < shape.columns) store_box(map, address, column, token, item.batch, entry);
        });
    };
    if (DISPATCH) {
        start_from_stack(sums, shape, weights, consumer, pipeline);
    } else {
        start_from_bias(sums, bias, item.column, shape.columns);
        multiply(sums, PARTS * __popcll(all_heads(shape) & ~word), consumer, pipeline);
        store_to(stack, item.entry);
        if (item.entry) return;
    }
    multiply(sums, PARTS * __popcll(word), consumer, pipeline);
    store_to(out, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_o(const __grid_constant__ Sources sources, const __grid_constant__ TensorMap weight,
           const __grid_constant__ TensorMap stack_in, const __grid_constant__ TensorMap stack_out,
           const __grid_constant__ TensorMap out, const element* bias, const u64* mask64, int* counters,
           const __grid_constant__ Weights weights, const __grid_constant__ Shape shape) {
    if (threadIdx.x == 0) {
        Pipeline().init();
        Mail().init();
        barrier_init_fence();
    }
    __syncthreads();
    int consumer = threadIdx.x / WARPGROUP - 1;
    if (consumer < 0) {
        registers_lower<56>();
        if (threadIdx.x == 0) produce(shape, sources, &weight, &stack_in, mask64, counters);
    } else {
        registers_raise<224>();
        Pipeline pipeline;
        Mail mail;
        int whole;
        ticket_count(shape, whole);
        u64 word;
        for (int ticket; (ticket = mail.receive(word)) >= 0;) {
            Item item = item_of(shape, ticket, whole);
            if (item.halves == 2)
                tile<128>(shape, item, word, bias, weights, &out, &stack_out, consumer, pipeline);
            else
                tile<64>(shape, item, word, bias, weights, &out, &stack_out, consumer, pipeline);
        }
        if (threadIdx.x % WARPGROUP == 0) store_wait_read();
    }
}
