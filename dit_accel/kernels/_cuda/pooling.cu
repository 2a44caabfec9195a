// Pooled map in two launches: block statistics at the speed of memory, then scores and their softmax.
//
// block_statistics: a thread block a (side, batch, block, head). A lane reads 16 bytes of a token, LANES lanes a token,
// and all loads of a thread are under way before the first is used. Neighbouring thread blocks read neighbouring heads.
//
// pooled_probabilities: a thread block 16 query blocks of a head. Means of keys are taken from the first block's mean:
// any vector may be subtracted from all keys of a softmax, and this one holds what they share. float32 products are
// three TF32 products, x = big + small, x y = big big + big small + small big; what is left out is 2^-22 of x y. The
// tensor core may see the head dimension in any order, so a lane loads 8 consecutive values for 4 of its steps.

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef ELEMENT
#define ELEMENT 2  // 0: float32, 1: float16, 2: bfloat16
#endif
#ifndef BLOCK
#define BLOCK 128
#endif

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int WARP = 32;
constexpr int WARPS = 4;
constexpr int VECTOR = ELEMENT ? 8 : 4;      // elements in 16 bytes
constexpr int LANES = HEAD_DIM / VECTOR;     // that read a token
constexpr int TOKENS = WARP / LANES;         // that a warp reads at a time
constexpr int STEPS = BLOCK / WARPS / TOKENS;

__device__ void to_floats(const uint4& packed, float (&x)[VECTOR]) {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if (ELEMENT == 0) {
            x[word] = __uint_as_float(words[word]);
        } else if (ELEMENT == 1) {
            asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
                : "=f"(x[2 * word % VECTOR]), "=f"(x[(2 * word + 1) % VECTOR]) : "r"(words[word]));
        } else {
            x[2 * word % VECTOR] = __uint_as_float(words[word] << 16);
            x[(2 * word + 1) % VECTOR] = __uint_as_float(words[word] & 0xffff0000u);
        }
    }
}

__device__ int valid_keys(const int* kv_len, int batch, int tokens) {
    return kv_len ? max(min(kv_len[batch], tokens), 0) : tokens;
}

// `volatile` keeps the loads of a thread together and in front.
__device__ uint4 load16(const uint4* from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

// grid (H, T, 2 B). Strides in steps of 16 bytes. mean [2, B, H, T, HEAD_DIM], similarity [2, B, H, T].
extern "C" __global__ void __launch_bounds__(WARPS * WARP) block_statistics(
    const uint4* __restrict__ q, const uint4* __restrict__ k, const int* __restrict__ kv_len,
    float* __restrict__ mean, float* __restrict__ similarity,
    int q_batch, int q_token, int q_head, int k_batch, int k_token, int k_head,
    int tokens, int batches, float smallest_squared_norm) {
    __shared__ float sums[2][WARPS][HEAD_DIM];
    __shared__ int directed[WARPS];  // tokens that are not 0
    int head = blockIdx.x, block = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    bool is_key = blockIdx.z >= batches;
    int batch = is_key ? blockIdx.z - batches : blockIdx.z;
    int length = is_key ? valid_keys(kv_len, batch, tokens) : tokens;
    int count = min(max(length - block * BLOCK, 0), BLOCK);
    const uint4* x = is_key ? k + (long long)batch * k_batch + (long long)head * k_head
                            : q + (long long)batch * q_batch + (long long)head * q_head;
    int stride = is_key ? k_token : q_token;
    x += (long long)block * BLOCK * stride + lane % LANES;
    int first_slot = warp * TOKENS + lane / LANES;
    const uint4* first = x + (long long)first_slot * stride;
    long long step_stride = (long long)WARPS * TOKENS * stride;

    uint4 packed[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        bool inside = step * WARPS * TOKENS + first_slot < count;
        packed[step] = load16(inside ? first + step * step_stride : x);  // the block's first token is always there
    }
    if (count < BLOCK) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            if (step * WARPS * TOKENS + first_slot >= count) packed[step] = make_uint4(0, 0, 0, 0);
    }
    float total[VECTOR] = {}, unit_total[VECTOR] = {};
    int directions = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        float token[VECTOR], squared_norm = 0.0f;
        to_floats(packed[step], token);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) squared_norm += token[i] * token[i];
#pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2)
            squared_norm += __shfl_xor_sync(WHOLE_WARP, squared_norm, distance);
        float scale;
        asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(fmaxf(squared_norm, smallest_squared_norm)));
        bool has_direction = squared_norm > smallest_squared_norm;
        scale = has_direction ? scale : 0.0f;
        directions += has_direction;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            total[i] += token[i];
            unit_total[i] += token[i] * scale;
        }
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
        for (int distance = LANES; distance < WARP; distance *= 2) {
            total[i] += __shfl_xor_sync(WHOLE_WARP, total[i], distance);
            unit_total[i] += __shfl_xor_sync(WHOLE_WARP, unit_total[i], distance);
        }
        if (lane < LANES) {
            sums[0][warp][lane * VECTOR + i] = total[i];
            sums[1][warp][lane * VECTOR + i] = unit_total[i];
        }
    }
#pragma unroll
    for (int distance = LANES; distance < WARP; distance *= 2)
        directions += __shfl_xor_sync(WHOLE_WARP, directions, distance);
    if (lane == 0) directed[warp] = directions;
    __syncthreads();
    if (warp) return;
    long long row = ((long long)blockIdx.z * gridDim.x + head) * gridDim.y + block;
    float divisor = max(count, 1), squared = 0.0f;
    for (int dim = lane; dim < HEAD_DIM; dim += WARP) {
        float sum = 0.0f, unit_sum = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
            sum += sums[0][other][dim];
            unit_sum += sums[1][other][dim];
        }
        mean[row * HEAD_DIM + dim] = sum / divisor;
        squared += unit_sum * unit_sum;
    }
    for (int distance = WARP / 2; distance; distance /= 2) squared += __shfl_xor_sync(WHOLE_WARP, squared, distance);
    directions = 0;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) directions += directed[other];
    if (lane == 0) similarity[row] = directions ? squared / ((float)directions * directions) : 1.0f;
}

constexpr int MAP_WARPS = 8;
constexpr int QUERIES = 16;            // query blocks of a thread block
constexpr int KEYS = 8;                // key blocks that a warp scores at a time
constexpr int GROUPS = HEAD_DIM / 32;  // 32 of the head dimension are 4 steps of the product, of which a lane holds 8

struct Tf32 {
    unsigned big[8], small[8];
};

__device__ Tf32 split(const float (&x)[8], float scale) {
    Tf32 parts;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float value = x[i] * scale;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(parts.big[i]) : "f"(value));
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(parts.small[i]) : "f"(value - __uint_as_float(parts.big[i])));
    }
    return parts;
}

__device__ void load8(const float* from, bool valid, float (&x)[8]) {
    float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 low = valid ? *(const float4*)from : zero, high = valid ? *(const float4*)(from + 4) : zero;
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// sums [16 queries, 8 keys] += queries keys, over 8 of the head dimension, of which a lane holds i and i + 1.
__device__ void multiply(
    float (&sums)[4], const unsigned (&upper)[8], const unsigned (&lower)[8], const unsigned (&keys)[8], int i) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(upper[i]), "r"(lower[i]), "r"(upper[i + 1]), "r"(lower[i + 1]), "r"(keys[i]), "r"(keys[i + 1]));
}

// A lane's part of `GROUPS * 32` values of one mean, of which it has 8 of each 32.
__device__ void load_mean(const float* mean, bool valid, float (&x)[GROUPS][8]) {
#pragma unroll
    for (int step = 0; step < GROUPS; ++step) load8(mean + step * 32, valid, x[step]);
}

