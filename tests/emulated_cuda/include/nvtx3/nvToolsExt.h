// The part of NVTX that Ballast calls. tests/emulated_cuda counts the ranges.
#pragma once

int nvtxRangePushA(const char* name);
int nvtxRangePop();
