// Attention: the warps that compute and store, independent of the warps that fill the rings of keys and values.
//
// With SLICES the softmax continues from a row's output and lse over its tiles. Keys and values then come by ordinary
// asynchronous copies, and a partly filled tile is padded with finite keys.
#pragma once
#ifndef SLICES
#define SLICES 0
#endif
#include "attention_work.cuh"

struct Tiles {
    u32 queries, keys, values;
    __device__ explicit Tiles(const char* memory)
        : queries(shared_address(memory)),
          keys(queries + ROW_SLOTS * TILE_BYTES),
          values(keys + KEY_STAGES * TILE_BYTES) {}
};

// Called by one lane: BLOCK tokens of one head from `token` on.
__device__ __forceinline__ void load_tile(u32 tile, const TensorMap* map, u64& full, int token, int head, int batch) {
    const u32 barrier = shared_address(&full);
    barrier_arrive_expect(barrier, TILE_BYTES);
#pragma unroll
    for (int box = 0; box < BOXES; ++box) load_box(tile + box * BOX_BYTES, map, barrier, box * 64, head, token, batch);
}

// Called by all lanes of a warp: publishes the next piece, and loads its queries if it has tiles.
__device__ __forceinline__ void publish(const Piece& piece, bool has_tiles, const Tiles& tiles, const TensorMap* q_map,
                                        Shared& shared, Ring<ROW_SLOTS>& row) {
    barrier_wait(shared_address(&shared.row_empty[row.slot]), row.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
        shared.pieces[row.slot] = piece;
        if (has_tiles)
            load_tile(tiles.queries + row.slot * TILE_BYTES, q_map, shared.row_full[row.slot], piece.token, piece.head,
                      piece.batch);
        else
            barrier_arrive(shared_address(&shared.row_full[row.slot]));
    }
    row.advance();
}

template <int SLOTS>
__device__ __forceinline__ void init_ring(u64 (&full)[SLOTS], u64 (&empty)[SLOTS], int writers, int readers) {
    for (int i = 0; i < SLOTS; ++i) {
        barrier_init(shared_address(&full[i]), writers);
        barrier_init(shared_address(&empty[i]), readers);
    }
}

// Called by one thread; `arrivals`: number of arrivals that complete the load of a tile of keys or values.
__device__ __forceinline__ void init_barriers(Shared& shared, int arrivals) {
    init_ring(shared.row_full, shared.row_empty, 1, WARP_ARRIVALS);
    init_ring(shared.key_full, shared.key_empty, arrivals, CONSUMERS * 4 * WARP_ARRIVALS);
    init_ring(shared.value_full, shared.value_empty, arrivals, CONSUMERS * 4 * WARP_ARRIVALS);
    for (u64& done : shared.row_done) barrier_init(shared_address(&done), CONSUMERS * 4 * WARP_ARRIVALS);
}

// ---- the storing warp

__device__ __forceinline__ void store(const Problem& problem, const TensorMap& out_map, Tiles tiles, Shared& shared) {
    const int lane = threadIdx.x % 32;
    Ring<ROW_SLOTS> row;
    while (true) {
        barrier_wait(shared_address(&shared.row_full[row.slot]), row.parity);
        const Piece piece = shared.pieces[row.slot];
        if (piece.row < 0) break;
        const u32 output = tiles.queries + row.slot * TILE_BYTES;
        if (piece.begin == piece.end) {
            for (int chunk = lane; chunk < TILE_BYTES / 16; chunk += 32) store_zeros(output + chunk * 16);
            for (int query = piece.token + lane; problem.lse && query < min(piece.token + BLOCK, problem.tokens);
                 query += 32)
                *lse_of(problem, piece, query) = NEGATIVE_INFINITY;
            fence_async_proxy();
            __syncwarp();
        }
        barrier_wait(shared_address(&shared.row_done[row.slot]), row.parity);
        if (lane == 0) {
            for (int consumer = 0; consumer < CONSUMERS; ++consumer)
                if (piece.begin == piece.end || shared.is_stored[row.slot][consumer])
                    for (int box = 0; box < BOXES; ++box)
                        store_box(&out_map, output + consumer * HALF_BYTES + box * BOX_BYTES, box * 64, piece.head,
                                  piece.token + consumer * (BLOCK / CONSUMERS), piece.batch);
            store_commit();
            store_wait_read();
        }
        barrier_arrive_warp(shared_address(&shared.row_empty[row.slot]));
        row.advance();
    }
}

