// Packing: bool [rows, n] -> bits uint8 [rows, ceil(n / 8)]. A warp turns 32 bytes of a row into 4 with one ballot, and
// takes WORDS such pieces of a row at a time, so that as many loads are in flight.

typedef unsigned char uint8;

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int WARP = 32;
constexpr int WORDS = 8;

extern "C" __global__ void pack_bits(
    const uint8* __restrict__ mask, uint8* __restrict__ bits, long long rows, int n, int spans) {
    int lane = threadIdx.x % WARP;
    long long task = (long long)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;  // row * spans + span
    long long row = task / spans;
    if (row >= rows) return;
    int start = task % spans * (WORDS * WARP), row_bytes = (n + 7) / 8;
    const uint8* mask_row = mask + row * n;
    unsigned mine = 0;  // the word of which the lane writes a byte
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
        int position = start + word * WARP + lane;
        unsigned ballot = __ballot_sync(WHOLE_WARP, position < n && mask_row[position]);
        mine = lane / 4 == word ? ballot : mine;
    }
    int byte = start / 8 + lane;
    if (byte < row_bytes) bits[row * row_bytes + byte] = mine >> lane % 4 * 8;
}
