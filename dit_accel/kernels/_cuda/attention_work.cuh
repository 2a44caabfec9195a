// Attention: sizes, shared memory, and the work of each thread block.
//
// The kernel divides work by the number of rows that compute, with G = thread blocks:
//   rows    Many rows (at least SHARED_WAVES G) are taken by ticket, in the order of the work list. Rows of one head
//           run together, and their keys are read from L2.
//   shares  Few rows would leave multiprocessors idle (195 rows on 132 take two rounds instead of 1.48), so their
//           concatenated tiles are cut into G equal shares. A cut row's parts (acc, m, l) go to scratch memory, and the
//           last part to arrive adds them up, in the order of the row.
#pragma once
#ifndef HAS_KV_LEN
#define HAS_KV_LEN 1
#endif
#ifndef HAS_MASKS
#define HAS_MASKS 0
#endif
#include "hopper.cuh"

constexpr int BLOCK = 128;    // queries of a row, keys of a tile
constexpr int CONSUMERS = 2;  // warpgroups of 64 queries
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int BOXES = HEAD_DIM / 64;  // boxes of 64 elements per tile
constexpr int BOX_BYTES = BLOCK * 128;
constexpr int TILE_BYTES = BOXES * BOX_BYTES;
constexpr int HALF_BYTES = BOX_BYTES / CONSUMERS;  // a consumer's queries in a box
constexpr int ROW_SLOTS = 2;                       // the next row's queries are loaded while this row is computed
constexpr int KEY_STAGES = 3, VALUE_STAGES = 2;
constexpr int TILES_BYTES = (ROW_SLOTS + KEY_STAGES + VALUE_STAGES) * TILE_BYTES;
constexpr int DIMS = HEAD_DIM / 2;  // accumulators of a thread: 64 rows x HEAD_DIM over 128 threads
constexpr int SCORES = BLOCK / 2;
constexpr int MAX_PROGRAMS = 192;  // thread blocks
constexpr int SHARED_WAVES = 4;    // fewer rows than this for each thread block are cut into shares
constexpr int ROWS_A_THREAD = (SHARED_WAVES * MAX_PROGRAMS + THREADS - 1) / THREADS;  // where work is cut into shares
constexpr int SMALLEST_SHARE = 4;       // tiles; parts of fewer cost more to add up than to compute
constexpr int OWN = 1, TURN = 3;        // named barriers: each consumer's own (1, 2), whose turn it is (3, 4)
constexpr float MAXIMUM_GROWTH = 8.0f;  // base-2 exponent that the maximum may grow by before acc is rescaled
constexpr float LOWEST = -1e30f;        // replaces -inf, because the difference of two -inf is NaN
constexpr int FULL = 0, CAUSAL = 1, FIRST_PARTIAL = 2;  // codes of masked tiles
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

struct Piece {
    int row;                           // (b * H + h) * Tq + i, or -1: no more pieces
    int batch, head, key_head, token;  // of the row's queries; token: the first one
    int begin, end;                    // range of the row's key list; empty: the row has no valid key
    int valid;                         // valid keys of tile end - 1; other tiles are fully valid
    int parts;                         // number of pieces of the row
    int first_share;                   // of a cut row: the thread block with its first tile
    int item;                          // the row's place in the work list
#if HAS_MASKS
    int whole;                         // entries at the begin of the row's list that need no mask
#endif
};
constexpr Piece NO_PIECE = {-1, 0, 0, 0, 0, 0, 0, BLOCK, 1, 0, 0};

struct KeyTile {  // a tile's data for masks
    int code, token;
};

struct Shared {  // follows the tiles
    u64 row_full[ROW_SLOTS], row_done[ROW_SLOTS], row_empty[ROW_SLOTS];
    u64 key_full[KEY_STAGES], key_empty[KEY_STAGES];
    u64 value_full[VALUE_STAGES], value_empty[VALUE_STAGES];
#if HAS_MASKS
    KeyTile key_tile[KEY_STAGES];
#endif
    Piece pieces[ROW_SLOTS];
    int is_stored[ROW_SLOTS][CONSUMERS];  // true if the row's slot has the consumer's finished output
    int is_last[CONSUMERS];
    int sums[THREADS / 32];
    int total;                     // tiles of all rows
    int first_item, first_offset;  // where this thread block's share begins, and tiles into it
};

struct Problem {
    const int* work;
    const int* work_count;
    const int* kv_count;
    const int* kv_index;
    const int* kv_len;
    int* tickets;   // [2]: rows taken beyond the first of each thread block, and thread blocks that are done
    int* arrivals;  // [SHARED_WAVES MAX_PROGRAMS, CONSUMERS]: parts of a row that have arrived; zero between launches,
                    // and so are the tickets
    float* parts;   // [programs, 2, PART]: of each share, a row cut at its end and one cut at its begin
    float* lse;
    int heads, group, blocks, tokens;
    float scale_log2;
#if HAS_MASKS
    const int* full_count;
    const int* codes;   // [B or 1, H or 1, blocks, blocks], axes of size 1 with stride 0
    const uint4* pool;  // of partial tiles: bits of a query's keys, [entries, BLOCK]
    int codes_batch, codes_head;
#endif
#if SLICES
    const element* out;  // earlier output, with lse, in rows whose kv_count is not 0
    long long out_batch, out_token, out_head;
#endif
};