// ---- consumers

struct Softmax {  // of two rows per thread: lane / 4, and eight rows below
    float maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
    float sum[2] = {0.0f, 0.0f};  // over this thread's columns

    // Turns scores into probabilities; returns in `decay` the factors for acc.
    __device__ __forceinline__ void add(float (&scores)[SCORES], float scale_log2, float (&decay)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) largest[i] = fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]);
#pragma unroll
            for (int i = 4; i < SCORES / 4; ++i)
                largest[i % 4] = fmaxf(largest[i % 4], fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
            float top = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
#if HAS_MASKS
            top = fmaxf(top, LOWEST);  // if a query has no key in the tile
#endif
            const float before = maximum[r];
            // false at the first tile, where before is -inf
            if (!((top - before) * scale_log2 <= MAXIMUM_GROWTH)) maximum[r] = top;
            decay[r] = exp2_fast((before - maximum[r]) * scale_log2);
            const float offset = maximum[r] * scale_log2;
            float total[2] = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < SCORES / 4; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = scores[4 * i + 2 * r + j];
                    score = exp2_fast(fmaf(score, scale_log2, -offset));
                    total[j] += score;
                }
            }
            sum[r] = fmaf(sum[r], decay[r], total[0] + total[1]);
        }
    }
};

__device__ __forceinline__ void multiply_keys(float (&scores)[SCORES], u32 queries, u32 keys) {
    const u32 query_descriptor = descriptor_k_major(queries), key_descriptor = descriptor_k_major(keys);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        const u32 offset = (step / 4 * BOX_BYTES + step % 4 * 32) >> 4;
        wgmma<0>(scores, query_descriptor + offset, key_descriptor + offset, step > 0);
    }
    wgmma_commit();
}

__device__ __forceinline__ void multiply_values(float (&acc)[DIMS], const u32 (&probabilities)[SCORES / 2], u32 values,
                                                bool accumulate) {
    const u32 descriptor = descriptor_n_major(values, BOX_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK / 16; ++step)
        wgmma<1>(acc, probabilities + 4 * step, descriptor + step * (2048 >> 4), step > 0 || accumulate);
    wgmma_commit();
}