// mean [2, B, H, T, HEAD_DIM] -> probabilities [B, H, T, T]. scale is in units of log 2.
extern "C" __global__ void __launch_bounds__(MAP_WARPS * WARP) pooled_probabilities(
    const float* __restrict__ mean, float* __restrict__ probabilities, const int* __restrict__ kv_len,
    int tokens, int heads, int blocks, float scale) {
    extern __shared__ float4 memory[];
    float* shared = (float*)memory;     // [HEAD_DIM], what all keys share
    float* scores = shared + HEAD_DIM;  // [QUERIES, stride]
    int stride = (blocks + 31) / 32 * 32 + 8;  // 8 banks from row to row: stores of a warp meet none twice
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int group = lane / 4, part = lane % 4;  // of the tensor core's fragments
    long long head_row = blockIdx.y;        // b * H + h
    int first_query = blockIdx.x * QUERIES;
    const float* q_mean = mean + head_row * blocks * HEAD_DIM;
    const float* k_mean = q_mean + (long long)gridDim.y * blocks * HEAD_DIM;
    int valid_blocks = (valid_keys(kv_len, head_row / heads, tokens) + BLOCK - 1) / BLOCK;

    float keys[GROUPS][8], query[2][GROUPS][8];
    int key = warp * KEYS + group;
    load_mean(k_mean + (long long)key * HEAD_DIM + part * 8, key < valid_blocks, keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = first_query + group + 8 * half;
        load_mean(q_mean + (long long)row * HEAD_DIM + part * 8, row < blocks, query[half]);
    }
    for (int dim = threadIdx.x; dim < HEAD_DIM; dim += MAP_WARPS * WARP) shared[dim] = k_mean[dim];
    Tf32 queries[2][GROUPS];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int step = 0; step < GROUPS; ++step) queries[half][step] = split(query[half][step], scale);
    }
    __syncthreads();

    for (int first_key = warp * KEYS; first_key < valid_blocks; first_key += MAP_WARPS * KEYS) {
        float next_keys[GROUPS][8], sums[4][4] = {};  // four chains, since a product takes 33 cycles to come out
        key = first_key + MAP_WARPS * KEYS + group;
        load_mean(k_mean + (long long)key * HEAD_DIM + part * 8, key < valid_blocks, next_keys);
#pragma unroll
        for (int step = 0; step < GROUPS; ++step) {
            float origin[8];
            load8(shared + step * 32 + part * 8, true, origin);
#pragma unroll
            for (int i = 0; i < 8; ++i) origin[i] = keys[step][i] - origin[i];
            Tf32 centred = split(origin, 1.0f);
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                multiply(sums[i / 2], queries[0][step].small, queries[1][step].small, centred.big, i);
                multiply(sums[i / 2], queries[0][step].big, queries[1][step].big, centred.small, i);
                multiply(sums[i / 2], queries[0][step].big, queries[1][step].big, centred.big, i);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[0][i] += sums[1][i] + sums[2][i] + sums[3][i];
        *(float2*)(scores + group * stride + first_key + part * 2) = make_float2(sums[0][0], sums[0][1]);
        *(float2*)(scores + (group + 8) * stride + first_key + part * 2) = make_float2(sums[0][2], sums[0][3]);
#pragma unroll
        for (int step = 0; step < GROUPS; ++step) {
#pragma unroll
            for (int i = 0; i < 8; ++i) keys[step][i] = next_keys[step][i];
        }
    }
    __syncthreads();

    for (int row = warp; row < QUERIES && first_query + row < blocks; row += MAP_WARPS) {
        float* row_scores = scores + row * stride;
        float largest = -3.402823466e38f, sum = 0.0f;
        for (int key = lane; key < valid_blocks; key += WARP) largest = fmaxf(largest, row_scores[key]);
        for (int distance = WARP / 2; distance; distance /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(WHOLE_WARP, largest, distance));
        for (int key = lane; key < valid_blocks; key += WARP) {
            row_scores[key] = exp2f(row_scores[key] - largest);
            sum += row_scores[key];
        }
        for (int distance = WARP / 2; distance; distance /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, distance);
        float share = 1.0f / sum;
        float* out = probabilities + (head_row * blocks + first_query + row) * blocks;
        for (int key = lane; key < blocks; key += WARP) out[key] = key < valid_blocks ? row_scores[key] * share : 0.0f;
    }
}
