// Selection: which tiles and rows carry enough of the pooled map's mass to compute, straight into packed symbols.
//
// Masses are counted in integers, so sums come out alike in any order, and the largest threshold whose smaller masses
// sum to at most the budget can be found bit by bit, from the top. Lane l of a warp holds entries l, l + 32, ... of a
// row in ITEMS registers, and a sum over the warp is one instruction. The search stops where at most one entry lies
// between the threshold and what is known not to fit.

typedef unsigned char uint8;
typedef unsigned long long uint64;

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int WARP = 32;
constexpr int HEADS_PER_BYTE = 8;
constexpr float UNITS = 1 << 30;               // of the part of the guidance that differs from block to block
constexpr float SMALLEST_SHARE = 1.0f / 16;    // of that part, as a share of the common one, that is told apart

#ifndef ITEMS
#define ITEMS 8
#endif
#ifndef BY_COUNT
#define BY_COUNT 0  // 1: tiles are counted, not weighed
#endif
#ifndef COUNT_SLACK
#define COUNT_SLACK 0  // see selection.py
#endif
#ifndef JUDGED
#define JUDGED 0  // 1: some rows compute whole, some columns compute whole and carry no mass
#endif
constexpr int TEXTS = ITEMS <= 12 ? 4 : 1;  // text blocks whose loads are under way at a time, as registers allow

// The sum of masses up to a limit, each with `offset` added. Entries behind the row's end, `padding` in all, are 0.
template <bool HAS_OFFSET>
__device__ uint64 sum_up_to(const unsigned (&mass)[ITEMS], unsigned limit, uint64 offset, int padding) {
    unsigned sum = 0, count = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        bool counts = mass[item] <= limit;
        sum += counts ? mass[item] : 0;
        if (HAS_OFFSET) count += counts;
    }
    uint64 total = __reduce_add_sync(WHOLE_WARP, sum);
    if (HAS_OFFSET) total += (__reduce_add_sync(WHOLE_WARP, count) - padding) * offset;
    return total;
}

// A threshold such that masses up to it sum to at most tau_units / 2^30 of the total, and with any larger mass to more.
template <bool HAS_OFFSET>
__device__ unsigned lowest_mass(
    const unsigned (&mass)[ITEMS], unsigned& largest, int tau_units, uint64 offset, int padding) {
    largest = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) largest = max(largest, mass[item]);
    largest = __reduce_max_sync(WHOLE_WARP, largest);
    uint64 total = sum_up_to<HAS_OFFSET>(mass, largest, offset, padding);
    uint64 budget = (uint64)((double)total * tau_units * 0x1p-30);
    if (total <= budget) return largest;
    uint64 sum_to_threshold = 0, sum_to_end = total;  // the end does not fit
    unsigned threshold = 0;
    for (unsigned bit = 1u << (31 - __clz(largest)); bit; bit /= 2) {
        // Entries in between are each larger than the threshold: so at most one is left, and it does not fit.
        if (sum_to_end - sum_to_threshold < 2 * (threshold + 1 + offset)) break;
        uint64 sum = sum_up_to<HAS_OFFSET>(mass, threshold | bit, offset, padding);
        if (sum <= budget) threshold |= bit, sum_to_threshold = sum;
        else sum_to_end = sum;
    }
    return threshold;
}

// The largest threshold up to which at most `budget` ranks lie that are not 0. Ranks are bits of floats up to 1.
__device__ unsigned lowest_count(const unsigned (&rank)[ITEMS], unsigned budget) {
    unsigned threshold = 0;
    for (unsigned bit = 1u << 30; bit; bit /= 2) {
        unsigned count = 0;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) count += rank[item] - 1 < (threshold | bit);  // 0 - 1 is the largest
        if (__reduce_add_sync(WHOLE_WARP, count) <= budget) threshold |= bit;
    }
    return threshold;
}

