// Lowering: packed symbols -> counts, ascending indices and the work list, without a host synchronisation and, up to
// 16 KB of bits a group, in one launch. Thread blocks have one of two roles:
//
// - index_tiles, a warp a row: lane l looks at tile start + l. The ballot of the warp is 32 tiles of the row, and the
//   population count of the ballot below a lane is the tile's place in the list, so stores are coalesced.
// - list_rows, some rows of a group (a head, or all heads): a row's place in the work list is the number of rows of its
//   group that are longer, or as long and earlier. A row's length is the population count of its bits, so every thread
//   block can count its whole group anew (2 KB of bits a head at 17K tokens) and need not wait for index_tiles. Where
//   that is too much it reads their counts, in a launch of its own.

typedef unsigned char uint8;
typedef unsigned long long uint64;

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int WARP = 32;
constexpr int THREADS = 256;
constexpr int FULL_TILE = 0;
constexpr int BYTES = 16;  // of a row's bits that a lane loads at a time

struct Symbols {
    const uint8* cache_bits;  // [B, Tq, ceil(H / 8)]
    const uint8* skip_bits;   // [B, H, Tq, ceil(Tk / 8)], null: every tile computes
    const int* codes;         // [B, H, Tq, Tk] by the strides below, null: every tile is full
    long long codes_batch, codes_head, codes_row;
    int heads, blocks;

    __device__ const uint8* cache_row(int batch, int row_block) const {
        return cache_bits + ((long long)batch * blocks + row_block) * head_bytes();
    }
    __device__ int head_bytes() const { return (heads + 7) / 8; }
    __device__ int row_bytes() const { return (blocks + 7) / 8; }
    __device__ bool computes(int row) const {  // row: (b * H + h) * Tq + i
        int head_row = row / blocks, head = head_row % heads;
        return cache_row(head_row / heads, row % blocks)[head / 8] >> head % 8 & 1;
    }
};

__device__ void index_tiles(
    const Symbols& symbols, int row, int lane, uint64* mask64, int* kv_count, int* full_count, int* kv_index) {
    int blocks = symbols.blocks, heads = symbols.heads;
    int row_block = row % blocks, head = row / blocks % heads, batch = row / blocks / heads;
    const uint8* cache_row = symbols.cache_row(batch, row_block);
    if (head == 0) {
        uint64 word = lane < symbols.head_bytes() ? (uint64)cache_row[lane] << 8 * lane : 0;
        for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(WHOLE_WARP, word, step);
        if (heads < 64) word &= (1ull << heads) - 1;
        if (lane == 0) mask64[(long long)batch * blocks + row_block] = word;
    }

    int stop = cache_row[head / 8] >> head % 8 & 1 ? blocks : 0;  // a reused row has no tile
    const uint8* row_bits = symbols.skip_bits ? symbols.skip_bits + (long long)row * symbols.row_bytes() : nullptr;
    const int* codes = symbols.codes;
    if (codes) codes += batch * symbols.codes_batch + head * symbols.codes_head + row_block * symbols.codes_row;
    int* row_index = kv_index + (long long)row * blocks;
    unsigned below = (1u << lane) - 1;

    int full_tiles = 0;
    if (codes) {
#pragma unroll 4
        for (int start = 0; start < stop; start += WARP) {
            int tile = start + lane;
            bool keep = tile < blocks && (!row_bits || row_bits[tile / 8] >> tile % 8 & 1);
            full_tiles += __popc(__ballot_sync(WHOLE_WARP, keep && codes[tile] == FULL_TILE));
        }
        if (lane == 0) full_count[row] = full_tiles;
    }
    int before = 0;                  // full tiles of earlier steps
    int masked_before = full_tiles;  // masked tiles stand behind all full ones
#pragma unroll 8
    for (int start = 0; start < stop; start += WARP) {
        int tile = start + lane;
        bool keep = tile < blocks && (!row_bits || row_bits[tile / 8] >> tile % 8 & 1);
        bool full = keep && (!codes || codes[tile] == FULL_TILE);
        unsigned word = __ballot_sync(WHOLE_WARP, full);
        if (full) row_index[before + __popc(word & below)] = tile;
        before += __popc(word);
        if (codes) {
            word = __ballot_sync(WHOLE_WARP, keep && !full);
            if (keep && !full) row_index[masked_before + __popc(word & below)] = tile;
            masked_before += __popc(word);
        }
    }
    if (lane == 0) kv_count[row] = codes ? masked_before : before;
}

// Tiles in a row of bits, by `lanes` neighbouring threads that all get the sum.
__device__ int row_length(const Symbols& symbols, int row, bool inside, int lanes) {
    if (!symbols.skip_bits) return symbols.blocks;
    int row_bytes = symbols.row_bytes(), length = 0;
    unsigned last_mask = 0xffu >> (8 * row_bytes - symbols.blocks);
    const uint8* row_bits = symbols.skip_bits + (long long)row * row_bytes;
    for (int start = threadIdx.x % lanes; start < row_bytes; start += lanes * BYTES) {
        unsigned bits[BYTES];
#pragma unroll
        for (int i = 0; i < BYTES; ++i) {
            int byte = start + i * lanes;
            bits[i] = inside && byte < row_bytes ? row_bits[byte] : 0;
            if (byte == row_bytes - 1) bits[i] &= last_mask;
        }
#pragma unroll
        for (int i = 0; i < BYTES; ++i) length += __popc(bits[i]);
    }
    for (int step = lanes / 2; step; step /= 2) length += __shfl_xor_sync(WHOLE_WARP, length, step);
    return length;
}

