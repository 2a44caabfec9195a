// Attention to single keys for Hopper (sm_90a): continues from the attention over a row's tiles, in out and lse.
//
// The consumers and the storing warp are those of attention.cu. Three warps replace the loading warp, because the copy
// engine can't gather (FG-Attn, section 4.2):
//
//   lister   takes rows by ticket, loads their queries, and turns the bits of their keys into positions, 128 per tile,
//            in a ring of LISTS tiles: the warp reads 1024 keys at a time, counts the bits before each lane's, and every
//            lane writes its own positions;
//   keys     copies the keys at a tile's positions to their place in the swizzled tile, 16 bytes per lane; the copies
//            arrive at the barrier on which the consumers wait;
//   values   does the same with the values.
//
// So no list of a row's keys is ever in memory. A row's first tile is the partly filled one, because consumers mask the
// first tile; it is padded with the row's first key.
//
// 12 heads, 32760 tokens, head dimension 128, one H200: 11.6 ms with every key single (545 TF; whole tiles 9.0 ms), 1.2 ms
// with a tenth of them. Triton's gather takes 14.6 and 1.8 ms.
#define SLICES 1
#include "attention_consumers.cuh"

constexpr int LISTS = 4;  // tiles that are listed before their keys are copied
constexpr int READERS = 2;
constexpr int BEYOND_TILES = 3072;  // bytes of shared memory, as the launcher gives them

struct alignas(16) Listed {
    u64 full[LISTS], empty[LISTS];
    u32 positions[LISTS][BLOCK];
};

static_assert(sizeof(Shared) % 16 == 0 && sizeof(Shared) + sizeof(Listed) <= BEYOND_TILES);

// A row's bits as words of 32 keys; keys from `key_end` on are none.
struct Words {
    const u32* words;
    int key_end;

    __device__ __forceinline__ u32 at(int index) const {
        const int keys = key_end - index * 32;
        if (keys <= 0) return 0;
        const u32 word = __ldg(words + index);
        return keys < 32 ? word & ((1u << keys) - 1) : word;
    }
};

struct Lister {
    const Problem& problem;
    const u32* bits;
    const int* slice_count;
    const TensorMap* q_map;
    const Tiles tiles;
    Shared& shared;
    Listed& listed;
    const int lane = threadIdx.x % 32;
    int item = blockIdx.x;  // lane 0's: the next row's place in the work list
    Ring<ROW_SLOTS> row;
    Ring<LISTS> list;

    __device__ __forceinline__ void run(int rows) {
        for (int drawn = draw(rows); drawn >= 0; drawn = draw(rows)) {
            const long long first_word = (long long)drawn * problem.blocks * (BLOCK / 32);
            const Words words = {bits + first_word, key_end_of(problem, drawn)};
            const int count = count_keys(words, drawn);
            if (count == 0) continue;
            Piece piece = NO_PIECE;
            place(problem, piece, drawn);
            piece.end = (count + BLOCK - 1) / BLOCK;
            piece.valid = count - (piece.end - 1) * BLOCK;
            publish(piece, true, tiles, q_map, shared, row);
            list_keys(words, count, piece.valid);
        }
        const Piece none = NO_PIECE;  // a constant at file scope has no address on the device
        publish(none, false, tiles, q_map, shared, row);
        if (lane == 0) return_tickets(problem);
    }

    __device__ __forceinline__ int draw(int rows) {
        const int drawn = __shfl_sync(~0u, item, 0);
        if (drawn >= rows) return -1;
        if (lane == 0) item = gridDim.x + atomicAdd(problem.tickets, 1);  // arrives while this row is listed
        return problem.work[drawn];
    }

    __device__ __forceinline__ int count_keys(const Words& words, int row) {
#if HAS_KV_LEN
        int count = 0;
        for (int index = lane; index * 32 < words.key_end; index += 32) count += __popc(words.at(index));
        for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(~0u, count, step);
        return count;
#else
        return slice_count[row];
#endif
    }

    // The first tile has `first` positions, each other tile BLOCK.
    __device__ __forceinline__ void list_keys(const Words& words, int count, int first) {
        int begin = 0, end = first;  // of the tile, among the row's keys
        u32* positions = next_tile();
        u32 word = words.at(lane);
        for (int index = 0, before = 0; before < count; index += 32) {
            const u32 next = words.at(index + 32 + lane);
            const int own = __popc(word);
            const int upto = sum_of_lanes(own);  // keys up to this lane's last
            int ordinal = before + upto - own;
            before += __shfl_sync(~0u, upto, 31);
            while (true) {
                for (; word != 0 && ordinal < end; word &= word - 1, ++ordinal)
                    positions[ordinal - begin] = (index + lane) * 32 + __ffs(word) - 1;
                if (before < end) break;
                finish_tile(positions, end - begin);
                begin = end, end += BLOCK;
                if (begin == count) return;
                positions = next_tile();
            }
            word = next;
        }
    }

