// GEMM-O on Hopper: out = start + sum over wanted heads of o_h W_h, in tiles of 128 tokens by 256 columns.
//
// DISPATCH starts from the weighted sum of the stack's entries, which come through the same ring as the operands. UPDATE
// starts from the bias, adds the reused heads, writes the stack's entry and (for entry 0) adds the computed heads and
// writes out. A later entry may instead be rebased from its entry in the previous stack: that entry is negated, heads
// that compute now but did not before are added, the sum is negated, and heads that no longer compute are added.
//
// Tiles are numbered `(row * entries + entry) * column_tiles + column_tile`, so tiles that run together share o's rows
// and, in L2, the weights. Thread blocks take them by ticket, because a tile's cost depends on its number of heads.
// Tiles beyond the last whole round are cut into halves of 128 columns.
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
    int entry, column, batch, row_block, halves;  // halves of 128 columns; 0 = the tile is beyond the last one
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

// The heads of a tile: `before` are added before UPDATE stores the stack's entry, or negates it; `after` follow.
struct Heads {
    u64 before, after;
};

__device__ __forceinline__ Heads heads_of(const Shape& shape, const Item& item, const u64* mask64,
                                          const u64* mask64_before) {
    int at = item.batch * shape.blocks + item.row_block;
    u64 word = __ldg(mask64 + at);
    if (DISPATCH) return {0, word};
    if (item.entry == 0) return {all_heads(shape) & ~word, word};
    if (!mask64_before) return {all_heads(shape) & ~word, 0};
    u64 then = __ldg(mask64_before + at);
    return {word & ~then, then & ~word};
}

// The producer's messages to the consumers: the next tile, -1 = none, and its numbers of heads.
struct Mail {
    u32 base = shared_address(shared_memory) + TABLE;
    Ring<MAIL> ring;

    __device__ __forceinline__ void init() const {
        for (u32 slot = 0; slot < MAIL; ++slot) {
            barrier_init(base + slot * 32, 1);
            barrier_init(base + slot * 32 + 8, CONSUMERS * 4 * WARP_ARRIVALS);
        }
    }
    __device__ __forceinline__ void send(int ticket, const Heads& heads) {
        u32 slot = base + ring.slot * 32;
        barrier_wait(slot + 8, ring.parity ^ 1);
        int counts = __popcll(heads.before) << 8 | __popcll(heads.after);
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(slot + 16), "r"(ticket), "r"(counts) : "memory");
        barrier_arrive(slot);
        ring.advance();
    }
    __device__ __forceinline__ int receive(int& before, int& after) {
        u32 slot = base + ring.slot * 32;
        int ticket, counts;
        barrier_wait(slot, ring.parity);
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(ticket), "=r"(counts) : "r"(slot + 16) : "memory");
        barrier_arrive_warp(slot + 8);
        ring.advance();
        counts = __shfl_sync(~0u, counts, 0);
        before = counts >> 8, after = counts & 0xFF;
        return __shfl_sync(~0u, ticket, 0);
    }
};