// Rows of earlier heads that compute: the calling thread's share.
__device__ int earlier_rows(const Symbols& symbols, int first) {
    int head_bytes = symbols.head_bytes(), blocks = symbols.blocks, heads = symbols.heads;
    int batch = first / blocks / heads, head = first / blocks % heads, count = 0;
    for (int index = threadIdx.x; index < (batch + 1) * blocks * head_bytes; index += THREADS) {
        int limit = index / head_bytes / blocks < batch ? heads : head;
        int bits = min(max(limit - index % head_bytes * 8, 0), 8);  // of this byte that are earlier heads
        count += __popc(symbols.cache_bits[index] & ((1u << bits) - 1));
    }
    return count;
}

// A key orders a group's rows: by length, then index, and reused rows (below `padded`) behind all that compute.
// lengths null: they are counted, by `lanes` threads a row.
__device__ void list_rows(
    const Symbols& symbols, const int* lengths, int lanes, int first, int chunk, int rows, int group_rows,
    int chunk_rows, int* row_count, int* row_index, int* work, int* work_count) {
    extern __shared__ int4 shared[];
    __shared__ int earlier;
    int padded = (group_rows + WARP - 1) / WARP * WARP;
    int* keys = (int*)shared;                             // [padded]
    unsigned* compute_bits = (unsigned*)(keys + padded);  // [padded / 32]
    int lane = threadIdx.x % WARP, blocks = symbols.blocks;

    if (threadIdx.x == 0) earlier = 0;
    for (int index = threadIdx.x / lanes; index < padded; index += THREADS / lanes) {
        bool inside = index < group_rows;
        int length = 0;
        if (!lengths) length = row_length(symbols, first + index, inside, lanes);
        else if (inside) length = lengths[first + index];
        bool computes = inside && symbols.computes(first + index);
        if (threadIdx.x % lanes == 0) keys[index] = (computes ? (length + 1) * padded : 0) + padded - 1 - index;
    }
    __syncthreads();
    for (int index = threadIdx.x; index < padded; index += THREADS) {
        unsigned word = __ballot_sync(WHOLE_WARP, keys[index] >= padded);
        if (lane == 0) compute_bits[index / WARP] = word;
    }
    int count = first ? __reduce_add_sync(WHOLE_WARP, earlier_rows(symbols, first)) : 0;
    if (lane == 0 && count) atomicAdd(&earlier, count);
    __syncthreads();

    int parts = THREADS / chunk_rows, part = threadIdx.x % parts;  // threads that share a row's comparisons
    int index = chunk * chunk_rows + threadIdx.x / parts;
    bool inside = index < group_rows;
    int key = inside ? keys[index] : 0, rank = 0;
#pragma unroll 4
    for (int other = part; other < padded / 4; other += parts) {
        int4 four = shared[other];
        rank += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
    }
    for (int step = parts / 2; step; step /= 2) rank += __shfl_xor_sync(WHOLE_WARP, rank, step);
    if (inside && part == 0) {
        bool computes = key >= padded;
        int head_row = (first + index) / blocks, row_block = (first + index) % blocks;
        int begin = index - row_block;  // the head's first row
        int place = 0;                  // rows of the head that compute and come earlier
        for (int word = begin / WARP; word <= index / WARP; ++word) {
            unsigned bits = compute_bits[word];
            if (word == begin / WARP) bits &= WHOLE_WARP << begin % WARP;
            if (word == index / WARP) bits &= (1u << index % WARP) - 1;
            place += __popc(bits);
        }
        if (computes) {
            work[earlier + rank] = first + index;
            row_index[(long long)head_row * blocks + place] = row_block;
        }
        if (row_block == blocks - 1) row_count[head_row] = place + computes;
    }
    if (first + group_rows == rows && chunk == 0 && threadIdx.x < WARP) {
        int total = 0;
        for (int word = lane; word < padded / WARP; word += WARP) total += __popc(compute_bits[word]);
        total = __reduce_add_sync(WHOLE_WARP, total);
        if (lane == 0) *work_count = earlier + total;
    }
}

// The first list_blocks thread blocks list rows, `chunk_rows` each; the others index tiles, a row a warp. Lists that
// read kv_count (`counted`) are a launch of their own, after that of the tiles.
extern "C" __global__ void __launch_bounds__(THREADS) lower(
    const uint8* __restrict__ cache_bits, const uint8* __restrict__ skip_bits, const int* __restrict__ codes,
    long long codes_batch, long long codes_head, long long codes_row,
    uint64* __restrict__ mask64, int* __restrict__ kv_count, int* __restrict__ full_count, int* __restrict__ kv_index,
    int* __restrict__ row_count, int* __restrict__ row_index, int* __restrict__ work, int* __restrict__ work_count,
    int rows, int heads, int blocks, int group_rows, int list_blocks, int chunk_rows, int lanes, int counted) {
    Symbols symbols{cache_bits, skip_bits, codes, codes_batch, codes_head, codes_row, heads, blocks};
    if (blockIdx.x < list_blocks) {
        int chunks = (group_rows + chunk_rows - 1) / chunk_rows;
        list_rows(symbols, counted ? kv_count : nullptr, lanes, blockIdx.x / chunks * group_rows, blockIdx.x % chunks,
                  rows, group_rows, chunk_rows, row_count, row_index, work, work_count);
        return;
    }
    int row = (blockIdx.x - list_blocks) * (THREADS / WARP) + threadIdx.x / WARP;
    if (row < rows) index_tiles(symbols, row, threadIdx.x % WARP, mask64, kv_count, full_count, kv_index);
}
