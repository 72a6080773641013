// archs: 80 86 89 90 100 120
// hot: sinkhorn4_forward sinkhorn4_backward
//
// Sinkhorn normalisation of 4x4 matrices, forward and gradient. One thread holds one matrix in registers.
//
// Equations. With p = softmax of each row of x and P = p + eps, every state of the iteration is P with its
// rows and columns scaled, y_ij = r_i P_ij c_j, so only the 8 scale factors are iterated. Dividing by
// (sum + eps) is, for the inverses R = 1/r and C = 1/c, which start at 1:
//     columns   C_j <- sum_i P_ij r_i + eps C_j     (because y_ij / (sum_i y_ij + eps) = r_i P_ij / (that))
//     rows      R_i <- sum_j P_ij c_j + eps R_i
// This is the definition's own function, eps terms included, not an approximation of it: 5 multiply-adds and
// a reciprocal per row or column where dividing the matrix costs 4 adds, 4 multiplications and a reciprocal.
// In float32 its error against float64 is that of the unrolled divisions or smaller (random logits of scale
// 1 to 100, repeat 1 to 50: y within 1e-6 relative where y > 0.01, gradients within 6e-7 of the largest;
// on an H200, repeat 20: 1.2e-6 and 5.7e-7).
//
// Gradient. Step k = 1..repeat is columns (giving c^k from r^(k-1)), step k-1 before it rows (giving r^(k-1)
// from c^(k-1)). With dC, dR the gradients of C and R, walking back from k = repeat:
//     dC_j   <- eps dC_j - dc_j (c^k_j)^2          dP_ij += r^(k-1)_i dC_j        dr_i += sum_j P_ij dC_j
//     dR_i   <- eps dR_i - dr_i (r^(k-1)_i)^2      dP_ij += dR_i c^(k-1)_j        dc_j  = sum_i P_ij dR_i
//     dx_ij   = p_ij (dP_ij - sum_j p_ij dP_ij)
// The forward pass is repeated, and its factors (r^(k-1), c^k) are kept in shared memory, `window` steps at
// a time; a longer iteration is repeated once per window, so that any repeat works in fixed memory.
//
// Grid: forward, one thread per matrix. Backward, any number of warps; warp w takes the tiles of 32 matrices
//   w, w + warps, ... so that the next tile's x is on its way while this one is computed.
// Block: any multiple of 32 up to 128. Warps never wait for each other.
// Shared memory: forward, 32 matrices per warp (static). Backward, dynamic, window x 1024 bytes per warp.
// Alignment: x, y, grad_y, grad_x must be 16-byte aligned (sinkhorn_generic.cu takes the rest).
// Determinism: no atomics, no sum across threads; a matrix has the same bits wherever it lies.
//
// Memory access. A thread's float32 matrix is 64 bytes, so a warp-wide 16-byte load touches 32 half-used
// sectors in 16 lines; the 4 loads of a thread follow each other and the second half of a sector hits L1, so
// device memory and L2 see each byte once, and going through shared memory instead is 5 % slower. Stores pass
// through L1, so direct ones reach L2 as two halves of every sector. That hardly matters: the forward kernel gains
// 1 % by storing whole lines by way of shared memory; the backward kernel, with 2.5 times the arithmetic per byte
// stored, loses 1 % by it and stores directly.
//
// Predicted and measured, 4,194,304 matrices, repeat 20, one H200 (132 multiprocessors of 4 schedulers, 1.98 GHz;
// driver 580.159.04, CuPy 14.2.0, device copy 4193 GB/s in the same run): 131072 warps, 248 a scheduler. Predictions
// count the sm_90 code. Milliseconds:
//                                                       predicted    measured
//   forward, float32                                    0.18         0.231   (memory alone: 0.126)
//   forward, bfloat16 / float16                                      0.236 / 0.235
//   backward, float32, first version                    0.43-0.5     0.599   (memory alone: 0.19)
//   backward, float32, as it is now                                  0.580
//   backward, bfloat16 / float16, first version                      0.594 / 0.592
// The first version of backward had staged stores and as many blocks as are resident, 3 a multiprocessor.
//   forward   176 reciprocals and exponentials a thread at 8 cycles a warp = 1408 cycles, beside 1340 issue slots (49.5
//             an iteration). Measured: 1850 cycles. Half the bytes take as long, so memory is not what is waited for.
//             Probably the two do not overlap as well as assumed: a thread's 4 reciprocals come together and its next
//             sums need them all.
//   backward  3400 issue slots (52.5 an iteration forward, 92 backward, 650 the rest) beside 1440 cycles of
//             reciprocals. Measured: 4780 cycles. A third fewer warps cost only 2 %, so it is not too few warps; again
//             16-bit types gain nothing. Not profiled.
// What was tried (loads x stores: 1 = by way of shared memory; 64 and 128 threads a block alike):
//   forward, loads/stores 0/1: 0.2311 (kept)   1/1: 0.2427   0/0: 0.2344   1/0: 0.2400
//   backward, stores 1 / 0: 3 blocks a multiprocessor 0.5982 / 0.5930, 24 blocks 0.5853 / 0.5807 (kept; float32 only
//             was tried); with stores 1: 2 blocks 0.6085; window 9, which repeats half of the forward pass, 0.7250
// More blocks than are resident probably gain because warps with a fixed share do not all end together.
#include "common.cuh"