__device__ __forceinline__ void round_probabilities(u32 (&probabilities)[SCORES / 2], const float (&scores)[SCORES]) {
#pragma unroll
    for (int i = 0; i < SCORES / 2; ++i) probabilities[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

__device__ __forceinline__ void rescale(float (&acc)[DIMS], const float (&decay)[2]) {
    if (__any_sync(~0u, decay[0] != 1.0f || decay[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < DIMS; ++i) acc[i] *= decay[i / 2 % 2];
    }
}

// Masks keys from `valid` on; its second number is for the rows eight below.
__device__ __forceinline__ void mask_tail(float (&scores)[SCORES], int valid, int valid_below) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < SCORES; ++i)
        if (i / 4 * 8 + column + i % 2 >= (i / 2 % 2 ? valid_below : valid)) scores[i] = NEGATIVE_INFINITY;
}

__device__ __forceinline__ void mask_tail(float (&scores)[SCORES], int valid) { mask_tail(scores, valid, valid); }

__device__ __forceinline__ void release(u64& empty) { barrier_arrive_warp(shared_address(&empty)); }

#if HAS_KV_LEN && !SLICES
// Values of keys from `valid` on may be NaN, and 0 NaN is NaN. Each consumer clears all of them itself: waiting here for
// the other consumer, which waits for its turn, would be a deadlock.
__device__ __forceinline__ void clear_tail(u32 values, int valid, int consumer) {
    for (int chunk = valid * 8 + threadIdx.x % WARPGROUP; chunk < BLOCK * 8; chunk += WARPGROUP)
#pragma unroll
        for (int box = 0; box < BOXES; ++box) store_zeros(values + box * BOX_BYTES + chunk * 16);
    fence_async_proxy();
    named_sync(OWN + consumer, WARPGROUP);
}
#endif

// Merges a row's parts: stores this part to scratch, unless it is the last to arrive; the last part adds the others.
// Returns true if this part is the last.
__device__ __forceinline__ bool combine_parts(const Problem& problem, const Piece& piece, Softmax& softmax,
                                              float (&acc)[DIMS], int consumer, Shared& shared) {
    const int thread = threadIdx.x % WARPGROUP, barrier = OWN + consumer;
    auto part_of = [&](int share) {
        const long long part = 2ll * share + (share == piece.first_share);
        return reinterpret_cast<float4*>(problem.parts + part * PART) + consumer * (PART / 4 / CONSUMERS) + thread;
    };
    int* arrivals = problem.arrivals + piece.item * CONSUMERS + consumer;
    named_sync(barrier, WARPGROUP);  // all have read is_last of the previous row
    if (thread == 0) shared.is_last[consumer] = load_acquire(arrivals) == piece.parts - 1;
    named_sync(barrier, WARPGROUP);
    bool is_last = shared.is_last[consumer];
    if (!is_last) {
        float4* own = part_of(blockIdx.x);
#pragma unroll
        for (int i = 0; i < DIMS / 4; ++i)
            own[i * WARPGROUP] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        own[DIMS / 4 * WARPGROUP] = make_float4(softmax.maximum[0], softmax.maximum[1], softmax.sum[0], softmax.sum[1]);
        __threadfence();
        named_sync(barrier, WARPGROUP);
        if (thread == 0) shared.is_last[consumer] = atomicAdd(arrivals, 1) == piece.parts - 1;
        named_sync(barrier, WARPGROUP);
        is_last = shared.is_last[consumer];
    }
    if (!is_last) return false;
    if (thread == 0) *arrivals = 0;
    __threadfence();
    // added in the row's order, so the result does not depend on which part is last
    float result[DIMS] = {}, maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int share = piece.first_share; share < piece.first_share + piece.parts; ++share) {
        const bool is_own = share == int(blockIdx.x);
        const float4* part = part_of(share);
        float4 of_part = make_float4(softmax.maximum[0], softmax.maximum[1], softmax.sum[0], softmax.sum[1]);
        if (!is_own) of_part = __ldcg(part + DIMS / 4 * WARPGROUP);
        const float part_maximum[2] = {of_part.x, of_part.y}, part_sum[2] = {of_part.z, of_part.w};
        float decay[2], factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float top = fmaxf(maximum[r], part_maximum[r]);
            decay[r] = exp2_fast((maximum[r] - top) * problem.scale_log2);
            factor[r] = exp2_fast((part_maximum[r] - top) * problem.scale_log2);
            maximum[r] = top;
            sum[r] = sum[r] * decay[r] + part_sum[r] * factor[r];
        }
#pragma unroll
        for (int i = 0; i < DIMS / 4; ++i) {
            float4 values = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
            if (!is_own) values = __ldcg(part + i * WARPGROUP);
            result[4 * i] = result[4 * i] * decay[0] + values.x * factor[0];
            result[4 * i + 1] = result[4 * i + 1] * decay[0] + values.y * factor[0];
            result[4 * i + 2] = result[4 * i + 2] * decay[1] + values.z * factor[1];
            result[4 * i + 3] = result[4 * i + 3] * decay[1] + values.w * factor[1];
        }
    }
