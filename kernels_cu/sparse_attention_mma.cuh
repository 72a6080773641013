// What the mma.sync kernels of sparse attention share: instructions, the walk along an id row, gathers, a value product.
//
// Include after ELEMENT, HEAD_DIM, ROWS, KEYS and WARPS are defined: a block works on ROWS heads of a query and KEYS of its
// keys at a time. Matrices of 16-bit elements lie row by row in shared memory, in 16-byte chunks that are swizzled by XOR with
// the row, so that ldmatrix and the copies meet no bank conflict.
#pragma once
#include "common_mma.cuh"

typedef ELEMENT Element;

static const int THREADS = WARPS * 32;
static const int ROW_GROUPS = ROWS / 16, KEY_GROUPS = WARPS / ROW_GROUPS;  // how warps share the scores
static const int GROUP_KEYS = KEYS / KEY_GROUPS;                          // keys a warp scores
static const int COLUMNS = HEAD_DIM / WARPS;                              // value columns of a warp
static const int COPY_ROWS = KEYS / WARPS;                                // key rows a warp gathers
static const int CHUNKS = HEAD_DIM / 8;                                   // 16-byte chunks of a row of Q or keys
static const int P_CHUNKS = KEYS / 8;                                     // and of a row of P
static const u32 ROW_BYTES = HEAD_DIM * 2, P_ROW_BYTES = KEYS * 2;
static_assert(WARPS % ROW_GROUPS == 0 && COLUMNS % 16 == 0, "how warps split the work");
static_assert(P_CHUNKS <= 8 && COPY_ROWS % (CHUNKS < 32 ? 32 / CHUNKS : 1) == 0, "swizzle of P, copies");

// ---- Instructions --------------------------------------------------------------------------------------

// 16 bytes to shared memory in the background; zeros, and nothing read, unless `exists`.
DEVICE void copy16(u32 to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void store_u32(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
DEVICE u32 load_u32(u32 from) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
DEVICE uint4 load_uint4(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE void store_float(u32 to, float v) { store_u32(to, __float_as_uint(v)); }
DEVICE float load_float(u32 from) { return __uint_as_float(load_u32(from)); }

// ---- Ids -----------------------------------------------------------------------------------------------

// Slots of a lane at a time. 4 hides more latency where most are masked, but spills on sm_120.
#ifndef SCANS
#define SCANS 2
#endif

// One warp's walk along the id row: 32 SCANS slots open in registers, the next ones loading.
struct Scan {
    const int* row;
    u32 slots, next_slot;
    int id[SCANS], rank[SCANS], next_id[SCANS];  // rank among the open slots' valid ids, -1: masked
    int count, used;  // valid ids among the open slots, and how many of them blocks have taken
};

DEVICE void scan_load(Scan& scan, int lane) {
#pragma unroll
    for (int u = 0; u < SCANS; ++u) {
        u32 slot = scan.next_slot + u * 32 + lane;
        scan.next_id[u] = slot < scan.slots ? __ldg(scan.row + slot) : -1;
    }
}

DEVICE void scan_open(Scan& scan, u32 first, u32 keys, int lane) {
    scan.count = scan.used = 0;
#pragma unroll
    for (int u = 0; u < SCANS; ++u) {
        scan.id[u] = scan.next_id[u];
        bool valid = (u32)scan.id[u] - first < keys;  // -1 and other negative ids are large as unsigned
        u32 mask = __ballot_sync(FULL_WARP, valid);
        scan.rank[u] = valid ? scan.count + __popc(mask & ((1u << lane) - 1)) : -1;
        scan.count += __popc(mask);
    }
    scan.next_slot += SCANS * 32;
    if (scan.next_slot < scan.slots) scan_load(scan, lane);
}

// The next up to KEYS valid ids, which are first to first + keys - 1; those of the rows that this warp gathers go to `ids`. Returns how many there are.
DEVICE int next_block(Scan& scan, u32 first, u32 keys, u32 ids, int warp, int lane) {
    int have = 0;
    __syncwarp();  // the warp has read the previous block's ids
    while (true) {
        if (scan.used == scan.count) {
            if (scan.next_slot >= scan.slots) break;
            scan_open(scan, first, keys, lane);
        }
#pragma unroll
        for (int u = 0; u < SCANS; ++u) {
            int at = scan.rank[u] - scan.used + have;
            if (scan.rank[u] >= scan.used && at / COPY_ROWS == warp) store_u32(ids + at * 4, scan.id[u]);
        }
        int taken = min(scan.count - scan.used, KEYS - have);
        scan.used += taken;
        have += taken;
        if (have == KEYS) break;
    }
    __syncwarp();  // the ids are there for the whole warp
    return have;
}

// Starts copying the warp's rows of a block of keys; rows from `have` on are zeros.
DEVICE void gather(u32 stage, const u16* kv, i64 stride, u32 ids, int have, int warp, int lane) {
    const int LANES = CHUNKS < 32 ? CHUNKS : 32, AT_ONCE = 32 / LANES;  // lanes a row, rows that a warp copies at once
    const int row0 = warp * COPY_ROWS + lane / LANES, chunk = lane % LANES;
    int id[COPY_ROWS / AT_ONCE];  // read before the first copy starts: the copies then follow each other at once
#pragma unroll
    for (int i = 0; i < COPY_ROWS / AT_ONCE; ++i) id[i] = (int)load_u32(ids + (row0 + i * AT_ONCE) * 4);
#pragma unroll
    for (int i = 0; i < COPY_ROWS / AT_ONCE; ++i) {
        const int row = row0 + i * AT_ONCE;
        const bool exists = row < have;
        const u16* from = kv + (exists ? id[i] : 0) * stride + chunk * 8;  // 64-bit: may pass 2^31 elements
        const u32 to = stage + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
#pragma unroll
        for (int c = 0; c < CHUNKS / LANES; ++c) copy16(to + c * LANES * 16, from + c * LANES * 8, exists);
    }
}

// ---- The value product --------------------------------------------------------------------------------

// o[ROWS][COLUMNS] += P V, P [ROWS][KEYS]. p_at, v_at: this lane's ldmatrix row at chunk 0 of P and at the warp's first
// chunk of V.
DEVICE void value_product(float (&o)[ROW_GROUPS][COLUMNS / 8][4], u32 p_at, u32 v_at) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        u32 a[ROW_GROUPS][4];
#pragma unroll
        for (int r = 0; r < ROW_GROUPS; ++r) load_matrices(a[r], (p_at ^ (k << 5)) + r * 16 * P_ROW_BYTES);
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j) {
            u32 b[4];
            load_matrices_transposed(b, (v_at ^ ((j & 3) << 5)) + (j >> 2) * 128 + k * 16 * ROW_BYTES);
#pragma unroll
            for (int r = 0; r < ROW_GROUPS; ++r) {
                multiply<Element>(o[r][j * 2], a[r], b[0], b[1]);
                multiply<Element>(o[r][j * 2 + 1], a[r], b[2], b[3]);
            }
        }
    }
}