#ifndef ELEMENT
#define ELEMENT Float32
#endif

typedef ELEMENT Element;

static const int CHUNKS = 16 / Element::PER_CHUNK;  // 16-byte chunks per matrix: 4 for float32, 2 for 16-bit types
static const int TILE = 32 * CHUNKS;                // chunks of the 32 matrices of a warp

// Where chunk `part` of the warp's matrix `matrix` lies in its shared tile. The swizzle spreads 8 neighbouring
// lanes over all 32 banks both when they hold 8 consecutive chunks and when they hold 8 matrices' same chunk.
DEVICE int tile_slot(int matrix, int part) {
    return CHUNKS == 4 ? matrix * 4 + (part ^ ((matrix >> 1) & 3)) : matrix * 2 + (part ^ ((matrix >> 2) & 1));
}

// The thread's matrix, still in its storage type. Beyond the last matrix, the last one: its results are not
// stored, and a load without a condition costs nothing.
DEVICE void load_matrix(const uint4* __restrict__ x, i64 first, i64 count, int lane, uint4* raw) {
    const uint4* from = x + min(first + lane, count - 1) * CHUNKS;
#pragma unroll
    for (int part = 0; part < CHUNKS; ++part) raw[part] = from[part];
}

DEVICE void unpack_matrix(const uint4* raw, float (*out)[4]) {
#pragma unroll
    for (int part = 0; part < CHUNKS; ++part) Element::unpack(raw[part], out[0] + part * Element::PER_CHUNK);
}

// The thread's matrix, packed and written by itself.
DEVICE void store_matrix(uint4* __restrict__ y, i64 first, i64 count, int lane, const float (*in)[4]) {
    if (first + lane >= count) return;
#pragma unroll
    for (int part = 0; part < CHUNKS; ++part)
        y[(first + lane) * CHUNKS + part] = Element::pack(in[0] + part * Element::PER_CHUNK);
}

// The warp's 32 matrices, written as whole lines by way of a shared tile.
DEVICE void store_matrices(uint4* __restrict__ y, i64 first, i64 count, int lane, uint4* tile, const float (*in)[4]) {
#pragma unroll
    for (int part = 0; part < CHUNKS; ++part)
        tile[tile_slot(lane, part)] = Element::pack(in[0] + part * Element::PER_CHUNK);
    __syncwarp();  // the tile is complete before anyone reads it
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        int chunk = k * 32 + lane, matrix = chunk / CHUNKS;
        if (first + matrix < count) y[first * CHUNKS + chunk] = tile[tile_slot(matrix, chunk % CHUNKS)];
    }
}

// p_ij = exp(x_ij - max_j x_ij) / sum_j exp(x_ij - max_j x_ij), in place
DEVICE void softmax_rows(float (*p)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float top = fmaxf(fmaxf(p[i][0], p[i][1]), fmaxf(p[i][2], p[i][3]));
#pragma unroll
        for (int j = 0; j < 4; ++j) p[i][j] = expf(p[i][j] - top);
        float scale = reciprocal((p[i][0] + p[i][1]) + (p[i][2] + p[i][3]));
#pragma unroll
        for (int j = 0; j < 4; ++j) p[i][j] *= scale;
    }
}

// The scale factors of the current state, their inverses, and C before the last columns.
struct Factors {
    float r[4], c[4], R[4], C[4], C_before[4];
};

// r = 1, C_j = sum_i P_ij + eps
DEVICE void first_columns(const float (*P)[4], float eps, Factors& f) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        f.r[j] = f.R[j] = f.C_before[j] = 1.0f;
        f.C[j] = ((P[0][j] + P[1][j]) + (P[2][j] + P[3][j])) + eps;
        f.c[j] = reciprocal(f.C[j]);
    }
}