__device__ float sum_of_warp(float value) {
    for (int step = WARP / 2; step; step /= 2) value += __shfl_xor_sync(WHOLE_WARP, value, step);
    return value;
}

// exp(x) - 1 for 0 <= x <= 1, to the last bits of a small x too: the series, to x^12 / 12!.
__device__ float exponential_minus_1(float x) {
    float sum = 1.0f;
#pragma unroll
    for (int term = 12; term > 1; --term) sum = 1.0f + x * (1.0f / term) * sum;
    return x * sum;
}

// A warp a row of probabilities [B, H, T, T]. Rows and columns first_always .. stop_always - 1 are kept whole, and where
// JUDGED, rows and columns that whole_rows and whole_columns [B, H, T] mark (null: none).
extern "C" __global__ void __launch_bounds__(256) select_tiles(
    const float* __restrict__ probabilities, const uint8* __restrict__ whole_rows,
    const uint8* __restrict__ whole_columns, uint8* __restrict__ skip_bits, int rows, int blocks, float units,
    int tau_units, int first_always, int stop_always) {
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const float* map_row = probabilities + (long long)row * blocks;
    int row_block = row % blocks, row_bytes = (blocks + 7) / 8;
    bool whole = row_block >= first_always && row_block < stop_always;
    uint64 in_column = 0;  // a bit an item
    if (JUDGED) {
        whole |= whole_rows && whole_rows[row];
        if (whole_columns) {
            const uint8* columns = whole_columns + (row - row_block);
#pragma unroll
            for (int item = 0; item < ITEMS; ++item) {
                int tile = item * WARP + lane;
                in_column |= (uint64)(tile < blocks && columns[tile]) << item;
            }
        }
    }
    unsigned mass[ITEMS];
    auto load_mass = [&](float scale) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            int tile = item * WARP + lane;
            bool counts = tile < blocks && !(JUDGED && in_column >> item & 1);
            if (BY_COUNT) mass[item] = counts ? __float_as_uint(map_row[tile]) : 0;
            else mass[item] = counts ? __float2uint_ru(map_row[tile] * scale) : 0;
        }
    };
    load_mass(units);
    unsigned largest = 0, threshold;
    if (BY_COUNT) {
        unsigned count = 0;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            count += mass[item] > 0;
            largest = max(largest, mass[item]);
        }
        count = __reduce_add_sync(WHOLE_WARP, count);
        largest = __reduce_max_sync(WHOLE_WARP, largest);
        threshold = lowest_count(mass, ((uint64)count * tau_units + COUNT_SLACK) >> 30);
    } else {
        if (JUDGED && whole_columns) {
            unsigned quotient = (1u << 30) / max((unsigned)sum_up_to<false>(mass, ~0u, 0, 0), 1u);
            if (quotient > 1) load_mass(units * (1u << (31 - __clz(quotient))));
        }
        threshold = lowest_mass<false>(mass, largest, tau_units, 0, 0);
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        int tile = item * WARP + lane;
        bool keep = whole || (tile >= first_always && tile < stop_always) || mass[item] > threshold ||
                    mass[item] == largest || (JUDGED && in_column >> item & 1);
        unsigned word = __ballot_sync(WHOLE_WARP, keep && tile < blocks);
        int byte = item * 4 + lane;
        if (lane < 4 && byte < row_bytes) skip_bits[(long long)row * row_bytes + byte] = word >> 8 * lane;
    }
}

struct Blocks {
    int first_text, stop_text, first_vision, stop_vision, blocks;
};

// A bit an item, set where the vision block carries more of the text rows' mass than the smallest that fit the budget.
__device__ uint64 contributes(const float* map, const Blocks& at, float units, int tau_units, int lane) {
    unsigned mass[ITEMS] = {}, largest;
#pragma unroll TEXTS
    for (int text = at.first_text; text < at.stop_text; ++text) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            int vision = at.first_vision + item * WARP + lane;
            float to_text = vision < at.stop_vision ? map[(long long)text * at.blocks + vision] : 0.0f;
            mass[item] += __float2uint_ru(to_text * units);
        }
    }
    unsigned threshold = lowest_mass<false>(mass, largest, tau_units, 0, 0);
    uint64 above = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) above |= (uint64)(mass[item] > threshold) << item;
    return above;
}

