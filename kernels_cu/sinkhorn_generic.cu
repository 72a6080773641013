// archs: 80 86 89 90 100 120
//
// Sinkhorn normalisation of M x M matrices, 1 <= M <= 16, forward and gradient; also 4x4 matrices whose memory
// is not 16-byte aligned. The equations are those of sinkhorn.cu (y_ij = r_i P_ij c_j; only R = 1/r and C = 1/c
// are iterated); only who holds what differs.
//
// Threads: WIDTH = 2, 4, 8 or 16 neighbouring lanes hold one matrix, WIDTH the least that is at least M. Lane l
//   holds row l and column l of P, and r_l, c_l. Lanes and entries beyond M hold zeros (r = c = 0 there), which
//   add exact zeros to the sums. Sums over a row or column fetch the other lanes' factors by shuffles.
// Grid: one warp for 32/WIDTH matrices. Block: any multiple of 32. Warps never wait for each other.
// Shared memory, dynamic, per warp: a tile of 32 rows of WIDTH + 1 floats (the odd stride keeps both rows and
//   columns free of bank conflicts), through which loads and stores are contiguous; backward also
//   window x 32 float2 for the factors of `window` steps (see sinkhorn.cu).
// Determinism: no atomics; every sum runs in ascending order within one thread.
#include "common.cuh"

#ifndef ELEMENT
#define ELEMENT Float32
#endif
#ifndef WIDTH
#define WIDTH 4
#endif

typedef ELEMENT Element;
typedef Element::storage Storage;

static const int GROUPS = 32 / WIDTH;         // matrices of a warp
static const int TILE_FLOATS = 32 * (WIDTH + 1);

// What a lane knows about its place.
struct Place {
    int lane, l, m;     // lane of the warp, row and column of the matrix, M
    i64 first;          // the warp's first matrix
    int matrices;       // how many of its matrices exist
    bool active;        // this lane has a row
};

DEVICE Place place(i64 count, int m) {
    Place at;
    at.lane = threadIdx.x & 31;
    at.l = at.lane % WIDTH;
    at.m = m;
    // 64-bit: there may be more than 2^31 matrices, and elements before that.
    at.first = ((i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)) * GROUPS;
    at.matrices = (int)max((i64)0, min((i64)GROUPS, count - at.first));
    at.active = at.l < m && at.lane / WIDTH < at.matrices;
    return at;
}

DEVICE float from_lane(float value, int lane) { return __shfl_sync(FULL_WARP, value, lane, WIDTH); }

// Where element `e` of the warp's consecutive matrices lies in the tile.
DEVICE int tile_slot(int e, int m) {
    int row = e / m, matrix = row / m;
    return (matrix * WIDTH + row - matrix * m) * (WIDTH + 1) + e - row * m;
}

// Row l of the lane's matrix, zeros beyond M.
DEVICE void load_rows(const Storage* __restrict__ x, const Place& at, float* tile, float* row) {
    int elements = at.matrices * at.m * at.m;
    for (int e = at.lane; e < elements; e += 32)
        tile[tile_slot(e, at.m)] = Element::load(x + at.first * at.m * at.m + e);
    __syncwarp();  // the tile is complete before anyone reads it
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) row[j] = at.active && j < at.m ? tile[at.lane * (WIDTH + 1) + j] : 0.0f;
    __syncwarp();  // and read before it is written again
}

DEVICE void store_rows(Storage* __restrict__ y, const Place& at, float* tile, const float* row) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) tile[at.lane * (WIDTH + 1) + j] = row[j];
    __syncwarp();  // the tile is complete before anyone reads it
    int elements = at.matrices * at.m * at.m;
    for (int e = at.lane; e < elements; e += 32)
        Element::store(y + at.first * at.m * at.m + e, tile[tile_slot(e, at.m)]);
}

// column_i = row_l of lane i: the transpose within each matrix.
DEVICE void transpose(const Place& at, float* tile, const float* row, float* column) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) tile[at.lane * (WIDTH + 1) + j] = row[j];
    __syncwarp();  // the tile is complete before anyone reads it
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) column[i] = tile[(at.lane - at.l + i) * (WIDTH + 1) + at.l];
    __syncwarp();  // and read before it is written again
}