// R_i <- sum_j P_ij c_j + eps R_i, then C_j <- sum_i P_ij r_i + eps C_j
DEVICE void rows_then_columns(const float (*P)[4], float eps, Factors& f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float sum = eps * f.R[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum = fmaf(P[i][j], f.c[j], sum);
        f.R[i] = sum;
        f.r[i] = reciprocal(sum);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float sum = eps * f.C[j];
        f.C_before[j] = f.C[j];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = fmaf(P[i][j], f.r[i], sum);
        f.C[j] = sum;
        f.c[j] = reciprocal(sum);
    }
}

extern "C" __global__ void __launch_bounds__(128)
    sinkhorn4_forward(const uint4* __restrict__ x, uint4* __restrict__ y, i64 count, int repeat, float eps) {
    __shared__ uint4 tiles[4][TILE];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // 64-bit: there may be more than 2^31 matrices, and chunks before that.
    i64 first = ((i64)blockIdx.x * (blockDim.x >> 5) + warp) * 32;
    if (first >= count) return;  // the whole warp leaves; nothing below waits for other warps

    uint4 raw[CHUNKS];
    load_matrix(x, first, count, lane, raw);
    float P[4][4];
    unpack_matrix(raw, P);
    softmax_rows(P);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) P[i][j] += eps;

    Factors f;
    first_columns(P, eps, f);
#pragma unroll 2
    for (int k = 1; k < repeat; ++k) rows_then_columns(P, eps, f);

    // y_ij = r_i P_ij c_j
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) P[i][j] = (f.r[i] * P[i][j]) * f.c[j];
    store_matrices(y, first, count, lane, tiles[warp], P);
}

// The gradients that walk backwards with the factors.
struct Adjoint {
    float dr[4], dc[4], dR[4], dC[4];
};

// dC_j <- eps dC_j - dc_j c_j^2,  dP_ij += r_i dC_j,  dr_i = sum_j P_ij dC_j
DEVICE void columns_backward(const float (*P)[4], float eps, const float* r, const float* c, Adjoint& a,
                             float (*dP)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a.dC[j] = fmaf(-a.dc[j] * c[j], c[j], eps * a.dC[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float sum = P[i][0] * a.dC[0];
#pragma unroll
        for (int j = 1; j < 4; ++j) sum = fmaf(P[i][j], a.dC[j], sum);
        a.dr[i] = sum;
#pragma unroll
        for (int j = 0; j < 4; ++j) dP[i][j] = fmaf(r[i], a.dC[j], dP[i][j]);
    }
}

// dR_i <- eps dR_i - dr_i r_i^2,  dP_ij += dR_i c_j (the c that these rows were made from),  dc_j = sum_i P_ij dR_i
DEVICE void rows_backward(const float (*P)[4], float eps, const float* r, const float* c, Adjoint& a, float (*dP)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.dR[i] = fmaf(-a.dr[i] * r[i], r[i], eps * a.dR[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float sum = P[0][j] * a.dR[0];
#pragma unroll
        for (int i = 1; i < 4; ++i) sum = fmaf(P[i][j], a.dR[i], sum);
        a.dc[j] = sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) dP[i][j] = fmaf(a.dR[i], c[j], dP[i][j]);
    }
}

// The last columns and y_ij = r_i P_ij c_j together, with t_j = sum_i g_ij y_ij:
//     dP_ij = (g_ij - t_j) r_i c_j,  dC_j = -t_j c_j,  dr_i = sum_j (g_ij - t_j) P_ij c_j
// Only differences of g within a column matter, but for eps: a g of +100 everywhere has t_j = 100 with an error of
// 1e-5, which would stay in the result. So a_j, a first t_j, is taken off g exactly. The part taken off is
// a_j sum_i y_ij = a_j (1 - eps c_j C_j before these columns), which gives t_j = a_j + s_j with
//     s_j = sum_i (g_ij - a_j) y_ij - eps a_j c_j C_before_j,   g_ij - t_j = (g_ij - a_j) - s_j
DEVICE void outputs_backward(const float (*P)[4], float eps, float (*g)[4], const Factors& f, Adjoint& a,
                             float (*dP)[4]) {
    float rP[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) rP[i][j] = f.r[i] * P[i][j];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float first = g[0][j] * rP[0][j];
#pragma unroll
        for (int i = 1; i < 4; ++i) first = fmaf(g[i][j], rP[i][j], first);
        first *= f.c[j];
        float second = -eps * first * fminf(f.C_before[j], 3e38f);  // C overflows where y underflows: keep 0 * C = 0
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            g[i][j] -= first;
            second = fmaf(g[i][j], rP[i][j], second);
        }
        second *= f.c[j];
        a.dC[j] = -(first + second) * f.c[j];
#pragma unroll
        for (int i = 0; i < 4; ++i) g[i][j] = (g[i][j] - second) * f.c[j];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float sum = g[i][0] * P[i][0];
#pragma unroll
        for (int j = 1; j < 4; ++j) sum = fmaf(g[i][j], P[i][j], sum);
        a.dr[i] = sum;
        a.dR[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) dP[i][j] = g[i][j] * f.r[i];
    }
}