// The same by the softmax over vision of the text columns. exp(P) / sum = 1 / sum + (exp(P) - 1) / sum: the first part
// is alike for all vision blocks, and only the second, which may be a thousandth of it, is counted block by block.
__device__ uint64 is_guided(const float* map, const Blocks& at, int tau_units, int lane) {
    int entries = at.stop_vision - at.first_vision;
    float share[ITEMS] = {}, common = 0.0f;
#pragma unroll TEXTS
    for (int text = at.first_text; text < at.stop_text; ++text) {
        float excess[ITEMS], sum = 0.0f;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            int vision = at.first_vision + item * WARP + lane;
            bool inside = vision < at.stop_vision;
            excess[item] = inside ? exponential_minus_1(map[(long long)vision * at.blocks + text]) : 0.0f;
            sum += excess[item];
        }
        float scale = 1.0f / (entries + sum_of_warp(sum));
        common += scale;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) share[item] += excess[item] * scale;
    }
    float total = 0.0f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) total += share[item];
    float units = UNITS / fmaxf(sum_of_warp(total), common * SMALLEST_SHARE);
    unsigned mass[ITEMS], largest;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        bool inside = item * WARP + lane < entries;
        mass[item] = inside ? __float2uint_ru(share[item] * units) + 1 : 0;  // 1 of the offset: a mass of 0 is no entry
    }
    uint64 offset = __float2ull_ru(common * units) - 1;
    unsigned threshold = lowest_mass<true>(mass, largest, tau_units, offset, ITEMS * WARP - entries);
    uint64 above = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) above |= (uint64)(mass[item] > threshold) << item;
    return above;
}

// A thread block a byte of heads. Warps 0 to 7 score the contribution of its eight heads, warps 8 to 15 the guidance; a
// row computes where either score is above its threshold.
extern "C" __global__ void __launch_bounds__(512) select_rows(
    const float* __restrict__ probabilities, uint8* __restrict__ cache_bits, int heads, int blocks, float units,
    int tau_units, int first_text, int stop_text, int first_vision, int stop_vision) {
    extern __shared__ uint8 flags[];  // [8, blocks], 1 = compute
    int head_bytes = (heads + 7) / 8;
    int batch = blockIdx.x / head_bytes, head_byte = blockIdx.x % head_bytes;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int head = head_byte * HEADS_PER_BYTE + warp % HEADS_PER_BYTE;
    uint8* head_flags = flags + warp % HEADS_PER_BYTE * blocks;
    if (warp < HEADS_PER_BYTE) {
        for (int block = lane; block < blocks; block += WARP)
            head_flags[block] = head < heads && (block < first_vision || block >= stop_vision);
    }
    __syncthreads();
    if (head < heads) {
        const float* map = probabilities + ((long long)batch * heads + head) * blocks * blocks;
        Blocks at{first_text, stop_text, first_vision, stop_vision, blocks};
        uint64 above = warp < HEADS_PER_BYTE ? contributes(map, at, units, tau_units, lane)
                                             : is_guided(map, at, tau_units, lane);
        for (int item = 0; item < ITEMS; ++item) {
            int vision = first_vision + item * WARP + lane;
            if (vision < stop_vision && above >> item & 1) head_flags[vision] = 1;
        }
    }
    __syncthreads();
    for (int block = threadIdx.x; block < blocks; block += blockDim.x) {
        unsigned byte = 0;
#pragma unroll
        for (int bit = 0; bit < HEADS_PER_BYTE; ++bit) byte |= (unsigned)flags[bit * blocks + block] << bit;
        cache_bits[((long long)batch * blocks + block) * head_bytes + head_byte] = byte;
    }
}
