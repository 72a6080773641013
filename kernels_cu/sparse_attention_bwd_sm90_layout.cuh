// What the roles of sparse_attention_bwd_sm90.cu share: sizes, the map of shared memory, barriers, the call.
#pragma once
#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#include "fixed_sum.cuh"
#include "sparse_attention_bwd_delta.cuh"
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
// 32 KB each: two hold Q and dO of an item, one the keys of a block of slots, as many as fit into 227 KB; see Units.
#ifndef UNITS
#define UNITS (HEAD_BLOCKS == 1 && !DETERMINISTIC ? 6 : 5)
#define P_STAGES (HEAD_BLOCKS == 1 && DETERMINISTIC ? 2 : 1)
#endif
// 1: the kernel finds L and delta itself; 0: they are given, as sums of fixed order need more of every query beforehand.
#ifndef DELTA
#define DELTA (1 - DETERMINISTIC)
#endif
static const int ITEM_STAGES = 2, KEY_STAGES = UNITS - 2, ID_STAGES = DETERMINISTIC ? 4 : 6, GATHER_WARPS = 3, THREADS = 512;
// 512 together, four times 128 of the launch; the producers alone give some.
static const int SCORE_REGISTERS = DETERMINISTIC ? 136 : 152, PRODUCT_REGISTERS = DETERMINISTIC ? 168 : 160, PRODUCER_REGISTERS = 40;
static_assert(SCORE_REGISTERS >= 128 && SCORE_REGISTERS + 2 * PRODUCT_REGISTERS + PRODUCER_REGISTERS == 512, "setmaxnreg's directions");
static const u32 UNIT = 32768, KEY_CHUNK = SLOTS * 128, X_CHUNK = 2 * HEADS * 128;  // chunks: 64 columns of keys; of stacked Q and dO
static_assert(4 * KEY_CHUNK == UNIT && 2 * X_CHUNK == UNIT, "what a unit holds");
static const u32 BOX = OWN_HEADS * 128, P_TILE = SLOTS * HEADS * 2, SENT_BYTES = SLOTS * HEADS * 4;
static const u32 AT_DS = UNITS * UNIT;  // P behind dS
static const u32 AT_SENT = AT_DS + P_STAGES * 2 * P_TILE, AT_TRADE = AT_SENT + SENT_BYTES, TRADE_BYTES = SLOTS * 64 * 4;
static const u32 AT_IDS = AT_TRADE + (HEAD_BLOCKS - 1) * 2 * TRADE_BYTES, AT_ID_META = AT_IDS + (1 + DETERMINISTIC) * ID_STAGES * SLOTS * 4;
static const u32 AT_FACTORS = AT_IDS + ID_STAGES * SLOTS * 4, AT_KEY_META = AT_ID_META + ID_STAGES * 4;
static const u32 AT_HEADS = (AT_KEY_META + KEY_STAGES * 4 + 15) / 16 * 16;
static const u32 AT_PARTS = AT_HEADS + ITEM_STAGES * OWN_HEADS * 8;  // L and delta of this block's heads; the other block's part of delta
static const u32 AT_BARS = AT_PARTS + DELTA * ITEM_STAGES * OWN_HEADS * 4;
static const int BAR_X_FULL = 0, BAR_KEY_FULL = BAR_X_FULL + ITEM_STAGES, BAR_UNIT_FREE = BAR_KEY_FULL + KEY_STAGES;
static const int BAR_ID_FULL = BAR_UNIT_FREE + UNITS, BAR_ID_FREE = BAR_ID_FULL + ID_STAGES, BAR_SENT_FULL = BAR_ID_FREE + ID_STAGES;
static const int BAR_SENT_FREE = BAR_SENT_FULL + 1, BAR_P_FULL = BAR_SENT_FREE + 1, BAR_P_FREE = BAR_P_FULL + P_STAGES;
static const int BAR_TRADE_FULL = BAR_P_FREE + P_STAGES, BAR_TRADE_FREE = BAR_TRADE_FULL + (HEAD_BLOCKS > 1 ? 2 : 0);
static const int BAR_OUT_FULL = BAR_TRADE_FREE + (HEAD_BLOCKS > 1 ? 2 : 0), BAR_PARTS_FULL = BAR_OUT_FULL + 1, BARS = BAR_OUT_FULL + 2 * DELTA;
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
    const TensorMap *q_map, *grad_out_map, *out_map;
    const element* kv;
    const int* ids;
    const float *lse, *sinks;
    float *log2_total, *delta;
    element* grad_q;
    void* sums;
    int* exponents;
    i64 kv_stride_b, kv_stride_k;
    int queries, heads, keys, slots, items, key_first, key_last, parts;
    float scale, scale2;
    DEVICE int groups() const { return (heads + HEADS * HEAD_BLOCKS - 1) / (HEADS * HEAD_BLOCKS); }  // items of a query
    DEVICE int query(int item) const { return item / groups(); }
    // The cluster's items: first(), first() + step(), ... Read again at each use: few registers outlive the split into roles.
    DEVICE int step() const {
        int blocks;
        asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
        return blocks / CLUSTER;
    }
    DEVICE int first() const {
        int block;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        return block / CLUSTER;
    }
    // 0, which takes a look at x to know: added to the address of an arrival at another block's barrier, it holds the arrival
    // back until loads from shared memory have returned. Else it overtakes them, since they queue behind the additions, and
    // what they read is overwritten: such an arrival orders memory within its own block alone, and one that orders the
    // cluster's waits for all additions under way.
    DEVICE u32 nothing_of(u32 x) const { return x & (u32)(slots >> 31); }
    DEVICE u32 half() const { return cluster_rank() & 1; }  // of the columns
    DEVICE int head_block() const { return HEAD_BLOCKS > 1 ? cluster_rank() >> 1 : 0; }
    DEVICE int first_head(int item) const { return (item % groups() * HEAD_BLOCKS + head_block()) * HEADS; }
};

// Which units hold what. They are taken, the longest free first, in the order X X K O K K .. of each item (Q and dO, keys, and
// once `out` for delta), and given back in the order O K .. K X X: so the Q and dO of the next item come while this one's last
// blocks of slots are worked on, and in between keys have all units but two. Every role counts along; a unit's barrier says
// when it was given back. No cycle of waits: what is given back n-th was taken before the (n + UNITS)-th that takes its place.
struct Units {
    u32 bits;  // four a unit: those for keys, the longest free lowest; from bit 24 on the two of Q and dO
    static const u32 KEYS = (1u << 4 * KEY_STAGES) - 1;
    DEVICE Units() : bits(0x543210) {}
    DEVICE void begin_item() { bits = (bits >> 8 & KEYS) | bits << 24; }
    DEVICE u32 next_keys(bool first) {
        const u32 unit = bits & 15;
        u32 keys = (bits & KEYS) >> 4;
        if (DELTA && first) keys = keys >> 4 | (keys & 15) << 4 * (KEY_STAGES - 2);
        bits = (bits & ~KEYS) | keys | unit << 4 * (KEY_STAGES - 1);
        return unit;
    }
    DEVICE void end_item() { bits = (bits & KEYS) | bits >> 24 << 4 * KEY_STAGES; }
    DEVICE u32 x0() const { return bits >> 24 & 15; }  // of the columns of the first product warpgroup
    DEVICE u32 x1() const { return bits >> 28; }
    DEVICE u32 out() const { return bits >> 4 * (KEY_STAGES - 2) & 15; }  // after the item's first keys
};

// threadIdx.x, read again so that nothing derived from it is kept across roles.
DEVICE int fresh_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