// p_j = exp(x_j - max_j x_j) / sum_j exp(x_j - max_j x_j) over the lane's row, in place
DEVICE void softmax_row(const Place& at, float* p) {
    float top = p[0], sum = 0.0f;
#pragma unroll
    for (int j = 1; j < WIDTH; ++j)
        if (j < at.m) top = fmaxf(top, p[j]);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        p[j] = at.active && j < at.m ? expf(p[j] - top) : 0.0f;
        sum += p[j];
    }
    float scale = at.active ? reciprocal(sum) : 0.0f;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) p[j] = at.active && j < at.m ? p[j] * scale : 0.0f;
}

// The lane's factors, their inverses, and C before the last columns.
struct Factors {
    float r, c, R, C, C_before;
};

// r = 1, C_l = sum_i P_il + eps
DEVICE void first_columns(const Place& at, const float* column, float eps, Factors& f) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum += column[i];
    f.R = f.C_before = 1.0f;
    f.r = at.active ? 1.0f : 0.0f;
    f.C = sum + eps;
    f.c = at.active ? reciprocal(f.C) : 0.0f;
}

// R_l <- sum_j P_lj c_j + eps R_l, then C_l <- sum_i P_il r_i + eps C_l
DEVICE void rows_then_columns(const Place& at, const float* row, const float* column, float eps, Factors& f) {
    f.R *= eps;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) f.R = fmaf(row[j], from_lane(f.c, j), f.R);
    f.r = at.active ? reciprocal(f.R) : 0.0f;
    f.C_before = f.C;
    f.C *= eps;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) f.C = fmaf(column[i], from_lane(f.r, i), f.C);
    f.c = at.active ? reciprocal(f.C) : 0.0f;
}

// p and P of the lane's row, P of its column
DEVICE void prepare(const Place& at, const Storage* x, float eps, float* tile, float* p, float* row, float* column) {
    load_rows(x, at, tile, p);
    softmax_row(at, p);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) row[j] = at.active && j < at.m ? p[j] + eps : 0.0f;
    transpose(at, tile, row, column);
}

extern "C" __global__ void sinkhorn_forward(const Storage* __restrict__ x, Storage* __restrict__ y, i64 count, int m,
                                            int repeat, float eps) {
    extern __shared__ float shared[];
    Place at = place(count, m);
    if (at.matrices == 0) return;  // the whole warp leaves; nothing below waits for other warps
    float* tile = shared + (threadIdx.x >> 5) * TILE_FLOATS;

    float p[WIDTH], row[WIDTH], column[WIDTH];
    prepare(at, x, eps, tile, p, row, column);
    Factors f;
    first_columns(at, column, eps, f);
#pragma unroll 1
    for (int k = 2; k <= repeat; ++k) rows_then_columns(at, row, column, eps, f);

    // y_lj = r_l P_lj c_j
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) row[j] = (f.r * row[j]) * from_lane(f.c, j);
    store_rows(y, at, tile, row);
}

// The gradients that walk backwards with the factors.
struct Adjoint {
    float dr, dc, dR, dC;
};

// dC_l <- eps dC_l - dc_l c_l^2,  dP_lj += r_l dC_j,  dr_l = sum_j P_lj dC_j
DEVICE void columns_backward(const float* row, float eps, float r, float c, Adjoint& a, float* dP) {
    a.dC = fmaf(-a.dc * c, c, eps * a.dC);
    a.dr = 0.0f;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        float dC = from_lane(a.dC, j);
        a.dr = fmaf(row[j], dC, a.dr);
        dP[j] = fmaf(r, dC, dP[j]);
    }
}

// dR_l <- eps dR_l - dr_l r_l^2,  dP_lj += dR_l c_j (the c that these rows were made from),  dc_l = sum_i P_il dR_i
DEVICE void rows_backward(const float* column, float eps, float r, float c, Adjoint& a, float* dP) {
    a.dR = fmaf(-a.dr * r, r, eps * a.dR);
    a.dc = 0.0f;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        a.dc = fmaf(column[j], from_lane(a.dR, j), a.dc);
        dP[j] = fmaf(a.dR, from_lane(c, j), dP[j]);
    }
}

