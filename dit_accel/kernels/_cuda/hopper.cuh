// Hopper's asynchronous machinery (sm_90a): mbarriers, bulk tensor copies (TMA), warpgroup matrix products (wgmma).
//
// ELEMENT_BF16 chooses the 16-bit type: 1 = bfloat16, 0 = float16. Addresses in shared memory are 32-bit. All tiles in
// shared memory are boxes of 64 elements (128 bytes) a row in the 128-byte swizzle: 16-byte chunk c of row r lies at
// chunk c ^ (r % 8). Boxes begin at multiples of 1024 bytes.
//
// Compile-time, of every kernel: HEAD_DIM 64 or 128, ELEMENT_BF16.
#pragma once
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef ELEMENT_BF16
#define ELEMENT_BF16 1
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    char opaque[128];
};

constexpr int WARPGROUP = 128;

typedef unsigned short element;
#if ELEMENT_BF16
#define ELEMENT "bf16"
#else
#define ELEMENT "f16"
#endif

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers: a phase completes after `arrivals` arrivals and all expected bytes; waits take the phase's parity

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival for all lanes of a warp, after what each of them did. compute-sanitizer's racecheck loses track of the
// other lanes there; for it each lane can arrive for itself.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
constexpr u32 WARP_ARRIVALS = EVERY_LANE_ARRIVES ? 32 : 1;

__device__ __forceinline__ void barrier_arrive_warp(u32 barrier) {
    __syncwarp();
    if (EVERY_LANE_ARRIVES || threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives once what this thread has copied so far by copy_async is there.
__device__ __forceinline__ void barrier_arrive_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Ring of `STAGES` slots: each use of the ring is one step; slots and parities follow from its number.
template <int STAGES>
struct Ring {
    u32 slot = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

// ---- named barriers: `threads` threads meet at, or only announce themselves to, barrier `id` (0 is __syncthreads)

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- bulk tensor copies; coordinates from the innermost axis out

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_box(u32 shared, const TensorMap* map, u32 barrier, int c0, int c1, int c2,
                                         int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap* map, u32 shared, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the stores of this thread have read shared memory, which may then be overwritten.
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Ordinary writes to shared memory, copy_async's too, become visible to the copy engine and to wgmma; then a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sum over the lanes up to this one.
__device__ __forceinline__ int sum_of_lanes(int sum) {
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (threadIdx.x % 32 >= step) sum += other;
    }
    return sum;
}

// ---- registers

template <int COUNT>
__device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Two floats as two 16-bit elements, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float2 unpack(u32 packed) {
    float2 pair;
#if ELEMENT_BF16
    pair.x = __uint_as_float(packed << 16);
    pair.y = __uint_as_float(packed & 0xFFFF0000);
#else
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(packed));
#endif
    return pair;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void store_zeros(u32 address) {  // 16 bytes of shared memory
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ void copy_async(u32 to, const void* from) {  // 16 bytes, to shared memory
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// ---- wgmma: D[64, N] += A[64, 16] B[16, N], float32 sums
//
// Accumulators of thread t of the warpgroup, warp w = t / 32, lane l: d[4 i + 0, 1] are row 16 w + l / 4, columns
// 8 i + 2 (l % 4) + 0, 1; d[4 i + 2, 3] the same columns eight rows below. As operand A, k step j takes
// pack(d[8 j + 0, 1]), pack(d[8 j + 2, 3]), pack(d[8 j + 4, 5]), pack(d[8 j + 6, 7]).

// Operands in shared memory are named by the low word of a descriptor, to which `bytes >> 4` may be added; the high word
// is the same for all of them: 8-row groups 1024 bytes apart, 128-byte swizzle.
#define DESCRIPTOR_HIGH "0x40000040"

// K-major operand: rows of 64 k elements. k step j of a box begins 32 j bytes on.
__device__ __forceinline__ u32 descriptor_k_major(u32 address) { return address >> 4 | 1 << 16; }

// MN-major operand B: rows of 64 n elements, a row a k; boxes of 64 n are `box_bytes` apart. k step j begins 2048 j on.
__device__ __forceinline__ u32 descriptor_n_major(u32 address, u32 box_bytes) {
    return address >> 4 | (box_bytes >> 4) << 16;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads of accumulators above the wait that completes them.
template <int COUNT>
__device__ __forceinline__ void touch(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Names in asm of the first 32 and 64 registers of an accumulator, and these registers.
#define NAMES_32                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23" \
    ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                               \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50" \
             ", %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_8(i)                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define REGISTERS_32(i) REGISTERS_8(i), REGISTERS_8(i + 8), REGISTERS_8(i + 16), REGISTERS_8(i + 24)
#define REGISTERS_64 REGISTERS_32(0), REGISTERS_32(32)

// A and B in shared memory, of SHAPE; COUNT accumulators per thread; their names precede those of the other operands.
// `accumulate` 0 overwrites d.
#define WGMMA_OF_SHARED(COUNT, SHAPE, NAMES, REGISTERS, A, B, ACCUMULATE, MAJOR)                            \
    template <int B_N_MAJOR>                                                                                \
    __device__ __forceinline__ void wgmma(float (&d)[COUNT], u32 a, u32 b, int accumulate) {                \
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"               \
                     "mov.b64 a, {" A ", " DESCRIPTOR_HIGH "};\nmov.b64 b, {" B ", " DESCRIPTOR_HIGH "};\n" \
                     "wgmma.mma_async.sync.aligned." SHAPE ".f32." ELEMENT "." ELEMENT " {" NAMES           \
                     "}, a, b, p, 1, 1, 0, " MAJOR ";\n}"                                                   \
                     : REGISTERS                                                                            \
                     : "r"(a), "r"(b), "r"(accumulate), "n"(B_N_MAJOR));                                    \
    }
WGMMA_OF_SHARED(64, "m64n128k16", NAMES_64, REGISTERS_64, "%64", "%65", "%66", "%67")

// The same with A in registers.
#define WGMMA_OF_REGISTERS(COUNT, SHAPE, NAMES, REGISTERS, A, B, ACCUMULATE, MAJOR)                          \
    template <int B_N_MAJOR>                                                                                 \
    __device__ __forceinline__ void wgmma(float (&d)[COUNT], const u32* a, u32 b, int accumulate) {          \
        asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                   \
                     "mov.b64 b, {" B ", " DESCRIPTOR_HIGH "};\n"                                            \
                     "wgmma.mma_async.sync.aligned." SHAPE ".f32." ELEMENT "." ELEMENT " {" NAMES            \
                     "}, {" A "}, b, p, 1, 1, " MAJOR ";\n}"                                                 \
                     : REGISTERS                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(B_N_MAJOR)); \
    }
WGMMA_OF_REGISTERS(32, "m64n64k16", NAMES_32, REGISTERS_32(0), "%32, %33, %34, %35", "%36", "%37", "%38")
WGMMA_OF_REGISTERS(64, "m64n128k16", NAMES_64, REGISTERS_64, "%64, %65, %66, %67", "%68", "%69", "%70")
