// Shared code of the projections: sums `A B^T` of 64 or more tokens per consumer, over steps of 64 columns of K.
//
// One warp fills a ring of stages by TMA, two warpgroups multiply from it. A stage holds three boxes of at most 128 rows
// of 64 elements, K-major. Its full barrier counts the producer and the bytes, its empty barrier the consumers' warps.
#pragma once
#include "hopper.cuh"

constexpr int BLOCK = 128;  // tokens in a row-block
constexpr int K_TILE = 64;
constexpr int CONSUMERS = 2;  // warpgroups
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int SLOTS = 4;                 // stages in the ring
constexpr int BOX = BLOCK * K_TILE * 2;  // bytes
constexpr int STAGE_BYTES = 3 * BOX;
constexpr int STAGING_BOXES = 2;  // of 64 rows, for each consumer, on the way out
constexpr int STAGING_BYTES = STAGING_BOXES * BOX / 2;
constexpr int BARRIERS = SLOTS * STAGE_BYTES + CONSUMERS * STAGING_BYTES;  // offset in shared memory
constexpr int TABLE = BARRIERS + SLOTS * 16;                               // a kernel's own data

extern __shared__ __align__(1024) char shared_memory[];

struct Pipeline {
    u32 base = shared_address(shared_memory);
    Ring<SLOTS> ring;

    __device__ __forceinline__ u32 stage() const { return base + ring.slot * STAGE_BYTES; }
    __device__ __forceinline__ u32 full() const { return base + BARRIERS + ring.slot * 16; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return base + BARRIERS + slot * 16 + 8; }
    __device__ __forceinline__ u32 staging(int consumer) const {
        return base + SLOTS * STAGE_BYTES + consumer * STAGING_BYTES;
    }

    __device__ __forceinline__ void init() const {
        for (u32 slot = 0; slot < SLOTS; ++slot) {
            barrier_init(base + BARRIERS + slot * 16, 1);
            barrier_init(empty(slot), CONSUMERS * 4 * WARP_ARRIVALS);
        }
    }

    // Producer: the stage once the consumers have left it, with `bytes` announced.
    __device__ __forceinline__ u32 acquire(u32 bytes) const {
        barrier_wait(empty(ring.slot), ring.parity ^ 1);
        barrier_arrive_expect(full(), bytes);
        return stage();
    }

    // Consumer: the stage once its bytes have arrived.
    __device__ __forceinline__ u32 await() const {
        barrier_wait(full(), ring.parity);
        return stage();
    }

    // Consumer: this warp has read the stage.
    __device__ __forceinline__ void release(u32 slot) const { barrier_arrive_warp(empty(slot)); }
};

// Runs `steps` stages; `product(stage)` issues the products of one, which overlap with those of the previous stage. The
// sums are complete when it returns, and the caller must `touch` them.
template <typename Product>
__device__ __forceinline__ void multiply(int steps, Pipeline& pipeline, Product product) {
    if (steps == 0) return;
    auto issue = [&] {
        u32 stage = pipeline.await();
        wgmma_fence();
        product(stage);
        wgmma_commit();
    };
    issue();
    for (int step = 1; step < steps; ++step) {
        u32 previous = pipeline.ring.slot;
        pipeline.ring.advance();
        issue();
        wgmma_wait<1>();
        pipeline.release(previous);
    }
    wgmma_wait<0>();
    pipeline.release(pipeline.ring.slot);
    pipeline.ring.advance();
}

__device__ __forceinline__ u32 load_pair(const element* pointer) {
    return __ldg(reinterpret_cast<const u32*>(pointer));
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
    touch(sums);  // otherwise ptxas keeps two rows' equal numbers in one register and copies them between products
}

// Address at which this lane reads or writes its row of four 8x8 matrices: rows `16 warp ..` of a box of 64 columns,
// columns `16 group ..`. The matrices are those of the accumulators d[8 group ..] (see wgmma).
__device__ __forceinline__ u32 matrix_address(u32 box, int group) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    return box + row * 128 + ((2 * group + lane / 16) ^ (lane % 8)) * 16;
}

// Writes 64 rows, in rounds of as many boxes of 64 columns as the staging holds: `store(box, address)` runs on one
// thread for each box, and the copies run while the warpgroup continues. The copy engine cuts a box that crosses the
// tensor's edge, but a box that lies completely outside must not be issued, here as in loads.
template <int SIZE, typename Store>
__device__ __forceinline__ void copy_out(const float (&sums)[SIZE], u32 staging, int consumer, Store store) {
    constexpr int BOXES = SIZE / 32, ROUND = BOXES < STAGING_BOXES ? BOXES : STAGING_BOXES;
    bool leader = threadIdx.x % WARPGROUP == 0;
#pragma unroll
    for (int first = 0; first < BOXES; first += ROUND) {
        if (leader) store_wait_read();
        named_sync(1 + consumer, WARPGROUP);
#pragma unroll
        for (int box = 0; box < ROUND; ++box)
#pragma unroll
            for (int group = 0; group < 4; ++group) {
                const float* s = sums + (first + box) * 32 + group * 8;
                store_matrices(matrix_address(staging + box * BOX / 2, group), pack(s[0], s[1]), pack(s[2], s[3]),
                               pack(s[4], s[5]), pack(s[6], s[7]));
            }
        fence_async_proxy();
        named_sync(1 + consumer, WARPGROUP);
        if (leader) {
#pragma unroll
            for (int box = 0; box < ROUND; ++box) store(first + box, staging + box * BOX / 2);
            store_commit();
        }
    }
}