__device__ __forceinline__ void produce(const Shape& shape, const Sources& sources, const TensorMap* weight,
                                        const TensorMap* stack, const u64* mask64, const u64* mask64_before,
                                        int* counters) {
    Pipeline pipeline;
    Mail mail;
    int whole, count = ticket_count(shape, whole);
    auto heads_at = [&](int ticket) {
        return ticket < count ? heads_of(shape, item_of(shape, ticket, whole), mask64, mask64_before) : Heads{0, 0};
    };
    int ticket = blockIdx.x, next = gridDim.x + atomicAdd(counters, 1);
    Heads heads = heads_at(ticket);
    while (ticket < count) {
        Item item = item_of(shape, ticket, whole);
        if (item.halves) mail.send(ticket, heads);
        int token = item.row_block * BLOCK - shape.offset;
        bool rebases = !DISPATCH && mask64_before && item.entry;
        if (DISPATCH || rebases)
            for (int entry = rebases ? item.entry - 1 : 0; entry < (rebases ? item.entry : shape.entries); ++entry)
                for (int half = 0; half < item.halves; ++half) {
                    int column = item.column + half * HALF, boxes = column + 64 < shape.columns ? 2 : 1;
                    u32 stage = pipeline.acquire(boxes * BOX);
                    for (int box = 0; box < boxes; ++box)
                        load_box(stage + (1 + box) * BOX, stack, pipeline.full(), column + box * 64, token, item.batch,
                                 entry);
                    pipeline.ring.advance();
                }
        int after_next = gridDim.x + (next < count ? atomicAdd(counters, 1) : count);
        Heads next_heads = heads_at(next);
        for (int phase = 0; item.halves && phase < 2; ++phase)
            for (u64 left = phase ? heads.after : heads.before; left; left &= left - 1) {
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
        ticket = next, next = after_next, heads = next_heads;
    }
    mail.send(-1, {0, 0});
    __threadfence();
    if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;  // for the next launch
}

__device__ __forceinline__ void load_matrices(u32 address, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
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
    float first = DISPATCH ? weights.of[0] : -1;
    add_entry<0, true>(sums, first, consumer, pipeline);
    if constexpr (SIZE == 128) add_entry<64, true>(sums, first, consumer, pipeline);
    for (int entry = 1; DISPATCH && entry < shape.entries; ++entry) {
        add_entry<0, false>(sums, weights.of[entry], consumer, pipeline);
        if constexpr (SIZE == 128) add_entry<64, false>(sums, weights.of[entry], consumer, pipeline);
    }
}

template <int SIZE>
__device__ __forceinline__ void tile(const Shape& shape, const Item& item, int before, int after, bool rebases,
                                     const element* bias, const Weights& weights, const TensorMap* out,
                                     const TensorMap* stack, int consumer, Pipeline& pipeline) {
    float sums[SIZE];
    int token = item.row_block * BLOCK - shape.offset + consumer * 64;
    bool rows_valid = token + 64 > 0 && token < shape.length;
    auto store_to = [&](const TensorMap* map, int entry) {
        copy_out(sums, pipeline.staging(consumer), consumer, [&](int box, u32 address) {
            int column = item.column + box * 64;
            if (rows_valid && column < shape.columns) store_box(map, address, column, token, item.batch, entry);
        });
    };
    auto add_heads = [&](int count) {
        multiply(PARTS * count, pipeline, [&](u32 stage) {
            u32 a = descriptor_k_major(stage + consumer * BOX / 2), b = descriptor_k_major(stage + BOX);
#pragma unroll
            for (int k = 0; k < K_TILE / 16; ++k) wgmma<0>(sums, a + 2 * k, b + 2 * k, 1);
        });
        touch(sums);
    };
    if (DISPATCH || rebases)
        start_from_stack(sums, shape, weights, consumer, pipeline);
    else
        start_from_bias(sums, bias, item.column, shape.columns);
    if (!DISPATCH) {
        add_heads(before);
        if (rebases) {
#pragma unroll
            for (int i = 0; i < SIZE; ++i) sums[i] = -sums[i];
        } else {
            store_to(stack, item.entry);
            if (item.entry) return;
        }
    }
    add_heads(after);
    store_to(rebases ? stack : out, item.entry);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_o(const __grid_constant__ Sources sources, const __grid_constant__ TensorMap weight,
           const __grid_constant__ TensorMap stack_in, const __grid_constant__ TensorMap stack_out,
           const __grid_constant__ TensorMap out, const element* bias, const u64* mask64, const u64* mask64_before,
           int* counters, const __grid_constant__ Weights weights, const __grid_constant__ Shape shape) {
    if (threadIdx.x == 0) {
        Pipeline().init();
        Mail().init();
        barrier_init_fence();
    }
    __syncthreads();
    int consumer = threadIdx.x / WARPGROUP - 1;
    if (consumer < 0) {
        registers_lower<56>();
        if (threadIdx.x == 0) produce(shape, sources, &weight, &stack_in, mask64, mask64_before, counters);
    } else {
        registers_raise<224>();
        Pipeline pipeline;
        Mail mail;
        int whole;
        ticket_count(shape, whole);
        for (int ticket, before, after; (ticket = mail.receive(before, after)) >= 0;) {
            Item item = item_of(shape, ticket, whole);
            bool rebases = !DISPATCH && mask64_before && item.entry;
            if (item.halves == 2)
                tile<128>(shape, item, before, after, rebases, bias, weights, &out, &stack_out, consumer, pipeline);
            else
                tile<64>(shape, item, before, after, rebases, bias, weights, &out, &stack_out, consumer, pipeline);
        }
        if (threadIdx.x % WARPGROUP == 0) store_wait_read();
    }
}
