// What the indexer's gradient kernels share on Hopper.
#pragma once
#include "common_wgmma.cuh"

DEVICE void product_barrier() { asm volatile("bar.sync 1, 128;" ::: "memory"); }  // of the four warps that multiply