    __device__ __forceinline__ u32* next_tile() {
        barrier_wait(shared_address(&listed.empty[list.slot]), list.parity ^ 1);
        return listed.positions[list.slot];
    }

    __device__ __forceinline__ void finish_tile(u32* positions, int count) {
        if (count < BLOCK) {
            __syncwarp();
            const u32 padding = positions[0];
            for (int i = count + lane; i < BLOCK; i += 32) positions[i] = padding;
        }
        barrier_arrive_warp(shared_address(&listed.full[list.slot]));
        list.advance();
    }
};

struct Source {  // keys or values, [B, S, H_kv, D]; strides in elements
    const element* data;
    long long batch, token, head;
};

// One warp: gathers the rows of `source` at each tile's positions into the ring that begins at `ring`.
template <int STAGES>
__device__ __forceinline__ void gather(const Source& source, u32 ring, u64 (&full)[STAGES], u64 (&empty)[STAGES],
                                       Shared& shared, Listed& listed) {
    constexpr int CHUNKS = BOXES * 8;  // of 16 bytes, a row
    constexpr int ROWS = BLOCK * CHUNKS / 32;  // rows whose chunk a lane copies, one after the other
    const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, first_row = lane / CHUNKS * ROWS;
    const u32 own = ring + chunk / 8 * BOX_BYTES + first_row * 128;
    const u32 token_bytes = source.token * sizeof(element);
    Ring<ROW_SLOTS> row;
    Ring<LISTS> list;
    Ring<STAGES> stage;
    while (true) {
        barrier_wait(shared_address(&shared.row_full[row.slot]), row.parity);
        const Piece piece = shared.pieces[row.slot];
        if (piece.row < 0) break;
        row.advance();
        const char* base = reinterpret_cast<const char*>(source.data + piece.batch * source.batch +
                                                         piece.key_head * source.head) +
                           chunk * 16;
        for (int tile = 0; tile < piece.end; ++tile) {
            barrier_wait(shared_address(&listed.full[list.slot]), list.parity);
            barrier_wait(shared_address(&empty[stage.slot]), stage.parity ^ 1);
            const uint4* positions = reinterpret_cast<const uint4*>(listed.positions[list.slot] + first_row);
#pragma unroll 1
            for (int r = 0; r < ROWS; r += 8) {
                const uint4 low = positions[r / 4], high = positions[r / 4 + 1];
                const u32 position[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    copy_async(own + stage.slot * TILE_BYTES + (r + i) * 128 + (chunk % 8 ^ i) * 16,
                               base + u64(position[i]) * token_bytes);
            }
            barrier_arrive_copied(shared_address(&full[stage.slot]));
            release(listed.empty[list.slot]);
            list.advance();
            stage.advance();
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    slices(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap out_map, const element* k,
           long long k_batch, long long k_token, long long k_head, const element* v, long long v_batch,
           long long v_token, long long v_head, const element* out, long long out_batch, long long out_token,
           long long out_head, float* lse, const u32* bits, const int* slice_count, const int* work,
           const int* work_count, const int* kv_count, const int* kv_len, int* tickets, int heads, int group, int blocks,
           int tokens, float scale_log2) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + TILES_BYTES);
    Listed& listed = *reinterpret_cast<Listed*>(memory + TILES_BYTES + sizeof(Shared));
    const Problem problem = {work, work_count, kv_count, nullptr, kv_len,     tickets, nullptr,   nullptr,   lse,
                             heads, group,     blocks,   tokens,  scale_log2, out,     out_batch, out_token, out_head};
    if (threadIdx.x == 0) {
        prefetch_map(&q_map), prefetch_map(&out_map);
        init_barriers(shared, 32);
        init_ring(listed.full, listed.empty, WARP_ARRIVALS, READERS * WARP_ARRIVALS);
        barrier_init_fence();
    }
    __syncthreads();
    const Tiles tiles(memory);
    if (threadIdx.x < WARPGROUP) {
        registers_lower<56>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) Lister{problem, bits, slice_count, &q_map, tiles, shared, listed}.run(*work_count);
        if (warp == 1) store(problem, out_map, tiles, shared);
        if (warp == 2)
            gather<KEY_STAGES>({k, k_batch, k_token, k_head}, tiles.keys, shared.key_full, shared.key_empty, shared,
                               listed);
        if (warp == 3)
            gather<VALUE_STAGES>({v, v_batch, v_token, v_head}, tiles.values, shared.value_full, shared.value_empty,
                                 shared, listed);
    } else {
        registers_raise<224>();
        Consumer{problem, tiles, shared}.run();
    }
}