// The last columns and y together, as in sinkhorn.cu: a first t_l is taken off g, then the rest s_l,
//     t_l = sum_i g_il y_il,  dP_lj = (g_lj - t_j) r_l c_j,  dC_l = -t_l c_l,  dr_l = sum_j (g_lj - t_j) P_lj c_j
DEVICE void outputs_backward(const Place& at, const float* row, const float* column, float eps, const float* g,
                             const Factors& f, float* tile, Adjoint& a, float* dP) {
    float g_column[WIDTH], first = 0.0f;
    transpose(at, tile, g, g_column);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) first = fmaf(g_column[i], column[i] * from_lane(f.r, i), first);
    first *= f.c;
    float second = -eps * first * fminf(f.C_before, 3e38f);  // C overflows where y underflows: keep 0 * C = 0
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) second = fmaf(g_column[i] - first, column[i] * from_lane(f.r, i), second);
    second *= f.c;
    a.dC = -(first + second) * f.c;
    a.dr = a.dR = 0.0f;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        float h = ((g[j] - from_lane(first, j)) - from_lane(second, j)) * from_lane(f.c, j);
        a.dr = fmaf(h, row[j], a.dr);
        dP[j] = h * f.r;
    }
}

extern "C" __global__ void sinkhorn_backward(const Storage* __restrict__ grad_y, const Storage* __restrict__ x,
                                             Storage* __restrict__ grad_x, i64 count, int m, int repeat, float eps,
                                             int window) {
    extern __shared__ float shared[];
    Place at = place(count, m);
    if (at.matrices == 0) return;  // the whole warp leaves; nothing below waits for other warps
    // The factors (r^(k-1), c^k) of step k = lowest + s lie at kept[32 s]; only this lane reads what it wrote.
    float* mine = shared + (threadIdx.x >> 5) * (TILE_FLOATS + window * 64);
    float* tile = mine + window * 64;
    float2* kept = reinterpret_cast<float2*>(mine) + at.lane;

    float p[WIDTH], row[WIDTH], column[WIDTH], dP[WIDTH];
    prepare(at, x, eps, tile, p, row, column);

    Adjoint a;
    float r, first_c;
    for (int top = repeat;;) {
        // Forward to step `top`; the factors of steps lowest..top-1 are kept.
        int lowest = max(2, top - window);
        Factors f;
        first_columns(at, column, eps, f);
        first_c = f.c;
#pragma unroll 1
        for (int k = 2; k <= top; ++k) {
            if (k > lowest) kept[(k - 1 - lowest) * 32] = make_float2(f.r, f.c);
            rows_then_columns(at, row, column, eps, f);
        }
        r = f.r;

        if (top == repeat) {
            float g[WIDTH];
            load_rows(grad_y, at, tile, g);
            outputs_backward(at, row, column, eps, g, f, tile, a, dP);
        }
        // Backward from the rows before step `top` to the columns of step `lowest`.
#pragma unroll 1
        for (int k = top; k > lowest; --k) {
            float2 before = kept[(k - 1 - lowest) * 32];
            rows_backward(column, eps, r, before.y, a, dP);
            columns_backward(row, eps, before.x, before.y, a, dP);
            r = before.x;
        }
        if (lowest == 2) break;
        top = lowest;  // the next window ends with the step that this one stopped at
    }
    if (repeat > 1) {
        // The first columns' factors are kept in a register, and r before them is 1.
        rows_backward(column, eps, r, first_c, a, dP);
        columns_backward(row, eps, at.active ? 1.0f : 0.0f, first_c, a, dP);
    }

    // dx_lj = p_lj (dP_lj - sum_j p_lj dP_lj)
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) sum = fmaf(p[j], dP[j], sum);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) dP[j] = p[j] * (dP[j] - sum);
    store_rows(grad_x, at, tile, dP);
}