__device__ __forceinline__ float* lse_of(const Problem& problem, const Piece& piece, int query) {
    return problem.lse + (long long)(piece.batch * problem.heads + piece.head) * problem.tokens + query;
}

constexpr int PART = CONSUMERS * WARPGROUP * (DIMS + 4);  // acc, then m and l of two rows, of each thread

__device__ __forceinline__ int key_end_of(const Problem& problem, int row) {
#if HAS_KV_LEN
    const int length = problem.kv_len[row / problem.blocks / problem.heads];
    return min(max(length, 0), problem.tokens);
#else
    return problem.tokens;
#endif
}

// Number of a row's tiles with a valid key: tiles beyond kv_len are at the end of the ascending list.
__device__ __forceinline__ int tiles_of(const Problem& problem, int row) {
    int count = problem.kv_count[row];
#if HAS_KV_LEN
    const int key_end = key_end_of(problem, row);
    const int* index = problem.kv_index + (long long)row * problem.blocks;
#pragma unroll 1
    while (count > 0 && index[count - 1] * BLOCK >= key_end) --count;
#endif
    return count;
}

#if HAS_MASKS
// Leading entries of a row's list that need no mask: its FULL tiles, except one cut by the sequence's end.
__device__ __forceinline__ int whole_of(const Problem& problem, int row) {
    const int full = problem.full_count[row];
    if (problem.tokens % BLOCK == 0 || full == 0) return full;
    return full - (problem.kv_index[(long long)row * problem.blocks + full - 1] == problem.blocks - 1);
}
#endif

// Weight of a row when work is divided: a row without a tile must be in some share too.
__device__ __forceinline__ int length_of(const Problem& problem, int item) {
    return max(tiles_of(problem, problem.work[item]), 1);
}

// ---- division of work

__device__ __forceinline__ bool is_shared(int rows) { return rows < SHARED_WAVES * int(gridDim.x); }

__device__ __forceinline__ int share_of(int total) {
    return max((total + int(gridDim.x) - 1) / int(gridDim.x), SMALLEST_SHARE);
}

// Called by all threads: adds up the rows' tiles and finds where this thread block's share begins.
__device__ __forceinline__ void find_share(const Problem& problem, int rows, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * ROWS_A_THREAD;
    int length[ROWS_A_THREAD], sum = 0;
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; ++i) length[i] = first + i < rows ? length_of(problem, first + i) : 0;
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; ++i) sum += length[i];
    int before = sum_of_lanes(sum);  // becomes the sum of all threads up to this one
    if (lane == 31) shared.sums[warp] = before;
    __syncthreads();
    int total = 0;
    for (int other = 0; other < THREADS / 32; ++other) {
        if (other < warp) before += shared.sums[other];
        total += shared.sums[other];
    }
    int offset = int(blockIdx.x) * share_of(total) - (before - sum);
    if (threadIdx.x == 0) shared.total = total;
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; ++i) {
        if (offset >= 0 && offset < length[i]) shared.first_item = first + i, shared.first_offset = offset;
        offset -= length[i];
    }
}

__device__ __forceinline__ void place(const Problem& problem, Piece& piece, int row) {
    const int head_row = row / problem.blocks;
    piece.row = row;
    piece.batch = head_row / problem.heads, piece.head = head_row % problem.heads;
    piece.key_head = piece.head / problem.group;
    piece.token = row % problem.blocks * BLOCK;
#if HAS_MASKS
    piece.whole = whole_of(problem, row);
#endif
}

// Called by one thread of each block: the last one leaves the tickets as it found them.
__device__ __forceinline__ void return_tickets(const Problem& problem) {
    if (atomicAdd(problem.tickets + 1, 1) == int(gridDim.x) - 1) problem.tickets[0] = 0, problem.tickets[1] = 0;
}

// The pieces of this thread block, one after the other; called by all lanes of the loading warp.
struct Pieces {
    const Problem& problem;
    const int rows;
    int item, offset, position, stop, share;

    __device__ Pieces(const Problem& problem, int rows, const Shared& shared) : problem(problem), rows(rows) {
        if (is_shared(rows)) {
            share = share_of(shared.total);
            position = blockIdx.x * share, stop = min(position + share, shared.total);
            item = shared.first_item, offset = shared.first_offset;
        } else {
            item = blockIdx.x;
        }
    }

    __device__ Piece next() {
        Piece piece = NO_PIECE;
        if (is_shared(rows)) {
            if (position >= stop) return piece;
            piece.item = item;
            place(problem, piece, problem.work[item]);
            const int count = tiles_of(problem, piece.row), length = max(count, 1);
            const int row_begin = position - offset, taken = min(length - offset, stop - position);
            piece.begin = min(offset, count), piece.end = min(offset + taken, count);
            piece.first_share = row_begin / share;
            piece.parts = (row_begin + length - 1) / share - piece.first_share + 1;
            position += taken;
            ++item, offset = 0;
        } else {
            piece.item = __shfl_sync(~0u, item, 0);
            if (piece.item >= rows) return piece;
            if (threadIdx.x % 32 == 0) item = gridDim.x + atomicAdd(problem.tickets, 1);  // arrives while this one runs
            place(problem, piece, problem.work[piece.item]);
            piece.end = tiles_of(problem, piece.row);
        }
        return piece;
    }

    __device__ void finish() {
        if (!is_shared(rows) && threadIdx.x % 32 == 0) return_tickets(problem);
    }
};
