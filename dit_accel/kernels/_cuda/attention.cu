// Block-sparse attention for Hopper (sm_90a): a persistent grid with one loading warp, one storing warp and two
// consumer warpgroups per multiprocessor.
//
// A thread block processes *pieces*: (row, [begin, end)) of the row's key list, from the last tile down. The loader
// copies the piece's queries and then one key and one value tile after the other. Each consumer warpgroup holds
// 64 queries and keeps, with c = scale * log2(e), a running maximum m (of raw scores) and sum l:
//
//     p_j = exp2(c (q k_j) - c m)      l = a l + sum_j p_j      acc = a acc + sum_j p_j v_j      a = exp2(c (m_old - m))
//
// m is updated only when the true maximum has grown by a factor of 2^8, so acc is rarely rescaled. The factor cancels
// in acc / l, and p <= 2^8 loses nothing in 16-bit floats or float32 sums. Within a warpgroup the product with the
// values of one tile overlaps with the softmax of the next, also from row to row. Two barriers make one warpgroup
// multiply while the other computes its softmax.
//
// With HAS_MASKS the loader publishes the kind of each tile, and consumers mask pairs that do not attend, by their
// position or by the bits of the tile's entry in the pool. A row's list then ends with its masked tiles.
#include "attention_consumers.cuh"

// Fills the rings one step ahead of the consumers: the keys of tile j + 1 before the values of tile j, and the next
// piece's queries and first keys before this piece's last values. All lanes run it; lane 0 issues the copies.
struct Loader {
    const Problem& problem;
    const TensorMap *q_map, *k_map, *v_map;
    const Tiles tiles;
    Shared& shared;
    const int lane = threadIdx.x % 32;
    Ring<ROW_SLOTS> row;
    Ring<KEY_STAGES> key;
    Ring<VALUE_STAGES> value;

    __device__ __forceinline__ void load_keys(const Piece& piece, KeyTile tile) {
        barrier_wait(shared_address(&shared.key_empty[key.slot]), key.parity ^ 1);
        if (lane == 0) {
#if HAS_MASKS
            shared.key_tile[key.slot] = tile;
#endif
            load_tile(tiles.keys + key.slot * TILE_BYTES, k_map, shared.key_full[key.slot], tile.token, piece.key_head,
                      piece.batch);
        }
        key.advance();
    }

    __device__ __forceinline__ void load_values(const Piece& piece, int token) {
        barrier_wait(shared_address(&shared.value_empty[value.slot]), value.parity ^ 1);
        if (lane == 0)
            load_tile(tiles.values + value.slot * TILE_BYTES, v_map, shared.value_full[value.slot], token,
                      piece.key_head, piece.batch);
        value.advance();
    }

    // 32 entries of the piece's key list, one per lane, from tile `done` on; tiles are counted from the last one down.
    __device__ __forceinline__ KeyTile list(const Piece& piece, int done) {
        const int entry = piece.end - 1 - done - lane;
        if (entry < piece.begin) return {FULL, 0};
        const int block = problem.kv_index[(long long)piece.row * problem.blocks + entry];
        int code = FULL;
#if HAS_MASKS
        const int* of_head = problem.codes + (long long)piece.batch * problem.codes_batch +
                             (long long)piece.head * problem.codes_head;
        code = of_head[piece.token / BLOCK * problem.blocks + block];
#endif
        return {code, block * BLOCK};
    }

    __device__ __forceinline__ KeyTile tile_of(KeyTile listed, int lane) {
        return {__shfl_sync(~0u, listed.code, lane), __shfl_sync(~0u, listed.token, lane)};
    }

    // Publishes the next piece, and loads its queries and first keys; returns the first token of the keys.
    __device__ __forceinline__ int take_up(Piece piece, KeyTile listed) {
        const bool has_tiles = piece.begin < piece.end;
        const KeyTile tile = tile_of(listed, 0);
        if (has_tiles) piece.valid = key_end_of(problem, piece.row) - tile.token;
        publish(piece, has_tiles, tiles, q_map, shared, row);
        if (has_tiles) load_keys(piece, tile);
        return tile.token;
    }

    __device__ __forceinline__ void run(int rows) {
        Pieces pieces(problem, rows, shared);
        Piece piece = pieces.next();
        KeyTile listed = list(piece, 0);
        int token = take_up(piece, listed);
        while (piece.row >= 0) {
            const int count = piece.end - piece.begin;
            Piece next;
            KeyTile next_listed;
            if (count == 0) {
                next = pieces.next();
                next_listed = list(next, 0);
                token = take_up(next, next_listed);
            }
            for (int done = 0; done < count; ++done) {
                if (done == min(1, count - 1)) {  // dependent loads from memory, hidden behind the tiles in flight
                    next = pieces.next();
                    next_listed = list(next, 0);
                }
                const int value_token = token;
                if (done + 1 < count) {
                    if ((done + 1) % 32 == 0) listed = list(piece, done + 1);
                    const KeyTile tile = tile_of(listed, (done + 1) % 32);
                    token = tile.token;
                    load_keys(piece, tile);
                } else {
                    token = take_up(next, next_listed);
                }
                load_values(piece, value_token);
            }
            piece = next;
            listed = next_listed;
        }
        pieces.finish();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map, const int* work,
              const int* work_count, const int* kv_count, const int* kv_index, const int* kv_len, int* counters,
              float* parts, float* lse,
#if HAS_MASKS
              const int* full_count, const int* codes, const uint4* pool, int codes_batch, int codes_head,
#endif
              int heads, int group, int blocks, int tokens, float scale_log2) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + TILES_BYTES);
    const Problem problem = {work,  work_count, kv_count, kv_index, kv_len, counters, counters + 2,
                             parts, lse,        heads,    group,    blocks, tokens,   scale_log2,
#if HAS_MASKS
                             full_count, codes, pool,     codes_batch, codes_head
#endif
    };
    if (threadIdx.x == 0) {
        prefetch_map(&q_map), prefetch_map(&k_map), prefetch_map(&v_map), prefetch_map(&out_map);
        init_barriers(shared, 1);
        barrier_init_fence();
    }
    const int rows = *work_count;
    if (is_shared(rows)) find_share(problem, rows, shared);
    __syncthreads();
    const Tiles tiles(memory);
    if (threadIdx.x < WARPGROUP) {
        registers_lower<56>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) Loader{problem, &q_map, &k_map, &v_map, tiles, shared}.run(rows);
        if (warp == 1) store(problem, out_map, tiles, shared);
    } else {
        registers_raise<224>();
        Consumer{problem, tiles, shared}.run();
    }
}