#pragma unroll
    for (int i = 0; i < DIMS; ++i) acc[i] = result[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) softmax.maximum[r] = maximum[r], softmax.sum[r] = sum[r];
    return true;
}

#if SLICES
// Adds two rows' earlier outputs, times their `share` of the sum, to this thread's normalised acc.
__device__ __forceinline__ void add_output(const Problem& problem, const Piece& piece, float (&acc)[DIMS],
                                           const float (&share)[2], int first_query) {
    const element* out = problem.out + piece.batch * problem.out_batch + piece.head * problem.out_head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = first_query + 8 * r;
        if (query >= problem.tokens) continue;
        const element* own = out + query * problem.out_token + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < DIMS / 4; ++i) {
            const float2 pair = unpack(*reinterpret_cast<const u32*>(own + 8 * i));
            acc[4 * i + 2 * r] = fmaf(pair.x, share[r], acc[4 * i + 2 * r]);
            acc[4 * i + 2 * r + 1] = fmaf(pair.y, share[r], acc[4 * i + 2 * r + 1]);
        }
    }
}
#endif

// Writes acc / l, rounded, over this consumer's queries in shared memory, for the storing warp; and the row's lse.
__device__ __forceinline__ void finish_row(const Problem& problem, const Piece& piece, Softmax& softmax,
                                           float (&acc)[DIMS], u32 queries, int consumer) {
    const int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
    const int first_query = piece.token + consumer * (BLOCK / CONSUMERS) + warp * 16 + lane / 4;
    float inverse[2];
#if SLICES
    const bool has_output = problem.kv_count[piece.row] > 0;
    float share[2] = {0.0f, 0.0f};
#endif
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = softmax.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
#if HAS_MASKS
        inverse[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
#else
        inverse[r] = 1.0f / sum;
#endif
        float lse_log2 = softmax.maximum[r] * problem.scale_log2 + log2f(sum);
        const int query = first_query + 8 * r;
#if SLICES
        if (has_output && query < problem.tokens) {
            const float before = *lse_of(problem, piece, query) * 1.4426950408889634f;  // log2 e
            const float top = fmaxf(lse_log2, before);
            const float total = top + log2f(exp2_fast(lse_log2 - top) + exp2_fast(before - top));
            share[r] = exp2_fast(before - total);
            inverse[r] *= exp2_fast(lse_log2 - total);
            lse_log2 = total;
        }
        __syncwarp();  // all lanes of a row have read its lse
#endif
        if (problem.lse && lane % 4 == 0 && query < problem.tokens)
            *lse_of(problem, piece, query) = lse_log2 * 0.6931471805599453f;  // ln 2
    }
#if SLICES
    if (has_output) {
#pragma unroll
        for (int i = 0; i < DIMS; ++i) acc[i] *= inverse[i / 2 % 2];
        add_output(problem, piece, acc, share, first_query);
        inverse[0] = inverse[1] = 1.0f;
    }
#endif
    named_sync(OWN + consumer, WARPGROUP);  // all four warps are done with the queries, which the output replaces
    const int row = warp * 16 + lane % 16;  // lanes 0-15: left of two chunks of 8 columns, 16-31: right chunk
#pragma unroll
    for (int i = 0; i < DIMS / 8; ++i) {
        const int chunk = 2 * i + lane / 16;
        const u32 address =
            queries + consumer * HALF_BYTES + chunk / 8 * BOX_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
        store_matrices(address, pack(acc[8 * i] * inverse[0], acc[8 * i + 1] * inverse[0]),
                       pack(acc[8 * i + 2] * inverse[1], acc[8 * i + 3] * inverse[1]),
                       pack(acc[8 * i + 4] * inverse[0], acc[8 * i + 5] * inverse[0]),
                       pack(acc[8 * i + 6] * inverse[1], acc[8 * i + 7] * inverse[1]));
    }
    fence_async_proxy();
}