DEVICE void keep(float4* at, const Factors& f) {
    at[0] = make_float4(f.r[0], f.r[1], f.r[2], f.r[3]);
    at[32] = make_float4(f.c[0], f.c[1], f.c[2], f.c[3]);
}

DEVICE void recall(const float4* at, float* out) {
    float4 v = *at;
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}

extern "C" __global__ void __launch_bounds__(128, 3)
    sinkhorn4_backward(const uint4* __restrict__ grad_y, const uint4* __restrict__ x, uint4* __restrict__ grad_x,
                       i64 count, int repeat, float eps, int window) {
    extern __shared__ float4 shared[];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    // The factors (r^(k-1), c^k) of step k = lowest + s lie at kept[64 s] and kept[64 s + 32], one float4 a lane. Only
    // this lane reads what it wrote: no barrier.
    float4* kept = shared + warp * window * 64 + lane;

    // 64-bit: there may be more than 2^31 matrices, and chunks before that.
    i64 stride = (i64)gridDim.x * warps * 32;
    i64 first = ((i64)blockIdx.x * warps + warp) * 32;
    if (first >= count) return;  // the whole warp leaves; nothing below waits for other warps
    uint4 raw_x[CHUNKS], raw_g[CHUNKS];
    load_matrix(x, first, count, lane, raw_x);

#pragma unroll 1
    for (; first < count; first += stride) {
        float p[4][4], P[4][4], dP[4][4];
        load_matrix(grad_y, first, count, lane, raw_g);  // needed only after the forward pass
        unpack_matrix(raw_x, p);
        softmax_rows(p);
        load_matrix(x, first + stride, count, lane, raw_x);  // the next tile's, needed only then
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) P[i][j] = p[i][j] + eps;

        Adjoint a;
        float r[4], first_c[4];
        for (int top = repeat;;) {
            // Forward to step `top`; the factors of steps lowest..top-1 are kept.
            int lowest = max(2, top - window);
            Factors f;
            first_columns(P, eps, f);
#pragma unroll
            for (int j = 0; j < 4; ++j) first_c[j] = f.c[j];
            int k = 2;
#pragma unroll 1
            for (; k <= min(lowest, top); ++k) rows_then_columns(P, eps, f);
            float4* at = kept;
#pragma unroll 2
            for (; k <= top; ++k, at += 64) {
                keep(at, f);
                rows_then_columns(P, eps, f);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = f.r[i];

            if (top == repeat) {
                float g[4][4];
                unpack_matrix(raw_g, g);
                outputs_backward(P, eps, g, f, a, dP);
            }
            // Backward from the rows before step `top` to the columns of step `lowest`.
#pragma unroll 2
            for (k = top; k > lowest; --k) {
                float c[4];
                at -= 64;
                recall(at + 32, c);
                rows_backward(P, eps, r, c, a, dP);
                recall(at, r);
                columns_backward(P, eps, r, c, a, dP);
            }
            if (lowest == 2) break;
            top = lowest;  // the next window ends with the step that this one stopped at
        }
        if (repeat > 1) {
            // The first columns' factors are kept in registers, and r before them is 1.
            rows_backward(P, eps, r, first_c, a, dP);
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = 1.0f;
            columns_backward(P, eps, r, first_c, a, dP);
        }

        // dx_ij = p_ij (dP_ij - sum_j p_ij dP_ij)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = p[i][0] * dP[i][0];
#pragma unroll
            for (int j = 1; j < 4; ++j) sum = fmaf(p[i][j], dP[i][j], sum);
#pragma unroll
            for (int j = 0; j < 4; ++j) dP[i][j] = p[i][j] * (dP[i][j] - sum);
        }
        store_matrix(grad_x, first, count, lane, dP);
    }
}
