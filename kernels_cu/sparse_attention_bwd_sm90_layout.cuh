// What the roles of sparse_attention_bwd_sm90.cu share: sizes, the map of shared memory, barriers, the call.
#pragma once
#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#include "fixed_sum.cuh"
#include "sparse_attention_bwd_sm90.cuh"

#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
typedef ELEMENT Element;
typedef Element::storage element;

static const int HEAD_DIM = 512, HALF = 256, HEADS = 64, OWN_HEADS = 32, SLOTS = 64;
#ifndef HEAD_BLOCKS
#define HEAD_BLOCKS 1
#endif
static const int CLUSTER = 2 * HEAD_BLOCKS;
static const int GROUPS = 16 / HEAD_BLOCKS;  // of 8 columns, that a product warpgroup adds to the sums
// Stages of Q and dO, of key rows, of P and dS: what fits into 227 KB. Two of Q and dO hide the change of queries; sums in
// fixed order take long enough to hide it.
#ifndef Q_STAGES
#define Q_STAGES (HEAD_BLOCKS == 1 && !DETERMINISTIC ? 2 : 1)
#define STAGES (HEAD_BLOCKS == 1 && !DETERMINISTIC ? 2 : 3)
#define P_STAGES (HEAD_BLOCKS == 1 && DETERMINISTIC ? 2 : 1)
#endif
static const int ID_STAGES = 4, GATHER_WARPS = 3, THREADS = 512;
// 512 together, four times 128 of the launch; the producers alone give some.
static const int SCORE_REGISTERS = DETERMINISTIC ? 136 : 152, PRODUCT_REGISTERS = DETERMINISTIC ? 168 : 160, PRODUCER_REGISTERS = 40;
static_assert(SCORE_REGISTERS >= 128 && SCORE_REGISTERS + 2 * PRODUCT_REGISTERS + PRODUCER_REGISTERS == 512, "setmaxnreg's directions");
static const u32 KEY_CHUNK = SLOTS * 128, KEY_BYTES = 4 * KEY_CHUNK;   // 64 columns of the rows; all
static const u32 X_CHUNK = 2 * HEADS * 128, X_BYTES = 4 * X_CHUNK;     // the same of the stacked Q and dO
static const u32 BOX = OWN_HEADS * 128, P_TILE = SLOTS * HEADS * 2, SENT_BYTES = SLOTS * HEADS * 4;
static const u32 AT_KEYS = Q_STAGES * X_BYTES, AT_DS = AT_KEYS + STAGES * KEY_BYTES;  // P behind dS
static const u32 AT_SENT = AT_DS + P_STAGES * 2 * P_TILE, AT_TRADE = AT_SENT + SENT_BYTES, TRADE_BYTES = SLOTS * 64 * 4;
static const u32 AT_IDS = AT_TRADE + (HEAD_BLOCKS - 1) * 2 * TRADE_BYTES, AT_ID_META = AT_IDS + 2 * ID_STAGES * SLOTS * 4;
static const u32 AT_FACTORS = AT_IDS + ID_STAGES * SLOTS * 4, AT_KEY_META = AT_ID_META + ID_STAGES * 4;
static const u32 AT_HEADS = (AT_KEY_META + STAGES * 4 + 15) / 16 * 16;
static const u32 AT_BARS = AT_HEADS + Q_STAGES * OWN_HEADS * 8;  // after L and delta of this block's heads
static const int BAR_X_FULL = 0, BAR_X_FREE = BAR_X_FULL + Q_STAGES, BAR_KEY_FULL = BAR_X_FREE + Q_STAGES;
static const int BAR_KEY_FREE = BAR_KEY_FULL + STAGES, BAR_ID_FULL = BAR_KEY_FREE + STAGES, BAR_ID_FREE = BAR_ID_FULL + ID_STAGES;
static const int BAR_SENT_FULL = BAR_ID_FREE + ID_STAGES, BAR_SENT_FREE = BAR_SENT_FULL + 1, BAR_P_FULL = BAR_SENT_FREE + 1;
static const int BAR_P_FREE = BAR_P_FULL + P_STAGES, BAR_TRADE_FULL = BAR_P_FREE + P_STAGES, BAR_TRADE_FREE = BAR_TRADE_FULL + 2;
static const int BARS = HEAD_BLOCKS > 1 ? BAR_TRADE_FREE + 2 : BAR_TRADE_FULL;
static const u32 AT_CLOCKS = AT_BARS + BARS * 8;
#ifdef CLOCKS
static const u32 SHARED = AT_CLOCKS + 128;
__device__ u64 clock_sums[32];
#else
static const u32 SHARED = AT_CLOCKS;
#endif
#ifdef SHARED_BYTES
static_assert(SHARED == SHARED_BYTES, "what cuda_bwd_sm90.py asks for");
#else
__device__ u32 shared_needed = SHARED;  // for builds that try other stages
#endif

static const u32 LAST = 0x10000;  // flag beside a block's slot count
#define INFINITE __int_as_float(0x7f800000)

// Where time goes, in builds that ask: clocks since the previous reading, added to a role's counter by one thread.
#ifdef CLOCKS
struct Clock {
    u32 at, last;
    bool mine;
    DEVICE Clock(u32 shared, bool mine) : at(shared + AT_CLOCKS), last(clock()), mine(mine) {}
    DEVICE void read(int n) {
        const u32 now = clock();
        if (mine) store_u32(at + n * 4, load_u32(at + n * 4) + now - last);
        last = now;
    }
};
#else
struct Clock {
    DEVICE Clock(u32, bool) {}
    DEVICE void read(int) {}
};
#endif

struct Call {
    const TensorMap *q_map, *grad_out_map;
    const element* kv;
    const int* ids;
    const float *log2_total, *delta;
    element* grad_q;
    void* sums;
    int* exponents;
    i64 kv_stride_b, kv_stride_k;
    int queries, heads, keys, slots, groups, items, key_first, key_last, parts;
    float scale, scale2;
    int step;  // the cluster's items: first(), first() + step, ...
    DEVICE int query(int item) const { return item / groups; }
    // Read again at each use: few registers outlive the split into roles.
    DEVICE int first() const {
        int block;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        return block / CLUSTER;
    }
    DEVICE u32 half() const { return cluster_rank() & 1; }  // of the columns
    DEVICE int head_block() const { return HEAD_BLOCKS > 1 ? cluster_rank() >> 1 : 0; }
    DEVICE int first_head(int item) const { return (item % groups * HEAD_BLOCKS + head_block()) * HEADS; }
};

// threadIdx.x, read again so that nothing derived from it is kept across roles.
DEVICE int fresh_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