struct Consumer {
    const Problem& problem;
    const Tiles tiles;
    Shared& shared;
    const int consumer = __shfl_sync(~0u, int(threadIdx.x / WARPGROUP), 0) - 1;
    Ring<ROW_SLOTS> row;
    Ring<KEY_STAGES> key;
    Ring<VALUE_STAGES> value;
    u32 queries;  // of the current piece, for both consumers

    // Waits for the next piece and returns true if it has tiles; only then the piece is taken.
    __device__ __forceinline__ bool take_piece(Piece& next) {
        barrier_wait(shared_address(&shared.row_full[row.slot]), row.parity);
        next = shared.pieces[row.slot];
        if (next.begin == next.end) return false;
        queries = tiles.queries + row.slot * TILE_BYTES;
        row.advance();
        return true;
    }

    __device__ __forceinline__ void pass_turn() { named_arrive(TURN + 1 - consumer, CONSUMERS * WARPGROUP); }

    __device__ __forceinline__ void begin_scores(float (&scores)[SCORES]) {
        barrier_wait(shared_address(&shared.key_full[key.slot]), key.parity);
#if SLICES
        fence_async_proxy();
#endif
        named_sync(TURN + consumer, CONSUMERS * WARPGROUP);
        multiply_keys(scores, queries + consumer * HALF_BYTES, tiles.keys + key.slot * TILE_BYTES);
    }

    __device__ __forceinline__ void end_scores(float (&scores)[SCORES]) {
        touch(scores);
        release(shared.key_empty[key.slot]);
        key.advance();
    }

#if HAS_MASKS
    // Pairs that attend in the tile whose scores are in progress; read before end_scores releases its slot.
    struct Mask {
        KeyTile tile;
        uint4 words[2];  // in a partial tile: bits of the keys for this thread's two rows
    };

    __device__ __forceinline__ int row_in_tile() {  // first of this thread's two rows, among the tile's queries
        return consumer * (BLOCK / CONSUMERS) + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    }

    __device__ __forceinline__ Mask mask_of_tile() {
        Mask mask;
        mask.tile = shared.key_tile[key.slot];
        if (mask.tile.code >= FIRST_PARTIAL) {
            const uint4* of_row = problem.pool + (mask.tile.code - FIRST_PARTIAL) * BLOCK + row_in_tile();
            mask.words[0] = __ldg(of_row), mask.words[1] = __ldg(of_row + 8);
        }
        return mask;
    }

    __device__ __forceinline__ void leave_out(float (&scores)[SCORES], const Mask& mask, const Piece& piece) {
        const KeyTile tile = mask.tile;
        if (tile.code == CAUSAL) {
            const int seen = piece.token + row_in_tile() - tile.token + 1;
            mask_tail(scores, seen, seen + 8);
        } else if (tile.code >= FIRST_PARTIAL) {
            const int column = threadIdx.x % 4 * 2;
            u32 bits[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                bits[r][0] = mask.words[r].x >> column, bits[r][1] = mask.words[r].y >> column;
                bits[r][2] = mask.words[r].z >> column, bits[r][3] = mask.words[r].w >> column;
            }
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (!(bits[i / 2 % 2][i / 16] & 1u << (i / 4 % 4 * 8 + i % 2))) scores[i] = NEGATIVE_INFINITY;
        }
        if (problem.tokens - tile.token < BLOCK) mask_tail(scores, problem.tokens - tile.token);
    }
#else
    struct Mask {};
    __device__ __forceinline__ Mask mask_of_tile() { return Mask(); }
    __device__ __forceinline__ void leave_out(float (&scores)[SCORES], Mask, const Piece& piece) {
        if (piece.valid < BLOCK) mask_tail(scores, piece.valid);
    }
#endif

    __device__ __forceinline__ void begin_values(float (&acc)[DIMS], const u32 (&probabilities)[SCORES / 2],
                                                 bool is_first, int valid, bool passes_turn = true) {
        barrier_wait(shared_address(&shared.value_full[value.slot]), value.parity);
#if SLICES
        fence_async_proxy();
#elif HAS_KV_LEN
        if (is_first && valid < BLOCK) clear_tail(tiles.values + value.slot * TILE_BYTES, valid, consumer);
#endif
        multiply_values(acc, probabilities, tiles.values + value.slot * TILE_BYTES, !is_first);
        if (passes_turn) pass_turn();
    }

    __device__ __forceinline__ void end_values(float (&acc)[DIMS]) {
        wgmma_wait<0>();
        touch(acc);
        release(shared.value_empty[value.slot]);
        value.advance();
    }

    __device__ __forceinline__ void run() {
        Piece piece;
        if (consumer == 1) pass_turn();  // consumer 0 begins
        while (true) {
            if (take_piece(piece))
                run_pieces(piece);
            else if (piece.row < 0)
                return;
            else {  // a row without tiles: only its slot is released
                release(shared.row_done[row.slot]);
                row.advance();
            }
        }
    }

    // Computes this piece and all pieces that follow without a gap.
    __device__ __forceinline__ void run_pieces(Piece piece) {
        float acc[DIMS], scores[SCORES], decay[2];
        u32 probabilities[SCORES / 2];
        begin_scores(scores);
        Mask mask = mask_of_tile();
        pass_turn();
        wgmma_wait<0>();
        end_scores(scores);
        leave_out(scores, mask, piece);
        Softmax softmax;
        softmax.add(scores, problem.scale_log2, decay);
        round_probabilities(probabilities, scores);
        for (bool goes_on = true; goes_on;) {
            bool is_first = true;
            int tile = piece.end - 2;  // the first tile is in progress
#if HAS_MASKS
#pragma unroll 1
            for (const int whole = max(piece.whole, piece.begin); tile >= whole; --tile) {
                begin_scores(scores);
                mask = mask_of_tile();
                begin_values(acc, probabilities, is_first, piece.valid);
                is_first = false;
                wgmma_wait<1>();
                end_scores(scores);
                leave_out(scores, mask, piece);
                softmax.add(scores, problem.scale_log2, decay);
                end_values(acc);
                rescale(acc, decay);
                round_probabilities(probabilities, scores);
            }
#endif
#pragma unroll 1
            for (; tile >= piece.begin; --tile) {
                begin_scores(scores);
                begin_values(acc, probabilities, is_first, piece.valid);
                is_first = false;
                wgmma_wait<1>();
                end_scores(scores);
                softmax.add(scores, problem.scale_log2, decay);
                end_values(acc);
                rescale(acc, decay);
                round_probabilities(probabilities, scores);
            }
            const Piece ended = piece;
            const u32 ended_queries = queries;
            const int ended_slot = row.slot ^ 1;
            Softmax ended_softmax = softmax;
            goes_on = take_piece(piece);
            if (goes_on) {
                begin_scores(scores);
                mask = mask_of_tile();
                begin_values(acc, probabilities, is_first, ended.valid);
                wgmma_wait<1>();
                end_scores(scores);
                leave_out(scores, mask, piece);
                softmax = Softmax();
                softmax.add(scores, problem.scale_log2, decay);
                end_values(acc);
                round_probabilities(probabilities, scores);
            } else {
                begin_values(acc, probabilities, is_first, ended.valid, false);
                end_values(acc);
            }
            const bool is_stored =
                ended.parts == 1 || combine_parts(problem, ended, ended_softmax, acc, consumer, shared);
            if (is_stored) finish_row(problem, ended, ended_softmax, acc, ended_queries, consumer);
            if (threadIdx.x % WARPGROUP == 0) shared.is_stored[ended_slot][consumer] = is_stored;
            release(shared.row_done[ended_slot]);
        }
    }
};
